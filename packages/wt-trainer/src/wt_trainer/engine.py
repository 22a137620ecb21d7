"""The trainer's end of a weight transfer: what a backend implements and a training loop calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Self, TypeVar

from wt_trainer.client.protocol import VLLMWeightSyncClient
from wt_trainer.source import WeightSource

__all__ = ["TrainerInitInfo", "TrainerWeightTransferEngine"]


@dataclass
class TrainerInitInfo:
    """What a trainer rank passes to `WeightTransferTrainerFactory.trainer_init`.

    A subclass sets `backend`, the factory's name for its engine, and adds its own fields. `rank` is this process's trainer
    rank; it is never read from a process group, since a trainer may have several. Rank 0 is the sender: it alone drives
    the inference engines.

    Raises:
        TypeError: when a subclass is created without `backend`.
    """

    backend: ClassVar[str]

    rank: int = field(kw_only=True)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not getattr(cls, "backend", None):
            raise TypeError(
                f"{cls.__name__} must set the class attribute `backend`, the name its engine is registered under in "
                "WeightTransferTrainerFactory"
            )

    @property
    def is_sender(self) -> bool:
        """Whether this rank drives the control plane."""
        return self.rank == 0


TTrainerInitInfo = TypeVar("TTrainerInitInfo", bound=TrainerInitInfo)


class TrainerWeightTransferEngine(ABC, Generic[TTrainerInitInfo]):
    """A backend's trainer end.

    1. Every trainer rank calls `trainer_init` (through the factory), which returns when the inference side is connected.
    2. Every trainer rank calls `send_weights` after each training step; it returns or raises the same on all of them.
    3. `shutdown` releases sockets, groups and threads.

    A backend sets `init_info_cls` and implements `trainer_init` and `send_weights`.
    """

    init_info_cls: type[TTrainerInitInfo]

    def __init__(
        self,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
        is_sender: bool = True,
        rank: int = 0,
    ) -> None:
        self.client = client
        self.source = source
        self.is_sender = is_sender
        self.rank = rank

    @classmethod
    @abstractmethod
    def trainer_init(
        cls,
        init_info: TTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """A ready engine, the inference side connected. Called on every trainer rank."""

    @abstractmethod
    def send_weights(self) -> Any:
        """Push the weights and drive the whole update. Called on every trainer rank."""

    def shutdown(self) -> None:
        """Release what the engine holds; it cannot be used afterwards. Does nothing by default."""
