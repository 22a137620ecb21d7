"""Making a round's bytes ready to be sent, without a wire: tensors of a source that vouches for them, against one that does not.

The tensors are freshly gathered, which a clone stands for: the reference is gathering them and nothing else. On a GPU, if there
is one, they are those of an 8B Llama, and times are medians of the wall clock; else 1 GB in tensors of 32 MB, and times are the
best CPU times of one thread. Without digests, and with them (`_verified`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
from measure import best_of, in_turn, line

from wt_common.packing import plan_groups
from wt_trainer import ParamMeta, WeightSource
from wt_trainer.metadata import RoundMetadata
from wt_trainer.round import Round
from wt_trainer.staging import Staging
from wt_trainer.stream import CheckedStream

RUNS = 15
GROUP_BYTES = 64 << 20


class Gathered(WeightSource):
    """Tensors by name, each gathered when it is its turn."""

    def __init__(self, tensors: dict[str, torch.Tensor], *, is_stable: bool) -> None:
        self.tensors = tensors
        self.yields_stable = is_stable

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors.items():
            yield name, tensor.clone()


def measure() -> Iterator[str]:
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tensors = {name: torch.randn(shape, dtype=torch.bfloat16, device=device) for name, shape in _shapes(device).items()}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    for suffix, digest in (("", False), ("_verified", True)):
        calls = [_filling(Gathered(tensors, is_stable=is_stable), device, digest=digest) for is_stable in (True, False)]
        calls.append(_alone(Gathered(tensors, is_stable=True), device))
        if device.type == "cpu":
            stable_ms, copied_ms, alone_ms = best_of(*calls, runs=RUNS, clock=time.thread_time)
        else:
            stable_ms, copied_ms, alone_ms = in_turn(*calls, runs=RUNS)
        more: dict[str, Any] = {"num_bytes": num_bytes, "runs": RUNS, "reference_ms": alone_ms}
        more |= {"times": "best"} if device.type == "cpu" else {}
        yield line(f"staging_stable{suffix}", ours_ms=stable_ms, **more)
        yield line(f"staging_copied{suffix}", ours_ms=copied_ms, **more)


def _shapes(device: torch.device) -> dict[str, list[int]]:
    if device.type == "cpu":
        return {f"layers.{index}.weight": [4096, 4096] for index in range(32)}
    from nccl_dense import shapes

    return shapes()


def _filling(source: Gathered, device: torch.device, *, digest: bool) -> Callable[[], None]:
    """A round's groups, one after the other, each let go when the next but one is ready."""
    metadata = RoundMetadata.of(source, 1)
    groups = plan_groups(metadata.sizes_bytes, max_bytes=GROUP_BYTES, max_pieces=4096, roots=metadata.roots)
    staging = Staging(2, device)

    def fill() -> None:
        round_ = Round(1, 60, threading.Condition())
        stream = CheckedStream(source, metadata, metadata, 0, round_, digest=digest, device=device)
        in_flight = []
        for number in range(len(groups)):
            in_flight = [*in_flight[-1:], staging.fill(groups, number, number, stream, metadata)]
        stream.finish()
        _wait(device)

    return fill


def _alone(source: Gathered, device: torch.device) -> Callable[[], None]:
    def gather() -> None:
        kept = []
        for _, tensor in source.iter_full():
            kept = [*kept[-1:], tensor]
        _wait(device)

    return gather


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
