"""What all benchmarks share: the line that they print, runs taken in turn, and the hardware's name."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch


def hardware() -> str:
    """Processor, cores that this process may use, and accelerators."""
    cpuinfo = Path("/proc/cpuinfo")
    models = [line.partition(": ")[2] for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
    parts = [f"{len(os.sched_getaffinity(0))} cores", models[0] if models else platform.processor()]
    parts += [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join(parts)


def in_turn(*calls: Callable[[], object], runs: int) -> list[float]:
    """The median milliseconds of each of `calls`, which are made in turn: whatever slows the machine slows all of them."""
    for call in calls:
        call()  # warm-up: memory is touched, connections are made
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(runs):
        for index, call in enumerate(calls):
            started = time.perf_counter()
            call()
            seconds[index].append(time.perf_counter() - started)
    return [1e3 * statistics.median(each) for each in seconds]


def best_of(*calls: Callable[[], object], runs: int, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """The least milliseconds of each of `calls`, which are made in turn: for what no other process should have a part in."""
    for call in calls:
        call()
    best = [float("inf")] * len(calls)
    for _ in range(runs):
        for index, call in enumerate(calls):
            started = clock()
            call()
            best[index] = min(best[index], clock() - started)
    return [1e3 * each for each in best]


def line(
    name: str, *, ours_ms: float, num_bytes: int, runs: int, reference_ms: float | None = None, **more: float | str
) -> str:
    """One measurement as a line of JSON; times are medians, unless `more`, what else the benchmark has to say, says otherwise."""
    ratio = None if reference_ms is None else round(ours_ms / reference_ms, 3)
    rounded = None if reference_ms is None else round(reference_ms, 2)
    fields = {"name": name, "ours_ms": round(ours_ms, 2), "reference_ms": rounded, "ratio": ratio}
    return json.dumps({**fields, "bytes": num_bytes, "runs": runs, **more, "hardware": hardware()})
