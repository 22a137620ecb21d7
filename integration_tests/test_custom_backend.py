"""A user's own backend, written by vLLM's documentation and published as a package, runs in an unmodified vLLM."""

from __future__ import annotations

import math
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import models
import pytest
import torch
from engines import Running
from harness import HERE, HostError, WorkerHost

from wt_trainer import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferTrainerFactory,
)

PACKAGE = HERE.parent / "examples" / "custom_backend"
PROMPT = [72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100, 33, 10, 65, 66]
NUM_TOKENS = 16
TOLERANCE = 1e-4  # of a log-probability in float32, as in test_sync.py


class CheckpointSource(WeightSource):
    """A model under its checkpoint names."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        items = models.checkpoint_items(self.model)
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in items]

    def iter_full(self):
        yield from models.checkpoint_items(self.model)


def install(package: Path, target: Path) -> None:
    """Lay out in `target` what installing the package puts there; needs no build tool, and changes no environment."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    module = project["name"].replace("-", "_")
    shutil.copytree(package / "src" / module, target / module, ignore=shutil.ignore_patterns("__pycache__"))
    info = target / f"{module}-{project['version']}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(metadata)
    groups = (
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    )
    (info / "entry_points.txt").write_text("\n".join(groups))


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which the backend's package is installed, for both sides."""
    directory = tmp_path_factory.mktemp("packages")
    install(PACKAGE, directory)
    return directory


@pytest.fixture(scope="module")
def init_info_cls(packages: Path) -> Iterator[type[TrainerInitInfo]]:
    """The backend registered on the trainer's side, and its init info."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightTransferTrainerFactory, "_registry", dict(WeightTransferTrainerFactory._registry))
        patch.syspath_prepend(packages)
        engine = ("custom_backend.trainer", "FileTrainerWeightTransferEngine")
        WeightTransferTrainerFactory.register_engine("file", *engine)
        from custom_backend.trainer import FileTrainerInitInfo

        yield FileTrainerInitInfo


@pytest.fixture(scope="module")
def host(
    packages: Path, _running: Running, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerHost]:
    """A vLLM that was started with the backend's name."""
    _running.stop()  # two do not fit beside each other on a small machine
    model = str(checkpoint("llama"))
    with WorkerHost("vllm", tmp_path_factory.mktemp("host"), packages=packages, model=model, backend="file") as host:
        assert host.port
        yield host


def test_client_and_engine_are_the_documented_ones(init_info_cls: type[TrainerInitInfo]) -> None:
    """The host is a client by its four methods, and the backend's classes are what the bases promise."""
    assert issubclass(WorkerHost, VLLMWeightSyncClient)
    assert init_info_cls.backend == "file"
    engine = WeightTransferTrainerFactory.engine_class("file")
    assert issubclass(engine, TrainerWeightTransferEngine)
    assert engine.init_info_cls is init_info_cls


@pytest.mark.parametrize("tensors_per_file", [1000, 3], ids=["one call", "many calls"])
def test_two_rounds_equal_hugging_face(
    host: WorkerHost, init_info_cls: type[TrainerInitInfo], tmp_path: Path, tensors_per_file: int
) -> None:
    """After each round vLLM computes what Hugging Face does on the weights sent, in one update call or in many."""
    source = CheckpointSource(models.build_model("llama", 0))
    info = init_info_cls(str(tmp_path), tensors_per_file, rank=0)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=host, source=source)
    before = host.call("greedy", token_ids=PROMPT, num_tokens=NUM_TOKENS)
    for seed in (3, 4):
        source.model = models.build_model("llama", seed)
        trainer.send_weights()
        expected = models.prompt_logprobs(source.model, PROMPT)
        found = host.call("prompt_logprobs", token_ids=PROMPT)
        differences = [abs(ours - theirs) for ours, theirs in zip(found, expected, strict=True)]
        assert not any(map(math.isnan, differences))
        assert max(differences) < TOLERANCE
        tokens = host.call("greedy", token_ids=PROMPT, num_tokens=NUM_TOKENS)
        assert tokens == models.greedy(source.model, PROMPT, NUM_TOKENS)
        assert tokens != before
        before = tokens
    trainer.shutdown()


def test_bad_payload_is_a_value_error(host: WorkerHost, tmp_path: Path) -> None:
    """A payload that the user's dataclass does not take is refused by name inside vLLM, and the engine is as it was."""
    with pytest.raises(HostError, match=r"init_info for FileWeightTransferEngine is invalid.*colour") as caught:
        host.init_weight_transfer_engine({"directory": str(tmp_path), "colour": "red"})
    assert caught.value.error["type"] == "ConfigurationError"
    host.init_weight_transfer_engine({"directory": str(tmp_path)})


def test_each_side_has_its_own_library_only(host: WorkerHost) -> None:
    """The backend runs where neither side can import the other's packages."""
    assert host.call("importable", module="wt_worker") is True
    assert host.call("importable", module="wt_trainer") is False
    assert "vllm" not in sys.modules
    assert "wt_worker" not in sys.modules


def test_unknown_backend_lists_it(host: WorkerHost, init_info_cls: type[TrainerInitInfo]) -> None:
    """A misspelled backend is an error that names the user's beside the built-in ones: vLLM's, ours, and the trainer's."""
    of_vllm, ours = host.call("unknown_backend", backend="nope")
    for name in ("nope", "'file'", "'wt_gloo'", "'nccl'"):
        assert name in of_vllm
    for name in ("'nope'", "'file'", "'gloo'"):
        assert name in ours
    assert init_info_cls.backend == "file"
    with pytest.raises(ValueError, match=r"unknown trainer backend 'nope'; available: .*'file'.*'gloo'"):
        WeightTransferTrainerFactory.engine_class("nope")
