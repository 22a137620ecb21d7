"""A trainer rank for tests, in a process of its own: python trainer_host.py '{"port_file": ...}'.

Runs in the trainer environment, without vLLM. What `configure` takes: `rank`, `num_ranks`,
`layout` (see `LAYOUTS`), `group_port` (of the default group, if the layout has one), what reaches the engines (`workers`, ports
of worker processes; `base_urls`, of servers; `actors` and `ray_address`), `parameters` (name: [dtype, shape]) or `model` (a
kind of `models.py`), its `dtype` and `device`, and `info` (options of the init info).
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
import threading
import time
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import fake_nccl
import torch
from harness import HostClient, together
from hosting import checksums, device_bytes, process_stats, serve

from wt_trainer import (
    GlooTrainerInitInfo,
    HTTPVLLMWeightSyncClient,
    ModuleSource,
    NCCLTrainerInitInfo,
    ParamMeta,
    RayVLLMWeightSyncClient,
    RenamedSource,
    WeightSource,
    WeightTransferTrainerFactory,
)


class TensorSource(WeightSource):
    """Tensors by name, whole on every rank that owns them.

    `owners` maps a name to the ranks that own it. What is yielded can be made to differ from the metadata: `edit` is applied to
    the list of (name, tensor) just before.
    """

    yields_stable = True

    def __init__(self, tensors: dict[str, torch.Tensor], rank: int, owners: dict[str, list[int]] | None = None) -> None:
        self.tensors = tensors
        self.rank = rank
        self.owners = owners or {}
        self.edit: Any = None
        self.pause_s = 0.0

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(name, tensor.dtype, tuple(tensor.shape), owners=self.owners.get(name))
            for name, tensor in self.tensors.items()
        ]

    def iter_full(self):
        owned = set(self.owned_names(self.rank))
        items = [item for item in self.tensors.items() if item[0] in owned]
        if self.edit is not None:
            items = self.edit(items)
        for name, tensor in items:
            time.sleep(self.pause_s)
            yield name, tensor


class GatheredSource(TensorSource):
    """A parameter that all ranks own is gathered from them when it is asked for, as a sharded trainer's are.

    At `raises_at` it raises before it gathers; what it yields at `spoilt` has another shape than the metadata.
    """

    raises_at = spoilt = ""

    def iter_full(self):
        num_ranks = torch.distributed.get_world_size()
        for name in self.owned_names(self.rank):
            tensor = self.tensors[name]
            time.sleep(self.pause_s)
            if name == self.raises_at:
                raise ValueError(f"on purpose, at {name}")
            if len(self.owners.get(name, range(num_ranks))) < num_ranks:
                yield name, tensor
                continue
            shards = list(torch.empty_like(tensor, device="cpu").chunk(num_ranks))
            torch.distributed.all_gather(shards, tensor.cpu().chunk(num_ranks)[self.rank])
            whole = torch.cat(shards).to(tensor.device)
            yield name, whole if name != self.spoilt else whole.flatten()


class BrokenSource(TensorSource):
    """One whose metadata raise."""

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        raise ValueError("on purpose, in the metadata")


def make_tensors(parameters: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Random tensors of every dtype, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for name, (dtype_name, shape) in parameters.items():
        dtype = getattr(torch, dtype_name)
        if dtype == torch.uint8 and math.prod(shape) >= 1 << 24:
            result[name] = torch.randint(0, 256, shape, dtype=dtype, generator=generator)
            continue
        data = torch.randn(shape, generator=generator)
        result[name] = (
            (data > 0)
            if dtype == torch.bool
            else (data * 100).to(dtype)
            if not dtype.is_floating_point
            else data.to(dtype)
        )
    return result


class EachHost:
    """One client for several worker processes, called at the same time."""

    def __init__(self, ports: list[int]) -> None:
        self.hosts = [HostClient(port) for port in ports]
        self.is_draft = False
        self.drops = False

    def _all(self, name: str, *args: Any) -> None:
        results = together(*(lambda host=host: getattr(host, name)(*args) for host in self.hosts), timeout_s=600)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._all("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._all("start_draft_weight_update" if self.is_draft else "start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        if not self.drops:
            self._all("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish_weight_update", weight_version)


class Trainer:
    """One rank: its model, its source, its engine."""

    def __init__(self, config: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.engine: Any = None

    def configure(self, config: dict[str, Any]) -> None:
        """Be another rank of another trainer; the one before is shut down."""
        if self.engine is not None:
            self.engine.shutdown()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        self.config = config
        self.device = config.get("device", "cpu")
        if config.get("backend") == "nccl" and self.device == "cpu" and not config.get("is_real"):
            fake_nccl.install("wt_trainer")
        self.rank, self.num_ranks = config["rank"], config["num_ranks"]
        if "group_port" in config:
            torch.distributed.init_process_group(
                "gloo" if self.device == "cpu" else "cpu:gloo,cuda:nccl",
                init_method=f"tcp://127.0.0.1:{config['group_port']}",
                rank=self.rank,
                world_size=self.num_ranks,
            )
            if "group_timeout_s" in config:  # of collectives; processes that are only starting have longer to come
                torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=config["group_timeout_s"]))
        if config.get("alone"):
            self.rank = 0  # a trainer of one rank, whatever the default group is there for
        self.source: WeightSource = LAYOUTS[config["layout"]](self)

    def client(self) -> Any:
        if "base_urls" in self.config:
            options = {"timeout": self.config.get("client_timeout_s", 60), "pause": self.config.get("pause", "keep")}
            return HTTPVLLMWeightSyncClient(self.config["base_urls"], **options)
        if "actors" in self.config:
            import ray

            if not ray.is_initialized():
                ray.init(address=self.config["ray_address"], namespace="wt", log_to_driver=False)
            return RayVLLMWeightSyncClient([ray.get_actor(name) for name in self.config["actors"]], timeout=60)
        return EachHost(self.config["workers"])

    def importable(self, module: str) -> bool:
        return importlib.util.find_spec(module) is not None

    def drop_updates(self, *, drops: bool) -> None:
        """The client's updates return and reach nobody, as through a proxy that answers by itself."""
        self.engine.client.drops = drops

    def declare(self, parameters: dict[str, Any]) -> None:
        """The next init's source, on this rank alone, has these parameters."""
        self.source = TensorSource(make_tensors(parameters, 0), self.rank)

    def configure_withheld(self, param: str) -> None:
        """The source leaves out this parameter, in its metadata too."""
        self.source = CheckpointSource(self.source.model, withhold=param)

    def init(self, **options: Any) -> None:
        info_class = {"gloo": GlooTrainerInitInfo, "nccl": NCCLTrainerInitInfo}[self.config.get("backend", "gloo")]
        info = info_class(rank=self.rank, **{"timeout_s": 30, **self.config.get("info", {}), **options})
        self.engine = WeightTransferTrainerFactory.trainer_init(info, client=self.client(), source=self.source)

    def tie(self, param: str, to: str) -> None:
        """`param` is sent with the values of `to`."""
        self.source.tied[param] = to

    def reach(self, workers: list[int]) -> None:
        """The next init's client calls these workers."""
        self.config["workers"] = workers

    def set_weights(self, seed: int) -> None:
        """The next round sends the weights of `seed`."""
        self.load(seed)

    def declare_broken(self) -> None:
        """The next init's source raises when it is asked for its metadata."""
        self.source = BrokenSource({}, self.rank)

    def send_broken(self) -> Any:
        """One round of a source that raises when it is asked for its metadata."""
        return self.engine.send_weights(source=BrokenSource({}, self.rank)).to_dict()

    def fault(self, kind: str, param: str = "") -> None:
        """From now on a source that gathers `raises_at` this parameter, or has it `spoilt`."""
        setattr(self.source, kind, param)

    def skew(self, by: int) -> None:
        """This rank believes that it has made so many calls more."""
        self.engine._round_number += by

    def send(self, weight_version: Any = None) -> dict[str, Any]:
        started = time.monotonic()
        report = self.engine.send_weights(weight_version=weight_version)
        return {**report.to_dict(), "call_s": time.monotonic() - started}

    def send_part(self, names: list[str], weight_version: str) -> dict[str, Any]:
        """One round of these parameters alone; its report."""
        tensors = {name: tensor for name, tensor in self.source if name in names}
        return self.engine.send_weights(
            weight_version=weight_version, source=TensorSource(tensors, self.rank)
        ).to_dict()

    def send_draft(self, parameters: dict[str, Any], seed: int) -> dict[str, int]:
        """One round for the draft model; the checksums of what was sent."""
        source = TensorSource(make_tensors(parameters, seed), self.rank)
        self.engine.client.is_draft = True
        try:
            self.engine.send_weights(source=source)
        finally:
            self.engine.client.is_draft = False
        return checksums(source.tensors)

    def send_draft_model(self, seed: int) -> dict[str, Any]:
        """One round for the draft model, which is of the same kind as the served one; its report."""
        with self.engine.client.draft():
            return self.engine.send_weights(source=CheckpointSource(_build_hf(self, seed))).to_dict()

    def edit(self, kind: str, param: str = "") -> None:
        """What the source yields from now on differs from its metadata in the named way; `none` puts it right."""
        self.source.edit = _EDITS[kind](param)

    def stop_after(self, count: int) -> None:
        """The source's iterator ends after this many parameters; -1 is all."""
        self.source.stop_after = count

    def vouch(self, *, is_stable: bool) -> None:
        """Whether the source says that its tensors stay as they are."""
        self.source.yields_stable = is_stable

    def slow(self, pause_s: float) -> None:
        self.source.pause_s = pause_s

    def sums(self, *, merged: bool = False) -> dict[str, int]:
        """Checksums of the source's tensors, or of what edit `merged` makes of them."""
        return checksums({name: tensor + 1 if merged else tensor for name, tensor in self.source.tensors.items()})

    def shutdown(self) -> None:
        self.engine.shutdown()

    def stats(self) -> dict[str, Any]:
        return process_stats()

    def device_bytes(self) -> int:
        return device_bytes()

    def echo(self, value: Any) -> Any:
        return value


