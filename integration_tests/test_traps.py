"""Models that a write in place would get wrong: each is noticed, and goes through the loader or is refused.

They are planted into a running vLLM, one at a time. Others are models of `test_placement.py`: a packed `lm_head` beside a live
weight and repacked experts (the packed cases), padding of the vocabulary (llama-oddvocab), a value transform after the copy
(mamba2), a loader that writes into its source (gpt-oss).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engines import InProcess
from harness import Cast, HostError, TrainerHost
from test_placement import sync


@pytest.fixture(scope="module")
def engine(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    """A llama whose layers multiply with their weights, as on CUDA, so that all could be written in place."""
    engine = InProcess(checkpoint("llama"), tmp_path_factory.mktemp("traps"), unpacked=True)
    yield engine
    engine.close()


@pytest.fixture
def plant(engine: InProcess, cast: Cast) -> Iterator[Callable[[str], tuple[TrainerHost, str]]]:
    """Plants a trap; returned are a trainer that is connected and the layer concerned. It is gone after the test."""

    def plant_one(trap: str) -> tuple[TrainerHost, str]:
        (layer,) = engine.host.call("each_rank", method="plant", arguments=[trap])
        trainer = cast.trainer([], layout="whole", model="llama", **engine.reach())
        trainer.call("init")
        return trainer, layer

    yield plant_one
    engine.host.call("each_rank", method="uproot", arguments=[])


def reasons(report: dict[str, Any], layer: str) -> list[str]:
    """Why `layer` was not written in place."""
    return [
        reason for worker in report["workers"] for reason, layers in worker["not_in_place"].items() if layer in layers
    ]


@pytest.mark.parametrize(
    ("trap", "words"),
    [
        ("transposed", "its processing moves bytes"),
        ("repacked", "its processing moves bytes"),
        ("two_names", "is served from the memory of"),
    ],
)
def test_layer_goes_through_the_loader(plant: Callable[[str], tuple[TrainerHost, str]], trap: str, words: str) -> None:
    """What serves is not laid out as what is loaded: the layer is never written in place, all others are."""
    trainer, layer = plant(trap)
    if trap == "two_names":
        trainer.call("tie", param="lm_head.weight", to="model.embed_tokens.weight")
    report = {}
    for seed in (3, 4, 5):
        report = sync(trainer, seed)
    found = reasons(report, layer)
    assert len(found) == 1
    assert words in found[0]
    assert sum(len(layers) for layers in report["workers"][0]["not_in_place"].values()) <= 2


def test_parameter_that_a_load_replaces_is_refused(plant: Callable[[str], tuple[TrainerHost, str]]) -> None:
    """A new parameter at every load, which vLLM's reload would drop, is an error before a byte moves."""
    trainer, layer = plant("replaced")
    with pytest.raises(HostError, match="copied into a tensor that is no parameter") as caught:
        sync(trainer, 3)
    error = caught.value.error
    assert (error["type"], error["outcome"], error["param"]) == ("PlanError", "unchanged", f"{layer}.weight")


def test_view_that_processing_left_behind_is_refused(plant: Callable[[str], tuple[TrainerHost, str]]) -> None:
    """A buffer that shows memory which its parameter has left, and nobody fills, is an error before a byte moves."""
    trainer, layer = plant("detached_view")
    with pytest.raises(HostError, match=r"mlp\.probe was a view of") as caught:
        sync(trainer, 3)
    error = caught.value.error
    assert (error["type"], error["outcome"], error["param"]) == ("PlanError", "unchanged", f"{layer}.weight")


def test_parameter_that_serves_emptied_is_refused(plant: Callable[[str], tuple[TrainerHost, str]]) -> None:
    """A parameter that somebody has emptied, and not its own layer's processing, is an error before a byte moves."""
    trainer, layer = plant("emptied_norm")
    with pytest.raises(HostError, match=r"is loaded with shape \(64,\) and serves with \(0,\)") as caught:
        sync(trainer, 3)
    error = caught.value.error
    assert (error["type"], error["outcome"], error["param"]) == ("PlanError", "unchanged", f"{layer}.weight")


@pytest.mark.parametrize(
    ("trap", "path"),
    [
        ("float_copy", "attn.impl.probe"),
        ("concatenated", "mlp.probe"),
        ("loaded_copy", "down_proj.probe"),
        ("loaded_view", "layers.0.probe"),
        ("emptied_copy", "down_proj.probe"),
    ],
)
def test_copy_that_nobody_makes_again_is_refused(
    plant: Callable[[str], tuple[TrainerHost, str]], trap: str, path: str
) -> None:
    """A model that would compute with an old copy is an error that names the copy, as soon as the weights are others.

    That is so for layers that could be written in place, and for those that go through the loader for good.
    """
    trainer, layer = plant(trap)
    errors = []
    for seed in (3, 4):
        trainer.call("set_weights", seed=seed)
        try:
            trainer.call("send")
        except HostError as exc:
            errors.append(exc.error)
    assert errors, "two rounds committed"
    error = errors[0]
    assert error["type"] == "PlanError"
    assert path in error["message"]
    assert "holds a copy of" in error["message"]
    assert error["param"].startswith(layer)
    assert error["outcome"] == "poisoned"


def test_view_of_memory_that_a_round_has_left_is_refused(plant: Callable[[str], tuple[TrainerHost, str]]) -> None:
    """What refers to the memory that a parameter had before the round, and has no longer, is an error that names it."""
    trainer, layer = plant("moved_weight")
    with pytest.raises(HostError, match=r"layers\.0\.probe is a view of memory that") as caught:
        sync(trainer, 3)
    error = caught.value.error
    assert (error["type"], error["outcome"], error["param"]) == ("PlanError", "poisoned", f"{layer}.weight")


def test_experts_that_moved_are_not_written_in_place(
    engine: InProcess, plant: Callable[[str], tuple[TrainerHost, str]]
) -> None:
    """What was proved with one map of experts counts for nothing with another; a server that moves them at will is refused."""
    trainer, layer = plant("expert_map")
    for seed in (3, 4):
        sync(trainer, seed)
    assert reasons(sync(trainer, 5), layer) == []
    engine.host.call("each_rank", method="move_experts", arguments=[])
    assert reasons(sync(trainer, 3), layer) == ["not proved yet"]
    (refused,) = engine.host.call("each_rank", method="refuses_moving_experts", arguments=[])
    assert refused.startswith("PlanError: expert parallel load balancing is on")
