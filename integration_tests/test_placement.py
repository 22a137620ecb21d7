"""Every layer of a real vLLM is installed in the way that the matrix says, and what serves is what a fresh load would serve."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import models
import pytest
from cases import PlacementCase, count_reasons
from engines import InProcess
from harness import Cast, HostError, TrainerHost
from test_sync import PROMPT

SEED_LOADED = 0  # of the checkpoint that the engine started from; see `checkpoint`


@pytest.fixture(scope="module")
def placed(
    placement: PlacementCase, checkpoint: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[InProcess, list[Any], list[float]]]:
    """The case's engine; what it serves after a fresh load, by rank, and what it computes then."""
    config: dict[str, Any] = {"unpacked": not placement.packed, "tensor_parallel_size": placement.num_ranks}
    engine = InProcess(checkpoint(placement.model), tmp_path_factory.mktemp(str(placement)), **config)
    try:
        fresh = engine.host.call("each_rank", method="live_digests", arguments=[])
        yield engine, fresh, engine.prompt_logprobs(PROMPT)[0]
    finally:
        engine.close()


def connect(cast: Cast, engine: InProcess, placement: PlacementCase, **options: Any) -> TrainerHost:
    trainer = cast.trainer([], layout="whole", model=placement.model, **engine.reach())
    trainer.call("init", **options)
    return trainer


def sync(trainer: TrainerHost, seed: int) -> dict[str, Any]:
    trainer.call("set_weights", seed=seed)
    return dict(trainer.call("send"))


def test_third_round_equals_a_fresh_load(
    placement: PlacementCase, placed: tuple[InProcess, list[Any], list[float]], cast: Cast
) -> None:
    """Two rounds prove the layers; the third writes in place, and leaves bit for bit what a fresh load had left."""
    engine, fresh, logprobs = placed
    trainer = connect(cast, engine, placement)
    for seed in (3, 4):
        sync(trainer, seed)
        assert engine.prompt_logprobs(PROMPT)[0] != logprobs
    report = sync(trainer, SEED_LOADED)
    live = engine.host.call("each_rank", method="live_digests", arguments=[])
    for rank, (now, then) in enumerate(zip(live, fresh, strict=True)):
        assert now.keys() == then.keys()
        assert [name for name in then if now[name] != then[name]] == [], f"rank {rank}"
    assert engine.prompt_logprobs(PROMPT)[0] == logprobs
    assert report["outcome"] == "committed"
    assert report["verify"] == "full"
    assert report["ignored"] in ((), [])
    all_kinds = engine.host.call("each_rank", method="kinds", arguments=[])
    for worker, kinds, expected in zip(report["workers"], all_kinds, placement.kinds, strict=True):
        assert worker["not_synced"] == []
        reasons = count_reasons(worker["not_in_place"], placement.not_in_place)
        counts = {kind: list(kinds.values()).count(kind) for kind in kinds.values()}
        assert (reasons, counts) == (placement.not_in_place, expected)


@pytest.mark.parametrize("moment", ["flight", "staging", "installed"])
def test_flipped_bit_is_caught_and_named(
    placement: PlacementCase, placed: tuple[InProcess, list[Any], list[float]], cast: Cast, moment: str
) -> None:
    """One bit, in flight, in staging or after it was installed, fails the round and is named; the next round repairs it."""
    engine, _, logprobs = placed
    trainer = connect(cast, engine, placement)
    for seed in (3, 4, 3):
        sync(trainer, seed)
    names = [name for name, _ in models.checkpoint_items(models.build_model(placement.model, 0))]
    norm = next(name for name in names if name.endswith(FINAL_NORMS))
    rank = 0 if moment == "flight" else placement.num_ranks - 1  # the first bytes of a vocabulary are the first rank's
    flipped = names[0] if moment == "flight" else norm
    engine.host.call("each_rank", method="flip_next", arguments=[moment, norm, rank])
    with pytest.raises(HostError) as caught:
        sync(trainer, 4)
    error = caught.value.error or {}
    assert (error.get("type"), error.get("param")) == ("IntegrityError", flipped), error
    assert error["outcome"] == "poisoned"
    assert error.get("rank") in ((rank, None) if moment == "flight" else (rank,))
    sync(trainer, SEED_LOADED)
    assert engine.prompt_logprobs(PROMPT)[0] == logprobs


LONG_PROMPT = [(7 * place * place + 3 * place) % 250 for place in range(120)]
SEEDS = (SEED_LOADED, 5, 6, 7, 8, 9, 10, 11)
OTHER_SEED = 3

FINAL_NORMS = ("model.norm.weight", "ln_f.weight", "norm_f.weight")


def test_withholding_any_parameter_shows(
    request: pytest.FixtureRequest,
    placement: PlacementCase,
    placed: tuple[InProcess, list[Any], list[float]],
    cast: Cast,
) -> None:
    """No parameter is without effect: leaving out any single one, cover check off, gives other log-probabilities."""
    if not request.config.getoption("--all"):
        pytest.skip("for all kinds with --all; test_sync.py shows it for those of the default run")
    if placement.packed or placement.num_ranks > 1:
        pytest.skip("shown once for each kind")
    engine, _, _ = placed
    names = [name for name, _ in models.checkpoint_items(models.build_model(placement.model, 0))]
    assert names

    def computed(trainer: TrainerHost, seed: int) -> list[float]:
        sync(trainer, seed)
        return list(engine.prompt_logprobs(LONG_PROMPT)[0])

    def shows(name: str, seed: int, whole: list[float]) -> bool:
        trainer = connect(cast, engine, placement)
        sync(trainer, OTHER_SEED)
        trainer.call("configure_withheld", param=name)
        trainer.call("init", check_cover=False)
        now = computed(trainer, seed)
        cast.release()
        return any(not abs(a - b) < 1e-3 for a, b in zip(now, whole, strict=True))  # what nobody wrote is NaN

    unseen = names
    for seed in SEEDS:  # with some weights a router gives no token to some expert, and nobody can tell what is in it
        whole = computed(connect(cast, engine, placement), seed)
        cast.release()
        unseen = [name for name in unseen if not shows(name, seed, whole)]
        if not unseen:
            return
    raise AssertionError(f"withholding makes no difference: {unseen}")