def _plain(trainer: Trainer, kind: type[TensorSource] = TensorSource) -> WeightSource:
    """Every rank holds everything."""
    parameters = trainer.config["parameters"]
    tensors = {n: t.to(trainer.device) for n, t in make_tensors(parameters, 0).items()}
    source = kind(tensors, trainer.rank, trainer.config.get("owners"))

    def load(seed: int) -> None:
        for name, tensor in make_tensors(parameters, seed).items():
            source.tensors[name].copy_(tensor)

    trainer.load = load
    return source


def _build_hf(trainer: Trainer, seed: int) -> torch.nn.Module:
    import models

    return models.build_model(trainer.config["model"], seed).to(getattr(torch, trainer.config.get("dtype", "float32")))


def _own_hf(trainer: Trainer) -> torch.nn.Module:
    """The model that `trainer` trains."""
    return _build_hf(trainer, 0).to(trainer.device)


def _load_whole(trainer: Trainer, model: torch.nn.Module) -> None:
    """`trainer.load(seed)` gives `model`, which is whole on this rank, the weights of that seed."""
    trainer.load = lambda seed: model.load_state_dict(_build_hf(trainer, seed).state_dict()) and None


class CheckpointSource(WeightSource):
    """A Hugging Face model under the names of its checkpoint.

    On request one name is left out, or goes under another name or shape (in metadata and data alike), or the iterator ends early.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        withhold: str = "",
        lie: str = "",
        lie_about: str = "",
        extra: dict[str, Any] | None = None,
        *,
        only_extra: bool = False,
    ) -> None:
        self.model = model
        self.withhold = withhold
        self.extra = make_tensors(extra or {}, 1)  # further names, or others in their place
        self.only_extra = only_extra
        self.lie, self.lie_about = lie, lie_about
        self.stop_after = -1
        self.pause_s = 0.0
        self.tied: dict[str, str] = {}  # names that are sent with another's tensor

    def _items(self) -> list[tuple[str, torch.Tensor]]:
        import models

        items = {} if self.only_extra else dict(models.checkpoint_items(self.model))
        items |= {name: items[to] for name, to in self.tied.items()}
        items |= self.extra
        return [self._tell(*item) for item in items.items() if item[0] != self.withhold]

    def _tell(self, name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        if name != self.lie_about:
            return name, tensor
        return {
            "renamed": (f"renamed.{name}", tensor),
            "reshaped": (name, tensor[1:]),
        }[self.lie]

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._items()]

    def iter_full(self):
        for name, tensor in self._items()[: None if self.stop_after < 0 else self.stop_after]:
            time.sleep(self.pause_s)
            yield name, tensor


def _hf_whole(trainer: Trainer) -> WeightSource:
    """A Hugging Face model, whole on every rank."""
    model = _own_hf(trainer)
    _load_whole(trainer, model)
    options = {
        name: trainer.config[name] for name in ("lie", "lie_about", "extra", "only_extra") if name in trainer.config
    }
    return CheckpointSource(model, **options)


def _hf_renamed(trainer: Trainer) -> WeightSource:
    """A Hugging Face model by its own names, fused experts among them, in the wrapper of torch.compile."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from renamed import checkpoint_name

    model = _own_hf(trainer)
    _load_whole(trainer, model)
    return RenamedSource(ModuleSource(torch.compile(model, backend="eager")), checkpoint_name)


