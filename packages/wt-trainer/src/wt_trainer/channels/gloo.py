"""Bytes between CPUs over gloo, in a process group of our own beside any default group.

wt-trainer and wt-worker each have this module, the same but for the package's name (`nox -s lint` checks it): the two packages
share what is on the wire, not code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]  # not in torch's stubs
from torch.distributed.distributed_c10d import BroadcastOptions

from wt_common import RoundTimeoutError, TransportError
from wt_trainer.channels.base import Mark, Membership
from wt_trainer.store import RendezvousStore

__all__ = ["GlooChannel"]

OP_TIMEOUT_S = 5.0
"""For one broadcast of at most 64 MiB, entered when everybody is ready for it: 100 Mbit/s still makes it. gloo notices a
peer that dies in mid-transfer only at this timeout, so this is also how long an abandoned thread may live."""


class _Done:
    """A broadcast that has ended."""

    def done(self) -> bool:
        return True


class GlooChannel:
    """A gloo group of one root (rank 0, a trainer) and its receivers (workers); see `Channel`.

    An op that was abandoned at its timeout goes on in gloo's threads and cannot be stopped.
    """

    receives_in_place: ClassVar[bool] = False  # an abandoned receive goes on writing
    blocks: ClassVar[bool] = True  # a blocked op ends by itself at `OP_TIMEOUT_S`, never sooner

    def __init__(self, membership: Membership) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stubs
        options._timeout = timedelta(seconds=OP_TIMEOUT_S)
        options._devices = [ProcessGroupGloo.create_device(hostname=membership.address)]
        rank, world_size = membership.rank, membership.world_size
        store = _SessionStore(
            membership.store, membership.epoch, f"{membership.root}/", membership.deadline, membership.abandoned
        )
        try:
            self._group: Any = ProcessGroupGloo(store, rank, world_size, options)
        except RuntimeError as exc:
            raise TransportError(f"gloo: rank {rank} of {world_size} cannot join ({exc})") from exc
        self._options = BroadcastOptions()
        self._options.rootRank = 0

    @staticmethod
    def settings() -> dict[str, str]:
        """Nothing: gloo comes with torch, and its releases understand one another."""
        return {}

    @staticmethod
    def versions() -> dict[str, str]:
        """Nothing beside torch's."""
        return {}

    def broadcast(self, buffers: Sequence[torch.Tensor], deadline: float, *, after: Mark = None) -> _Done:
        """`buffers` hold on every rank what they hold on rank 0. Blocks for `OP_TIMEOUT_S` or to `deadline` at most.

        Every rank must enter with the same numbers of bytes: gloo ends the process of a receiver that differs. All operations are
        begun before the first one is waited for, since each costs a wake-up on every rank.

        Args:
            buffers: each 1-D uint8, contiguous, on the CPU; together at most 64 MiB.
            deadline: in seconds of the monotonic clock.
            after: None.

        Raises:
            RoundTimeoutError, TransportError: not everybody took part in time, or the group broke.
        """
        assert after is None  # a CPU's work is done when a call returns
        for buffer in buffers:
            if buffer.dtype != torch.uint8 or not buffer.is_contiguous() or buffer.device.type != "cpu":
                raise TransportError(
                    f"gloo: expected a contiguous uint8 CPU tensor, got {buffer.dtype} on {buffer.device}"
                )
        left = min(OP_TIMEOUT_S, deadline - time.monotonic())
        if left <= 0:
            raise RoundTimeoutError("gloo: the deadline passed before the broadcast was entered")
        group = self._group  # keeps the group alive here: dropping the last reference waits for the op
        if group is None:
            raise TransportError("gloo: the channel is closed")
        self._options.timeout = timedelta(seconds=left)
        try:
            begun = [group.broadcast([buffer], self._options) for buffer in buffers]
            for operation in begun:
                operation.wait()
        except RuntimeError as exc:
            num_bytes = sum(buffer.numel() for buffer in buffers)
            raise TransportError(f"gloo: a broadcast of {num_bytes} bytes failed ({exc})") from exc
        return _Done()

    def close(self) -> None:
        """Leave the group, at once; an op that is still blocked keeps it alive until its timeout."""
        self._group = None


class _SessionStore(Store):
    """torch's store interface over the session's rendezvous."""

    def __init__(
        self, store: RendezvousStore, epoch: int, prefix: str, deadline: float, abandoned: Callable[[], bool]
    ) -> None:
        super().__init__()
        self._store = store
        self._epoch = epoch
        self._prefix = prefix
        self._deadline = deadline
        self._abandoned = abandoned

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # the stub says str; torch passes bytes
        self._store.set(self._epoch, self._prefix + key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._epoch, self._prefix + key, self._deadline, self._abandoned)

    def wait(self, keys: list[str], timeout: Any = None) -> None:  # noqa: ARG002  # our deadline is the round's
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(self._store.has(self._epoch, self._prefix + key) for key in keys)
