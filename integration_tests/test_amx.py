"""What vLLM does on a CPU with AMX, as far as any CPU can show it: it is told that there is AMX, and no such kernel runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engines import FreshLoad, InProcess
from test_sync import PROMPT, TOLERANCE


def test_latent_attention_starts_in_float32(
    checkpoint: Callable[..., Path], fresh_load: Callable[..., FreshLoad], tmp_path: Path
) -> None:
    """The harness's engines compute latent attention in float32 with AMX as without."""
    options = {"unpacked": True, "tensor_parallel_size": 1, "dtype": "float32"}  # as in test_placement.py
    expected = fresh_load("deepseek-v2", 5, PROMPT, **options)
    found = FreshLoad.of(checkpoint("deepseek-v2", 5), tmp_path, PROMPT, pretends_amx=True)
    assert found.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE)


def test_unpacked_layers_keep_their_weights_in_bfloat16(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Small layers too, which a kernel for AMX would multiply with by a packed copy."""
    engine = InProcess(checkpoint("llama"), tmp_path, unpacked=True, dtype="bfloat16", pretends_amx=True)
    try:
        (digests,) = engine.host.call("each_rank", method="live_digests", arguments=[])
    finally:
        engine.close()
    assert [
        name for name, digest in digests.items() if name.endswith("weight") and digest == 0
    ] == []  # none is emptied
