"""A float32 trainer and a vLLM in bfloat16: what serves is what a checkpoint that was rounded to bfloat16 would give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import InProcess
from harness import Cast
from test_placement import sync

MODEL = "qwen2"  # it has biases


@pytest.fixture
def engine(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    """A vLLM in bfloat16 whose packing has turned biases into float32."""
    engine = InProcess(checkpoint(MODEL), tmp_path_factory.mktemp("rounding"), dtype="bfloat16")
    try:
        assert engine.host.call("each_rank", method="plant", arguments=["float_biases"]) == ["2"]
        yield engine
    finally:
        engine.close()


def test_biases_that_serve_in_float32_are_rounded(engine: InProcess, cast: Cast) -> None:
    """A round from float32 weights leaves bit for bit what one from the same weights in bfloat16 leaves."""

    def served(dtype: str, *seeds: int) -> list[dict[str, Any]]:
        trainer = cast.trainer([], layout="whole", model=MODEL, dtype=dtype, **engine.reach())
        trainer.call("init")
        for seed in seeds:
            sync(trainer, seed)
        cast.release()
        return list(engine.host.call("each_rank", method="live_digests", arguments=[]))

    rounded = served("bfloat16", 3)
    assert served("float32", 4) != rounded
    assert served("float32", 3) == rounded
