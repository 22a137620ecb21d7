"""What is measured on the worker's side: `worker_side.py NAME` prints one line of JSON; the benchmarks call it (`child.py`).

One thread, and its CPU time, best of several: what other processes do meanwhile is not ours.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from math import prod

import mixture
import torch
from measure import best_of

from wt_common.packing import Group, plan_groups
from wt_common.session import Finishing, Metadata, encode_message
from wt_worker.installers.module import ModuleInstaller
from wt_worker.placement.inbox import Arrival
from wt_worker.placement.trace import Target, trace
from wt_worker.placement.writer import RoundWriter, WriterCache
from wt_worker.shares import Shares

GROUP_BYTES = 64 << 20
NUM_BUFFERS = 2
NUM_FUSED = 500
NUM_PARTS = 60


def measure_trace() -> dict[str, float]:
    """Tracing the loader of a mixture of experts, and that loader alone; best of three."""
    model = mixture.Mixture(mixture.Config())
    rows = list(mixture.checkpoint(model.config))
    targets = [Target(name, name.rpartition(".")[0], tensor) for name, tensor in model.by_name.items()]

    def load() -> None:
        model.load_weights((name, torch.empty(shape, dtype=dtype, device="meta")) for name, dtype, shape in rows)

    def traced() -> None:
        plan = trace(rows, targets, model.load_weights)
        problem = next((each for each in plan.cover.values() if each), None)
        if problem or any(name.problem for name in plan.names):
            raise RuntimeError(f"the trace did not follow the loader: {problem}")

    ours_ms, reference_ms = best_of(traced, load, runs=3, clock=time.thread_time)
    num_bytes = sum(tensor.nbytes for tensor in model.by_name.values())
    return {
        "ours_ms": ours_ms,
        "reference_ms": reference_ms,
        "num_bytes": num_bytes,
        "runs": 3,
        "num_names": len(rows),
    }


class Fused(torch.nn.Module):
    """500 parameters, each made of 60 of the checkpoint's, of which it takes the last `shape[1]` columns."""

    def __init__(self, shape: tuple[int, int], of_columns: int) -> None:
        super().__init__()
        self.shape = shape
        self.of_columns = of_columns
        for index in range(NUM_FUSED):
            tensor = torch.zeros(NUM_PARTS, *shape, dtype=torch.bfloat16)
            self.register_parameter(f"fused_{index}", torch.nn.Parameter(tensor, requires_grad=False))

    def load_weights(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in pairs:
            parameter, _, part = name.partition(".")
            columns = tensor.narrow(1, self.of_columns - self.shape[1], self.shape[1])
            parameters[parameter].data[int(part)].copy_(columns)

    def metadata(self) -> Metadata:
        """Of a checkpoint for it."""
        names = [f"fused_{index}.{part}" for index in range(NUM_FUSED) for part in range(NUM_PARTS)]
        shape = [self.shape[0], self.of_columns]
        return Metadata(round=1, names=names, dtype_names=["bfloat16"] * len(names), shapes=[shape] * len(names))


class Rounds:
    """A worker without a wire: the same groups, again and again, out of staging buffers that hold anything."""

    def __init__(self, model: torch.nn.Module, metadata: Metadata) -> None:
        self.installer = ModuleInstaller(model)
        self.metadata = metadata
        self.prepared = self.installer.prepare(metadata, "the benchmark's")
        if self.prepared.not_in_place:
            raise RuntimeError(f"not in place: {self.prepared.not_in_place}")
        self.shares = Shares.of(self.prepared, "full")
        self.cache = WriterCache()
        sizes = [2 * prod(shape) for shape in metadata.shapes]
        self.num_bytes = sum(sizes)
        self.groups = plan_groups(sizes, max_bytes=GROUP_BYTES, max_pieces=4096)
        self.staging = [torch.randint(0, 100, (GROUP_BYTES,), dtype=torch.uint8) for _ in range(NUM_BUFFERS)]
        self.arrivals = [Arrival.staged(group, buffer) for group, buffer in self.in_buffers()]

    def writer(self) -> RoundWriter:
        """A round has begun."""
        writer = RoundWriter(
            self.metadata,
            "the benchmark's",
            [torch.bfloat16] * len(self.metadata.names),
            self.installer,
            cut_bytes=GROUP_BYTES,
            cache=self.cache,
            digested=self.shares.received([]),
        )
        self.installer.begin()
        return writer

    def write(self, writer: RoundWriter) -> None:
        """All groups are in the model."""
        for number, (group, arrival) in enumerate(zip(self.groups, self.arrivals, strict=True)):
            writer.take(group, arrival, number)
        writer.finish()
        self.installer.finish()

    def in_buffers(self) -> list[tuple[Group, torch.Tensor]]:
        """Each group, and the buffer that it comes in."""
        return [(group, self.staging[number % NUM_BUFFERS]) for number, group in enumerate(self.groups)]

    def round(self) -> None:
        """A whole round, with the message that ends it."""
        if self.installer.prepare(self.metadata, "the benchmark's") is not self.prepared:
            raise RuntimeError("what was prepared is not used again")
        writer = self.writer()
        self.write(writer)
        digests = self.shares.digests(writer.received, self.prepared.binding)
        encode_message(Finishing(round=1, digests=digests))
        self.installer.commit()


class Separate(torch.nn.Module):
    """30,000 parameters, each in memory of its own, as the checkpoint has them."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.shape = shape
        for index in range(NUM_FUSED * NUM_PARTS):
            tensor = torch.zeros(shape, dtype=torch.bfloat16)
            self.register_parameter(f"p{index}", torch.nn.Parameter(tensor, requires_grad=False))

    def metadata(self) -> Metadata:
        """Of a checkpoint for it."""
        names = [name for name, _ in self.named_parameters()]
        return Metadata(
            round=1, names=names, dtype_names=["bfloat16"] * len(names), shapes=[list(self.shape)] * len(names)
        )


def measure_replay(model: Fused | Separate) -> dict[str, float]:
    """A round's work beside receiving, for parameters of 128 bytes in the model; best of 20.

    The reference is one `Tensor.copy_` for each parameter.
    """
    rounds = Rounds(model, model.metadata())
    copies = [
        (torch.empty(64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.bfloat16)) for _ in rounds.metadata.names
    ]

    def copy() -> None:
        for target, tensor in copies:
            target.copy_(tensor)

    ours_ms, reference_ms = best_of(rounds.round, copy, runs=20, clock=time.thread_time)
    return {"ours_ms": ours_ms, "reference_ms": reference_ms, "num_bytes": rounds.num_bytes, "runs": 20}


def measure_direct(model: Fused | Separate) -> dict[str, float]:
    """Writing 1 GB that is in the staging buffers, in place and through the installer's loader; best of 7.

    The reference is one copy of the same bytes out of the same buffers.
    """
    rounds = Rounds(model, model.metadata())
    flat = torch.zeros(sum(group.num_bytes for group in rounds.groups), dtype=torch.uint8)

    def write() -> None:
        rounds.write(rounds.writer())

    def load() -> None:
        rounds.installer.begin()
        for group, buffer in rounds.in_buffers():
            batch = []
            for piece in group.pieces:
                tensor = buffer[piece.offset : piece.offset + piece.num_bytes].view(torch.bfloat16)
                batch.append((rounds.metadata.names[piece.index], tensor.view(model.shape)))
            rounds.installer.install(batch)

    def copy() -> None:
        start = 0
        for group, buffer in rounds.in_buffers():
            flat[start : start + group.num_bytes].copy_(buffer[: group.num_bytes])
            start += group.num_bytes

    ours_ms, reference_ms, loader_ms = best_of(write, copy, load, runs=7, clock=time.thread_time)
    return {
        "ours_ms": ours_ms,
        "reference_ms": reference_ms,
        "loader_ms": loader_ms,
        "num_bytes": rounds.num_bytes,
        "runs": 7,
    }


MEASUREMENTS: dict[str, Callable[[], dict[str, float]]] = {
    "trace": measure_trace,
    "replay": lambda: measure_replay(Fused((4, 16), 16)),
    "replay_parts": lambda: measure_replay(Fused((4, 16), 32)),
    "replay_separate": lambda: measure_replay(Separate((4, 16))),
    "direct": lambda: measure_direct(Fused((16, 1040), 1040)),
    "direct_separate": lambda: measure_direct(Separate((16, 1040))),
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(MEASUREMENTS[sys.argv[1]]()))