def _hf_module(trainer: Trainer) -> WeightSource:
    """A Hugging Face model by its own names, as a server of the same class takes them; without buffers on request."""
    model = _own_hf(trainer)
    _load_whole(trainer, model)
    return ModuleSource(model, buffers=trainer.config.get("buffers", True))


def _none(trainer: Trainer) -> WeightSource | None:
    """No model."""
    return None


def _hf_fsdp2(trainer: Trainer, *, offload: bool = False) -> WeightSource:
    """A Hugging Face model, each layer and the rest sharded by FSDP2 over the default group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    mesh = init_device_mesh(trainer.device, (trainer.num_ranks,))
    model = _own_hf(trainer)
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)

    def load(seed: int) -> None:
        from torch.distributed.tensor import distribute_tensor

        full = _build_hf(trainer, seed).state_dict()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(distribute_tensor(full[name], param.device_mesh, param.placements))

    trainer.load = load
    return ModuleSource(model)


def _hf_tp(trainer: Trainer, shape: tuple[int, ...] | None = None) -> WeightSource:
    """A Hugging Face model whose projections are tensor-parallel DTensors, on the inner axis of a mesh of this shape."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    shape = shape or (trainer.num_ranks,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])["tp"]
    model = _build_hf(trainer, 0)

    def placement(name: str, param: torch.Tensor) -> Any:
        if param.dim() < 2:
            return Replicate()
        return Shard(1) if "o_proj" in name or "down_proj" in name else Shard(0)

    for name, param in list(model.named_parameters()):
        path, _, leaf = name.rpartition(".")
        sharded = distribute_tensor(param.data, mesh, [placement(name, param)])
        model.get_submodule(path).register_parameter(leaf, torch.nn.Parameter(sharded, requires_grad=False))

    def load(seed: int) -> None:
        full = _build_hf(trainer, seed).state_dict()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(distribute_tensor(full[name], param.device_mesh, param.placements))

    trainer.load = load
    return ModuleSource(model)


