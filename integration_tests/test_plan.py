"""`python -m wt_worker.plan` tells the truth about a vLLM that it starts, and about a server before and after a round."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
from harness import Cast, VLLMServer, worker_environment, worker_python
from test_rounds import committed
from test_sync import NUM_TOKENS, PROMPT

EXTENSION = "wt_worker.vllm.describe.PlanExtension"
PACKED = "multiplies with a packed copy of its weight (cpu_linear)"
KINDS = {
    "model.embed_tokens": "contiguous+filled",  # the vocabulary is padded
    "model.layers.1.self_attn.qkv_proj": "contiguous",
    "model.layers.1.self_attn.o_proj": "whole",
    "model.layers.1.mlp.gate_up_proj": "contiguous",
    "model.layers.1.mlp.down_proj": "whole",
    "model.norm": "whole",
    "lm_head": "contiguous+filled",
}
"""Of `llama` with one rank. With two, what is cut along its columns is strided, and a vocabulary's first half has no padding."""
KINDS_OF_TWO = KINDS | {"model.layers.1.self_attn.o_proj": "strided", "model.layers.1.mlp.down_proj": "strided"}
NORMS = {f"model.layers.{at}.{name}" for at in (0, 1) for name in ("input_layernorm", "post_attention_layernorm")} | {
    "model.norm"
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A vLLM with two ranks takes a minute to start, and is left to `--all`."""
    if "size" in metafunc.fixturenames:
        metafunc.parametrize("size", [1, 2] if metafunc.config.getoption("--all") else [1])


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command, in the worker's environment."""
    command = [worker_python(), "-m", "wt_worker.plan", *map(str, arguments)]
    return subprocess.run(command, env=worker_environment(), capture_output=True, text=True, timeout=280, check=False)


def ask(*arguments: object) -> list[dict[str, Any]]:
    """What the command prints with `--json`: an object for each rank."""
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def by_layer(answer: dict[str, Any], field: str) -> dict[str, Any]:
    """One field of each layer of a rank's answer."""
    return {layer["name"]: layer[field] for layer in answer["layers"]}


def in_place(answer: dict[str, Any]) -> dict[str, bool | None]:
    """How each layer is installed; packed ones through the loader, and for that reason."""
    ways: dict[str, bool | None] = by_layer(answer, "in_place")
    for name, reason in by_layer(answer, "reason").items():
        assert (ways[name], reason) == (False, PACKED) if name not in NORMS else reason is None, (name, reason)
    return ways


def test_a_vllm_that_is_started(checkpoint: Callable[[str], Path], size: int) -> None:
    """Each rank says how each parameter is written, and why a layer is not written in place; nothing else is printed."""
    answers = ask("--model", checkpoint("llama"), "--dtype", "float32", "--tp", size)
    assert [(answer["rank"], answer["size"]) for answer in answers] == [(rank, size) for rank in range(size)]
    for rank, answer in enumerate(answers):
        kinds = by_layer(answer, "kinds")
        expected = KINDS if size == 1 else KINDS_OF_TWO
        if size == 2 and rank == 0:
            expected = expected | {"model.embed_tokens": "contiguous", "lm_head": "contiguous"}
        assert {name: kinds[name]["weight"] for name in expected} == expected
        ways = in_place(answer)
        assert {name for name, way in ways.items() if way is None} == NORMS
        assert answer["num_names"] == len(models.checkpoint_items(models.build_model("llama", 0)))
        assert answer["ignored"] == answer["untouched"] == []
    assert len({answer["digest"] for answer in answers}) == size


def test_a_server(checkpoint: Callable[[str], Path], cast: Cast, tmp_path: Path) -> None:
    """It answers about a checkpoint before its first round, then about that round; and serves as if nobody had asked."""
    model = checkpoint("llama")
    with VLLMServer(model, tmp_path, arguments=("--worker-extension-cls", EXTENSION)) as server:
        server.wait_ready()
        done = run("--url", server.base_url)
        assert done.returncode == 1
        assert "no round was announced to this engine yet" in done.stderr

        before = server.prompt_logprobs(PROMPT)
        (planned,) = ask("--url", server.base_url, "--model", model)
        assert {name for name, way in in_place(planned).items() if way is None} == NORMS
        assert server.prompt_logprobs(PROMPT) == before

        trainer = cast.trainer([], layout="whole", model="llama", base_urls=[server.base_url], info={"packed": False})
        trainer.call("init")
        for seed in (1, 2):
            trainer.call("set_weights", seed=seed)
            committed(trainer.call("send"))
            (answer,) = ask("--url", server.base_url)
            assert by_layer(answer, "kinds") == by_layer(planned, "kinds")
            assert {name for name, way in in_place(answer).items() if way is True} == NORMS
            expected = models.greedy(models.build_model("llama", seed), PROMPT, NUM_TOKENS)
            assert server.greedy(PROMPT, NUM_TOKENS) == expected
        assert ask("--url", server.base_url, "--model", model) == [answer]  # the same list, in another order

        done = run("--url", server.base_url)
        assert done.returncode == 0, done.stderr
        (line,) = [line for line in done.stdout.splitlines() if "qkv_proj" in line]
        expected = ["model.layers.0-1.self_attn.qkv_proj", "QKVParallelLinear", "weight:", "contiguous", "loader:"]
        assert line.split() == [*expected, *PACKED.split()]
