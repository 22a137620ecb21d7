"""Buffers out of which groups are sent, and how a source's tensors get there.

Large pieces are sent from where they lie, if that is memory of ours (a cast, for instance) or the source vouches that it stays as
it is (`WeightSource.yields_stable`). Others are copied into the buffer before the source is asked for its next tensor. They could
also be sent from where they lie, if the source were held until they are sent. But a group usually has several tensors, of which
all but the last would be copied all the same, and the source and the wire would take turns. With the copies a buffer takes no
more than `packed_buffer_size_bytes`; it is made so large when that is first needed.

Digests are over the bytes in the buffers that are sent, so what is digested cannot differ from what is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from wt_common.packing import DIRECT_BYTES, PIECE_ALIGNMENT_BYTES, Group, Piece, operations
from wt_trainer.digest import SmallDigests, digest_total, tensor_digest, unsigned
from wt_trainer.digest_runs import RunDigests
from wt_trainer.metadata import RoundMetadata
from wt_trainer.stream import CheckedStream, Loan

__all__ = ["Filled", "Staging"]


@dataclass(frozen=True, slots=True)
class Filled:
    """What a group is sent from.

    Attributes:
        buffers: one for each operation.
        lent: the tensors of the source's that are among them.
        held_bytes: of the buffers that are neither lent nor staging buffers, such as gathered or cast parameters.
    """

    buffers: list[torch.Tensor]
    lent: list[Loan]
    held_bytes: int


@dataclass(slots=True)
class _Operation:
    """Pieces that are sent from one buffer, or, if there are no targets, one large piece.

    A target is where in the buffer a piece goes: as a tensor of the wire's dtype and shape, if it is small, else as bytes. A
    large piece goes out from where it lies; if it must be copied, its place in the slot's buffer begins at `start`.
    """

    pieces: tuple[Piece, ...]
    buffer: torch.Tensor
    small: SmallDigests
    start: int = 0
    small_indexes: list[int] = field(default_factory=list)
    targets: list[tuple[Piece, torch.Tensor, bool]] = field(default_factory=list)


class Staging:
    """One buffer for each group in flight. What can be known of a group before its bytes are there is worked out once.

    On the CPU small parameters are digested many at a time: a digest for each tensor would cost more than all else together.
    Larger ones are digested one by one. On a GPU all of a group is digested at once.
    """

    def __init__(self, num_buffers: int, device: torch.device) -> None:
        self._num_buffers = num_buffers
        self._device = device
        self.clear()

    def clear(self) -> None:
        """No buffer is held: a collective that was abandoned may still read the old ones."""
        self._buffers: list[torch.Tensor] = []
        self._buffer_bytes = self._whole_bytes = 0
        self._groups: Sequence[Group] = ()
        self._operations: dict[tuple[int, int], list[_Operation]] = {}  # by group and buffer
        self._digests: dict[tuple[int, int], tuple[list[int], RunDigests]] = {}  # with the addresses that they are of

    @property
    def num_bytes(self) -> int:
        """What the buffers take."""
        return sum(buffer.numel() for buffer in self._buffers)

    def fill(
        self, groups: Sequence[Group], number: int, count: int, stream: CheckedStream, wire: RoundMetadata
    ) -> Filled:
        """The bytes of group `number` of `groups`, which the source yields next, ready to be sent.

        On a GPU they are once the current stream has come so far.

        Args:
            groups: all groups of the round; the same object as long as they are the same.
            number: which one.
            count: how many were filled in this round: the buffer of the group that is as many back as there are buffers is used.
            stream: where the bytes come from.
            wire: what the groups were made for.

        Raises:
            PlanError: what the source yields differs from its metadata.
        """
        if groups is not self._groups:
            self.clear()
            self._groups = groups
            own = [group for group in groups if group.root == groups[number].root]
            self._buffer_bytes = max(map(_packed_bytes, own))
            self._whole_bytes = max(_aligned(group.num_bytes) for group in own)
        slot = count % self._num_buffers
        known = self._operations.get((number, slot))
        if known is None:
            with torch.inference_mode(mode=False):  # else it could not be written outside of it in a later round
                known = self._operations[number, slot] = self._plan(groups[number], slot, wire)
        filled = Filled([], [], 0)
        held_bytes = 0
        for operation in known:
            if operation.targets:
                self._pack(operation, stream)
                filled.buffers.append(operation.buffer)
                continue
            (piece,) = operation.pieces
            data = stream.piece(piece)
            if stream.must_be_copied:
                data = self._copied(data, slot, operation.start)
            elif stream.is_lent:
                filled.lent.append(stream.loan())
                stream.sent_in_place()
            else:
                held_bytes += data.numel()
            filled.buffers.append(data)
            if stream.is_digested and self._device.type == "cpu":
                stream.add_digest(piece.index, tensor_digest(data, piece.start))
        if stream.is_digested and self._device.type != "cpu":
            self._digest(known, filled.buffers, (number, slot), stream.totals)
        return Filled(filled.buffers, filled.lent, held_bytes)

    def _pack(self, operation: _Operation, stream: CheckedStream) -> None:
        """The operation's pieces are in its buffer."""
        if self._device.type != "cpu":
            self._pack_at_once(operation, stream)
            return
        for piece, target, is_small in operation.targets:
            if is_small:
                target.copy_(stream.whole(piece.index))
                continue
            target.copy_(stream.piece(piece))
            if stream.is_digested:
                stream.add_digest(piece.index, tensor_digest(target, piece.start))
        if stream.is_digested and operation.small_indexes:
            totals = torch.zeros(len(operation.small_indexes), dtype=torch.int64)
            operation.small.add_to(totals)
            stream.take_digests(operation.small_indexes, unsigned(totals))

    @staticmethod
    def _pack_at_once(operation: _Operation, stream: CheckedStream) -> None:
        """The same in few launches, of which each costs as much as copying megabytes, as far as tensors may be copied later."""
        copies: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        lent: list[Loan] = []
        for piece, target, is_small in operation.targets:
            data = stream.whole(piece.index) if is_small else stream.piece(piece)
            if data.dtype == target.dtype and data.device == target.device and not stream.must_be_copied:
                targets, sources = copies.setdefault(data.dtype, ([], []))
                targets.append(target)
                sources.append(data)
                if stream.is_lent:
                    lent.append(stream.loan())
            else:
                target.copy_(data)
        for targets, sources in copies.values():
            torch._foreach_copy_(targets, sources)
        for loan in lent:
            loan.check()

    def _digest(
        self, known: list[_Operation], buffers: list[torch.Tensor], key: tuple[int, int], totals: torch.Tensor
    ) -> None:
        """The digests of a group's pieces are added to `totals`, over the buffers that they are sent from."""
        runs: list[tuple[int, torch.Tensor, int]] = []
        for operation, buffer in zip(known, buffers, strict=True):
            first = operation.pieces[0].offset
            for piece in operation.pieces:
                data = buffer[piece.offset - first : piece.offset - first + piece.num_bytes]
                if RunDigests.takes(data, piece.start):
                    runs.append((piece.index, data, piece.start))
                else:
                    totals[piece.index] += digest_total(data, piece.start)
        addresses = [data.data_ptr() for _, data, _ in runs]
        found = self._digests.get(key)
        if found is None or found[0] != addresses:
            found = self._digests[key] = addresses, RunDigests(self._device, runs)
        found[1].add_to(totals)

    def _copied(self, data: torch.Tensor, slot: int, start: int) -> torch.Tensor:
        """The bytes `data` in the slot's buffer, from `start` on."""
        if self._buffer(slot).numel() < self._whole_bytes:
            # What was packed already is sent from the old buffer, which goes with it.
            with torch.inference_mode(mode=False):
                self._buffers[slot] = self._new_buffer(self._whole_bytes)
            self._operations = {key: known for key, known in self._operations.items() if key[1] != slot}
        target = self._buffers[slot][start : start + data.numel()]
        return target.copy_(data)

    def _buffer(self, slot: int) -> torch.Tensor:
        while len(self._buffers) <= slot:
            self._buffers.append(self._new_buffer(self._buffer_bytes))
        return self._buffers[slot]

    def _new_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def _plan(self, group: Group, slot: int, wire: RoundMetadata) -> list[_Operation]:
        buffer = self._buffer(slot)
        result: list[_Operation] = []
        used, used_large = 0, _packed_bytes(group)
        for pieces in operations(group):
            num_bytes = _span(pieces)
            if pieces[0].num_bytes >= DIRECT_BYTES:
                result.append(_Operation(pieces, buffer, SmallDigests(self._device), used_large))
                used_large += _aligned(num_bytes)
                continue
            result.append(self._planned(pieces, buffer[used : used + num_bytes], wire))
            used += _aligned(num_bytes)
        return result

    def _planned(self, pieces: tuple[Piece, ...], buffer: torch.Tensor, wire: RoundMetadata) -> _Operation:
        operation = _Operation(pieces, buffer, SmallDigests(self._device))
        for piece in pieces:
            index, dtype = piece.index, wire.dtypes[piece.index]
            offset = piece.offset - pieces[0].offset
            data = buffer[offset : offset + piece.num_bytes]
            is_whole = piece.num_bytes == wire.sizes_bytes[index]
            is_small = is_whole and SmallDigests.takes(data) and _can_be_copied(dtype)
            if is_small:
                operation.small.add(len(operation.small_indexes), data)
                operation.small_indexes.append(index)
                data = data.view(dtype).view(wire.shapes[index])
            operation.targets.append((piece, data, is_small))
        return operation


def _packed_bytes(group: Group) -> int:
    """What of a buffer the group takes."""
    return sum(_aligned(_span(pieces)) for pieces in operations(group) if pieces[0].num_bytes < DIRECT_BYTES)


def _span(pieces: tuple[Piece, ...]) -> int:
    return pieces[-1].offset + pieces[-1].num_bytes - pieces[0].offset


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // PIECE_ALIGNMENT_BYTES) * PIECE_ALIGNMENT_BYTES


@cache
def _can_be_copied(dtype: torch.dtype) -> bool:
    """Whether torch copies elements of `dtype`; those of less than a byte it does not."""
    try:
        torch.empty(1, dtype=dtype).copy_(torch.empty(1, dtype=dtype))
    except NotImplementedError:
        return False
    return True
