"""What a round costs beside moving its bytes: 30,000 parameters of 128 bytes, and no wire. CPU time on each side, best of 20.

The trainer runs the source, checks, packs, digests and compares with what the workers say; the worker writes in place and digests
what it has installed: 500 parameters that are made of 60 each; the same of a checkpoint of which this rank takes half the columns
(`_parts`); and 30,000 that are one each (`_separate`).

The reference is one `Tensor.copy_` for each parameter: what the machine was able to do meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import cached_property

import torch
from child import ask_worker
from measure import best_of, line

from wt_common.packing import plan_groups
from wt_common.session import Finishing, Placed, decode_message, encode_message
from wt_trainer import ParamMeta, WeightSource
from wt_trainer.metadata import RoundMetadata
from wt_trainer.round import Round
from wt_trainer.staging import Staging
from wt_trainer.stream import CheckedStream
from wt_trainer.verify import PlacedRank, Placement, sent_digests

RUNS = 20
NUM_PARAMETERS = 30_000
SHAPE = (64,)
GROUP_BYTES = 64 << 20


class Source(WeightSource):
    """Tensors that are there already: what preparing them costs is not ours."""

    def __init__(self) -> None:
        self.tensors = {f"p{index}": torch.randn(SHAPE, dtype=torch.bfloat16) for index in range(NUM_PARAMETERS)}

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors.items())


def measure() -> Iterator[str]:
    torch.set_num_threads(1)
    yield _trainer()
    for kind in ("", "_parts", "_separate"):
        found = ask_worker(f"replay{kind}")
        yield _line(
            f"placement_replay_worker{kind}", found["ours_ms"], found["reference_ms"], found["num_bytes"], found["runs"]
        )


def _trainer() -> str:
    source = Source()
    metadata = RoundMetadata.of(source, 1)
    groups = plan_groups(metadata.sizes_bytes, max_bytes=GROUP_BYTES, max_pieces=4096, roots=metadata.roots)
    staging = Staging(2, torch.device("cpu"))
    placed = Placed(round=1, takes="a" * NUM_PARAMETERS, digested="w" * NUM_PARAMETERS, parts=[], not_in_place={})
    rank = PlacedRank(name="the worker", engine="e", rank=0, placed=placed)
    placement = Placement([rank], names=metadata.names, num_elements=metadata.num_elements)

    def send() -> list[int]:
        round_ = Round(1, 60, threading.Condition())
        wire = metadata.cast({})
        stream = CheckedStream(source, metadata, wire, 0, round_, digest=True)
        for number in range(len(groups)):
            staging.fill(groups, number, number, stream, wire)
        stream.finish()
        return sent_digests(metadata.roots, round_.digests, {})

    post = encode_message(Finishing(round=1, digests=send()))[4:]

    def round_() -> None:
        sent = send()
        finishing = decode_message(post)
        placement.check(sent, {("e", 0): finishing.digests})  # type: ignore[attr-defined]  # it is a Finishing

    targets = [torch.empty(SHAPE, dtype=torch.bfloat16) for _ in range(NUM_PARAMETERS)]

    def copy() -> None:
        for target, tensor in zip(targets, source.tensors.values(), strict=True):
            target.copy_(tensor)

    ours_ms, reference_ms = best_of(round_, copy, runs=RUNS, clock=time.thread_time)
    return _line("placement_replay_trainer", ours_ms, reference_ms, sum(metadata.sizes_bytes), RUNS)


def _line(name: str, ours_ms: float, reference_ms: float, num_bytes: int, runs: int) -> str:
    us = round(1e3 * ours_ms / NUM_PARAMETERS, 2)
    return line(
        name,
        ours_ms=ours_ms,
        reference_ms=reference_ms,
        num_bytes=num_bytes,
        runs=runs,
        us_per_parameter=us,
        times="best",
    )
