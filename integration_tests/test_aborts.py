"""How the ranks of a trainer end a failed round together. Their sources gather every parameter over gloo, as a sharded one's do.

A rank that stopped by itself would leave the others in a gather: these tests then end at gloo's timeout, with another error.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import requests
from harness import Cast, EmbeddedServer, TrainerHost, WorkerHost, together
from test_failures import PROMPT_S, Measured, assert_in_step, assert_no_thread_left, lost, next_round_commits
from test_rounds import MANY, committed, raises

GROUP_TIMEOUT_S = 15.0  # of the sources' gathers; what only ends then was left alone
AT_ONCE_S = 1.0
PARAM = "layers.30.weight"


def gathering(
    cast: Cast, num_ranks: int, size: int = 1, senders: list[int] | None = None, **config: Any
) -> tuple[list[WorkerHost], list[TrainerHost]]:
    """Workers with committed weights, and trainer ranks that gather each second parameter, which rank 0 sends.

    The others are not gathered: each is owned and sent by one of `senders`, in turn; None is all ranks.
    """
    workers = cast.engine(MANY, size)
    senders = list(range(num_ranks)) if senders is None else senders
    owners = {name: [senders[index % len(senders)]] for index, name in enumerate(list(MANY)[1::2])}
    everyone = {"layout": "gathered", "owners": owners, "group_timeout_s": GROUP_TIMEOUT_S}
    everyone["info"] = {"packed": False, "timeout_s": 60}
    trainers = cast.trainers(workers, num_ranks, parameters=MANY, **{**everyone, **config})
    for result in on_all(trainers, "init"):
        assert result is None, result
    for result in on_all(trainers, "send", weight_version="before"):
        committed(result)
    for trainer in trainers:
        trainer.call("set_weights", seed=9)
    return workers, trainers


def on_all(trainers: list[TrainerHost], name: str, **args: Any) -> list[Any]:
    """What the call returned or raised on each rank."""
    return together(*(lambda t=t: t.call(name, **args) for t in trainers))


def same_error(results: list[Any]) -> dict[str, Any]:
    """The error that all of `results` are: the same class, text, attributes and outcome. `call_s` is the longest time."""
    errors = [dict(result.error) for result in results]
    took_s = [error.pop("call_s") for error in errors]
    for error in errors:
        assert error == errors[0], errors
    return {**errors[0], "call_s": max(took_s)}


def sends(trainer: TrainerHost) -> tuple[dict[str, Any], float]:
    """The error that the call raises on this rank, and when it has."""
    return raises(lambda: trainer.call("send")), time.monotonic()


def all_lose_the_worker(trainers: list[TrainerHost], strike: Callable[[], float]) -> float:
    """All ranks raise the same, that the worker is gone, in time; the seconds that took from `strike`, which says when it was."""
    *results, killed_at = together(*(lambda t=t: sends(t) for t in trainers), strike)
    errors = [{name: value for name, value in error.items() if name != "call_s"} for error, _ in results]
    assert all(error == errors[0] for error in errors), errors
    assert (errors[0]["type"], errors[0]["rank"], errors[0]["outcome"]) == ("PeerLostError", 0, "poisoned")
    after_s = max(raised_at for _, raised_at in results) - killed_at
    assert after_s < PROMPT_S
    return float(after_s)


def next_round_is_in_step(workers: list[WorkerHost], trainers: list[TrainerHost]) -> None:
    """The next call commits, without a new init, and is the same round for all ranks."""
    for trainer in trainers:
        trainer.call("set_weights", seed=11)
    reports = [committed(report) for report in on_all(trainers, "send", weight_version="after")]
    assert len({report["round"] for report in reports}) == 1
    for worker in workers:
        assert worker.call("sums") == trainers[0].call("sums")
        assert worker.call("weight_version") == "after"


@pytest.mark.parametrize("slow", ["first", "last"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_worker_killed_while_ranks_gather(cast: Cast, measured: Measured, num_ranks: int, slow: str) -> None:
    """All ranks but the slow one are in a gather, and those that send notice the death: none stops before all have left it."""
    workers, trainers = gathering(cast, num_ranks)
    trainers[0 if slow == "first" else -1].call("slow", pause_s=0.3)

    def strike() -> float:
        time.sleep(1.0)
        struck_at = time.monotonic()
        workers[0].kill()
        return struck_at

    measured(all_lose_the_worker(trainers, strike))
    for trainer in trainers:
        assert_no_thread_left(trainer)
    replacement = cast.worker(MANY, engine="e", rank=0, size=1)
    for trainer in trainers:
        trainer.call("reach", workers=[replacement.port])
    next_round_commits([replacement], trainers, init=True)


@pytest.mark.parametrize("root", ["first", "last"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_worker_killed_while_one_rank_waits_to_send(cast: Cast, measured: Measured, num_ranks: int, root: str) -> None:
    """The rank that sends stands still outside of its source, the others are in the next gather: it must join them."""
    info = {
        "packed": False,
        "packed_buffer_size_bytes": 1 << 14,
        "timeout_s": 60,
    }  # the worker has room for two parameters
    workers, trainers = gathering(cast, num_ranks, senders=[0 if root == "first" else num_ranks - 1], info=info)
    for trainer in trainers:
        trainer.call("slow", pause_s=0.02)

    def strike() -> float:
        time.sleep(0.5)
        workers[0].signal(signal.SIGSTOP)
        time.sleep(1.0)  # until no buffer is free
        struck_at = time.monotonic()
        workers[0].kill()
        return struck_at

    measured(all_lose_the_worker(trainers, strike))


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_parameter_that_is_refused_on_one_rank(cast: Cast, measured: Measured, num_ranks: int, victim: int) -> None:
    """A PlanError on one rank, whose iterator is alive, leaves no rank in a gather; all raise it; the next round commits."""
    workers, trainers = gathering(cast, num_ranks)
    trainers[victim].call("fault", kind="spoilt", param=PARAM)
    for trainer in trainers:
        trainer.call("slow", pause_s=0.01)
    error = same_error(on_all(trainers, "send"))
    assert (error["type"], error["param"], error["side"], error.get("rank", 0), error["outcome"]) == (
        "PlanError",
        PARAM,
        "trainer",
        victim,
        "poisoned",
    )
    assert error["call_s"] < PROMPT_S
    measured(error["call_s"])
    assert workers[0].call("weight_version") == "before"
    trainers[victim].call("fault", kind="spoilt")
    next_round_is_in_step(workers, trainers)
    assert_in_step(workers)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_dead_worker_is_known_to_all_before_the_start(cast: Cast, measured: Measured, num_ranks: int) -> None:
    """A round that the sender cannot even begin fails at once on all ranks, whoever calls first."""
    workers, trainers = gathering(cast, num_ranks)
    workers[0].kill()
    for order in (trainers, trainers[::-1]):
        calls = [lambda t=t, i=i: (time.sleep(0.2 * i), t.call("send")) for i, t in enumerate(order)]
        error = same_error(together(*calls))
        assert (error["type"], error["rank"], error["outcome"]) == ("PeerLostError", 0, "unchanged")
        assert error["call_s"] < AT_ONCE_S
        measured(error["call_s"])


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_wrong_argument_on_one_rank(cast: Cast, measured: Measured, num_ranks: int, victim: int) -> None:
    """An argument that one rank alone gets wrong fails the call on all, at once and with the cause; the next call works."""
    workers, trainers = gathering(cast, num_ranks)
    for _ in range(2):
        versions = [5 if rank == victim else "never" for rank in range(num_ranks)]
        calls = [lambda t=t, v=v: t.call("send", weight_version=v) for t, v in zip(trainers, versions, strict=True)]
        error = same_error(together(*calls))
        assert (error["type"], error["outcome"], error.get("rank", 0)) == ("ConfigurationError", "unchanged", victim)
        assert "weight_version: expected a str or None, got 5" in error["message"]
        assert error["call_s"] < AT_ONCE_S
        measured(error["call_s"])
    next_round_is_in_step(workers, trainers)


@pytest.mark.parametrize("victim", [0, 1])
def test_metadata_that_raise_on_one_rank(cast: Cast, measured: Measured, victim: int) -> None:
    """A source that cannot say on one rank what it has fails the call on all, at once and with the cause; so does an init."""
    workers, trainers = gathering(cast, 2)
    calls = [lambda t=t, r=r: t.call("send_broken") if r == victim else t.call("send") for r, t in enumerate(trainers)]
    error = same_error(together(*calls))
    assert (error["outcome"], error.get("rank", 0)) == ("unchanged", victim)
    assert "ValueError: on purpose, in the metadata" in error["message"]
    assert error["call_s"] < AT_ONCE_S
    measured(error["call_s"])
    next_round_is_in_step(workers, trainers)
    trainers[victim].call("declare_broken")
    for error in [result.error for result in on_all(trainers, "init")]:
        assert "on purpose, in the metadata" in error["message"]
        assert error["call_s"] < AT_ONCE_S


@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_that_count_their_calls_otherwise(cast: Cast, measured: Measured, num_ranks: int, by: int) -> None:
    """A rank that joins another round than the sender's fails the call on all at once, and from the next one all are in step."""
    workers, trainers = gathering(cast, num_ranks)
    trainers[1].call("skew", by=by)
    results = [result.error for result in on_all(trainers, "send")]
    for error in results:
        assert (error["type"], error["outcome"], error["rank"]) == ("AgreementError", "unchanged", 1)
        assert "one has left out a call, or made one more" in error["message"]
        assert error["call_s"] < AT_ONCE_S
        measured(error["call_s"])
    next_round_is_in_step(workers, trainers)


