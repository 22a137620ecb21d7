"""Which worker engine a backend's name stands for."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Any, ClassVar

import torch

from wt_common import ConfigurationError
from wt_worker.engine import WeightTransferEngine

__all__ = ["BUILTIN_BACKENDS", "ENTRY_POINT_GROUP", "WeightTransferEngineFactory"]

BUILTIN_BACKENDS: dict[str, tuple[str, str]] = {
    "gloo": ("wt_worker.backends.broadcast", "GlooWeightTransferEngine"),
    "nccl": ("wt_worker.backends.broadcast", "NCCLWeightTransferEngine"),
}
"""Module and class of each built-in backend; inside vLLM their names begin with `wt_`, since vLLM has its own `nccl`."""

ENTRY_POINT_GROUP = "wt_worker.backends"
"""A package's `name = module:Class` in this group is a backend in every process that has the package installed."""


class WeightTransferEngineFactory:
    """Names and their engines. A module is imported when its backend is asked for, never before."""

    _registry: ClassVar[dict[str, tuple[str, str] | type[WeightTransferEngine[Any, Any]]]] = dict(BUILTIN_BACKENDS)

    @classmethod
    def register_engine(
        cls,
        name: str,
        module_path_or_cls: str | type[WeightTransferEngine[Any, Any]],
        class_name: str | None = None,
    ) -> None:
        """Make `name` stand for an engine class, or for attribute `class_name` of a module imported when needed.

        This is for the process that calls it. To reach every process of a vLLM, publish an entry point (`ENTRY_POINT_GROUP`).

        Raises:
            ConfigurationError: (a `ValueError`) the name is taken, or a module path comes without a class name.
        """
        if name in cls._registry:
            raise ConfigurationError(f"worker backend {name!r} is already registered", side="worker", backend=name)
        if not isinstance(module_path_or_cls, str):
            cls._registry[name] = module_path_or_cls
        elif class_name is None:
            raise ConfigurationError(
                f"worker backend {name!r}: a module path ({module_path_or_cls!r}) needs class_name", side="worker"
            )
        else:
            cls._registry[name] = (module_path_or_cls, class_name)

    @classmethod
    def engine_class(cls, name: str) -> type[WeightTransferEngine[Any, Any]]:
        """The engine class registered as `name`, or published under it as an entry point.

        Raises:
            ConfigurationError: (a `ValueError`) no such backend.
        """
        entry = cls._registry.get(name)
        if entry is None:
            published = entry_points(group=ENTRY_POINT_GROUP)
            if name not in published.names:
                raise ConfigurationError(
                    f"unknown worker backend {name!r}; available: {sorted({*cls._registry, *published.names})}",
                    side="worker",
                    backend=name,
                )
            entry = cls._registry[name] = published[name].load()
        elif isinstance(entry, tuple):
            entry = cls._registry[name] = getattr(importlib.import_module(entry[0]), entry[1])
        return entry

    @classmethod
    def create_engine(
        cls, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module
    ) -> WeightTransferEngine[Any, Any]:
        """An engine of backend `config.backend` for `model`.

        Args:
            config: a `WeightTransferConfig`, ours or vLLM's.
            vllm_config: vLLM's configuration; elsewhere any object with `parallel_config` (`rank`, `world_size`,
                `data_parallel_index`) and `model_config`.
            device: where the model lives.
            model: the module that receives the weights.

        Raises:
            ConfigurationError: (a `ValueError`) no such backend.
        """
        return cls.engine_class(config.backend)(config, vllm_config, device, model)
