"""The worker's end, by vLLM's documentation of custom engines: only the line that imports the base classes is ours."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from wt_worker import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo


@dataclass
class FileWeightTransferInitInfo(WeightTransferInitInfo):
    """Where the files are."""

    directory: str


@dataclass
class FileWeightTransferUpdateInfo(WeightTransferUpdateInfo):
    """One file of a round, and the names in it."""

    file: str
    names: list[str]

    def __post_init__(self) -> None:
        if Path(self.file).name != self.file:
            raise ValueError(f"file: expected a name without a path, got {self.file!r}")


class FileWeightTransferEngine(WeightTransferEngine[FileWeightTransferInitInfo, FileWeightTransferUpdateInfo]):
    """Loads what the trainer has put into files."""

    init_info_cls = FileWeightTransferInitInfo
    update_info_cls = FileWeightTransferUpdateInfo

    directory: Path | None = None

    def init_transfer_engine(self, init_info: FileWeightTransferInitInfo) -> None:
        self.directory = Path(init_info.directory)
        if not self.directory.is_dir():
            raise RuntimeError(f"{self.directory} is not a directory on this host")

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileWeightTransferUpdateInfo) -> None:
        if self.directory is None:
            raise RuntimeError("init_transfer_engine comes first")
        weights = torch.load(self.directory / update_info.file, map_location=self.device, weights_only=True)
        self.model.load_weights((name, weights[name]) for name in update_info.names)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self.directory = None
