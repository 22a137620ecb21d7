"""Backend `nccl` between CPUs, over a stand-in for NCCL: gloo's laws, and what only a channel into live memory can break.

Tests of the other modules are run again here, with this module's `cast`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import fake_nccl
import pytest
from harness import TEST_GPUS, Cast, TrainerHost, free_port, together
from test_failures import (  # noqa: F401  # collected here, too
    BIG,
    Measured,
    mid_round,
    test_frozen_trainer,
    test_frozen_worker,
    test_trainer_killed_in_mid_round,
    test_trainer_rank_killed,
    test_worker_answers_with_an_error,
    test_worker_killed_in_mid_broadcast,
    test_worker_killed_in_mid_round,
)
from test_rounds import (  # noqa: F401  # collected here, too
    MANY,
    committed,
    raises,
    test_draft_model_gets_its_own_rounds,
    test_engines_of_different_dtypes,
    test_every_dtype_and_shape_arrives,
    test_memory_that_is_written_during_a_round_is_the_trainers_fault,
    test_source_that_changes_what_it_yielded_sends_what_it_yielded,
    test_source_that_differs_from_its_metadata,
    test_source_that_overwrites_what_it_yielded,
    test_trainer_ranks_whose_metadata_differ,
    test_two_data_senders,
    test_two_engines_and_small_groups,
    test_two_trainer_ranks_one_sends,
    test_wider_dtype_is_cast,
    test_worker_out_of_a_round,
)

DEFAULT = (
    "large",
    "buffers",
    "settings",
    "missing",
    "every_dtype_and_shape_arrives[1]",
    "two_engines",
    "two_data_senders[default_group]",
    "wider_dtype",
    "overwrites",
    "what_it_yielded[full]",
    "trainers_fault[full-1]",
    "worker_answers_with_an_error[2-installing]",
    "worker_killed_in_mid_round[2-2]",
    "trainer_rank_killed[1]",
    "frozen_worker[1-2]",
    "full_speed[killed]",
)
"""Words of the tests that run without `--all`: gloo's runs of the others say the same of what both have in common."""


@pytest.fixture
def cast(request: pytest.FixtureRequest, _company: Cast) -> Iterator[Cast]:
    """The processes of one test, whose backend is `nccl`."""
    is_chosen = any(word in request.node.name for word in DEFAULT) or TEST_GPUS in os.environ
    if not (is_chosen or request.config.getoption("--all")):
        pytest.skip("with --all")
    _company.backend = "nccl"
    yield _company
    _company.release()


def test_large_parameters_need_no_buffer(cast: Cast) -> None:
    """What is sent and received where it lies takes no memory on either side; small neighbours share a bounded buffer."""
    parameters = {**BIG, "norm.weight": ["float32", [100]], "norm.bias": ["float32", [100]]}
    workers = cast.engine(parameters, 2)
    trainer = cast.trainer(workers, parameters=parameters)
    trainer.call("init")
    for seed in (1, 2):
        trainer.call("set_weights", seed=seed)
        report = committed(trainer.call("send"))
        assert [worker.call("sums") == trainer.call("sums") for worker in workers] == [True, True]
        assert 0 < report["buffer_bytes"] <= 2 * 1024
        assert all(0 < worker["buffer_bytes"] <= 2 * 1024 for worker in report["workers"])


def test_buffers_stay_within_what_the_init_info_says(cast: Cast) -> None:
    """A dtype that only one engine casts is received aside, in buffers that are used again."""
    wide, narrow = (cast.engine({n: [dtype, [1 << 18]] for n in MANY}, 1, dtype) for dtype in ("float32", "bfloat16"))
    trainer = cast.trainer([*wide, *narrow], parameters={n: ["float32", [1 << 18]] for n in MANY})
    trainer.call("init", packed_buffer_size_bytes=3 << 20, packed_num_buffers=2)
    trainer.call("set_weights", seed=3)
    report = committed(trainer.call("send"))
    by_engine = {worker["engine"]: worker["buffer_bytes"] for worker in report["workers"]}
    assert by_engine == {"float32/0": 0, "bfloat16/0": 6 << 20}
    assert report["buffer_bytes"] == 0


def round_s(trainer: TrainerHost) -> float:
    """Seconds of a round, the least of four, after one that makes what a session needs."""
    committed(trainer.call("send"))
    return min(committed(trainer.call("send"))["call_s"] for _ in range(4))


@pytest.mark.parametrize("event", ["killed", "stopped"])
def test_next_round_is_at_full_speed(cast: Cast, measured: Measured, event: str) -> None:
    """What a failure in mid-transfer leaves behind does not slow the rounds that follow, in a trainer that survived it."""
    (worker,) = cast.engine(BIG, 1)
    trainer = cast.trainer([worker], parameters=BIG)
    trainer.call("init")
    before_s = round_s(trainer)
    trainer.call("init", timeout_s=3)
    trainer.call("slow", pause_s=0.05)
    number = signal.SIGKILL if event == "killed" else signal.SIGSTOP
    error, after_s = mid_round(lambda: trainer.call("send"), lambda: worker.signal(number), 0.5)
    assert error["type"] == ("PeerLostError" if event == "killed" else "RoundTimeoutError")
    measured(after_s)
    if event == "killed":
        (worker,) = cast.engine(BIG, 1)
        trainer.call("reach", workers=[worker.port])
    worker.signal(signal.SIGCONT)
    trainer.call("slow", pause_s=0.0)
    trainer.call("init")
    after_s = round_s(trainer)
    assert after_s < 1.5 * before_s + 0.02
    assert worker.call("sums") == trainer.call("sums")


