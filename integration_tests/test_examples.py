"""Every example runs as its docstring says, and what the server then computes is what the example has saved."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import models
import pytest
from harness import HERE, EmbeddedServer
from transformers import AutoModelForCausalLM

EXAMPLES = HERE.parent / "examples"
PROMPT = [72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100]
TOLERANCE = 1e-4  # of a log-probability; a merged adapter is rounded where it is merged

# name: (ranks, servers, the version at the end)
RUNS = {
    "fsdp2": (2, 1, "step-1"),
    "pipeline": (2, 1, "step-1"),
    "megatron_style": (2, 1, "step-1"),
    "lora": (1, 1, "step-1"),
    "renamed": (1, 1, "renamed"),
    "rollout_pool": (1, 2, "step-1"),
    "colocated": (1, 1, "step-1"),
}


def test_every_example_has_a_run() -> None:
    """An example without a test would rot."""
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_example(name: str, servers: list[EmbeddedServer], checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """It ends well, within a minute, and the servers have its weights and version."""
    num_ranks, num_servers, version = RUNS[name]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"] if num_ranks > 1 else []
    used = servers[:num_servers]
    urls = [word for server in used for word in ("--server", server.base_url)]
    command = [sys.executable, *launcher, str(EXAMPLES / f"{name}.py"), "--model", str(checkpoint("llama")), *urls]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"committed, version {version}" in done.stdout
    expected = models.prompt_logprobs(AutoModelForCausalLM.from_pretrained(tmp_path), PROMPT)
    before = models.prompt_logprobs(models.build_model("llama", 0), PROMPT)
    assert expected != pytest.approx(before, abs=100 * TOLERANCE)
    for server in used:
        assert server.prompt_logprobs(PROMPT) == pytest.approx(expected, abs=TOLERANCE)
        assert server.weight_version() == version
