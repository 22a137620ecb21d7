"""Which trainer engine a backend's name stands for."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar, overload

from wt_common import ConfigurationError
from wt_trainer.client.protocol import VLLMWeightSyncClient
from wt_trainer.engine import TrainerInitInfo, TrainerWeightTransferEngine
from wt_trainer.source import WeightSource

if TYPE_CHECKING:
    from wt_trainer.init_infos import GlooTrainerInitInfo, NCCLTrainerInitInfo
    from wt_trainer.lifecycle import SessionTrainerEngine

__all__ = ["WeightTransferTrainerFactory"]

ENTRY_POINT_GROUP = "wt_trainer.backends"
"""A package's `name = module:Class` in this group is a backend, without a call to `register_engine`."""


class WeightTransferTrainerFactory:
    """Names and their engines. A module is imported when its backend is asked for, never before."""

    _registry: ClassVar[dict[str, tuple[str, str] | type[TrainerWeightTransferEngine[Any]]]] = {
        "gloo": ("wt_trainer.backends.broadcast", "GlooTrainerWeightTransferEngine"),
        "nccl": ("wt_trainer.backends.broadcast", "NCCLTrainerWeightTransferEngine"),
    }

    @classmethod
    def register_engine(
        cls,
        name: str,
        module_path_or_cls: str | type[TrainerWeightTransferEngine[Any]],
        class_name: str | None = None,
    ) -> None:
        """Make `name` stand for an engine class, or for attribute `class_name` of a module imported when needed.

        Raises:
            ConfigurationError: (a `ValueError`) the name is taken, or a module path comes without a class name.
        """
        if name in cls._registry:
            raise ConfigurationError(f"trainer backend {name!r} is already registered", side="trainer", backend=name)
        if not isinstance(module_path_or_cls, str):
            cls._registry[name] = module_path_or_cls
        elif class_name is None:
            raise ConfigurationError(
                f"trainer backend {name!r}: a module path ({module_path_or_cls!r}) needs class_name", side="trainer"
            )
        else:
            cls._registry[name] = (module_path_or_cls, class_name)

    @classmethod
    def engine_class(cls, name: str) -> type[TrainerWeightTransferEngine[Any]]:
        """The engine class registered as `name`, or published under it in the entry-point group `wt_trainer.backends`.

        Raises:
            ConfigurationError: (a `ValueError`) no such backend.
        """
        entry = cls._registry.get(name)
        if entry is None:
            published = entry_points(group=ENTRY_POINT_GROUP)
            if name not in published.names:
                raise ConfigurationError(
                    f"unknown trainer backend {name!r}; available: {sorted({*cls._registry, *published.names})}",
                    side="trainer",
                    backend=name,
                )
            entry = cls._registry[name] = published[name].load()
        elif isinstance(entry, tuple):
            entry = cls._registry[name] = getattr(importlib.import_module(entry[0]), entry[1])
        return entry

    if TYPE_CHECKING:
        # What the built-in engines' send_weights takes and returns is known, not so of a user's own.
        @overload
        @classmethod
        def trainer_init(
            cls,
            init_info: GlooTrainerInitInfo | NCCLTrainerInitInfo,
            *,
            client: VLLMWeightSyncClient,
            source: WeightSource | None = None,
        ) -> SessionTrainerEngine[Any]: ...

        @overload
        @classmethod
        def trainer_init(
            cls, init_info: TrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
        ) -> TrainerWeightTransferEngine[Any]: ...

    @classmethod
    def trainer_init(
        cls,
        init_info: TrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> TrainerWeightTransferEngine[Any]:
        """A ready engine for `init_info.backend`, the inference side connected. Called on every trainer rank.

        Raises:
            ConfigurationError: (a `ValueError`) unknown backend, or a full-resync engine without a source, or a delta
                engine with one.
            SourceModeError: (a `TypeError`) the source lacks the iterator that the engine needs.
            WeightTransferError: the inference side could not be connected; its class says why.
        """
        return cls.engine_class(init_info.backend).trainer_init(init_info, client=client, source=source)
