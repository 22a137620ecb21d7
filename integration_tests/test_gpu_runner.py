"""The runner of the GPU cells, as far as that can be tested without a GPU: the data, skips, and what a hanging cell leaves."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import gpu_runner
import pytest
from cases import GPU_CASES, LAYOUTS
from harness import HERE
from models import KINDS


def test_cells_are_well_formed() -> None:
    """Ids are unique, every trainer rank has a place, and GPUs are counted from 0 without a gap."""
    assert len({case.id for case in GPU_CASES}) == len(GPU_CASES)
    for case in GPU_CASES:
        assert case.model in KINDS
        assert len(case.trainer_gpus) == LAYOUTS[case.layout]
        used = {gpu for gpu in (*case.trainer_gpus, *case.worker_gpus) if gpu is not None}
        assert used == set(range(case.num_gpus))
        assert 1 <= case.num_gpus <= 8


@pytest.mark.skipif(gpu_runner.num_gpus() > 0, reason="this host has GPUs")
@pytest.mark.parametrize("required", [0, 8])
def test_missing_gpus_are_named(required: int) -> None:
    """Without GPUs a cell is skipped, saying so; where they must be there, that is an error."""
    command = [sys.executable, str(HERE / "gpu_runner.py"), GPU_CASES[0].id]
    environment = {**os.environ, "WT_REQUIRE_GPUS": str(required)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == (1 if required else 0)
    assert "needs 1 GPU(s), this host has 0" in done.stdout
    assert ("FAILED" if required else "SKIPPED") in done.stdout


def test_cells_may_share_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With WT_SHARE_GPUS=1 a cell of several GPUs needs one."""
    (case,) = (case for case in GPU_CASES if case.id == "nccl-pp2-tp2")
    monkeypatch.setattr(gpu_runner, "num_gpus", lambda: 0)
    assert gpu_runner.missing(case) == "needs 4 GPU(s), this host has 0"
    monkeypatch.setenv("WT_SHARE_GPUS", "1")
    assert gpu_runner.missing(case) == "needs 1 GPU(s), this host has 0"


@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        ("def test_one(): print('said')", "PASSED in"),
        ("def test_one(): print('said'); assert False", "FAILED (exit status 1)"),
        ("import pytest\ndef test_one(): print('said'); pytest.skip('no')", "FAILED (no test ran)"),
    ],
)
def test_a_cell_is_one_block(body: str, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What its processes print stands between two lines with its name, the second with the result."""
    test = tmp_path / "test_it.py"
    test.write_text(body)
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-c", os.devnull, str(test)]
    passed = gpu_runner.run_block("cell", command, timeout_s=60, environment=dict(os.environ))
    lines = capsys.readouterr().out.splitlines()
    assert passed is verdict.startswith("PASSED")
    assert lines[0] == "===== cell"
    assert any("said" in line for line in lines)
    assert lines[-1].startswith(f"===== cell: {verdict}")


def test_timeout_shows_all_stacks_and_ends_all_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cell that hangs: the stacks of its process and of a child in another session are in the block, and both are gone."""
    pid_file = tmp_path / "pid"
    child = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid()))\ndef in_child(): time.sleep(60)\nin_child()"
    parent = (
        "import subprocess, sys\n"
        f"def in_parent(): subprocess.run([sys.executable, '-c', {child!r}], start_new_session=True)\n"
        "in_parent()"
    )
    environment = {**os.environ, "PYTHONPATH": str(HERE / "stacks")}
    started = time.monotonic()
    assert not gpu_runner.run_block("cell", [sys.executable, "-c", parent], timeout_s=4, environment=environment)
    assert time.monotonic() - started < 30
    output = capsys.readouterr().out
    assert "in in_parent" in output
    assert "in in_child" in output
    assert "FAILED (no end within 4 s)" in output
    status = Path("/proc", pid_file.read_text(), "status")
    deadline = time.monotonic() + 10
    while status.exists() and "State:\tZ" not in status.read_text():  # gone, or only not yet reaped
        assert time.monotonic() < deadline
        time.sleep(0.05)
