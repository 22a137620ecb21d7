"""The embedded server: a host of the same engine, with vLLM's routes, that computes what Hugging Face does."""

from __future__ import annotations

import hashlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import models
import pytest
import requests
import torch
from harness import Cast, EmbeddedServer, TrainerHost, together

from wt_common.digest import digest_bytes
from wt_trainer import HTTPVLLMWeightSyncClient

PROMPT = [72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100]
TOLERANCE = 1e-5  # of a log-probability: the same kernels, over sequences of another length


@pytest.fixture(scope="module")
def embedded(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """One that serves a model whose head is tied to its embedding."""
    with EmbeddedServer(checkpoint("llama-tied"), tmp_path_factory.mktemp("embedded")) as server:
        server.wait_ready()
        yield server


@pytest.fixture
def trainer(embedded: EmbeddedServer, cast: Cast) -> TrainerHost:
    """One that has its weights from seed 5 on, connected."""
    trainer = cast.trainer([], base_urls=[embedded.base_url], layout="whole", model="llama-tied")
    trainer.call("init")
    trainer.call("set_weights", seed=5)
    return trainer


def digest_of(model: torch.nn.Module) -> str:
    """What `/weight_digest` must say, from the definition."""
    lines = sorted(
        f"{name} {digest_bytes(parameter.detach().reshape(-1).view(torch.uint8).numpy().tobytes()):016x}\n"
        for name, parameter in model.named_parameters()
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def test_rounds_equal_hugging_face(embedded: EmbeddedServer, trainer: TrainerHost) -> None:
    """After a round the server computes what Hugging Face does on the weights sent, and says which those are."""
    for seed in (3, 4):
        trainer.call("set_weights", seed=seed)
        report = trainer.call("send", weight_version=f"v{seed}")
        model = models.build_model("llama-tied", seed)
        expected = models.prompt_logprobs(model, PROMPT)
        assert embedded.prompt_logprobs(PROMPT) == pytest.approx(expected, abs=TOLERANCE)
        assert embedded.greedy(PROMPT, 12) == models.greedy(model, PROMPT, 12)
        assert embedded.get("/weight_info") == {"weight_version": f"v{seed}", "outcome": "committed"}
        assert embedded.get("/weight_digest") == {"digest": digest_of(model)}
        assert report["workers"][0]["not_synced"] == []


def test_failed_round_shows(embedded: EmbeddedServer, trainer: TrainerHost) -> None:
    """A round that fails leaves version and weights, and the server says how it ended."""
    trainer.call("send", weight_version="before")
    digest = embedded.get("/weight_digest")
    trainer.call("stop_after", count=3)
    with pytest.raises(RuntimeError, match="the source ended before parameter"):
        trainer.call("send")
    assert embedded.get("/weight_info") == {"weight_version": "before", "outcome": "unchanged"}
    assert embedded.get("/weight_digest") == digest
    trainer.call("stop_after", count=-1)
    assert trainer.call("send", weight_version="after")["outcome"] == "committed"


def test_log_probabilities_are_the_models(embedded: EmbeddedServer) -> None:
    """Several prompts and samples in one request: each token has the log-probability that the model gives it there."""
    prompts = [PROMPT, PROMPT[:3]]
    reply = embedded.post(
        "/v1/completions", prompt=prompts, n=2, max_tokens=5, temperature=0.8, seed=1, ignore_eos=True
    )
    choices = reply.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert choices[0]["token_ids"] != choices[1]["token_ids"]
    for choice, prompt in zip(choices, [PROMPT, PROMPT, *[PROMPT[:3]] * 2], strict=True):
        assert choice["finish_reason"] == "length"
        whole = embedded.prompt_logprobs(prompt + choice["token_ids"])
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(whole[-5:], abs=TOLERANCE)
    again = embedded.post(
        "/v1/completions", prompt=prompts, n=2, max_tokens=5, temperature=0.8, seed=1, ignore_eos=True
    )
    assert again.json()["choices"] == choices
    first = choices[0]["token_ids"][0]
    stopped = embedded.post("/v1/completions", prompt=PROMPT, n=1, seed=1, temperature=0.8, stop_token_ids=[first])
    assert [(c["token_ids"], c["finish_reason"]) for c in stopped.json()["choices"]] == [([first], "stop")]


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_pause(embedded: EmbeddedServer, mode: str) -> None:
    """A pause freezes, awaits or ends the request in hand, and holds back the next one until it is over."""
    client = HTTPVLLMWeightSyncClient(embedded.base_url, timeout=30)
    request: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    finished = threading.Event()

    def ask() -> requests.Response:
        try:
            return embedded.post("/v1/completions", **request)
        finally:
            finished.set()

    def hold() -> None:
        while embedded.get("/load")["num_running"] == 0:
            pass
        with client.paused(mode):
            assert client.is_paused() == [True]
            assert finished.wait(0.5) is (mode != "keep")
            late = threading.Thread(target=lambda: embedded.post("/v1/completions", prompt=[1], max_tokens=1))
            late.start()
            late.join(0.3)
            assert late.is_alive()
        late.join(30)
        assert not late.is_alive()

    reply, held = together(ask, hold)
    assert held is None, held
    (choice,) = reply.json()["choices"]
    assert choice["finish_reason"] == ("abort" if mode == "abort" else "length")
    assert client.is_paused() == [False]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_ends_a_server_with_a_frozen_request(
    checkpoint: Callable[[str], Path], tmp_path: Path, measured: Callable[[float], None], number: signal.Signals
) -> None:
    """A pause that nobody ends does not hold up the end of the process."""
    with EmbeddedServer(checkpoint("llama-tied"), tmp_path) as server:
        server.wait_ready()
        with ThreadPoolExecutor() as pool:
            request: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 10**6, "ignore_eos": True}
            frozen = pool.submit(server.post, "/v1/completions", **request)
            while server.get("/load")["num_running"] == 0:
                assert not frozen.done()
            assert server.post("/pause?mode=keep").ok
            started = time.monotonic()
            server.process.send_signal(number)
            assert server.process.wait(10) == -number
            measured(time.monotonic() - started)
            assert frozen.exception(10) is not None or not frozen.result().ok


def test_server_that_a_dead_trainer_paused_is_resumed(
    embedded: EmbeddedServer, trainer: TrainerHost, cast: Cast
) -> None:
    """A trainer that dies leaves its server paused; the next one's round resumes it, but not one that a user paused."""
    trainer.call("send")
    trainer.call("slow", pause_s=0.2)
    client = HTTPVLLMWeightSyncClient(embedded.base_url, timeout=30)

    def kill_when_paused() -> None:
        while client.is_paused() == [False]:
            pass
        trainer.kill()

    together(lambda: trainer.call("send"), kill_when_paused)
    assert client.is_paused() == [True]
    following = cast.trainer([], base_urls=[embedded.base_url], layout="whole", model="llama-tied")
    following.call("init")
    following.call("send", weight_version="next")
    assert client.is_paused() == [False]
    assert len(embedded.greedy(PROMPT, 4)) == 4
    with client.paused():
        following.call("send")
        assert client.is_paused() == [True]
    assert client.is_paused() == [False]


@pytest.mark.parametrize("level", [1, 2])
def test_sleep(embedded: EmbeddedServer, trainer: TrainerHost, level: int) -> None:
    """Weights that sleep are not written to; awake, they are as before (level 1) or wait for a round (level 2)."""
    trainer.call("send")
    before = embedded.prompt_logprobs(PROMPT)
    assert embedded.post(f"/sleep?level={level}").ok
    with pytest.raises(RuntimeError, match="asleep"):
        trainer.call("send")
    assert embedded.get("/is_sleeping") == {"is_sleeping": True}
    assert embedded.post("/wake_up?tags=weights").json()["status"] == "sleeping"
    if level == 2:
        assert trainer.call("send")["outcome"] == "committed"
    assert embedded.post("/wake_up?tags=kv_cache").json()["status"] == "awake"
    assert embedded.prompt_logprobs(PROMPT) == before


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/completions", {"prompt": "text"}, "prompt: expected token ids below 300"),
        ("/v1/completions", {}, "prompt: expected token ids"),
        ("/v1/completions", {"prompt": [1], "max_tokens": "x"}, "max_tokens: expected a number"),
        ("/v1/completions", {"prompt": [10**6]}, "prompt: expected token ids below 300"),
        ("/pause?mode=now", {}, "mode: expected"),
        ("/sleep?level=3", {}, "level: expected 1 or 2"),
        ("/init_weight_transfer_engine", {"init_info": {"x": 1}}, "init_info for GlooWeightTransferEngine is invalid"),
        ("/init_weight_transfer_engine", {}, "init_info"),
        ("/update_weights", {"update_info": {}}, "no update is open"),
        ("/finish_weight_update", {}, "no update is open"),
    ],
)
def test_bad_requests_name_the_field(embedded: EmbeddedServer, path: str, body: dict[str, Any], named: str) -> None:
    """What cannot be done is a 400 that says what was expected, and the server goes on."""
    reply = embedded.post(path, **body)
    assert reply.status_code == 400
    assert named in reply.json()["error"]["message"]
    assert requests.get(f"{embedded.base_url}/health", timeout=5).ok
    assert requests.post(f"{embedded.base_url}/v1/completions", data=b"{", timeout=5).status_code == 400
