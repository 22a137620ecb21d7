"""Dense broadcast: every parameter, whole, from the sender to all workers at once.

The trainer's end is `wt_trainer/backends/broadcast.py`, which lists the protocol's steps. Both sides compute the groups from
the metadata (`wt_common.packing`).
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from wt_common import Side, TransportError, WeightTransferError
from wt_common.broadcast import DenseBroadcastInitInfo
from wt_common.packing import Group, operations, plan_groups
from wt_common.session import Credit, Go, Metadata
from wt_worker.channels.gloo import GlooChannel
from wt_worker.lifecycle import SessionWeightTransferEngine
from wt_worker.placement.writer import RoundWriter
from wt_worker.round import Round
from wt_worker.session import WorkerSession

__all__ = ["GlooWeightTransferEngine"]


class GlooWeightTransferEngine(SessionWeightTransferEngine[DenseBroadcastInitInfo]):
    """Dense broadcast over gloo, between CPUs: the CPU twin of `nccl`."""

    init_info_cls = DenseBroadcastInitInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._channels: dict[int, GlooChannel] = {}  # by root, all of one epoch
        self._epoch = 0
        self._staging: list[torch.Tensor] = []
        self._groups: tuple[Any, tuple[Group, ...]] = (None, ())

    @property
    def _cut_bytes(self) -> int:
        assert self._init_info is not None  # a transfer follows an init
        return self._init_info.max_group_bytes

    def _receive(self, session: WorkerSession, round_: Round, go: Go, metadata: Metadata, writer: RoundWriter) -> None:
        info = self._init_info
        assert info is not None  # receiving follows an init
        groups = self._plan(metadata, tuple(writer.sizes), info)
        if go.epoch != self._epoch:
            self._close_channels()
            self._epoch = go.epoch
        while len(self._staging) < min(info.num_buffers, len(groups)):
            self._staging.append(torch.empty(info.max_group_bytes, dtype=torch.uint8))
        arrived = _Arrivals(round_)
        threading.Thread(
            target=self._pump, args=(session, round_, go, groups, arrived), name=f"wt-receive {session.id}", daemon=True
        ).start()
        session.send(Credit(round=round_.number, limit=info.num_buffers))
        for number, group in enumerate(groups):
            arrived.wait_for(number)
            writer.take(group, self._staging[number % info.num_buffers], number)
            session.send(Credit(round=round_.number, limit=number + 1 + info.num_buffers))

    def _plan(self, metadata: Metadata, sizes: tuple[int, ...], info: DenseBroadcastInitInfo) -> tuple[Group, ...]:
        """The groups, computed anew when the parameters or the bounds are new."""
        key = (sizes, tuple(metadata.roots), info.max_group_bytes, info.max_group_pieces)
        if self._groups[0] != key:
            groups = plan_groups(
                sizes,
                max_bytes=info.max_group_bytes,
                max_pieces=info.max_group_pieces,
                roots=metadata.roots or None,
            )
            self._groups = (key, groups)
        return self._groups[1]

    def _end_transfer(self, *, failed: bool) -> None:
        if failed:
            # A receive that was abandoned goes on writing into its buffer: never use that, or its group, again.
            self._staging = []
            self._close_channels()

    def _close_channels(self) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.close()

    def _pump(
        self, session: WorkerSession, round_: Round, go: Go, groups: tuple[Group, ...], arrived: _Arrivals
    ) -> None:
        """On a thread of its own: enter each group's broadcast when the sender says that everybody is ready for it."""
        staging = self._staging
        try:
            channels = self._open_channels(session, round_, go, sorted({group.root for group in groups}))
            for number, group in enumerate(groups):
                round_.wait(
                    lambda number=number: round_.num_entered > number,  # type: ignore[misc]
                    f"the trainer to send group {number} of {len(groups)}",
                )
                buffer = staging[number % len(staging)][: group.num_bytes]
                parts = [
                    buffer[pieces[0].offset : pieces[-1].offset + pieces[-1].num_bytes] for pieces in operations(group)
                ]
                channels[group.root].broadcast(parts, round_.deadline)
                arrived.mark(number)
        except WeightTransferError as exc:
            round_.fail_second_hand(exc.fill(side=Side.WORKER))
        except Exception as exc:
            round_.fail(TransportError(f"the receiving thread failed ({type(exc).__name__}: {exc})", side=Side.WORKER))

    def _open_channels(self, session: WorkerSession, round_: Round, go: Go, roots: list[int]) -> dict[int, GlooChannel]:
        """A channel from each root; those that are there are kept. All workers open them in the same order."""
        channels = dict(self._channels)
        for root in roots:
            if root not in channels:
                channels[root] = GlooChannel(
                    session.store,
                    epoch=go.epoch,
                    root=root,
                    rank=go.rank,
                    world_size=go.world_size,
                    address=session.local_address,
                    deadline=round_.deadline,
                    abandoned=lambda: round_.failure is not None,
                )
        with round_.changed:
            round_.wait(lambda: True, "")  # a failed round has dropped its channels already: do not bring them back
            self._channels = channels
        return channels


class _Arrivals:
    """How many groups are in their buffers, between the receiving thread and the worker's own."""

    def __init__(self, round_: Round) -> None:
        self._round = round_
        self._count = 0

    def mark(self, number: int) -> None:
        with self._round.changed:
            self._count = number + 1
            self._round.changed.notify_all()

    def wait_for(self, number: int) -> None:
        self._round.wait(lambda: self._count > number, f"group {number}")
