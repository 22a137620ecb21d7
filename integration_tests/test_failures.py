"""What kills, stops and lies do to a round, between real processes: an error in time, a known outcome, and a clean next round."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from harness import Cast, HostError, TrainerHost, WorkerHost, gpus_are_shared, together
from test_rounds import MANY, committed, raises

Measured = Callable[[float], None]

TIMEOUT_S = 4.0  # of the rounds that only a deadline ends
# Within which every other failure must have raised. Where all processes have one GPU, each waits for the others' communicators.
PROMPT_S = 4.0 if gpus_are_shared() else 2.0
OP_TIMEOUT_S = 5.0  # of a gloo operation: what an abandoned thread may take to end
BIG = {f"layers.{index}.weight": ("float32", [4 << 20]) for index in range(24)}
"""400 MB: a kill in the middle of it meets a broadcast that is under way."""


def mid_round(call: Callable[[], Any], event: Callable[[], Any], after_s: float) -> tuple[dict[str, Any], float]:
    """The error of `call` when `event` happens `after_s` into it, and how long after the event it was raised."""
    happened = 0.0

    def strike() -> None:
        nonlocal happened
        time.sleep(after_s)  # into the call: there is nothing to wait for that would not disturb it
        happened = time.monotonic()
        event()

    def observed() -> tuple[dict[str, Any], float]:
        error = raises(call)
        return error, time.monotonic()

    (error, raised_at), struck = together(observed, strike)
    assert not isinstance(struck, BaseException), struck
    return error, raised_at - happened


def assert_in_step(processes: list[Any]) -> None:
    """Every process answers, and each reply belongs to its call, twice in a row."""
    for value in (1, 2):
        assert [process.call("echo", value=[value, index]) for index, process in enumerate(processes)] == [
            [value, index] for index in range(len(processes))
        ]


def assert_no_thread_left(process: Any) -> None:
    """No thread of a round is left once a gloo operation's timeout is over."""
    deadline = time.monotonic() + OP_TIMEOUT_S + 1
    while True:
        left = [
            name for name in process.call("stats")["threads"] if name.startswith(("wt-send", "wt-receive", "wt-call"))
        ]
        if not left:
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def slow_round(cast: Cast, size: int, num_ranks: int = 1, **info: Any) -> tuple[list[WorkerHost], list[TrainerHost]]:
    """Workers with committed weights, and trainers whose next round takes about 3 s. Several are in step, as they gather."""
    workers = cast.engine(MANY, size)
    # A deadline even for what is noticed without one: a process that does not come back would hold up the tests after it.
    config = {"parameters": MANY, "info": {"packed": False, "timeout_s": 30, **info}}
    if num_ranks > 1:
        trainers = cast.trainers(workers, num_ranks, layout="gathered", **config)
    else:
        trainers = [cast.trainer(workers, **config)]
    # The first round of a process imports and traces: the deadline is not for that.
    for result in together(*(lambda t=t: t.call("init", timeout_s=60) for t in trainers)):
        assert result is None
    for result in together(*(lambda t=t: t.call("send", weight_version="before") for t in trainers)):
        committed(result)
    for result in together(*(lambda t=t: t.call("init") for t in trainers)):
        assert result is None
    for trainer in trainers:
        trainer.call("slow", pause_s=0.05)
        trainer.call("set_weights", seed=9)
    return workers, trainers


def next_round_commits(workers: list[WorkerHost], trainers: list[TrainerHost], *, init: bool) -> None:
    """After a new init, or without, the next round commits everywhere."""
    for trainer in trainers:
        trainer.call("slow", pause_s=0.0)
        trainer.call("set_weights", seed=11)
    if init:
        for result in together(*(lambda t=t: t.call("init") for t in trainers)):
            assert result is None, result
    for result in together(*(lambda t=t: t.call("send", weight_version="after") for t in trainers)):
        committed(result)
    for worker in workers:
        assert worker.call("sums") == trainers[0].call("sums")
        assert worker.call("weight_version") == "after"


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("size", [1, 2])
def test_worker_killed_in_mid_round(cast: Cast, measured: Measured, size: int, num_ranks: int) -> None:
    """Every trainer rank raises promptly, naming the rank; with a new worker and a new init the next round commits."""
    workers, trainers = slow_round(cast, size, num_ranks)
    errors = together(
        *(lambda t=t: mid_round(lambda: t.call("send"), lambda: None, 0.6) for t in trainers),
        lambda: (time.sleep(0.6), workers[-1].kill()),
    )[: len(trainers)]
    for error, after_s in errors:
        assert error["type"] == "PeerLostError"
        assert error["rank"] == size - 1
        assert error["engine"] == "e/0"
        assert error["outcome"] == "poisoned"
        assert after_s < PROMPT_S
    measured(max(after_s for _, after_s in errors))
    for survivor in [*workers[:-1], *trainers]:
        assert_no_thread_left(survivor)
    replacement = cast.worker(MANY, engine="e", rank=size - 1, size=size)
    everyone = [*workers[:-1], replacement]
    assert_in_step(everyone)
    for trainer in trainers:
        trainer.call("reach", workers=[worker.port for worker in everyone])
    next_round_commits(everyone, trainers, init=True)


