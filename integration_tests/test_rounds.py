"""Rounds between real processes, without vLLM: an engine around a small module on one side, trainer ranks on the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import Cast, HostError, free_port, together

EVERY_DTYPE = {
    f"layers.{index}.of_{dtype}": (dtype, shape)
    for index, shape in enumerate(([5, 7], [], [0, 3], [129], [2, 3, 4]))
    for dtype in (
        *("float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("int8", "uint8", "int16", "int32", "int64", "bool"),
    )
}
MANY = {f"layers.{index}.weight": ("float32", [64, 64]) for index in range(60)}
"""Enough parameters that a slow source is in the middle of a round for seconds."""


def raises(call: Callable[[], Any]) -> dict[str, Any]:
    """The error that `call` gets from the other process: type, message and attributes."""
    try:
        result = call()
    except HostError as exc:
        assert exc.error, exc  # noqa: PT017  # an error without attributes is the harness's own
        return exc.error
    raise AssertionError(f"expected an error, got {result}")


def committed(report: Any) -> dict[str, Any]:
    """`report`, which must be that of a committed round."""
    if isinstance(report, BaseException):
        raise report
    assert report["outcome"] == "committed"
    return report


@pytest.mark.parametrize("size", [1, 2])
def test_every_dtype_and_shape_arrives(cast: Cast, size: int) -> None:
    """Bytes arrive as they were, for every dtype, 0-dim, empty and odd-sized tensors, also from strided memory."""
    workers = cast.engine(EVERY_DTYPE, size)
    trainer = cast.trainer(workers, parameters=EVERY_DTYPE)
    trainer.call("init")
    for seed, edit in ((1, "none"), (2, "strided"), (3, "none")):
        trainer.call("set_weights", seed=seed)
        trainer.call("edit", kind=edit, param="layers.4.of_bfloat16")
        report = committed(trainer.call("send", weight_version=f"v{seed}"))
        for worker in workers:
            assert worker.call("sums") == trainer.call("sums")
            assert worker.call("weight_version") == f"v{seed}"
        assert len(report["workers"]) == size


def test_two_engines_and_small_groups(cast: Cast) -> None:
    """Independent engines behind one client, of different sizes, each get everything, also in tiny groups and unpacked."""
    workers = [*cast.engine(MANY, 2, "a"), *cast.engine(MANY, 1, "b")]
    trainer = cast.trainer(workers, parameters=MANY)
    for options in (
        {},
        {"packed_buffer_size_bytes": 1000, "packed_num_buffers": 3},
        {"packed": False},
        {"world_size": 4},
    ):
        trainer.call("init", **options)
        trainer.call("set_weights", seed=len(options) + 7)
        report = committed(trainer.call("send"))
        assert [(worker["engine"], worker["rank"]) for worker in report["workers"]] == [
            ("a/0", 0),
            ("a/0", 1),
            ("b/0", 0),
        ]
        assert all(worker.call("sums") == trainer.call("sums") for worker in workers)


def test_two_trainer_ranks_one_sends(cast: Cast) -> None:
    """With every rank holding everything, rank 0 sends, and both ranks get the same report."""
    workers = cast.engine(MANY, 1)
    trainers = cast.trainers(workers, 2, parameters=MANY)
    assert together(*(lambda t=t: t.call("init") for t in trainers)) == [None, None]
    for seed in (1, 2):
        together(*(lambda t=t, seed=seed: t.call("set_weights", seed=seed) for t in trainers))
        reports = [committed(report) for report in together(*(lambda t=t: t.call("send") for t in trainers))]
        for report in reports:
            report.pop("call_s")
        assert reports[0] == reports[1]
        assert workers[0].call("sums") == trainers[0].call("sums")


@pytest.mark.parametrize("how", ["default_group", "secret"])
def test_two_data_senders(cast: Cast, how: str) -> None:
    """Each of two trainer ranks sends the parameters that only it owns; together they are the model."""
    owners = {name: [index * 2 // len(MANY)] for index, name in enumerate(MANY)}
    workers = cast.engine(MANY, 2)
    config = {"parameters": MANY, "owners": owners}
    if how == "default_group":
        trainers = cast.trainers(workers, 2, **config)
    else:
        info = {
            "master_address": "127.0.0.1",
            "master_port": free_port(),
            "session_secret": "ab" * 32,
            "num_trainer_ranks": 2,
        }
        trainers = [cast.trainer(workers, rank=rank, num_ranks=2, info=info, **config) for rank in range(2)]
    assert together(*(lambda t=t: t.call("init") for t in trainers)) == [None, None]
    for seed in (1, 2, 3):
        together(*(lambda t=t, seed=seed: t.call("set_weights", seed=seed) for t in trainers))
        for report in together(*(lambda t=t: t.call("send") for t in trainers)):
            committed(report)
        assert all(worker.call("sums") == trainers[0].call("sums") for worker in workers)


@pytest.mark.parametrize("edit", ["missing", "extra", "renamed", "reordered", "shape", "dtype"])
def test_source_that_differs_from_its_metadata(cast: Cast, edit: str) -> None:
    """What a source yields against its metadata is an error that names parameter and side; the next round commits."""
    workers = cast.engine(MANY, 1)
    trainer = cast.trainer(workers, parameters=MANY)
    trainer.call("init")
    committed(trainer.call("send", weight_version="before"))
    trainer.call("edit", kind=edit, param="layers.30.weight")
    error = raises(lambda: trainer.call("send", weight_version="never"))
    assert error["type"] == "PlanError"
    assert error["side"] == "trainer"
    assert error["param"] in {"layers.30.weight", "layers.0.weight", "extra"}
    assert error["param"] in error["message"]
    assert error["outcome"] in {"unchanged", "poisoned"}
    assert workers[0].call("weight_version") == "before"
    trainer.call("edit", kind="none")
    trainer.call("set_weights", seed=5)
    committed(trainer.call("send", weight_version="after"))
    assert workers[0].call("sums") == trainer.call("sums")
    assert workers[0].call("weight_version") == "after"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layers.3.weight": ("float32", [64, 65])}, "layers.3.weight"),
        ({"layers.3.weight": ("int32", [64, 64])}, "layers.3.weight"),
        ({"layers.3.weight": None}, "layers.3.weight"),
        ({"layers.99.weight": ("float32", [4])}, "layers.99.weight"),
    ],
    ids=["shape", "dtype", "unknown", "not-sent"],
)
@pytest.mark.parametrize("size", [1, 2])
def test_model_that_differs_from_the_metadata(cast: Cast, size: int, change: dict[str, Any], named: str) -> None:
    """A model without a place for what is announced refuses before a byte moves, naming the parameter; all is unchanged."""
    model = {name: spec for name, spec in {**MANY, **change}.items() if spec is not None}
    workers = cast.engine(model, size)
    trainer = cast.trainer(workers, parameters=MANY)
    trainer.call("init")
    before = workers[0].call("sums")
    for _ in range(2):
        error = raises(lambda: trainer.call("send"))
        assert (error["type"], error["side"], error["param"], error["outcome"]) == (
            "PlanError",
            "worker",
            named,
            "unchanged",
        )
        assert error["call_s"] < 2
        assert workers[0].call("sums") == before
    for worker in workers:
        assert worker.call("echo", value=worker.port) == worker.port


def test_client_that_drops_a_call(cast: Cast) -> None:
    """A call that returns without having reached the engines fails the round soon, and names who was not reached."""
    workers = [*cast.engine(MANY, 1, "a"), *cast.engine(MANY, 1, "b")]
    trainer = cast.trainer(workers, parameters=MANY)
    trainer.call("init")
    trainer.call("drop_updates", drops=True)
    error = raises(lambda: trainer.call("send"))
    assert (error["type"], error["outcome"]) == ("AgreementError", "unchanged")
    assert "worker rank 0 of engine b/0" in error["message"]
    assert error["call_s"] < 10
    trainer.call("drop_updates", drops=False)
    committed(trainer.call("send"))
    assert all(worker.call("sums") == trainer.call("sums") for worker in workers)


def test_source_that_overwrites_what_it_yielded(cast: Cast) -> None:
    """A large tensor that is sent from where it lies must not change meanwhile: the round fails, and the next one repairs.

    Where the source does not vouch for that, its tensors are copied, and may change.
    """
    parameters = {"a": ("float32", [1 << 20]), "b": ("float32", [1 << 20]), "c": ("float32", [2])}
    workers = cast.engine(parameters, 1)
    trainer = cast.trainer(workers, parameters=parameters)
    trainer.call("init")
    trainer.call("edit", kind="overwritten", param="b")
    error = raises(lambda: trainer.call("send"))
    assert (error["type"], error["param"]) == ("PlanError", "b")
    assert error["outcome"] in {"poisoned", "unchanged"}  # by whether the group or the abort reaches the worker first
    trainer.call("edit", kind="overwritten", param="c")  # packed, so it has been copied by then
    committed(trainer.call("send"))
    assert workers[0].call("sums") == trainer.call("sums")
    trainer.call("vouch", is_stable=False)
    trainer.call("edit", kind="overwritten", param="b")
    trainer.call("set_weights", seed=2)
    committed(trainer.call("send"))
    assert workers[0].call("sums") == trainer.call("sums")


LARGE_AND_SMALL = {
    **{f"layers.{index}.weight": ("float32", [512, 512]) for index in range(6)},
    **{f"layers.{index}.bias": ("float32", [512]) for index in range(6)},
    "head.weight": ("bfloat16", [1024, 1500]),
}
"""The weights are just large enough to be sent from where they lie, if the source allows it."""


@pytest.mark.parametrize("verify", ["full", "received", "off"])
def test_source_that_changes_what_it_yielded_sends_what_it_yielded(cast: Cast, verify: str) -> None:
    """A source that merges for the time of a yield, or reuses memory, through `.data`: the workers get what it yielded.

    The groups are once those of all parameters, and once so small that the head is cut. Three rounds, on new weights.
    """
    workers = cast.engine(LARGE_AND_SMALL, 1)
    trainer = cast.trainer(workers, parameters=LARGE_AND_SMALL)
    for options in ({}, {"packed_buffer_size_bytes": 2_000_000}):
        trainer.call("init", verify=verify, **options)
        trainer.call("vouch", is_stable=False)
        for seed, edit in enumerate(("merged", "reused", "merged")):
            trainer.call("set_weights", seed=seed + 10 * len(options))
            trainer.call("edit", kind=edit)
            report = committed(trainer.call("send"))
            assert workers[0].call("sums") == trainer.call("sums", merged=edit == "merged")
            assert report["buffer_bytes"] <= 2 * options.get("packed_buffer_size_bytes", 64 << 20)


@pytest.mark.parametrize("root", [0, 1])
@pytest.mark.parametrize("verify", ["full", "received"])
def test_memory_that_is_written_during_a_round_is_the_trainers_fault(cast: Cast, verify: str, root: int) -> None:
    """A thread that trains meanwhile, through `.data`: all ranks name the rank whose memory changed; the next round repairs."""
    owners = {name: [root] for name in LARGE_AND_SMALL}
    workers = cast.engine(LARGE_AND_SMALL, 1)
    trainers = cast.trainers(workers, 2, parameters=LARGE_AND_SMALL, owners=owners)
    assert together(*(lambda t=t: t.call("init", verify=verify) for t in trainers)) == [None, None]
    trainers[root].call("edit", kind="trained", param="layers.3.weight")
    for error in together(*(lambda t=t: raises(lambda: t.call("send")) for t in trainers)):
        assert (error["type"], error["side"], error["rank"]) == ("PlanError", "trainer", root), error
        assert (error["param"], error["outcome"]) == ("layers.3.weight", "poisoned")
        assert f"changed in the memory of trainer rank {root}" in error["message"]
    trainers[root].call("edit", kind="none")
    for report in together(*(lambda t=t: t.call("send") for t in trainers)):
        committed(report)
    assert workers[0].call("sums") == trainers[root].call("sums")


@pytest.mark.parametrize("declared", [{"a": ("float32", [4]), "b": ("float32", [3])}, {"a": ("float32", [4])}])
def test_trainer_ranks_whose_metadata_differ(cast: Cast, declared: dict[str, Any]) -> None:
    """A rank that would send something else than rank 0 stops the round before a byte moves; all ranks name the parameter."""
    parameters = {"a": ("float32", [4]), "b": ("float32", [2])}
    workers = cast.engine(parameters, 1)
    trainers = cast.trainers(workers, 2, parameters=parameters)
    trainers[1].call("declare", parameters=declared)
    for result in together(*(lambda t=t: t.call("init") for t in trainers)):
        assert result is None, result
    for error in together(*(lambda t=t: raises(lambda: t.call("send")) for t in trainers)):
        assert (error["type"], error["outcome"], error["side"], error["rank"]) == (
            "PlanError",
            "unchanged",
            "trainer",
            1,
        )
        assert error["param"] == "b"
    trainers[1].call("declare", parameters=parameters)
    for result in together(*(lambda t=t: t.call("init") for t in trainers)):
        assert result is None, result
    for result in together(*(lambda t=t: t.call("send") for t in trainers)):
        committed(result)
    assert workers[0].call("sums") == trainers[0].call("sums")


def test_wider_dtype_is_cast(cast: Cast) -> None:
    """float32 master weights arrive rounded in a bfloat16 model."""
    narrow = {name: ("bfloat16", shape) for name, (_, shape) in MANY.items()}
    workers = cast.engine(narrow, 1)
    trainer = cast.trainer(workers, parameters=MANY)
    trainer.call("init")
    trainer.call("set_weights", seed=3)
    report = committed(trainer.call("send"))
    assert report["num_cast"] == len(MANY)
    assert report["num_bytes"] == sum(2 * 64 * 64 for _ in MANY)  # cast by the sender: half the bytes on the wire
    expected = cast.trainer(workers, parameters=narrow)
    expected.call("set_weights", seed=3)
    assert workers[0].call("sums") == expected.call("sums")


def test_engines_of_different_dtypes(cast: Cast) -> None:
    """Where engines want different dtypes, the trainer's own is sent and each worker casts."""
    narrow = {name: ("bfloat16", shape) for name, (_, shape) in MANY.items()}
    workers = [*cast.engine(MANY, 1, "wide"), *cast.engine(narrow, 1, "narrow")]
    trainer = cast.trainer(workers, parameters=MANY)
    trainer.call("init")
    trainer.call("set_weights", seed=3)
    assert committed(trainer.call("send"))["num_cast"] == 0
    assert workers[0].call("sums") == trainer.call("sums")
    expected = cast.trainer(workers, parameters=narrow)
    expected.call("set_weights", seed=3)
    assert workers[1].call("sums") == expected.call("sums")


