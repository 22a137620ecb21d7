"""A round of a one-parameter model over HTTP: everything that a round costs beside its bytes.

To the embedded server, and to a real vLLM where the worker's environment has one; there, all parameters of a tiny model are sent,
since vLLM takes no model in part, and so its figure has vLLM's loader and its calls to the engine core in it.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import models
import torch
from harness import EmbeddedServer, VLLMServer, worker_environment, worker_python
from measure import in_turn, line

from wt_trainer import (
    GlooTrainerInitInfo,
    HTTPVLLMWeightSyncClient,
    ModuleSource,
    WeightTransferTrainerFactory,
)

RUNS = 30


def measure() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory, "checkpoint")
        models.save_checkpoint("llama", 0, checkpoint)
        with EmbeddedServer(checkpoint, Path(directory)) as server:
            server.wait_ready()
            yield _round_of("control_plane", server.base_url, _first_parameter(), check_cover=False)
            yield _round_of("control_plane_tiny_model", server.base_url, models.build_model("llama", 1))
        if _has_vllm():
            with VLLMServer(checkpoint, Path(directory)) as server:
                server.wait_ready()
                yield _round_of("control_plane_tiny_model_vllm", server.base_url, models.build_model("llama", 1))


def _first_parameter() -> torch.nn.Module:
    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.norm = models.build_model("llama", 1).model.norm
    return model


def _round_of(name: str, url: str, model: torch.nn.Module, *, check_cover: bool = True) -> str:
    client = HTTPVLLMWeightSyncClient(url, timeout=60)
    info = GlooTrainerInitInfo(rank=0, timeout_s=60, check_cover=check_cover)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(model))
    reports = []
    (ours_ms,) = in_turn(lambda: reports.append(trainer.send_weights()), runs=RUNS)
    trainer.shutdown()
    return line(name, ours_ms=ours_ms, num_bytes=reports[-1].num_bytes, runs=RUNS)


def _has_vllm() -> bool:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    return subprocess.run([worker_python(), "-c", code], env=worker_environment(), check=False).returncode == 0
