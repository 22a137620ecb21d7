"""Checks that the modules which wt-trainer and wt-worker both have are still the same, but for the package's name.

The packages share no code beyond wt-common's wire definitions, so that each can be released alone. What must behave alike at both
ends of a socket or a collective is written once and copied; this keeps the copies from drifting apart.
"""

import sys
from pathlib import Path

PACKAGES = Path(__file__).parent.parent / "packages"
TWINS = (
    "connection.py",
    "digest.py",
    "digest_kernel.py",
    "digest_runs.py",
    "store.py",
    "channels/base.py",
    "channels/gloo.py",
    "channels/nccl.py",
)


def main() -> None:
    different = []
    for name in TWINS:
        trainer = (PACKAGES / "wt-trainer/src/wt_trainer" / name).read_text()
        worker = (PACKAGES / "wt-worker/src/wt_worker" / name).read_text()
        if trainer.replace("wt_trainer", "wt_worker") != worker:
            different.append(name)
    if different:
        sys.exit(f"differ between wt_trainer and wt_worker: {', '.join(different)}; make the change in both")
    print(f"twins are the same: {', '.join(TWINS)}")


if __name__ == "__main__":
    main()
