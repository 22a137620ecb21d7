"""Run benchmarks by name: one JSON line per measurement on stdout, everything else on stderr.

`nox -s bench -- NAME...` makes the two environments and runs this; `--list` names the benchmarks.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "integration_tests")]  # measure.py; harness.py, which starts servers

BENCHMARKS = {
    "control_plane": "a round of a one-parameter model over HTTP: what a round costs beside its bytes",
    "digest": "the digest of 1 GB, of many small tensors and of a shard on one core, against one copy of the same bytes",
    "gloo_dense": "1 GB in bfloat16 to the embedded server, against gloo alone",
    "install_direct": "1 GB in 30,000 tensors from staging into the model, in place and by its loader, against one copy",
    "nccl_dense": "16 GB in bfloat16 to a real vLLM on another GPU, against one flat broadcast and stock vLLM; needs two GPUs",
    "placement_replay": "30,000 small parameters and no wire: what our own code costs in a round, on each side",
    "placement_trace": "tracing the loader of 18,867 checkpoint names",
    "staging": "making 1 GB ready to be sent, or 16 GB on a GPU, where tensors are sent as they lie and where they are copied",
}
"""Each is a module of this folder with `measure()`, which yields the lines of one run."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="all by default")
    parser.add_argument("--list", action="store_true", help="print the names, and what each measures")
    args = parser.parse_args()
    if args.list:
        for name, what in BENCHMARKS.items():
            print(f"{name:16} {what}")
        return
    unknown = sorted(set(args.names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    from gpu_runner import num_gpus  # after --list, which any Python prints

    for name in args.names or [name for name in BENCHMARKS if name != "nccl_dense" or num_gpus() > 1]:
        for line in importlib.import_module(name).measure():
            print(line, flush=True)


if __name__ == "__main__":
    main()