class StageSource(WeightSource):
    """Pipeline stages: each rank holds, and sends, its own layers; the first the embedding, the last the head."""

    def __init__(self, model: torch.nn.Module, rank: int, num_ranks: int, num_layers: int) -> None:
        self.model = model
        self.rank = rank
        self.stage_of = lambda layer: layer * num_ranks // num_layers
        self.last = num_ranks - 1

    def _stage(self, name: str) -> int:
        parts = name.split(".")
        if "layers" in parts:
            return self.stage_of(int(parts[parts.index("layers") + 1]))
        return 0 if "embed_tokens" in name else self.last

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(name, param.dtype, tuple(param.shape), owners=(self._stage(name),))
            for name, param in self.model.named_parameters()
        ]

    def iter_full(self):
        owned = set(self.owned_names(self.rank))
        yield from ((name, param.detach()) for name, param in self.model.named_parameters() if name in owned)


def _hf_pipeline(trainer: Trainer) -> WeightSource:
    """A Hugging Face model in pipeline stages: every rank is a data sender."""
    model = _own_hf(trainer)
    _load_whole(trainer, model)
    return StageSource(model, trainer.rank, trainer.num_ranks, model.config.num_hidden_layers)


class FaultyModuleSource(ModuleSource):
    """A module's parameters; at `raises_at` it raises before the gather."""

    raises_at = ""

    def iter_full(self):
        for name, param in self._module.named_parameters():
            if name == self.raises_at:
                raise ValueError(f"on purpose, at {name}")
            yield name, param.detach().full_tensor()