def test_worker_killed_in_mid_broadcast(cast: Cast, measured: Measured) -> None:
    """A kill that meets a broadcast under way, which gloo does not report, is known from the closed connection."""
    workers = cast.engine(BIG, 1)
    trainer = cast.trainer(workers, parameters=BIG)
    trainer.call("init")
    committed(trainer.call("send"))
    error, after_s = mid_round(lambda: trainer.call("send"), workers[0].kill, 0.1)
    assert error["type"] == "PeerLostError"
    assert after_s < PROMPT_S
    measured(after_s)
    assert_no_thread_left(trainer)
    replacement = cast.worker(BIG, engine="e", rank=0, size=1)
    trainer.call("reach", workers=[replacement.port])
    next_round_commits([replacement], [trainer], init=True)


@pytest.mark.parametrize("moment", ["update", "installing", "finish"])
@pytest.mark.parametrize("size", [1, 2])
def test_worker_answers_with_an_error(cast: Cast, measured: Measured, size: int, moment: str) -> None:
    """An exception in a worker's engine reaches the trainer with its message; the version stays; the next round commits."""
    workers, trainers = slow_round(cast, size)
    trainers[0].call("slow", pause_s=0.0)
    for index, fragile in enumerate(workers):  # each rank in turn: the raising one and the silent ones
        fragile.call("break_next", moment=moment)
        error = raises(lambda: trainers[0].call("send"))
        assert "on purpose" in error["message"]
        assert error["side"] == "worker"
        assert error["rank"] == index
        assert error["outcome"] == ("unchanged" if moment == "update" else "poisoned")
        assert error["call_s"] < PROMPT_S
        measured(error["call_s"])
        # What vLLM publishes hangs on the last rank, whose failure fails the engine's call.
        assert workers[-1].call("weight_version") == "before"
        assert_in_step(workers)
    next_round_commits(workers, trainers, init=False)
    assert_no_thread_left(trainers[0])


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("size", [1, 2])
def test_frozen_worker(cast: Cast, measured: Measured, size: int, num_ranks: int) -> None:
    """A worker that stops (SIGSTOP) ends the round at the deadline; when it goes on, the next round commits."""
    workers, trainers = slow_round(cast, size, num_ranks, timeout_s=TIMEOUT_S)
    errors = together(
        *(lambda t=t: raises(lambda: t.call("send")) for t in trainers),
        lambda: (time.sleep(0.6), workers[-1].signal(signal.SIGSTOP)),
    )[: len(trainers)]
    for error in errors:
        assert error["type"] == "RoundTimeoutError"
        assert "rank" in error["message"] or "group" in error["message"]
        assert error["outcome"] == "poisoned"
        assert TIMEOUT_S - 0.1 < error["call_s"] < TIMEOUT_S + 1
        measured(error["call_s"] - TIMEOUT_S)
    workers[-1].signal(signal.SIGCONT)
    next_round_commits(workers, trainers, init=True)


def test_frozen_trainer(cast: Cast) -> None:
    """Workers of a trainer that stops (SIGSTOP) are free at the deadline, and take another trainer's rounds."""
    workers, (trainer,) = slow_round(cast, 2, timeout_s=TIMEOUT_S)
    started = time.monotonic()
    outcome = together(
        lambda: raises(lambda: trainer.call("send", reply_within_s=30)),
        lambda: (time.sleep(0.6), trainer.signal(signal.SIGSTOP)),
        lambda: (
            time.sleep(TIMEOUT_S + 1),
            assert_in_step(workers),
            time.monotonic() - started,
            trainer.signal(signal.SIGCONT),
        ),
    )
    assert not isinstance(outcome[2], BaseException), outcome[2]
    assert outcome[2][2] < TIMEOUT_S + 2
    assert outcome[0]["type"] in {"RoundTimeoutError", "TransportError", "PeerLostError"}
    second = cast.trainer(workers, parameters=MANY)
    second.call("init")
    next_round_commits(workers, [second], init=False)


@pytest.mark.parametrize("size", [1, 2])
def test_trainer_killed_in_mid_round(cast: Cast, measured: Measured, size: int) -> None:
    """The workers are free promptly, answer, and take a new trainer's rounds without a restart."""
    workers, (trainer,) = slow_round(cast, size)

    def strike() -> float:
        time.sleep(0.8)
        trainer.kill()
        killed = time.monotonic()
        assert_in_step(workers)  # the calls queue behind the update
        return time.monotonic() - killed

    result, free_after_s = together(lambda: lost(lambda: trainer.call("send")), strike)
    assert result is None
    assert free_after_s < PROMPT_S
    measured(free_after_s)
    for worker in workers:
        assert_no_thread_left(worker)
        assert worker.call("weight_version") == "before"
    second = cast.trainer(workers, parameters=MANY)
    next_round_commits(workers, [second], init=True)


def lost(call: Callable[[], Any]) -> None:
    """`call` goes to a process that is killed meanwhile."""
    with pytest.raises((HostError, OSError)):
        call()


@pytest.mark.parametrize("victim", [0, 1])
def test_trainer_rank_killed(cast: Cast, measured: Measured, victim: int) -> None:
    """Another trainer rank that dies ends the round for the rest, who name it."""
    workers, trainers = slow_round(cast, 1, 2)
    survivor = trainers[1 - victim]
    (error, after_s), _ = together(
        lambda: mid_round(lambda: survivor.call("send"), trainers[victim].kill, 0.8),
        lambda: lost(lambda: trainers[victim].call("send")),
    )
    assert error["type"] == "PeerLostError"
    assert error["rank"] == victim
    assert error["outcome"] == "poisoned"
    assert after_s < PROMPT_S
    measured(after_s)
    assert workers[0].call("weight_version") == "before"
    assert_in_step(workers)
    assert_no_thread_left(workers[0])
    second = cast.trainer(workers, parameters=MANY)
    next_round_commits(workers, [second], init=True)