def test_draft_model_gets_its_own_rounds(cast: Cast) -> None:
    """Within client.draft() another source goes to the draft model; model and version stay; the next round is ordinary."""
    draft = {"layers.0.weight": ("float32", [8, 8])}
    (worker,) = cast.engine(MANY, 1, draft=draft)
    trainer = cast.trainer([worker], parameters=MANY)
    trainer.call("init")
    committed(trainer.call("send", weight_version="before"))
    for seed in (1, 2):
        sent = trainer.call("send_draft", parameters=draft, seed=seed)
        assert worker.call("sums", draft=True) == sent
        assert worker.call("sums") == trainer.call("sums")
        assert worker.call("weight_version") == "before"
    trainer.call("set_weights", seed=4)
    committed(trainer.call("send"))
    assert worker.call("sums") == trainer.call("sums")
    assert worker.call("sums", draft=True) == sent


def test_probe_finds_a_live_session(cast: Cast) -> None:
    """An init marked probe is refused while a session lives, with its age, and never replaces it."""
    (worker,) = cast.engine(MANY, 1)
    trainer = cast.trainer([worker], parameters=MANY)
    trainer.call("init")
    committed(trainer.call("send"))
    info = {
        "session_address": "127.0.0.1",
        "session_port": 9,
        "session_secret": "00",
        "session": "probe",
        "schema": [1, 0],
        "timeout_s": 5.0,
        "probe": True,
        "max_group_bytes": 1,
        "max_group_pieces": 1,
        "num_buffers": 1,
    }
    error = raises(lambda: worker.call("init_weight_transfer_engine", init_info=info))
    assert error["type"] == "AgreementError"
    assert "busy" in error["message"]
    committed(trainer.call("send"))


