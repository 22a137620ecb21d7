"""Tracing a loader of 18,867 checkpoint names: Qwen3-30B-A3B, on one of two ranks, in its real shapes and without values.

The reference is the same loader, on the same model, not traced. CPU time of one thread, best of three.
"""

from __future__ import annotations

from collections.abc import Iterator

from child import ask_worker
from measure import line


def measure() -> Iterator[str]:
    found = ask_worker("trace")
    yield line(
        "placement_trace",
        ours_ms=found["ours_ms"],
        reference_ms=found["reference_ms"],
        num_bytes=found["num_bytes"],
        runs=found["runs"],
        us_per_name=round(1e3 * found["ours_ms"] / found["num_names"], 1),
        times="best",
    )
