"""Dense broadcast: every parameter, whole, from the sender to all workers at once.

The trainer's end is `wt_trainer/backends/broadcast.py`, which lists the protocol's steps. Both sides compute the groups from
the metadata (`wt_common.packing`).
"""

from __future__ import annotations

import threading
import time
from typing import Any, ClassVar

import torch

from wt_common import Side, TransportError, WeightTransferError
from wt_common.broadcast import DenseBroadcastInitInfo, SessionUpdateInfo
from wt_common.packing import Group, plan_groups
from wt_common.session import Credit, Go, Metadata
from wt_worker.channels.base import Channel, Mark, Membership, Transfer, mark_now
from wt_worker.channels.gloo import GlooChannel
from wt_worker.channels.nccl import NcclChannel
from wt_worker.lifecycle import SessionWeightTransferEngine
from wt_worker.placement.inbox import Inbox
from wt_worker.placement.writer import RoundWriter
from wt_worker.round import Round
from wt_worker.session import WorkerSession

__all__ = [
    "BroadcastWeightTransferEngine",
    "GlooWeightTransferEngine",
    "NCCLWeightTransferEngine",
    "NCCLWeightTransferInitInfo",
    "NCCLWeightTransferUpdateInfo",
]

POLL_S = 5e-5
"""Between two looks at what a device does: Linux sleeps no shorter, and 16 GB take 45 ms."""

NCCLWeightTransferInitInfo = DenseBroadcastInitInfo
NCCLWeightTransferUpdateInfo = SessionUpdateInfo


class BroadcastWeightTransferEngine(SessionWeightTransferEngine[DenseBroadcastInitInfo]):
    """Dense broadcast over a channel; which one is all that its subclasses say."""

    init_info_cls = DenseBroadcastInitInfo
    channel_class: ClassVar[type[Channel]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._channels: dict[int, Channel] = {}  # by root, all of one epoch
        self._epoch = 0
        self._groups: tuple[Any, tuple[Group, ...]] = (None, ())

    @property
    def _buffer_device(self) -> torch.device:
        """Where bytes are received that do not go into the model at once."""
        return torch.device("cpu")

    def _settings(self) -> dict[str, str]:
        return self.channel_class.settings()

    def _versions(self) -> dict[str, str]:
        return {**super()._versions(), **self.channel_class.versions()}

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
        inbox = writer.inbox(
            groups,
            self._buffer_device,
            in_place=self.channel_class.receives_in_place,
            num_buffers=info.num_buffers,
            max_group_bytes=info.max_group_bytes,
        )
        round_.buffer_bytes = inbox.num_bytes
        arrived = _Arrivals(round_, mark_now(self._buffer_device))
        limit = inbox.limits[0]
        session.send(Credit(round=round_.number, limit=limit))  # before a thread starts, which takes its time
        threading.Thread(
            target=self._pump,
            args=(session, round_, go, groups, inbox, arrived, writer),
            name=f"wt-receive {session.id}",
            daemon=True,
        ).start()
        for number, group in enumerate(groups):
            arrived.wait_for(number)
            writer.take(group, inbox.arrivals[number], number)
            arrived.mark_taken(mark_now(self._buffer_device))
            if inbox.limits[number + 1] > limit:
                limit = inbox.limits[number + 1]
                session.send(Credit(round=round_.number, limit=limit))

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
            # A receive that was abandoned may go on writing: never use its group again, nor its buffer, which the writer drops.
            self._close_channels()

    def _close_channels(self) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.close()

    def _pump(
        self,
        session: WorkerSession,
        round_: Round,
        go: Go,
        groups: tuple[Group, ...],
        inbox: Inbox,
        arrived: _Arrivals,
        writer: RoundWriter,
    ) -> None:
        """On a thread of its own: enter each group's broadcast when the sender says that everybody is ready for it."""
        try:
            channels = self._open_channels(session, round_, go, sorted({group.root for group in groups}))
            for number, (group, arrival) in enumerate(zip(groups, inbox.arrivals, strict=True)):
                round_.wait(
                    lambda number=number: round_.num_entered > number,  # type: ignore[misc]
                    f"the trainer to send group {number} of {len(groups)}",
                )
                if any(arrival.direct):
                    writer.touch()
                after = arrived.mark_after(arrival.after)
                arrived.add(channels[group.root].broadcast(arrival.buffers, round_.deadline, after=after))
        except WeightTransferError as exc:
            round_.fail_second_hand(exc.fill(side=Side.WORKER))
        except Exception as exc:
            round_.fail(TransportError(f"the receiving thread failed ({type(exc).__name__}: {exc})", side=Side.WORKER))

    def _open_channels(self, session: WorkerSession, round_: Round, go: Go, roots: list[int]) -> dict[int, Channel]:
        """A channel from each root; those that are there are kept. All workers open them in the same order."""
        channels = dict(self._channels)
        try:
            for root in roots:
                if root not in channels:
                    channels[root] = self.channel_class(
                        Membership(
                            store=session.store,
                            epoch=go.epoch,
                            root=root,
                            rank=go.rank,
                            world_size=go.world_size,
                            address=session.local_address,
                            device=self._buffer_device,
                            deadline=round_.deadline,
                            abandoned=lambda: round_.failure is not None,
                        )
                    )
            with round_.changed:
                round_.check("the channels")  # a failed round has dropped its channels: do not bring them back
                self._channels = channels
        except BaseException:
            for channel in channels.values():
                channel.close()
            raise
        return channels


class GlooWeightTransferEngine(BroadcastWeightTransferEngine):
    """Dense broadcast over gloo, between CPUs: the CPU twin of `nccl`."""

    channel_class = GlooChannel


class NCCLWeightTransferEngine(BroadcastWeightTransferEngine):
    """Dense broadcast over NCCL, between GPUs, into the model's own memory where it is written in place."""

    channel_class = NcclChannel

    @property
    def _buffer_device(self) -> torch.device:
        if self.device == torch.device("cuda"):
            return torch.device("cuda", torch.cuda.current_device())
        return self.device


class _Arrivals:
    """Which groups have come, between the receiving thread and the worker's own, and which the latter has taken away."""

    def __init__(self, round_: Round, begun: Mark) -> None:
        self._round = round_
        self._transfers: list[Transfer] = []
        self._taken = [begun]  # that of group k is at k + 1

    def add(self, transfer: Transfer) -> None:
        """The next group is on its way."""
        with self._round.changed:
            self._transfers.append(transfer)
            self._round.changed.notify_all()

    def wait_for(self, number: int) -> None:
        """Return once group `number` is where it was to be received. The device's own waiting could not be ended by anybody."""
        missing = f"group {number}"
        self._round.wait(lambda: len(self._transfers) > number, missing)
        while not self._transfers[number].done():
            self._round.check(missing)
            time.sleep(POLL_S)

    def mark_taken(self, mark: Mark) -> None:
        """The next group is out of its place once the device has reached `mark`."""
        self._taken.append(mark)

    def mark_after(self, number: int) -> Mark:
        """When group `number` is out of its place; of -1, when the round began."""
        return self._taken[number + 1]
