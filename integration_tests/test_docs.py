"""Every code block of README.md and docs/ is run: Python against embedded servers, commands as far as that needs no network."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import HERE, EmbeddedServer, worker_environment, worker_python

from wt_trainer import WeightTransferTrainerFactory

ROOT = HERE.parent
PAGES = sorted(
    [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("examples/*.md"), *ROOT.glob("benchmarks/*.md")]
)
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
URL = re.compile(r"http://10\.0\.0\.[78]:8000")

# What a page may take for granted: a model, its rank, and something that trains.
PRELUDE = """
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({checkpoint!r})
rank, num_steps = 0, 2
def train_one_step(model):
    with torch.no_grad():
        next(model.parameters()).mul_(1.01)
"""


def blocks(page: Path, language: str) -> list[str]:
    """The page's code blocks in this language, in order."""
    return [code for _, found, code in BLOCK.findall(page.read_text()) if found == language]


def test_every_block_says_what_it_is() -> None:
    """A block in a language that no test here runs would be unchecked; one without a language is a drawing or a command."""
    for page in PAGES:
        assert {language for _, language, _ in BLOCK.findall(page.read_text())} <= {"", "python", "console", "toml"}, (
            page
        )


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.stem)
def test_python_blocks_run(
    page: Path, servers: list[EmbeddedServer], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """A page's blocks run one after the other, in a process of their own."""
    code = PRELUDE.format(checkpoint=str(checkpoint("llama"))) + "\n".join(blocks(page, "python"))
    names = {"http://10.0.0.7:8000": servers[0].base_url, "http://10.0.0.8:8000": servers[1].base_url}
    code = URL.sub(lambda found: names[found.group()], code)
    assert "10.0.0." not in code
    script = tmp_path / f"{page.stem}.py"
    script.write_text(code)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_toml_blocks_parse() -> None:
    """An entry point group that a page names is ours."""
    for page in PAGES:
        for code in blocks(page, "toml"):
            assert set(tomllib.loads(code)["project"]["entry-points"]) <= {"wt_worker.backends", "wt_trainer.backends"}


def test_commands_exist() -> None:
    """Every command names sessions, packages, backends and options that there are."""
    commands = [
        (page, shlex.split(line.removeprefix("$ ")))
        for page in PAGES
        for code in [*blocks(page, "console"), *blocks(page, "")]
        for line in code.splitlines()
        if re.match(r"(\$ |nox\b|pip\b|python -m|VLLM_|torchrun)", line)
    ]
    assert len(commands) > 5
    for page, words in commands:
        check(page, words)


def check(page: Path, words: list[str]) -> None:
    """Fails unless this command would be understood."""
    while "=" in words[0]:
        words = words[1:]
    if "&&" in words:
        check(page, words[: words.index("&&")])
        return
    if words[0] == "nox":
        sessions = re.findall(r"^def (\w+)\(session: nox.Session\)", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
        assert len(words) == 1 or words[1] != "-s" or words[2].partition("(")[0] in sessions, (page, words)
    elif words[:2] == ["pip", "install"]:
        known = {"nox", "wt-worker", "wt-trainer", "wt-worker[serve]", "wt-trainer[ray]"}
        assert set(words[2:]) <= known, (page, words)
    elif words[:2] == ["python", "-m"] and words[2] in {"wt_worker.plan", "wt_worker.serve"}:
        command = [worker_python(), "-m", words[2], "--help"]
        done = subprocess.run(command, env=worker_environment(), capture_output=True, text=True, timeout=60, check=True)
        assert all(word in done.stdout for word in words if word.startswith("--")), (page, words)
    elif words[:2] == ["vllm", "serve"]:
        config = json.loads(words[words.index("--weight-transfer-config") + 1])
        assert config["backend"].removeprefix("wt_") in WeightTransferTrainerFactory._registry, (page, words)
    else:
        assert words[:3] == ["python", "-m", "venv"], (page, words)


def test_benchmarks_are_listed_by_any_python() -> None:
    """`nox -s bench -- --list` runs in nox's own environment, which has nothing of ours installed."""
    command = [sys.executable, "-S", str(ROOT / "benchmarks" / "run.py"), "--list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert listed.returncode == 0, listed.stderr
    assert "nccl_dense" in listed.stdout
