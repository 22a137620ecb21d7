"""Dense broadcast: every parameter, whole, from the sender to all workers at once.

The worker's end is `wt_worker/backends/broadcast.py`. In a round's transfer:

1. trainer: `Go` to every worker, with its place in the communicator; both sides open the channel if its epoch is new.
2. worker: `Credit(limit)`: it has buffers for the groups below `limit`.
3. trainer: when every worker has credit for group k and its bytes are ready, `Enter(k)`; all enter the broadcast of group k.
4. worker: installs the group, frees its buffer, `Credit` again; after the last group `Installed`.

A round that is like the last one saves two of these steps: the worker's `Ready` has its first credit in it, and a sender that has
made the first group ready meanwhile lets it be entered with `Go`.

Both sides compute the groups from the metadata (`wt_common.packing`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch

from wt_common import Side, TransportError, WeightTransferError
from wt_common.packing import Group, plan_groups
from wt_common.session import Credit, Enter, Go
from wt_trainer.channels.base import Channel, Mark, Membership, Transfer, mark_now
from wt_trainer.channels.gloo import GlooChannel
from wt_trainer.channels.nccl import NcclChannel
from wt_trainer.follower import FollowerSession
from wt_trainer.init_infos import GlooTrainerInitInfo, NCCLTrainerInitInfo
from wt_trainer.lifecycle import SessionTrainerEngine
from wt_trainer.metadata import RoundMetadata
from wt_trainer.round import Cause, Round
from wt_trainer.session import Peer, Session
from wt_trainer.staging import Filled, Staging
from wt_trainer.stream import CheckedStream
from wt_trainer.threads import run_in_thread

__all__ = ["BroadcastTrainerEngine", "GlooTrainerWeightTransferEngine", "NCCLTrainerWeightTransferEngine"]

logger = logging.getLogger(__name__)

MAX_GROUP_PIECES = 4096
"""Most parameters in one group: what a worker may have to keep track of at once. Small ones fill a buffer long before."""

POLL_S = 5e-5
"""Between two looks at what a device does: Linux sleeps no shorter, and 16 GB take 45 ms."""

TFields = TypeVar("TFields", bound=GlooTrainerInitInfo | NCCLTrainerInitInfo)


class BroadcastTrainerEngine(SessionTrainerEngine[TFields]):
    """Dense broadcast over a channel; which one is all that its subclasses say."""

    channel_class: ClassVar[type[Channel]]

    def __init__(self, init_info: TFields, **kwargs: Any) -> None:
        super().__init__(init_info, **kwargs)
        self._device = torch.device("cpu")
        self._channel: Channel | None = None
        self._needs_epoch = True  # on the sender: whether no communicator of the last epoch may be used again
        self._staging = Staging(init_info.packed_num_buffers, self._device)
        # By whether it is for the draft model, whose casts may be others: metadata, casts, wire and groups of the last round.
        self._planned: dict[bool, tuple[RoundMetadata, dict[str, str], RoundMetadata, tuple[Group, ...]]] = {}
        self._stream: CheckedStream | None = None
        self._ahead: tuple[_Pipeline, Iterator[None]] | None = None  # what was begun before the workers are ready

    def _prepare_metadata(self) -> None:
        self._check_source(self.source)  # what was passed is wrong on any machine
        # Not in the constructor: what the sender lacks, the other ranks hear of from here on.
        self._device = self._own_device()
        self._staging = Staging(self.init_info.packed_num_buffers, self._device)
        super()._prepare_metadata()

    @staticmethod
    def _own_device() -> torch.device:
        """Where the bytes are that this rank sends.

        Raises:
            BackendUnavailableError: this process lacks what the channel needs.
        """
        return torch.device("cpu")

    def _settings(self) -> dict[str, str]:
        return self.channel_class.settings()

    def _versions(self) -> dict[str, str]:
        return {**super()._versions(), **self.channel_class.versions()}

    def _init_fields(self) -> dict[str, Any]:
        return {
            "max_group_bytes": self.init_info.packed_buffer_size_bytes,
            "max_group_pieces": MAX_GROUP_PIECES if self.init_info.packed else 1,
            "num_buffers": self.init_info.packed_num_buffers,
        }

    def _get_ahead(self, session: Session, round_: Round, metadata: RoundMetadata) -> None:
        """Make the first group ready, if nobody else's collectives are needed and its bytes will be those of the last round."""
        self._ahead = None
        planned = self._planned.get(self._is_draft)
        if session.followers or planned is None or planned[0] != metadata:
            return
        _, _, wire, groups = planned
        pipeline = _Pipeline(round_, groups, self.rank)
        feeding = self._feed(round_, pipeline, metadata, wire)
        self._ahead = pipeline, feeding
        next(feeding, None)

    def _transmit(
        self, session: Session, round_: Round, metadata: RoundMetadata, casts: dict[str, str], received: list[int]
    ) -> int:
        wire, groups = self._plan(metadata, casts)
        workers = session.workers
        if self._ahead is None or self._ahead[0].groups is not groups:
            self._let_go()  # what was taken ahead was for another dtype
            round_.lent.clear()
            pipeline = _Pipeline(round_, groups, self.rank)
            self._ahead = pipeline, self._feed(round_, pipeline, metadata, wire)
        pipeline, feeding = self._ahead
        if self._needs_epoch:  # not where we have no channel: this rank may send nothing
            self._needs_epoch = False
            self._epoch += 1
        if not received:
            round_.take_first_credits(workers, casts)
        entered = pipeline.num_enterable(workers)
        go = Go(
            round=round_.number,
            epoch=self._epoch,
            rank=0,
            world_size=1 + len(workers),
            remaining_s=round_.remaining_s,
            casts=casts,
            received=received,
        )
        round_.enter(entered)
        session.send(session.followers, go)
        for index, peer in enumerate(workers):
            session.send([peer], replace(go, rank=1 + index, entered=entered))
        self._start_sending(round_, lambda: self._conduct(session, round_, pipeline, entered))
        if pipeline.num_own:
            self._start_sending(round_, lambda: self._play(session, round_, pipeline, go))
        for _ in feeding:
            pass
        pipeline.wait_sent(pipeline.num_own)
        round_.wait(lambda: round_.num_entered == len(groups), lambda: "the other senders")
        return sum(wire.sizes_bytes)

    def _assist(self, session: FollowerSession, round_: Round, metadata: RoundMetadata, go: Go) -> None:
        if self.rank not in metadata.roots:
            for _ in self._feed(round_, _Pipeline(round_, (), self.rank), metadata, metadata):
                pass
            return
        if go.epoch != self._epoch:
            self._end_transfer(failed=True)
            self._epoch = go.epoch
        wire, groups = self._plan(metadata, go.casts)
        pipeline = _Pipeline(round_, groups, self.rank)

        def announce(number: int) -> None:
            session.send(Credit(round=round_.number, limit=number + 1))

        self._start_sending(round_, lambda: self._play(session, round_, pipeline, go, announce))
        for _ in self._feed(round_, pipeline, metadata, wire):
            pass
        pipeline.wait_sent(pipeline.num_own)

    def _run_source_to(self, round_: Round, index: int) -> None:
        if index < 0:
            return
        try:
            if self._stream is None or self._stream.round is not round_:
                metadata = self._round_metadata()
                self._begin_stream(round_, metadata, metadata, digest=False)
            assert self._stream is not None  # as made
            self._stream.run_to(index)
        except Exception:
            logger.exception("the source failed after the round had")

    def _begin_stream(
        self, round_: Round, metadata: RoundMetadata, wire: RoundMetadata, *, digest: bool
    ) -> CheckedStream:
        source = self._round_source
        assert source is not None  # its metadata were taken
        try:
            self._stream = CheckedStream(source, metadata, wire, self.rank, round_, digest=digest, device=self._device)
        except BaseException:
            round_.stopped = True  # there is no iterator
            raise
        return self._stream

    def _let_go(self) -> None:
        self._ahead = None
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _end_transfer(self, *, failed: bool) -> None:
        self._ahead = None
        if failed:
            self._needs_epoch = True
            # A broadcast that was abandoned may still read the staging buffers: drop both, and start anew next time.
            channel, self._channel = self._channel, None
            if channel is not None:
                channel.close()
            self._staging.clear()

    def _plan(self, metadata: RoundMetadata, casts: dict[str, str]) -> tuple[RoundMetadata, tuple[Group, ...]]:
        """What goes over the wire, and in which groups; worked out anew when it is new."""
        planned = self._planned.get(self._is_draft)
        if planned is None or planned[:2] != (metadata, casts):
            fields = self._init_fields()
            wire = metadata.cast(casts)
            groups = plan_groups(
                wire.sizes_bytes,
                max_bytes=fields["max_group_bytes"],
                max_pieces=fields["max_group_pieces"],
                roots=wire.roots,
            )
            self._planned[self._is_draft] = planned = (metadata, casts, wire, groups)
        return planned[2:]

    # --- the calling thread ------------------------------------------------------------------------------------

    def _feed(self, round_: Round, pipeline: _Pipeline, metadata: RoundMetadata, wire: RoundMetadata) -> Iterator[None]:
        """Run the source, which only the calling thread may; yields whenever a group that this rank sends is ready."""
        num_buffers = self.init_info.packed_num_buffers
        stream = self._begin_stream(round_, metadata, wire, digest=self._verifies)
        for count, (number, _) in enumerate(pipeline.own):
            pipeline.wait_sent(count - num_buffers + 1)
            filled = self._staging.fill(pipeline.groups, number, count, stream, wire)
            round_.check(lambda: f"the source to reach {stream.current!r}")
            pipeline.mark_ready(number, filled, mark_now(self._device))
            yield
        stream.finish()
        round_.buffer_bytes = max(round_.buffer_bytes, self._staging.num_bytes + pipeline.most_held_bytes)

    # --- the sending thread ------------------------------------------------------------------------------------

    @staticmethod
    def _start_sending(round_: Round, send: Callable[[], None]) -> None:
        def run() -> None:
            try:
                send()
            except WeightTransferError as exc:
                round_.fail(exc.fill(side=Side.TRAINER), Cause.SECOND_HAND)
            except Exception as exc:
                error = TransportError(f"the sending thread failed ({type(exc).__name__}: {exc})", side=Side.TRAINER)
                error.__cause__ = exc
                round_.fail(error)

        run_in_thread(f"wt-send round {round_.number}", run)

    def _conduct(self, session: Session, round_: Round, pipeline: _Pipeline, first: int) -> None:
        """On the sender: let all enter group `first`, and each after it, as soon as they can, ahead of those under way."""
        workers, followers = session.workers, {peer.hello.rank: peer for peer in session.followers}
        for number in range(first, len(pipeline.groups)):
            root = pipeline.groups[number].root
            peers = workers if root == self.rank else [*workers, followers[root]]
            pipeline.wait_ready(number, [peer.key for peer in peers])
            round_.enter(number + 1)
            session.send(peers, Enter(round=round_.number, group=number))

    def _play(
        self,
        session: Session | FollowerSession,
        round_: Round,
        pipeline: _Pipeline,
        go: Go,
        announce: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Broadcast the groups that this rank is the root of, each when all enter it; `announce` says which one is ready."""
        channel = self._open_channel(session, round_, go)
        for number, _ in pipeline.own:
            pipeline.wait_ready(number, [])
            announce(number)
            round_.wait(
                lambda number=number: round_.num_entered > number,  # type: ignore[misc]
                lambda number=number: f"all to enter group {number}",  # type: ignore[misc]
            )
            pipeline.send(number, channel)

    def _open_channel(self, session: Session | FollowerSession, round_: Round, go: Go) -> Channel:
        if self._channel is not None:
            return self._channel
        channel = self.channel_class(
            Membership(
                store=session.store,
                epoch=go.epoch,
                root=self.rank,
                rank=0,
                world_size=go.world_size,
                address=session.address,
                device=self._device,
                deadline=round_.deadline,
                abandoned=lambda: round_.failure is not None,
            )
        )
        try:
            with round_.changed:
                round_.check(lambda: "the channel")  # a failed round has dropped its channel: do not bring one back
                self._channel = channel
        except WeightTransferError:
            channel.close()
            raise
        return channel


class GlooTrainerWeightTransferEngine(BroadcastTrainerEngine[GlooTrainerInitInfo]):
    """Dense broadcast over gloo, between CPUs."""

    init_info_cls = GlooTrainerInitInfo
    channel_class = GlooChannel


class NCCLTrainerWeightTransferEngine(BroadcastTrainerEngine[NCCLTrainerInitInfo]):
    """Dense broadcast over NCCL, between GPUs; what a rank sends is moved to its current CUDA device, if it is elsewhere."""

    init_info_cls = NCCLTrainerInitInfo
    channel_class = NcclChannel

    @staticmethod
    def _own_device() -> torch.device:
        NcclChannel.settings()  # raises where there is no GPU
        return torch.device("cuda", torch.cuda.current_device())


class _Pipeline:
    """The groups that this rank sends, between the calling thread, which makes them ready, and the sending thread.

    The calling thread also finds out which are sent, so that there is no third one; with that, the tensors that they were sent
    from are let go.
    """

    def __init__(self, round_: Round, groups: tuple[Group, ...], rank: int) -> None:
        self.groups = groups
        self.own = [(number, group) for number, group in enumerate(groups) if group.root == rank]
        self.num_own = len(self.own)
        self.most_held_bytes = 0  # of tensors that are neither the source's own memory nor staging buffers
        self._ready: dict[int, tuple[Filled, Mark]] = {}
        self._begun: list[tuple[Filled, Transfer]] = []  # in order; those that have ended are gone
        self._num_begun = self._num_sent = 0
        self._own_numbers = {number for number, _ in self.own}
        self._round = round_

    def mark_ready(self, number: int, filled: Filled, mark: Mark) -> None:
        """Group `number` can go out, once the device has reached `mark`."""
        with self._round.changed:
            self._ready[number] = filled, mark
            held = [*(each for each, _ in self._ready.values()), *(each for each, _ in self._begun)]
            self.most_held_bytes = max(self.most_held_bytes, sum(each.held_bytes for each in held))
            self._round.changed.notify_all()

    def num_enterable(self, workers: list[Peer]) -> int:
        """How many of the first groups are ours and ready, and have room on all of `workers`."""
        with self._round.changed:
            limit = min((self._round.credits.get(peer.key, 0) for peer in workers), default=0)
            return next((number for number in range(limit) if number not in self._ready), limit)

    def wait_ready(self, number: int, keys: list[tuple[str, str, int]]) -> None:
        """Return once group `number` is ready, if it is ours, and the peers `keys` have credit for it."""
        credits = self._round.credits
        self._round.wait(
            lambda: (
                (number in self._ready or number not in self._own_numbers)
                and all(credits.get(key, 0) > number for key in keys)
            ),
            lambda: (
                f"group {number} of {len(self.groups)}: "
                + (
                    ", ".join(f"{key[0]} {key[2]} of {key[1]}" for key in keys if credits.get(key, 0) <= number)
                    or "the source"
                )
            ),
        )

    def send(self, number: int, channel: Channel) -> None:
        """The broadcast of group `number` has begun."""
        filled, mark = self._ready[number]
        transfer = channel.broadcast(filled.buffers, self._round.deadline, after=mark)
        with self._round.changed:
            del self._ready[number]
            self._begun.append((filled, transfer))
            self._num_begun += 1
            self._round.changed.notify_all()

    def wait_sent(self, count: int) -> None:
        """Return once `count` of our groups are sent.

        Raises:
            PlanError: the source has written into a tensor that it had yielded, before that was sent.
        """

        def missing() -> str:
            return f"group {self._num_sent + 1} of {self.num_own} to be sent"

        while self._num_sent < count:
            self._round.wait(lambda: self._num_begun > self._num_sent, missing)
            filled, transfer = self._begun[0]
            while not transfer.done():
                self._round.check(missing)
                time.sleep(POLL_S)
            for loan in filled.lent:
                loan.check()
            with self._round.changed:
                del self._begun[0]
                self._num_sent += 1