def _sharded(trainer: Trainer) -> WeightSource:
    """A stack of linear layers under the names of `parameters`, each sharded by FSDP2 over the default group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    parameters = trainer.config["parameters"]
    mesh = init_device_mesh(trainer.device, (trainer.num_ranks,))
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(torch.nn.Linear(*shape, bias=False) for _, shape in parameters.values())
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    trainer.load = lambda seed: None
    return FaultyModuleSource(model)


LAYOUTS = {
    "sharded": _sharded,
    "none": _none,
    "plain": _plain,
    "gathered": lambda trainer: _plain(trainer, GatheredSource),
    "whole": _hf_whole,
    "renamed": _hf_renamed,
    "module": _hf_module,
    "master-fp32": _hf_whole,
    "fsdp2": _hf_fsdp2,
    "fsdp2-offload": lambda trainer: _hf_fsdp2(trainer, offload=True),
    "tp": _hf_tp,
    "tp-submesh": lambda trainer: _hf_tp(trainer, shape=(2, 2)),
    "pipeline": _hf_pipeline,
}


def _replace(name: str, change: Any) -> Any:
    return lambda items: [(key, change(value) if key == name else value) for key, value in items]


def _overwrites(name: str) -> Any:
    """The memory of `name` is written to once the next parameter is asked for, as by a source that reuses one buffer."""

    def edit(items: list[tuple[str, torch.Tensor]]) -> Any:
        for key, value in items:
            copy = value.clone()
            yield key, copy
            if key == name:
                copy.zero_()

    return edit


def _merges(items: list[tuple[str, torch.Tensor]]) -> Any:
    """Each tensor has something added while it is yielded, as by PEFT: in place, through `.data`, which torch does not count."""
    for key, value in items:
        before = value.clone()
        value.data.add_(1)
        yield key, value
        value.data.copy_(before)


def _reuses(items: list[tuple[str, torch.Tensor]]) -> Any:
    """All tensors of one shape come in the same memory, one after the other."""
    buffers: dict[Any, torch.Tensor] = {}
    for key, value in items:
        buffer = buffers.setdefault((value.dtype, value.shape), torch.empty_like(value))
        buffer.data.copy_(value)
        yield key, buffer


def _trains(name: str) -> Any:
    """Another thread changes `name`, uncounted, once the next parameter is asked for."""

    def edit(items: list[tuple[str, torch.Tensor]]) -> Any:
        for key, value in items:
            yield key, value
            if key == name:
                thread = threading.Thread(target=value.data.add_, args=(1,))
                thread.start()
                thread.join()

    return edit


_EDITS = {
    "merged": lambda name: _merges,
    "reused": lambda name: _reuses,
    "trained": _trains,
    "overwritten": _overwrites,
    "none": lambda name: None,
    "missing": lambda name: lambda items: [item for item in items if item[0] != name],
    "extra": lambda name: lambda items: [*items, ("extra", torch.zeros(3))],
    "renamed": lambda name: lambda items: [("renamed" if key == name else key, value) for key, value in items],
    "reordered": lambda name: lambda items: items[::-1],
    "shape": lambda name: _replace(name, lambda value: torch.cat([value.reshape(-1), value.reshape(-1)])),
    "dtype": lambda name: _replace(name, lambda value: value.to(torch.float64)),
    "strided": lambda name: _replace(name, lambda value: torch.stack([value, value], dim=-1)[..., 0]),
}


def main() -> None:
    config = json.loads(sys.argv[1])
    serve(Trainer(config), config["port_file"])
    os._exit(0)  # an abandoned gloo thread may still run; it must not decide the exit status


if __name__ == "__main__":
    main()