def test_schema_major_that_differs(cast: Cast) -> None:
    """A worker of another schema major refuses the init, and says which release to install."""
    (worker,) = cast.engine(MANY, 1)
    info = {"session_address": "127.0.0.1", "session_port": 9, "session_secret": "00", "session": "s", "timeout_s": 5.0}
    info |= {"schema": [9, 0], "max_group_bytes": 1, "max_group_pieces": 1, "num_buffers": 1}
    error = raises(lambda: worker.call("init_weight_transfer_engine", init_info=info))
    assert error["type"] == "AgreementError"
    assert "9.0" in error["message"]


def test_calls_out_of_order(cast: Cast) -> None:
    """A second trainer, an old session, a wrong world size, a used port, send after shutdown and init twice: typed errors."""
    workers = cast.engine(MANY, 1)
    first, second = (cast.trainer(workers, parameters=MANY) for _ in range(2))
    first.call("init")
    committed(first.call("send"))
    second.call("init")
    error = raises(lambda: first.call("send"))
    assert (error["type"], error["outcome"]) == ("StaleSessionError", "unchanged")
    committed(second.call("send"))
    error = raises(lambda: first.call("init", world_size=3))
    assert error["type"] == "AgreementError"
    assert "expected 2 worker ranks, got 1" in error["message"]
    error = raises(lambda: first.call("init", master_address="127.0.0.1", master_port=workers[0].port))
    assert error["type"] == "ConfigurationError"
    assert "master_port" in error["message"]
    first.call("init")
    first.call("init")
    committed(first.call("send"))
    first.call("shutdown")
    assert raises(lambda: first.call("send"))["type"] == "StaleSessionError"
    second.call("init")
    committed(second.call("send"))
    assert workers[0].call("sums") == second.call("sums")


