"""The worker's end of a weight transfer: what a backend implements and an inference worker calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from wt_common import ConfigurationError, WeightTransferInitInfo, WeightTransferUpdateInfo

__all__ = ["WeightTransferConfig", "WeightTransferEngine"]

TInitInfo = TypeVar("TInitInfo", bound=WeightTransferInitInfo)
TUpdateInfo = TypeVar("TUpdateInfo", bound=WeightTransferUpdateInfo)


@dataclass
class WeightTransferConfig:
    """Which backend a worker uses. Inside vLLM, vLLM's own class of this name arrives instead."""

    backend: str = "nccl"


class WeightTransferEngine(ABC, Generic[TInitInfo, TUpdateInfo]):
    """A backend's worker end, one per worker rank. vLLM's worker, or the embedded server, calls it:

    1. `init_transfer_engine(parse_init_info(dict))` when a trainer connects, and again when another one does.
    2. `start_weight_update()` opens an update.
    3. `update_weights(dict)` receives and installs; it returns when the model's device has everything, unless
       `defers_processing`.
    4. `finish_weight_update()` closes the update.
    5. `shutdown()` when the worker ends, or the trainer is to be released.

    All calls come on the worker's own thread, one at a time. Between 2 and 4, `set_weight_update_target` may point the engine
    at another model (a draft model).

    A backend sets `init_info_cls` and `update_info_cls`, and implements the abstract methods.
    """

    init_info_cls: type[TInitInfo]
    update_info_cls: type[TUpdateInfo]

    supports_draft_weight_update: bool = True
    """Whether the engine can update a speculative draft model."""

    defers_processing: bool = False
    """Whether `update_weights` may return before the weights are on the device; `finish_weight_update` then completes them."""

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        self.config = config
        self.vllm_config = vllm_config
        self.parallel_config = vllm_config.parallel_config
        self.model_config = vllm_config.model_config
        self.device = device
        self.model = model
        self._default_target = (self.model, self.model_config)

    def set_weight_update_target(self, model: torch.nn.Module, model_config: Any) -> None:
        """The open update goes to `model`."""
        self.model, self.model_config = model, model_config

    def reset_weight_update_target(self) -> None:
        """Updates go to the engine's own model again."""
        self.model, self.model_config = self._default_target

    def parse_init_info(self, init_dict: dict[str, Any]) -> TInitInfo:
        """`init_dict` as `init_info_cls`.

        Raises:
            ConfigurationError: (a `ValueError`) a field is missing, unknown or of the wrong type.
        """
        parsed: TInitInfo = self._parse("init_info", self.init_info_cls, init_dict)
        return parsed

    def parse_update_info(self, update_dict: dict[str, Any]) -> TUpdateInfo:
        """`update_dict` as `update_info_cls`.

        Raises:
            ConfigurationError: (a `ValueError`) a field is missing, unknown or of the wrong type.
        """
        parsed: TUpdateInfo = self._parse("update_info", self.update_info_cls, update_dict)
        return parsed

    def _parse(self, what: str, cls: type[Any], payload: dict[str, Any]) -> Any:
        try:
            return cls(**payload)
        except (TypeError, ValueError) as exc:
            raise ConfigurationError(
                f"{what} for {type(self).__name__} is invalid: {exc}. Trainer and worker must use the same backend",
                side="worker",
            ) from exc

    @abstractmethod
    def init_transfer_engine(self, init_info: TInitInfo) -> None:
        """A trainer is connected; an earlier one's connection is gone."""

    @abstractmethod
    def start_weight_update(self) -> None:
        """An update is open."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """One call's weights are installed, and on the device unless `defers_processing`."""
        self.receive_weights(self.parse_update_info(update_info))
        if not self.defers_processing:
            self.synchronize()

    @abstractmethod
    def receive_weights(self, update_info: TUpdateInfo) -> None:
        """One call's weights are received and handed to the model."""

    @abstractmethod
    def finish_weight_update(self) -> None:
        """The update is closed and the model serves its weights."""

    def drain_pending(self) -> None:
        """Every deferred update is applied. Does nothing by default; may be called at any time."""

    @abstractmethod
    def shutdown(self) -> None:
        """Transfer resources are released; the worker goes on serving."""

    def synchronize(self) -> None:
        """All work queued on the engine's device is done."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