@pytest.mark.parametrize("layout", ["gathered", "sharded"])
def test_source_that_raises_on_one_rank(cast: Cast, measured: Measured, layout: str) -> None:
    """All ranks raise what that rank's source raised, although another one's gather then ends with gloo's own error.

    Also where FSDP2 gathers.
    """
    workers, trainers = gathering(cast, 2, group_timeout_s=3, layout=layout)
    trainers[1].call("fault", kind="raises_at", param=PARAM)
    error = same_error(on_all(trainers, "send"))
    assert (error["type"], error["rank"], error["outcome"]) == ("TransportError", 1, "poisoned")
    assert f"ValueError: on purpose, at {PARAM}" in error["message"]
    measured(error["call_s"])
    assert workers[0].call("weight_version") == "before"


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_rank_killed_while_ranks_gather(cast: Cast, measured: Measured, num_ranks: int, victim: int) -> None:
    """The others name the rank that died, and how the round ended, although their own gathers fail first."""
    workers, trainers = gathering(cast, num_ranks, group_timeout_s=3)
    trainers[victim].call("slow", pause_s=0.1)
    survivors = [trainer for rank, trainer in enumerate(trainers) if rank != victim]

    def strike() -> float:
        time.sleep(1.0)
        struck_at = time.monotonic()
        trainers[victim].kill()
        return struck_at

    _, *results, killed_at = together(
        lambda: lost(lambda: trainers[victim].call("send")), *(lambda t=t: sends(t) for t in survivors), strike
    )
    for error, _ in results:
        assert (error["type"], error["rank"], error["side"], error["outcome"]) == (
            "PeerLostError",
            victim,
            "trainer",
            "poisoned",
        )
    measured(max(raised_at for _, raised_at in results) - killed_at)
    assert workers[0].call("weight_version") == "before"
    assert_no_thread_left(workers[0])


