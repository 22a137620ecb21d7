"""Dense broadcast: every parameter, whole, from the sender to all workers at once.

The worker's end is `wt_worker/backends/broadcast.py`. In a round's transfer:

1. trainer: `Go` to every worker, with its place in the communicator; both sides open the channel if its epoch is new.
2. worker: `Credit(limit)`: it has buffers for the groups below `limit`.
3. trainer: when every worker has credit for group k and its bytes are ready, `Enter(k)`; all enter the broadcast of group k.
4. worker: installs the group, frees its buffer, `Credit` again; after the last group `Installed`.

Both sides compute the groups from the metadata (`wt_common.packing`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from wt_common import PlanError, Side, TransportError, WeightTransferError
from wt_common.packing import Group, plan_groups
from wt_common.session import Enter, Go
from wt_trainer.channels.gloo import GlooChannel
from wt_trainer.init_infos import GlooTrainerInitInfo
from wt_trainer.lifecycle import RoundMetadata, SessionTrainerEngine
from wt_trainer.round import Round
from wt_trainer.session import Session
from wt_trainer.source import WeightSource

__all__ = ["GlooTrainerWeightTransferEngine"]

MAX_GROUP_PIECES = 4096
"""Most parameters in one group: what a worker may have to keep track of at once. Small ones fill a buffer long before."""


class GlooTrainerWeightTransferEngine(SessionTrainerEngine[GlooTrainerInitInfo]):
    """Dense broadcast over gloo."""

    init_info_cls: ClassVar[type[GlooTrainerInitInfo]] = GlooTrainerInitInfo

    def __init__(self, init_info: GlooTrainerInitInfo, **kwargs: Any) -> None:
        super().__init__(init_info, **kwargs)
        self._channel: GlooChannel | None = None
        self._staging: list[torch.Tensor] = []
        self._groups: tuple[Group, ...] | None = None

    def _init_fields(self) -> dict[str, Any]:
        return {
            "max_group_bytes": self.init_info.packed_buffer_size_bytes,
            "max_group_pieces": MAX_GROUP_PIECES if self.init_info.packed else 1,
            "num_buffers": self.init_info.packed_num_buffers,
        }

    def _transmit(self, session: Session, round_: Round) -> int:
        metadata = self._round_metadata()
        if self._groups is None:
            fields = self._init_fields()
            self._groups = plan_groups(
                metadata.sizes_bytes, max_bytes=fields["max_group_bytes"], max_pieces=fields["max_group_pieces"]
            )
        workers = session.workers
        if self._channel is None:
            self._epoch += 1
        for index, peer in enumerate(workers):
            session.send(
                [peer],
                Go(
                    round=round_.number,
                    epoch=self._epoch,
                    rank=1 + index,
                    world_size=1 + len(workers),
                    remaining_s=round_.remaining_s,
                ),
            )
        pipeline = _Pipeline(round_, len(self._groups))
        threading.Thread(
            target=self._pump, args=(session, round_, pipeline), name=f"wt-send {session.id}", daemon=True
        ).start()
        self._feed(round_, pipeline, metadata, self._groups)
        pipeline.wait_sent(len(self._groups))
        return sum(metadata.sizes_bytes)

    def _end_transfer(self, *, failed: bool) -> None:
        if failed:
            # A broadcast that was abandoned may still read the staging buffers: drop both, and start anew next time.
            self._staging = []
            if self._channel is not None:
                self._channel.close()
                self._channel = None

    def _pump(self, session: Session, round_: Round, pipeline: _Pipeline) -> None:
        """On a thread of its own: broadcast each group once it is ready here and every worker has room for it."""
        workers = session.workers
        keys = [peer.key for peer in workers]
        try:
            channel = self._channel
            if channel is None:
                channel = GlooChannel(
                    session.store,
                    epoch=self._epoch,
                    rank=0,
                    world_size=1 + len(workers),
                    address=session.address,
                    deadline=round_.deadline,
                )
                with round_.changed:
                    round_.check()  # a failed round has dropped the channel already: do not bring one back
                    self._channel = channel
            for number in range(pipeline.num_groups):
                round_.wait(
                    lambda number=number: (
                        number in pipeline.ready  # type: ignore[misc]
                        and all(round_.credits.get(key, 0) > number for key in keys)
                    ),
                    lambda number=number: f"room for group {number} on every worker",  # type: ignore[misc]
                )
                round_.entered = True
                session.send(workers, Enter(round=round_.number, group=number))
                channel.broadcast(pipeline.ready[number], round_.deadline)
                pipeline.mark_sent(number)
        except WeightTransferError as exc:
            round_.fail(exc.fill(side=Side.TRAINER))
        except Exception as exc:
            round_.fail(TransportError(f"the sending thread failed ({type(exc).__name__}: {exc})", side=Side.TRAINER))

    def _feed(self, round_: Round, pipeline: _Pipeline, metadata: RoundMetadata, groups: tuple[Group, ...]) -> None:
        """On the calling thread, which is the one that may run the source's collectives: make each group's bytes ready."""
        assert self.source is not None  # checked in trainer_init
        num_buffers = self.init_info.packed_num_buffers
        stream = _CheckedStream(self.source, metadata)
        for number, group in enumerate(groups):
            pipeline.wait_sent(number - num_buffers + 1)
            round_.check()
            if len(group.pieces) == 1:
                piece = group.pieces[0]
                flat = stream.bytes_of(piece.index)
                buffer = flat[piece.start : piece.start + piece.num_bytes]
            else:
                buffer = self._staging_buffer(number % num_buffers)[: group.num_bytes]
                for piece in group.pieces:
                    flat = stream.bytes_of(piece.index)
                    buffer[piece.offset : piece.offset + piece.num_bytes].copy_(
                        flat[piece.start : piece.start + piece.num_bytes]
                    )
            pipeline.mark_ready(number, buffer)
        stream.finish()

    def _staging_buffer(self, slot: int) -> torch.Tensor:
        while len(self._staging) <= slot:
            self._staging.append(torch.empty(self.init_info.packed_buffer_size_bytes, dtype=torch.uint8))
        return self._staging[slot]


class _Pipeline:
    """The groups that are ready and not yet sent, between the calling thread and the sending thread."""

    def __init__(self, round_: Round, num_groups: int) -> None:
        self.num_groups = num_groups
        self.ready: dict[int, torch.Tensor] = {}
        self._round = round_
        self._num_sent = 0

    def mark_ready(self, number: int, buffer: torch.Tensor) -> None:
        with self._round.changed:
            self.ready[number] = buffer
            self._round.changed.notify_all()

    def mark_sent(self, number: int) -> None:
        with self._round.changed:
            del self.ready[number]
            self._num_sent = number + 1
            self._round.changed.notify_all()

    def wait_sent(self, count: int) -> None:
        """Return once the first `count` groups are sent."""
        self._round.wait(lambda: self._num_sent >= count, lambda: f"the broadcast of group {self._num_sent}")


class _CheckedStream:
    """The source's parameters one by one, each checked against the metadata before a byte of it is used."""

    def __init__(self, source: WeightSource, metadata: RoundMetadata) -> None:
        self._metadata = metadata
        self._items: Iterator[tuple[str, torch.Tensor]] = iter(source.iter_full())
        self._index = -1
        self._flat = torch.empty(0, dtype=torch.uint8)

    def bytes_of(self, index: int) -> torch.Tensor:
        """The bytes of parameter `index`, as 1-D uint8 on the CPU; it is the current parameter or a later one.

        Raises:
            PlanError: what the source yields differs from its metadata.
        """
        while self._index < index:
            self._advance()
        return self._flat

    def finish(self) -> None:
        """Check what is left: empty parameters at the end, and that nothing comes after the last."""
        while self._index < len(self._metadata.names) - 1:
            self._advance()
        extra = next(self._items, None)
        if extra is not None:
            raise _plan_error(extra[0], f"the source yields {extra[0]!r} after the last parameter of its metadata")

    def _advance(self) -> None:
        self._index += 1
        name = self._metadata.names[self._index]
        item = next(self._items, None)
        if item is None:
            raise _plan_error(name, f"the source ended before parameter {name!r}, which its metadata declares")
        got, tensor = item
        if got != name:
            raise _plan_error(name, f"expected parameter {name!r} next, as in the metadata, the source yields {got!r}")
        dtype_name, shape = self._metadata.dtype_names[self._index], self._metadata.shapes[self._index]
        if str(tensor.dtype).rpartition(".")[2] != dtype_name or tuple(tensor.shape) != shape:
            raise _plan_error(
                name,
                f"parameter {name!r}: the metadata declares {dtype_name} {list(shape)}, the source yields "
                f"{str(tensor.dtype).rpartition('.')[2]} {list(tensor.shape)}",
            )
        self._flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)


def _plan_error(name: str, message: str) -> PlanError:
    return PlanError(message, side=Side.TRAINER, phase="update", param=name)
