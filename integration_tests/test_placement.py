"""Every layer of a real vLLM is installed in the way that the matrix says, and what serves is what a fresh load would serve."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import models
import pytest
import torch
from cases import PlacementCase, count_reasons
from engines import FreshLoad, InProcess
from harness import Cast, HostError, TrainerHost
from test_sync import PROMPT

SEED_LOADED = 0  # of the checkpoint that the engine started from; see `checkpoint`
SEED_NEW = 5  # of weights that it never had before the third round: a copy that was left behind at the start would show


@pytest.fixture(scope="module")
def new(placement: PlacementCase, fresh_load: Callable[..., FreshLoad]) -> FreshLoad:
    """What an engine of the case serves that started from the weights of `SEED_NEW`."""
    return fresh_load(placement.model, SEED_NEW, PROMPT, **options(placement))


@pytest.fixture(scope="module")
def placed(
    new: FreshLoad,  # first: two engines at a time are too much for a small machine
    placement: PlacementCase,
    checkpoint: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[InProcess, FreshLoad]]:
    """The case's engine, and what it served at first."""
    assert new.logprobs
    engine = InProcess(checkpoint(placement.model), tmp_path_factory.mktemp(str(placement)), **options(placement))
    try:
        yield engine, FreshLoad.now(engine, PROMPT)
    finally:
        engine.close()


def options(placement: PlacementCase) -> dict[str, Any]:
    """What its engine is started with."""
    return {
        "unpacked": not placement.packed,
        "tensor_parallel_size": placement.num_ranks,
        "dtype": placement.dtype,
    }


def connect(cast: Cast, engine: InProcess, placement: PlacementCase, **options: Any) -> TrainerHost:
    trainer = cast.trainer([], layout="whole", model=placement.model, **engine.reach())
    trainer.call("init", **options)
    return trainer


def sync(trainer: TrainerHost, seed: int) -> dict[str, Any]:
    trainer.call("set_weights", seed=seed)
    return dict(trainer.call("send"))


def test_third_round_equals_a_fresh_load(
    placement: PlacementCase, placed: tuple[InProcess, FreshLoad], new: FreshLoad, cast: Cast
) -> None:
    """Two rounds prove the layers; the third writes in place, and leaves bit for bit what a fresh load of its weights leaves."""
    engine, at_first = placed
    trainer = connect(cast, engine, placement)
    seen = [at_first.logprobs, new.logprobs]
    for seed in (3, 4):
        sync(trainer, seed)
        seen.append(engine.prompt_logprobs(PROMPT)[0])
    assert all(one != other for one, other in combinations(seen, 2))
    report = sync(trainer, SEED_NEW)
    now = FreshLoad.now(engine, PROMPT)
    for rank, (live, fresh) in enumerate(zip(now.digests, new.digests, strict=True)):
        assert live.keys() == fresh.keys()
        assert [name for name in fresh if live[name] != fresh[name]] == [], f"rank {rank}"
    assert now.logprobs == new.logprobs
    assert report["outcome"] == "committed"
    assert report["verify"] == "full"
    assert report["ignored"] in ((), [])
    not_in_place = placement.not_in_place
    if placement.dtype == "bfloat16" and torch.cpu._is_avx512_bf16_supported():
        not_in_place = not_in_place | placement.with_packed_convolutions
    all_kinds = engine.host.call("each_rank", method="kinds", arguments=[])
    for worker, kinds, expected in zip(report["workers"], all_kinds, placement.kinds, strict=True):
        assert worker["not_synced"] == []
        reasons = count_reasons(worker["not_in_place"], not_in_place)
        counts = {kind: list(kinds.values()).count(kind) for kind in kinds.values()}
        assert (reasons, counts) == (not_in_place, expected)


@pytest.mark.parametrize("moment", ["flight", "staging", "installed"])
def test_flipped_bit_is_caught_and_named(
    placement: PlacementCase, placed: tuple[InProcess, FreshLoad], cast: Cast, moment: str
) -> None:
    """One bit, in flight, in staging or after it was installed, fails the round and is named; the next round repairs it."""
    engine, at_first = placed
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
    assert engine.prompt_logprobs(PROMPT)[0] == at_first.logprobs


LONG_PROMPT = [(7 * place * place + 3 * place) % 250 for place in range(120)]
SEEDS = (SEED_LOADED, 5, 6, 7, 8, 9, 10, 11)
OTHER_SEED = 3

FINAL_NORMS = ("model.norm.weight", "ln_f.weight", "norm_f.weight")


def test_withholding_any_parameter_shows(
    request: pytest.FixtureRequest,
    placement: PlacementCase,
    placed: tuple[InProcess, FreshLoad],
    cast: Cast,
) -> None:
    """No parameter is without effect: leaving out any single one, cover check off, gives other log-probabilities."""
    if not request.config.getoption("--all"):
        pytest.skip("for all kinds with --all; test_sync.py shows it for those of the default run")
    if placement.packed or placement.num_ranks > 1:
        pytest.skip("shown once for each kind")
    engine, _ = placed
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
