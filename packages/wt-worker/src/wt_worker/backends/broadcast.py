"""Dense broadcast: every parameter, whole, from the sender to all workers at once.

The trainer's end is `wt_trainer/backends/broadcast.py`, which lists the protocol's steps. Both sides compute the groups from
the metadata (`wt_common.packing`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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

FEW_OPERATIONS = 32
"""So many can be begun without waiting for what they wait for; with more, NCCL's own queues may be full."""

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
        self._planned: tuple[Metadata, list[int], tuple[Group, ...]] | None = None

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

    def _make_room(self, metadata: Metadata, writer: RoundWriter) -> int:
        _, inbox = self._places(metadata, writer)
        return inbox.limits[0]

    def _receive(
        self, session: WorkerSession, round_: Round, go: Go, metadata: Metadata, writer: RoundWriter, limit: int
    ) -> None:
        groups, inbox = self._places(metadata, writer)
        round_.buffer_bytes = inbox.num_bytes
        if go.epoch != self._epoch:
            self._close_channels()
            self._epoch = go.epoch
        arrivals = _Arrivals(round_, mark_now(self._buffer_device))
        receiver = _Receiver(round_, groups, inbox, writer, arrivals)
        # Before a thread starts, which takes its time.
        limit = self._give_credit(session, round_, inbox.limits[0], limit)
        roots = sorted({group.root for group in groups})
        first = 0
        if not self.channel_class.blocks and self._channels.keys() >= set(roots):
            first = receiver.enter_begun(self._channels)
        if first < len(groups):
            threading.Thread(
                target=lambda: receiver.enter_from(first, lambda: self._open_channels(session, round_, go, roots)),
                name=f"wt-receive {session.id}",
                daemon=True,
            ).start()
        for number, group in enumerate(groups):
            arrivals.wait_for(number)
            writer.take(group, inbox.arrivals[number], number)
            arrivals.mark_taken(mark_now(self._buffer_device))
            limit = self._give_credit(session, round_, inbox.limits[number + 1], limit)

    @staticmethod
    def _give_credit(session: WorkerSession, round_: Round, limit: int, given: int) -> int:
        """The sender knows that groups below `limit` have room, if it does not know already; `given` is what it knows."""
        if limit > given:
            session.send(Credit(round=round_.number, limit=limit))
        return max(limit, given)

    def _places(self, metadata: Metadata, writer: RoundWriter) -> tuple[tuple[Group, ...], Inbox]:
        """The groups, and where each is received; those of the last round, unless something is new."""
        info = self._init_info
        assert info is not None  # a transfer follows an init
        groups = self._plan(metadata, writer.sizes, info)
        inbox = writer.inbox(
            groups,
            self._buffer_device,
            in_place=self.channel_class.receives_in_place,
            num_buffers=info.num_buffers,
            max_group_bytes=info.max_group_bytes,
        )
        return groups, inbox

    def _plan(self, metadata: Metadata, sizes: list[int], info: DenseBroadcastInitInfo) -> tuple[Group, ...]:
        """The groups, computed anew when metadata or sizes are other objects; both are forgotten with the session."""
        planned = self._planned
        if planned is None or planned[0] is not metadata or planned[1] is not sizes:
            groups = plan_groups(
                sizes,
                max_bytes=info.max_group_bytes,
                max_pieces=info.max_group_pieces,
                roots=metadata.roots or None,
            )
            self._planned = planned = metadata, sizes, groups
        return planned[2]

    def _end_transfer(self, *, failed: bool) -> None:
        if failed:
            self._planned = None
            # A receive that was abandoned may go on writing: never use its group again, nor its buffer, which the writer drops.
            self._close_channels()

    def _close_channels(self) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.close()

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


class _Receiver:
    """Enters each group's broadcast when the sender says that everybody is ready for it.

    On a thread of its own, since a channel may block; where it does not, the first group, if the sender has entered it with `Go`,
    is entered at once, on the worker's own.
    """

    def __init__(
        self, round_: Round, groups: tuple[Group, ...], inbox: Inbox, writer: RoundWriter, arrivals: _Arrivals
    ) -> None:
        self._round = round_
        self._groups = groups
        self._inbox = inbox
        self._writer = writer
        self._arrivals = arrivals

    def enter_begun(self, channels: Mapping[int, Channel]) -> int:
        """Enter the first group, if the sender has and it is small; returns how many were entered."""
        if self._round.num_entered == 0 or len(self._inbox.arrivals[0].buffers) > FEW_OPERATIONS:
            return 0
        with self._failing_second_hand():
            self._enter(0, channels)
        return 1

    def enter_from(self, first: int, open_channels: Callable[[], Mapping[int, Channel]]) -> None:
        """Enter group `first` and all after it; the round fails if that does. On a thread of its own."""
        with self._failing_second_hand():
            channels = open_channels()
            for number in range(first, len(self._groups)):
                self._round.wait(
                    lambda number=number: self._round.num_entered > number,  # type: ignore[misc]
                    f"the trainer to send group {number} of {len(self._groups)}",
                )
                self._enter(number, channels)

    def _enter(self, number: int, channels: Mapping[int, Channel]) -> None:
        arrival = self._inbox.arrivals[number]
        if any(arrival.direct):
            self._writer.touch()
        after = self._arrivals.mark_after(arrival.after)
        channel = channels[self._groups[number].root]
        self._arrivals.add(channel.broadcast(arrival.buffers, self._round.deadline, after=after))

    @contextmanager
    def _failing_second_hand(self) -> Iterator[None]:
        """What is raised inside fails the round, unless the words of whoever caused it come first; it is not raised here."""
        try:
            yield
        except WeightTransferError as exc:
            self._round.fail_second_hand(exc.fill(side=Side.WORKER))
        except Exception as exc:
            error = TransportError(f"the receiving thread failed ({type(exc).__name__}: {exc})", side=Side.WORKER)
            self._round.fail(error)


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