# --- over HTTP -------------------------------------------------------------------------------------------------


@contextmanager
def failing_proxy(server: EmbeddedServer, how: str) -> Iterator[str]:
    """The address of a proxy before `server` that answers /update_weights with a 500 of its own, or drops it."""

    class Handler(BaseHTTPRequestHandler):
        def _forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.path == "/update_weights":
                if how == "500":
                    self._send(500, b'{"error": {"message": "the proxy is out of order"}}')
                self.close_connection = True
                return
            headers = {"Content-Type": "application/json"}
            reply = requests.request(self.command, server.base_url + self.path, data=body, headers=headers, timeout=60)
            self._send(reply.status_code, reply.content)

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = _forward  # noqa: N815  # the names that http.server calls

        def log_message(self, *args: Any) -> None:
            """Nothing."""

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=proxy.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{proxy.server_address[1]}"
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join(10)


@pytest.mark.parametrize("how", ["500", "drop"])
@pytest.mark.parametrize("place", [0, 1])
def test_one_of_two_servers_fails_the_call(
    cast: Cast, servers: list[EmbeddedServer], measured: Measured, place: int, how: str
) -> None:
    """The other server waits in the round; the failure ends it at once, with the failed server's message, and it serves on."""
    with failing_proxy(servers[place], how) as address:
        base_urls = [server.base_url for server in servers]
        base_urls[place] = address
        config = {"layout": "whole", "model": "llama", "base_urls": base_urls}
        trainer = cast.trainer([], **config)
        trainer.call("init")
        labels = [server.weight_version() for server in servers]
        error = raises(lambda: trainer.call("send", weight_version="never"))
        assert (error["type"], error["outcome"]) == ("TransportError", "unchanged")
        assert f"{address}/update_weights" in error["message"]
        assert how == "drop" or "the proxy is out of order" in error["message"]
        assert error["call_s"] < PROMPT_S
        measured(error["call_s"])
    assert [server.weight_version() for server in servers] == labels
    trainer = cast.trainer([], **{**config, "base_urls": [server.base_url for server in servers]})
    trainer.call("init")
    committed(trainer.call("send", weight_version="after"))
    assert [server.weight_version() for server in servers] == ["after"] * 2


def test_refused_pause_is_known_to_all_ranks(cast: Cast, servers: list[EmbeddedServer], measured: Measured) -> None:
    """A client that may not pause a running server fails the call on all ranks at once; when it is paused the next one works."""
    config = {"layout": "whole", "model": "llama", "base_urls": [servers[0].base_url], "pause": None}
    trainers = cast.trainers([], 2, **config)
    assert on_all(trainers, "init") == [None, None]
    error = same_error(on_all(trainers, "send"))
    assert (error["type"], error["outcome"]) == ("ConfigurationError", "unchanged")
    assert "running, and this client was made with pause=None" in error["message"]
    assert error["call_s"] < AT_ONCE_S
    measured(error["call_s"])
    assert servers[0].post("/pause").ok
    try:
        for result in on_all(trainers, "send"):
            committed(result)
    finally:
        assert servers[0].post("/resume").ok
