"""The digest of the same bytes that a round proves, on one core, against one copy of them; on CUDA too, where there is one.

`digest_bf16` and `digest_f32` are 1 GB in tensors of a Llama's shapes; `digest_small` is 30,000 tensors of 256 bytes. The boxes,
a row-parallel shard and transposed weights, are the worker's: they are left out where wt-worker is not installed, as in the
environment of nox's session.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial

import torch
from measure import in_turn, line

from wt_trainer.digest import tensor_digests

RUNS = 7
HIDDEN, INTERMEDIATE, KEY_VALUE = 2048, 8192, 512
LAYER = [
    (HIDDEN, HIDDEN),
    (KEY_VALUE, HIDDEN),
    (KEY_VALUE, HIDDEN),
    (HIDDEN, HIDDEN),
    (INTERMEDIATE, HIDDEN),
    (INTERMEDIATE, HIDDEN),
    (HIDDEN, INTERMEDIATE),
    (HIDDEN,),
    (HIDDEN,),
]
# 1.0 GB each: the embedding is half of it.
LLAMA = {"bf16": (torch.bfloat16, 128_256, 4), "f32": (torch.float32, 64_128, 2)}


def measure() -> Iterator[str]:
    torch.set_num_threads(1)
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        suffix = "" if device == "cpu" else f"_{device}"
        for name, (dtype, vocabulary, num_layers) in LLAMA.items():
            shapes = [(vocabulary, HIDDEN), *LAYER * num_layers]
            tensors = [torch.empty(shape, dtype=dtype, device=device).normal_() for shape in shapes]
            yield _compare(f"digest_{name}{suffix}", tensors, partial(tensor_digests, tensors))
            del tensors
        tensors = [torch.randn(64, device=device) for _ in range(30_000)]
        yield _compare(f"digest_small{suffix}", tensors, partial(tensor_digests, tensors))
        yield from _boxes(device, suffix)


def _boxes(device: str, suffix: str) -> Iterator[str]:
    """One of eight shards of a row-parallel weight of (8192, 28672), and a transposed weight."""
    if importlib.util.find_spec("wt_worker") is None:
        return
    box_digest = importlib.import_module("wt_worker.placement.digest").box_digest
    shard = torch.empty(8192, 3584, dtype=torch.bfloat16, device=device).normal_()
    yield _compare(f"digest_rows{suffix}", [shard], partial(box_digest, shard, 3584, (28672, 1)))
    for name, dtype in (("bf16", torch.bfloat16), ("f32", torch.float32)):
        weight = torch.empty(4096, 4096, dtype=dtype, device=device).normal_()
        yield _compare(f"digest_transposed_{name}{suffix}", [weight], partial(box_digest, weight, 0, (1, 4096)))


def _compare(name: str, tensors: list[torch.Tensor], ours: Callable[[], object]) -> str:
    copies = [torch.empty_like(tensor) for tensor in tensors]

    def copy() -> None:
        for target, tensor in zip(copies, tensors, strict=True):
            target.copy_(tensor)
        if tensors[0].is_cuda:
            torch.cuda.synchronize()

    ours_ms, copy_ms = in_turn(ours, copy, runs=RUNS)
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    return line(name, ours_ms=ours_ms, reference_ms=copy_ms, num_bytes=num_bytes, runs=RUNS)
