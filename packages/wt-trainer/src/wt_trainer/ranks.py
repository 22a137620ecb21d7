"""How the other trainer ranks learn where the sender listens, without a pickle."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch

from wt_common import ConfigurationError, PeerLostError, Side
from wt_trainer.init_infos import SessionFields

__all__ = ["TrainerRanks"]


class TrainerRanks:
    """The trainer ranks that call `trainer_init` together: how many, and the group they share, if they share one.

    The group is `process_group`; else the default group, unless the trainer has one rank or finds the sender by a secret.

    Raises:
        ConfigurationError: a rank above 0 has no way to find the sender, or the group numbers the ranks otherwise.
    """

    def __init__(self, fields: SessionFields, rank: int) -> None:
        self.rank = rank
        self._timeout_s = fields.timeout_s
        self.group = _group_of(fields)
        if self.group is not None:
            self.count = self.group.size()
            if self.group.rank() != rank:
                raise ConfigurationError(
                    f"rank: the process group has this process as rank {self.group.rank()}, the init info as rank {rank}; "
                    "trainer ranks are numbered as in the group (pass process_group=, or num_trainer_ranks=1 for a trainer "
                    "of one rank beside a default group)",
                    side=Side.TRAINER,
                    rank=rank,
                    phase="init",
                )
        else:
            self.count = fields.num_trainer_ranks or 1
        if not 0 <= rank < self.count or (rank > 0 and self.group is None and fields.session_secret is None):
            raise ConfigurationError(
                f"rank: expected 0 <= rank < {self.count} (the trainer ranks), got {rank}. A rank above 0 finds the sender over "
                "process_group, the default group, or session_secret with master_address, master_port and num_trainer_ranks",
                side=Side.TRAINER,
                rank=rank,
                phase="init",
            )

    def share(self, payload: dict[str, Any] | None) -> dict[str, Any]:
        """On every rank of the group, what rank 0 passed. A collective of the group, with `timeout_s` for each rank to come.

        Raises:
            PeerLostError: a rank did not come, or is gone.
        """
        if self.group is None or self.count == 1:
            return payload or {}
        device = _device_of(self.group)
        data = json.dumps(payload or {}).encode()
        length = torch.tensor([len(data)], dtype=torch.int64, device=device)
        self._broadcast(length)
        buffer = torch.zeros(int(length.item()), dtype=torch.uint8, device=device)
        if self.rank == 0:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self._broadcast(buffer)
        return dict(json.loads(bytes(buffer.cpu().tolist())))

    def _broadcast(self, tensor: torch.Tensor) -> None:
        # On the object: a group that was made without a default group is not known to torch.distributed's functions.
        options = torch.distributed.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=self._timeout_s)
        try:
            self.group.broadcast([tensor], options).wait()
        except RuntimeError as exc:
            raise PeerLostError(
                f"trainer_init: the trainer ranks did not all come within {self._timeout_s:g} s, or one is gone ({exc}); all "
                "ranks must call it",
                side=Side.TRAINER,
                rank=self.rank,
                phase="init",
            ) from exc


def _group_of(fields: SessionFields) -> Any:
    if fields.process_group is not None:
        return fields.process_group
    if fields.num_trainer_ranks == 1 or fields.session_secret is not None:
        return None
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.group.WORLD
    return None


def _device_of(group: Any) -> torch.device:
    """Where the group's collectives take tensors: the CPU if a backend of it does, else this process's CUDA device."""
    if any(device.type == "cpu" for device in group._device_types):  # noqa: SLF001  # not public
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