def test_worker_out_of_a_round(cast: Cast) -> None:
    """Start and finish without a round do nothing; an update without an init, or of another session, is refused."""
    (worker,) = cast.engine(MANY, 1)
    info = {"session": "x", "round": 1, "metadata_digest": "y"}
    worker.call("start_weight_update")
    assert raises(lambda: worker.call("update_weights", update_info=info))["type"] == "StaleSessionError"
    worker.call("start_weight_update")
    worker.call("finish_weight_update", weight_version=None)
    worker.call("start_weight_update")
    assert raises(lambda: worker.call("update_weights", update_info={"session": "x"}))["type"] == "ConfigurationError"
    trainer = cast.trainer([worker], parameters=MANY)
    trainer.call("init")
    committed(trainer.call("send"))
    worker.call("start_weight_update")
    assert raises(lambda: worker.call("update_weights", update_info=info))["type"] == "StaleSessionError"
    committed(trainer.call("send"))


def test_default_group_beside_a_trainer_of_one(cast: Cast) -> None:
    """A trainer of one rank that is some other rank of a default group says so with num_trainer_ranks=1, and works."""
    workers = cast.engine(MANY, 1)
    other, trainer = cast.trainers(workers, 2, parameters=MANY, alone=True)
    assert raises(lambda: trainer.call("init"))["type"] == "ConfigurationError"
    trainer.call("init", num_trainer_ranks=1)
    committed(trainer.call("send"))
    assert other.call("echo", value=1) == 1
