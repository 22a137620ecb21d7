"""The trainer's end, by vLLM's documentation of custom engines: only the line that imports the base classes is ours."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import ClassVar, Self

import torch

from wt_trainer import TrainerInitInfo, TrainerWeightTransferEngine, VLLMWeightSyncClient, WeightSource


@dataclass
class FileTrainerInitInfo(TrainerInitInfo):
    """A directory that every worker sees under the same path, and how many tensors go into one file."""

    backend: ClassVar[str] = "file"

    directory: str
    tensors_per_file: int = 8


class FileTrainerWeightTransferEngine(TrainerWeightTransferEngine[FileTrainerInitInfo]):
    """Puts the weights into files, and names them to the workers one by one."""

    init_info_cls = FileTrainerInitInfo

    def __init__(self, init_info: FileTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)
        self.init_info = init_info
        self.num_rounds = 0

    @classmethod
    def trainer_init(
        cls, init_info: FileTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        if source is None:
            raise ValueError("backend file needs a WeightSource")
        engine = cls(init_info, client=client, source=source)
        if engine.is_sender:
            client.init_weight_transfer_engine({"directory": init_info.directory})
        return engine

    def send_weights(self) -> None:
        self.num_rounds += 1
        if self.is_sender:
            self.client.start_weight_update()
        items, number = iter(self.source), 0
        while batch := list(islice(items, self.init_info.tensors_per_file)):  # on every rank: the source may gather
            if self.is_sender:
                self._send_file(f"round-{self.num_rounds}-{number}.pt", dict(batch))
            number += 1
        if self.is_sender:
            self.client.finish_weight_update()

    def _send_file(self, name: str, weights: dict[str, torch.Tensor]) -> None:
        file = Path(self.init_info.directory) / name
        torch.save({name: tensor.detach().cpu().clone() for name, tensor in weights.items()}, file)
        self.client.update_weights({"file": file.name, "names": list(weights)})
        file.unlink()
