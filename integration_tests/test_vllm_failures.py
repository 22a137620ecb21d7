"""Failures in a real vLLM server, with one rank and with two: it answers, in step, serves, and takes the next round."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import requests
from harness import HERE, Cast, TrainerHost, VLLMServer, together
from test_failures import PROMPT_S, Measured, lost, mid_round
from test_rounds import committed, raises
from test_sync import NUM_TOKENS, PROMPT, TOLERANCE

from wt_trainer import HTTPVLLMWeightSyncClient

ENGINE_S = 5.0  # a round of the slowed source, and vLLM's own time to end its worker ranks


class Scene:
    """One server and the trainers that try it."""

    def __init__(self, server: VLLMServer, cast: Cast, size: int) -> None:
        self.server = server
        self.cast = cast
        self.size = size

    def trainer(self, **config: Any) -> TrainerHost:
        """A connected trainer of one rank with the model's checkpoint names."""
        base = {"layout": "whole", "model": "llama", "base_urls": [self.server.base_url], "info": {"packed": False}}
        trainer = self.cast.trainer([], **{**base, **config})
        trainer.call("init")
        return trainer

    def commit(self, trainer: TrainerHost, seed: int) -> None:
        """A round of `seed` commits, and the server computes what Hugging Face does."""
        trainer.call("set_weights", seed=seed)
        committed(trainer.call("send", weight_version=f"seed-{seed}"))
        assert self.version() == f"seed-{seed}"
        expected = models.prompt_logprobs(models.build_model("llama", seed), PROMPT)
        found = self.server.prompt_logprobs(PROMPT)
        assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < TOLERANCE

    def version(self) -> str:
        return self.server.weight_version()

    def assert_in_step(self, *, generates: bool = True) -> None:
        """Replies belong to their calls, on every rank, twice in a row; and the server generates, unless it is paused."""
        for value in ("first", "second"):
            reply = requests.post(
                f"{self.server.base_url}/collective_rpc", json={"method": "echo_rank", "args": [value]}, timeout=10
            )
            assert reply.json()["results"] == [f"{value} from rank {rank}" for rank in range(self.size)]
        assert not generates or len(self.server.greedy(PROMPT, NUM_TOKENS)) == NUM_TOKENS

    def workers(self) -> list[int]:
        """Process ids of the server's worker ranks."""
        found = self.server.processes("VLLM::Worker")
        assert len(found) == self.size, found
        return found


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory):
    """A server with this many ranks, for all tests of this file; the last one kills it."""
    extension = ("--worker-extension-cls", "extension.EchoExtension")
    with VLLMServer(
        checkpoint("llama"),
        tmp_path_factory.mktemp("server"),
        tensor_parallel_size=request.param,
        arguments=extension,
        packages=HERE,
    ) as server:
        server.wait_ready()
        yield server, request.param


@pytest.fixture
def scene(server: tuple[VLLMServer, int], cast: Cast) -> Scene:
    """The server, and the test's trainers."""
    return Scene(server[0], cast, server[1])


def test_plan_error_leaves_everything_unchanged(scene: Scene) -> None:
    """A name or shape that the model's loader does not take is refused before a byte moves, with the parameter's name."""
    scene.commit(scene.trainer(), 1)
    for change in ("renamed", "reshaped"):
        liar = scene.trainer(lie=change, lie_about="model.layers.1.mlp.up_proj.weight")
        liar.call("set_weights", seed=2)
        error = raises(lambda liar=liar: liar.call("send"))
        assert (error["type"], error["side"], error["outcome"]) == ("PlanError", "worker", "unchanged"), error
        assert "up_proj" in error["message"] or "renamed" in error["message"]
        assert scene.version() == "seed-1"
        scene.assert_in_step()
    scene.commit(scene.trainer(), 3)


def test_round_that_fails_half_way(scene: Scene) -> None:
    """A source that stops half-way poisons: the label says so, the server still serves, and a full round repairs it."""
    trainer = scene.trainer()
    scene.commit(trainer, 1)
    trainer.call("set_weights", seed=2)
    trainer.call("stop_after", count=14)
    error = raises(lambda: trainer.call("send", weight_version="never"))
    assert (error["type"], error["side"], error["outcome"]) == ("PlanError", "trainer", "poisoned")
    assert scene.version() == "seed-1+poisoned"
    scene.assert_in_step()
    trainer.call("stop_after", count=-1)
    scene.commit(trainer, 3)