@pytest.mark.skipif(TEST_GPUS not in os.environ, reason="needs GPUs: what is in flight there nobody sees")
@pytest.mark.parametrize("victim", ["worker", "trainer"])
def test_peer_killed_with_a_broadcast_in_flight(cast: Cast, measured: Measured, victim: str) -> None:
    """NCCL says nothing; the survivor's kernel is ended all the same, and its next round with another peer is at full speed."""
    huge = {f"layers.{index}.weight": ("uint8", [1 << 28]) for index in range(24)}
    (worker,) = cast.engine(huge, 1)
    trainer = cast.trainer([worker], parameters=huge)
    trainer.call("init")
    before_s = round_s(trainer)
    process = worker if victim == "worker" else trainer
    killed_at: list[float] = []

    def strike() -> None:
        process.signal(signal.SIGSTOP)  # what it has not launched by then, its peer waits for
        time.sleep(0.3)
        killed_at.append(time.monotonic())
        process.kill()

    if victim == "worker":
        error, after_s = mid_round(lambda: trainer.call("send"), strike, before_s / 3)
        assert (error["type"], error["outcome"]) == ("PeerLostError", "poisoned")
        measured(after_s - 0.3)
        (worker,) = cast.engine(huge, 1)
        trainer.call("reach", workers=[worker.port])
    else:
        together(lambda: trainer.call("send"), lambda: (time.sleep(before_s / 3), strike()))
        assert worker.call("echo", value=1) == 1
        measured(time.monotonic() - killed_at[0])
        trainer = cast.trainer([worker], parameters=huge)
    trainer.call("init")
    after_s = round_s(trainer)
    print(f"{before_s:.4f} s before, {after_s:.4f} s after")
    assert after_s < 1.3 * before_s
    assert worker.call("sums") == trainer.call("sums")


def test_missing_bindings_are_said_on_all_ranks(cast: Cast) -> None:
    """Without nccl4py nobody waits for a sender that cannot begin, and the text says what to install."""
    trainers = [TrainerHost(cast.directory) for _ in range(2)]
    try:
        port = free_port()
        for result in together(*(lambda r=rank: configure_real(trainers[r], r, port) for rank in range(2))):
            assert result is None, result
        errors = together(*(lambda t=t: raises(lambda: t.call("init", timeout_s=20)) for t in trainers))
    finally:
        together(*(trainer.close for trainer in trainers))
    for error in errors:
        assert error["type"] == "BackendUnavailableError", error
        assert "nccl4py" in error["message"]
        assert "[nccl]" in error["message"]


def configure_real(trainer: TrainerHost, rank: int, port: int) -> None:
    """One of two ranks whose NCCL is not a stand-in; no worker is reached."""
    config = {"layout": "plain", "rank": rank, "num_ranks": 2, "workers": [], "group_port": port, "parameters": MANY}
    trainer.call("configure", config={**config, "backend": "nccl", "is_real": True})


def test_settings_that_differ_are_named(cast: Cast, tmp_path: object) -> None:
    """Ranks whose NCCL would not understand each other are found in the init, before anything of theirs moves."""
    workers = cast.engine(MANY, 1)
    for environment, expected in (
        ({fake_nccl.VERSION: "2.29.1"}, "expected NCCL 2.29.1, as on the sender, got 2.28.9"),
        ({"NCCL_PROTO": "LL"}, "expected NCCL_PROTO LL, as on the sender, got unset"),
    ):
        with TrainerHost(cast.directory, environment=environment) as trainer:
            config = {"layout": "plain", "rank": 0, "num_ranks": 1, "workers": [workers[0].port]}
            trainer.call("configure", config={**config, "parameters": MANY, "backend": "nccl"})
            error = raises(lambda host=trainer: host.call("init"))
            assert (error["type"], error["rank"], error["engine"]) == ("AgreementError", 0, "e/0")
            assert expected in error["message"]


def test_failed_round_of_two_senders_leaves_nothing_behind(cast: Cast) -> None:
    """With a channel for each sender, a worker that stops in mid-round costs the deadline, and the next round is whole."""
    owners = {name: [index * 2 // len(BIG)] for index, name in enumerate(BIG)}
    workers = cast.engine(BIG, 1)
    trainers = cast.trainers(workers, 2, parameters=BIG, owners=owners, info={"timeout_s": 3})
    assert together(*(lambda t=t: t.call("init") for t in trainers)) == [None, None]
    for report in together(*(lambda t=t: t.call("send") for t in trainers)):
        committed(report)
    workers[0].signal(signal.SIGSTOP)
    errors = [
        raises(lambda r=result: _reraise(r)) for result in together(*(lambda t=t: t.call("send") for t in trainers))
    ]
    workers[0].signal(signal.SIGCONT)
    assert {error["type"] for error in errors} == {"RoundTimeoutError"}
    for trainer in trainers:
        trainer.call("set_weights", seed=5)
    assert together(*(lambda t=t: t.call("init") for t in trainers)) == [None, None]
    for report in together(*(lambda t=t: t.call("send") for t in trainers)):
        committed(report)
    assert workers[0].call("sums") == trainers[0].call("sums") == trainers[1].call("sums")


def _reraise(result: object) -> object:
    if isinstance(result, BaseException):
        raise result
    return result
