"""Runs one GPU cell: `python gpu_runner.py CASE`. `nox -s gpu_integration` runs all of them, and hosts without nox this file.

A cell is skipped, with the reason, where its GPUs or libraries are missing; with WT_REQUIRE_GPUS=n that is an error for every
cell of at most n GPUs. What its processes print comes out as one block, on a timeout with the stacks of all of them. A cell that
ran no test has failed.

With WT_SHARE_GPUS=1 all processes of a cell have the first GPU, so that every cell runs on a host with one. That needs NCCL 2.30
or newer in each process (LD_PRELOAD of its library, where torch brings an older one). It shows that all is right, not how fast
it is.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from cases import GPU_CASES, GPUCase  # noqa: E402  # of this folder
from harness import TEST_GPUS, gpus_are_shared  # noqa: E402

TIMEOUT_S = 300
LAWS_TIMEOUT_S = 900  # some fifty tests, of which two move 6 GB
MARKER = "WT_GPU_RUN"  # in the environment of all processes of a run, however they were started


def missing(case: GPUCase) -> str | None:
    """What this host lacks for `case`; None if nothing."""
    there, needed = num_gpus(), 1 if gpus_are_shared() else case.num_gpus
    if there < needed:
        return f"needs {needed} GPU(s), this host has {there}"
    worker = os.environ.get("WT_WORKER_PYTHON", sys.executable)
    for side, python, modules in (
        ("trainer", sys.executable, case.trainer_needs),
        ("worker", worker, case.worker_needs),
    ):
        environment = {**os.environ, "PYTHONPATH": os.environ.get(f"WT_{side.upper()}_PYTHONPATH", "")}
        code = f"import importlib.util as u; print(*[m for m in {list(modules)!r} if u.find_spec(m) is None])"
        found = subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True, check=True)
        if found.stdout.strip():
            return f"the {side}'s environment has no {', '.join(found.stdout.split())}"
    return None


def num_gpus() -> int:
    """GPUs that this host lends us, as NVIDIA's driver counts them; no library of CUDA is loaded for it."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=30).stdout
    except FileNotFoundError:
        return 0
    return len(re.findall(r"^GPU \d+:", listed, re.MULTILINE))


def run_block(name: str, command: list[str], *, timeout_s: float, environment: dict[str, str]) -> bool:
    """Run pytest's `command`, print its output as one block; whether at least one test passed and none failed."""
    run_id = uuid.uuid4().hex
    started = time.monotonic()
    with tempfile.TemporaryFile("a+") as output:  # appending: several processes write at the same time
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, MARKER: run_id},
            start_new_session=True,
        )
        try:
            process.wait(timeout=timeout_s)
            verdict = ""
        except subprocess.TimeoutExpired:
            verdict = f"no end within {timeout_s:g} s"
            signal_all(run_id, signal.SIGUSR1, pause_s=0.5)  # one after the other, or their stacks would be mixed
        signal_all(run_id, signal.SIGKILL)
        status = process.wait(timeout=10)
        output.seek(0)
        text = output.read()
    if not verdict and status:
        verdict = f"exit status {status}"
    if not verdict and not re.search(r"\b[1-9]\d* passed\b", text):
        verdict = "no test ran"
    seconds = time.monotonic() - started
    result = f"FAILED ({verdict})" if verdict else "PASSED"
    print(f"===== {name}\n{text.rstrip()}\n===== {name}: {result} in {seconds:.0f} s", flush=True)
    return not verdict


def signal_all(run_id: str, number: int, pause_s: float = 0) -> None:
    """Send a signal to every process of the run that is left, and wait `pause_s` after each."""
    entry = f"{MARKER}={run_id}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it is gone, or not ours
            if entry in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), number)
                time.sleep(pause_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "case", choices=[case.id for case in GPU_CASES], metavar="CASE", help="id of a cell in cases.py"
    )
    parser.add_argument("--timeout", type=float, help=f"seconds ({TIMEOUT_S}; {LAWS_TIMEOUT_S} for the laws)")
    args = parser.parse_args()
    (case,) = (case for case in GPU_CASES if case.id == args.case)
    reason = missing(case)
    if reason:
        is_required = int(os.environ.get("WT_REQUIRE_GPUS", "0")) >= case.num_gpus
        print(f"===== {case.id}: {'FAILED' if is_required else 'SKIPPED'} ({reason})")
        return int(is_required)
    paths = [str(HERE / "stacks"), *filter(None, [os.environ.get("WT_TRAINER_PYTHONPATH")])]
    worker_paths = [str(HERE / "stacks"), *filter(None, [os.environ.get("WT_WORKER_PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "WT_WORKER_PYTHONPATH": os.pathsep.join(worker_paths),
        "WT_WORKER_PYTHON": os.environ.get("WT_WORKER_PYTHON", sys.executable),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-s"]
    if case.laws is None:
        command += [str(HERE / "gpu_cells.py"), f"--gpu-case={case.id}"]
    else:
        command += [str(HERE / "test_fake_nccl.py"), "-k", case.laws]
        environment[TEST_GPUS] = "0,0" if gpus_are_shared() else f"{case.trainer_gpus[0]},{case.worker_gpus[0]}"
    if gpus_are_shared():
        environment["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    timeout_s = args.timeout or (TIMEOUT_S if case.laws is None else LAWS_TIMEOUT_S)
    return int(not run_block(case.id, command, timeout_s=timeout_s, environment=environment))


if __name__ == "__main__":
    sys.exit(main())
