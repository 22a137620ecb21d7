"""Many rounds on a bare worker process, a third of them failing: nothing grows, and every committed round is complete.

Not part of a plain `nox`: `nox -s integration -- integration_tests/test_soak.py --soak`.
"""

from __future__ import annotations

import random
import time

import pytest
from harness import Cast
from test_failures import assert_no_thread_left
from test_rounds import committed, raises

NUM_ROUNDS = 200
PARAMETERS = {f"layers.{index}.weight": ("bfloat16", [256, 256]) for index in range(40)}
MAX_IDLE = 8  # more than what a round does at the same time
FAILURES = ("missing", "shape", "update", "installing", "finish", "deadline", "init")


def test_two_hundred_rounds(cast: Cast, request: pytest.FixtureRequest) -> None:
    """Threads, descriptors and memory of both processes are flat; every committed round equals a fresh load."""
    if not request.config.getoption("--soak"):
        pytest.skip("takes minutes: run with --soak")
    choose = random.Random(7)  # the order of failures is the same in every run
    (worker,) = cast.engine(PARAMETERS, 1)
    trainer = cast.trainer([worker], parameters=PARAMETERS, info={"packed": False})
    trainer.call("init")
    started, stats, num_committed = time.monotonic(), {}, 0
    for number in range(NUM_ROUNDS):
        trainer.call("set_weights", seed=number)
        if choose.random() < 1 / 3:
            fail_once(worker, trainer, choose.choice(FAILURES))
        committed(trainer.call("send", weight_version=str(number)))
        num_committed += 1
        assert worker.call("sums") == trainer.call("sums")
        assert worker.call("weight_version") == str(number)
        if number % (NUM_ROUNDS // 8) == NUM_ROUNDS // 8 - 1:
            for process in (worker, trainer):
                assert_no_thread_left(process)
                stats.setdefault(process, []).append(process.call("stats"))
    for process, (_, early, *_, late) in stats.items():
        assert len(at_work(late)) <= len(at_work(early)), (process.log, early, late)
        assert len(late["threads"]) - len(at_work(late)) <= MAX_IDLE, (process.log, late)
        assert late["descriptors"] <= early["descriptors"] + 2, (process.log, early, late)
        assert late["resident_bytes"] < early["resident_bytes"] * 1.1 + (16 << 20), (process.log, early, late)
        assert late["children"] == early["children"] == []
        print(
            process.log.name,
            *((len(s["threads"]), s["descriptors"], s["resident_bytes"] >> 20) for s in stats[process]),
        )
    print(f"{num_committed} committed rounds of {NUM_ROUNDS} in {time.monotonic() - started:.0f} s")


def at_work(stats):
    """Threads but those that wait 2 s for something else to do."""
    return [name for name in stats["threads"] if name != "wt-idle"]


def fail_once(worker, trainer, kind: str) -> None:
    """One round that fails in this way."""
    name = "layers.20.weight"
    if kind in ("missing", "shape"):
        trainer.call("edit", kind=kind, param=name)
        raises(lambda: trainer.call("send"))
        trainer.call("edit", kind="none")
    elif kind == "deadline":
        trainer.call("init", timeout_s=0.5)
        trainer.call("slow", pause_s=0.1)
        assert raises(lambda: trainer.call("send"))["type"] == "RoundTimeoutError"
        trainer.call("slow", pause_s=0.0)
        trainer.call("init")
    elif kind == "init":
        trainer.call("init")
        return
    else:
        worker.call("break_next", moment=kind)
        raises(lambda: trainer.call("send"))
