"""1 GB in 30,000 tensors, from two staging buffers of 64 MiB into the model, against one copy of the same bytes out of them.

`install_direct` is a model of 500 parameters, 60 tensors each; `install_direct_separate` has 30,000 parameters, each in memory of
its own. `install_loader` is the same model as the first through its loader. CPU time of one thread, best of several.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from child import ask_worker
from measure import line


def measure() -> Iterator[str]:
    for name in ("direct", "direct_separate"):
        found = ask_worker(name)
        of_it = partial(
            line, reference_ms=found["reference_ms"], num_bytes=found["num_bytes"], runs=found["runs"], times="best"
        )
        yield of_it(f"install_{name}", ours_ms=found["ours_ms"])
        if name == "direct":
            yield of_it("install_loader", ours_ms=found["loader_ms"])