def test_finish_of_a_trainer_that_was_replaced(scene: Scene) -> None:
    """One that comes late publishes nothing and shifts no reply: outside of a round the last rank fails it, in one the round."""
    scene.commit(scene.trainer(), 1)
    trainer = scene.trainer()
    scene.commit(trainer, 2)

    def late() -> requests.Response:
        return requests.post(
            f"{scene.server.base_url}/finish_weight_update", json={"weight_version": "late"}, timeout=30
        )

    assert requests.post(f"{scene.server.base_url}/start_weight_update", timeout=10).ok
    assert "No version is published" in late().text
    assert scene.version() == "seed-2"
    scene.assert_in_step()
    raises(lambda: trainer.call("send"))  # whose start finds the update open
    scene.assert_in_step()
    scene.commit(trainer, 3)

    trainer.call("set_weights", seed=4)
    trainer.call("slow", pause_s=0.1)
    error, reply = together(
        lambda: raises(lambda: trainer.call("send", weight_version="never")),
        lambda: (time.sleep(0.7), late())[1],  # into the round: the call queues behind the update
    )
    assert (error["type"], error["outcome"]) == ("AgreementError", "poisoned")
    assert reply.status_code == 500
    assert scene.version() == "seed-3+poisoned"
    scene.assert_in_step()
    trainer.call("slow", pause_s=0.0)
    scene.commit(trainer, 5)


def test_trainer_killed(scene: Scene, measured: Measured) -> None:
    """The server is free within 2 s of its trainer's death; a new trainer labels, repairs and resumes it."""
    trainer = scene.trainer()
    scene.commit(trainer, 1)
    trainer.call("set_weights", seed=2)
    trainer.call("slow", pause_s=0.15)

    def strike() -> float:
        time.sleep(1.5)
        trainer.kill()
        killed = time.monotonic()
        scene.assert_in_step(generates=False)  # a reply comes when the update has ended; its trainer had paused it
        return time.monotonic() - killed

    _, free_after_s = together(lambda: lost(lambda: trainer.call("send")), strike)
    assert isinstance(free_after_s, float), free_after_s
    assert free_after_s < PROMPT_S
    measured(free_after_s)
    assert scene.version() == "seed-1"
    scene.commit(scene.trainer(), 3)


def test_paused_and_sleeping(scene: Scene) -> None:
    """A server that the user paused stays paused after a round; a client told not to pause refuses a running one."""
    trainer = scene.trainer()
    client = HTTPVLLMWeightSyncClient(scene.server.base_url, timeout=30)
    with client.paused("wait"):
        trainer.call("set_weights", seed=5)
        committed(trainer.call("send", weight_version="seed-5"))
        assert client.is_paused() == [True]
    assert client.is_paused() == [False]
    scene.assert_in_step()


def test_worker_killed(scene: Scene, measured: Measured) -> None:
    """A worker rank that dies in mid-round: the trainer raises within 2 s, naming it. (Last: the server does not survive it.)"""
    trainer = scene.trainer()
    trainer.call("set_weights", seed=2)
    trainer.call("slow", pause_s=0.15)
    victim = scene.workers()[-1]
    error, after_s = mid_round(lambda: trainer.call("send"), lambda: os.kill(victim, signal.SIGKILL), 1.5)
    assert error["type"] == "PeerLostError"
    assert error["outcome"] == "poisoned"
    assert after_s < PROMPT_S
    measured(after_s)


def test_engine_killed(cast: Cast, checkpoint: Callable[[str], Path], tmp_path: Path, measured: Measured) -> None:
    """The engine process dies in mid-round, and its worker ranks leave: a lost peer, not another trainer's server.

    vLLM lets the call to its dead engine hang, and a worker rank notices the death when it comes out of the update.
    """
    with VLLMServer(checkpoint("llama"), tmp_path, tensor_parallel_size=2) as server:
        server.wait_ready()
        trainer = Scene(server, cast, 2).trainer()
        trainer.call("set_weights", seed=2)
        trainer.call("slow", pause_s=0.1)
        (victim,) = server.processes("VLLM::EngineCore")
        error, after_s = mid_round(lambda: trainer.call("send"), lambda: os.kill(victim, signal.SIGKILL), 1.0)
        assert (error["type"], error["side"], error["outcome"]) == ("PeerLostError", "worker", "poisoned"), error
        assert after_s < ENGINE_S
        measured(after_s)
