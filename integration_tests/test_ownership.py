"""Whose a server is, and what it says: it never runs under a label that is not true, nor stays paused when nobody holds it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import Cast, EmbeddedServer, HostError, TrainerHost, together, unreachable_init_info
from test_failures import lost
from test_rounds import committed, raises

from wt_trainer import HTTPVLLMWeightSyncClient

HALF = 14  # parameters of 21
TIMEOUT_S = 3.0


@pytest.fixture(scope="module")
def embedded(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(checkpoint("llama"), tmp_path_factory.mktemp("embedded")) as server:
        server.wait_ready()
        yield server


@pytest.fixture
def connect(embedded: EmbeddedServer, cast: Cast) -> Callable[..., TrainerHost]:
    """Connects trainers whose rounds move a parameter at a time, to the server or to other ones."""

    def make(*urls: str, **config: Any) -> TrainerHost:
        info = {"packed": False, "check_cover": False, **config.pop("info", {})}
        base = {"base_urls": list(urls) or [embedded.base_url], "layout": "whole", "model": "llama", "info": info}
        trainer = cast.trainer([], **{**base, **config})
        trainer.call("init")
        return trainer

    return make


def poison(trainer: TrainerHost, version: str = "never") -> dict[str, Any]:
    """The error of a round that ends half-way."""
    trainer.call("stop_after", count=HALF)
    error = raises(lambda: trainer.call("send", weight_version=version))
    trainer.call("stop_after", count=-1)
    assert error["outcome"] == "poisoned", error
    return error


class Watch:
    """What a server says of itself, asked without a pause: its labels while it runs, since it was first seen paused."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.server = server
        self.was_paused = threading.Event()
        self.labels: list[str] = []
        self._ends = threading.Event()

    def is_running(self) -> bool:
        return not self.server.get("/is_paused")["is_paused"]

    def _look(self) -> None:
        while not self._ends.is_set():
            runs = self.is_running()
            label = (
                self.server.weight_version()
            )  # after the other question: an earlier label would be from before the pause
            if not runs:
                self.was_paused.set()
            elif self.was_paused.is_set() and label not in self.labels[-1:]:
                self.labels.append(label)

    @contextmanager
    def __call__(self) -> Iterator[Watch]:
        thread = threading.Thread(target=self._look, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._ends.set()
            thread.join(60)


def runs(server: EmbeddedServer, version: str) -> bool:
    """Whether the server generates under this version, now or soon: what a failed round does to it may take its time."""
    watch, deadline = Watch(server), time.monotonic() + 10
    while time.monotonic() < deadline:
        if watch.is_running():
            return server.weight_version() == version
        time.sleep(0.01)
    return False


# --- labels ----------------------------------------------------------------------------------------------------


def test_rounds_of_parts_keep_the_suffix(embedded: EmbeddedServer, connect: Callable[..., TrainerHost]) -> None:
    """After a poisoned round one of a part commits, and label and report keep saying what is left; the rest repairs it."""
    trainer = connect()
    trainer.call("set_weights", seed=6)
    committed(trainer.call("send", weight_version="v6"))
    trainer.call("set_weights", seed=7)
    poison(trainer)
    assert embedded.weight_version() == "v6+poisoned"
    report = trainer.call("send_part", names=["model.norm.weight"], weight_version="v8")
    assert (report["outcome"], report["version"]) == ("committed", "v8+poisoned")
    assert "still half-written" in report["notes"][0]
    assert runs(embedded, "v8+poisoned")
    committed(trainer.call("send", weight_version="v9"))
    assert runs(embedded, "v9")


def test_poisoned_server_runs_under_its_label_only(
    embedded: EmbeddedServer, connect: Callable[..., TrainerHost]
) -> None:
    """Whoever looks at the server sees it paused until its label says what it has."""
    trainer = connect()
    trainer.call("slow", pause_s=0.01)  # so that the pause is seen
    for index in range(20):
        trainer.call("set_weights", seed=index)
        committed(trainer.call("send", weight_version=f"v{index}"))
        with Watch(embedded)() as watch:
            poison(trainer)
        assert watch.was_paused.is_set()
        assert set(watch.labels) <= {f"v{index}+poisoned"}
        assert runs(embedded, f"v{index}+poisoned")


def test_server_that_was_frozen_comes_back_labelled(
    embedded: EmbeddedServer, connect: Callable[..., TrainerHost]
) -> None:
    """One that is stopped past the deadline takes its label before it runs, when it wakes up."""
    trainer = connect(info={"timeout_s": TIMEOUT_S})
    committed(trainer.call("send", weight_version="before"))
    trainer.call("slow", pause_s=0.1)
    trainer.call("set_weights", seed=8)

    def freeze() -> None:
        time.sleep(1.0)  # into the round
        embedded.signal(signal.SIGSTOP)

    error, _ = together(lambda: raises(lambda: trainer.call("send", weight_version="never")), freeze)
    assert (error["type"], error["outcome"]) == ("RoundTimeoutError", "poisoned")
    embedded.signal(signal.SIGCONT)
    assert runs(embedded, "before+poisoned")
    after = connect()
    committed(after.call("send", weight_version="after"))
    assert runs(embedded, "after")


def test_frozen_server_that_nobody_waits_for_is_set_right_by_the_next_init(
    embedded: EmbeddedServer, connect: Callable[..., TrainerHost]
) -> None:
    """Where the client's calls have ended, it stays paused; the next trainer labels it, then resumes it."""
    trainer = connect(client_timeout_s=TIMEOUT_S)
    committed(trainer.call("send", weight_version="before"))
    trainer.call("slow", pause_s=0.1)
    trainer.call("set_weights", seed=9)

    def freeze() -> None:
        time.sleep(1.0)  # into the round
        embedded.signal(signal.SIGSTOP)

    together(lambda: raises(lambda: trainer.call("send", weight_version="never")), freeze)
    time.sleep(TIMEOUT_S + 0.5)  # the calls that set it right give up
    trainer.kill()
    embedded.signal(signal.SIGCONT)
    with Watch(embedded)() as watch:
        assert watch.was_paused.wait(10)
        connect()
        assert runs(embedded, "before+poisoned")
    assert set(watch.labels) <= {"before+poisoned"}


def test_fresh_server_beside_a_poisoned_one(
    embedded: EmbeddedServer,
    connect: Callable[..., TrainerHost],
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """A trainer that takes over both labels the one whose model is half-written."""
    with EmbeddedServer(checkpoint("llama"), tmp_path) as fresh:
        first = connect()
        committed(first.call("send", weight_version="v1"))
        first.call("slow", pause_s=0.1)
        first.call("set_weights", seed=3)
        together(lambda: lost(lambda: first.call("send")), lambda: (time.sleep(1.0), first.kill()))
        fresh.wait_ready()
        second = connect(embedded.base_url, fresh.base_url)
        assert (embedded.weight_version(), fresh.weight_version()) == ("v1+poisoned", "default")
        assert runs(embedded, "v1+poisoned")
        committed(second.call("send", weight_version="v2"))
        assert runs(embedded, "v2")
        assert runs(fresh, "v2")


# --- two trainers ----------------------------------------------------------------------------------------------


def test_trainer_that_was_replaced_touches_no_server(
    embedded: EmbeddedServer, connect: Callable[..., TrainerHost]
) -> None:
    """Its next call fails, the server goes on for the other one, and generates."""
    first, second = connect(), connect()
    committed(second.call("send", weight_version="second"))
    with Watch(embedded)() as watch:
        assert raises(lambda: first.call("send", weight_version="first"))["type"] == "StaleSessionError"
    assert not watch.was_paused.is_set()
    assert runs(embedded, "second")
    committed(second.call("send", weight_version="again"))
    assert runs(embedded, "again")


def test_trainer_that_is_replaced_in_mid_round(embedded: EmbeddedServer, connect: Callable[..., TrainerHost]) -> None:
    """The next one labels what the round has left, resumes the server, and its rounds publish its own versions."""
    first = connect()
    committed(first.call("send", weight_version="v1"))
    first.call("set_weights", seed=4)
    first.call("slow", pause_s=0.1)
    seconds: list[TrainerHost] = []

    def replace() -> None:
        time.sleep(1.0)  # into the round
        seconds.append(connect())

    error, replaced = together(lambda: raises(lambda: first.call("send", weight_version="v3")), replace)
    assert replaced is None, replaced
    assert error["type"] == "StaleSessionError"
    assert runs(embedded, "v1+poisoned" if error["outcome"] == "poisoned" else "v1")
    committed(seconds[0].call("send", weight_version="v4"))
    assert runs(embedded, "v4")


def test_shut_down_engine_leaves_the_server_running(
    embedded: EmbeddedServer, connect: Callable[..., TrainerHost]
) -> None:
    """The trainer whose workers were told to let it go cannot send, and holds nothing."""
    trainer = connect()
    HTTPVLLMWeightSyncClient(embedded.base_url, timeout=30).shutdown_weight_transfer_engine()
    assert raises(lambda: trainer.call("send"))["type"] == "PeerLostError"
    assert Watch(embedded).is_running()


def test_unreachable_address_evicts_nobody(embedded: EmbeddedServer, connect: Callable[..., TrainerHost]) -> None:
    """An init that names an address where nobody listens fails; the trainer that is connected goes on."""
    trainer = connect()
    reply = embedded.post("/init_weight_transfer_engine", init_info=unreachable_init_info())
    assert reply.status_code == 500
    assert "cannot connect" in reply.json()["error"]["message"]
    committed(trainer.call("send", weight_version="goes on"))
    assert runs(embedded, "goes on")


# --- somebody else's finish ------------------------------------------------------------------------------------


def test_finish_without_a_round_publishes_nothing(
    embedded: EmbeddedServer, connect: Callable[..., TrainerHost]
) -> None:
    """While a trainer is connected, such a call fails; its next round closes what was left open."""
    trainer = connect()
    committed(trainer.call("send", weight_version="v12"))
    assert embedded.post("/start_weight_update").ok
    reply = embedded.post("/finish_weight_update", weight_version="v13")
    assert reply.status_code == 500
    assert "No version is published" in reply.json()["error"]["message"]
    assert embedded.weight_version() == "v12"
    raises(lambda: trainer.call("send"))  # whose start finds the update open, and which learns so
    committed(trainer.call("send", weight_version="v14"))
    assert runs(embedded, "v14")


def test_finish_within_anothers_round(embedded: EmbeddedServer, connect: Callable[..., TrainerHost]) -> None:
    """It may take the round's verdict, but not leave its own version: the round fails, or the label is corrected."""
    trainer = connect()
    trainer.call("slow", pause_s=0.05)
    for number in range(3):
        trainer.call("set_weights", seed=number)
        committed(trainer.call("send", weight_version="before"))

        def late() -> Any:
            time.sleep(0.5)  # into the round: the call queues behind the update
            return embedded.post("/finish_weight_update", weight_version="v13")

        def send() -> dict[str, Any]:
            try:
                return dict(trainer.call("send", weight_version="v14"))
            except HostError as exc:
                return exc.error

        result, reply = together(send, late)
        assert not isinstance(reply, BaseException), reply
        assert runs(embedded, "v14" if result["outcome"] == "committed" else "before+poisoned")
    committed(trainer.call("send", weight_version="after"))
    assert runs(embedded, "after")
