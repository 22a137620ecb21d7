"""A vLLM whose latent attention empties a weight once it has taken what it computes with, as on a CPU with AMX."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engines import FreshLoad, InProcess
from harness import Cast, HostError
from test_placement import SEED_LOADED, SEED_NEW, sync
from test_sync import PROMPT

MODEL = "deepseek-v2"


@pytest.fixture(scope="module")
def new(fresh_load: Callable[..., FreshLoad]) -> FreshLoad:
    """What a vLLM serves that was started from the weights of `SEED_NEW`."""
    return fresh_load(
        MODEL, SEED_NEW, PROMPT, unpacked=True, tensor_parallel_size=1, dtype="float32"
    )  # as in test_placement.py


@pytest.fixture(scope="module")
def engine(new: FreshLoad, checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    """The engine; every layer of attention has emptied the weight of its projection."""
    assert new.logprobs
    engine = InProcess(checkpoint(MODEL), tmp_path_factory.mktemp("latent"), unpacked=True)
    try:
        assert engine.host.call("each_rank", method="plant", arguments=["emptied_by_attention"]) == ["2"]
        yield engine
    finally:
        engine.close()


def test_emptied_weight_follows_every_round(engine: InProcess, new: FreshLoad, cast: Cast) -> None:
    """Rounds commit, and the third leaves what a fresh load leaves; refused and broken rounds leave old or whole weights."""
    trainer = cast.trainer([], layout="whole", model=MODEL, **engine.reach())
    trainer.call("init")
    seen = [engine.prompt_logprobs(PROMPT)[0]]
    for seed in (3, 4):
        sync(trainer, seed)
        seen.append(engine.prompt_logprobs(PROMPT)[0])
    assert sync(trainer, SEED_NEW)["outcome"] == "committed"
    assert engine.prompt_logprobs(PROMPT)[0] == new.logprobs
    assert new.logprobs not in seen

    trainer.call("init", packed_buffer_size_bytes=1 << 16)  # so that some layers are complete by then
    trainer.call("stop_after", count=30)
    with pytest.raises(HostError) as caught:
        sync(trainer, 3)
    assert caught.value.error["outcome"] == "poisoned"
    trainer.call("stop_after", count=-1)
    sync(trainer, SEED_LOADED)
    assert engine.prompt_logprobs(PROMPT)[0] == seen[0]

    trainer.call("stop_after", count=0)
    with pytest.raises(HostError) as caught:
        sync(trainer, 3)
    assert caught.value.error["outcome"] == "unchanged"
    assert engine.prompt_logprobs(PROMPT)[0] == seen[0]
