"""Buffers out of which groups are sent, and how a source's tensors get there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from wt_common.packing import DIRECT_BYTES, Group, Piece, operations
from wt_trainer.digest import SmallDigests, unsigned
from wt_trainer.metadata import RoundMetadata
from wt_trainer.stream import CheckedStream, Loan

__all__ = ["Staging"]


@dataclass(slots=True)
class _Operation:
    """Pieces that are sent from one buffer, or, if there are no targets, one piece that goes out from where it lies.

    A target is where in the buffer a piece goes: as a tensor of the wire's dtype and shape, if it is small, else as bytes.
    """

    pieces: tuple[Piece, ...]
    buffer: torch.Tensor
    small: SmallDigests
    small_indexes: list[int] = field(default_factory=list)
    targets: list[tuple[Piece, torch.Tensor, bool]] = field(default_factory=list)


class Staging:
    """One buffer for each group in flight. What can be known of a group before its bytes are there is worked out once.

    Small parameters are digested in the buffer, many at a time: a digest for each tensor would cost more than all else together.
    Larger ones are digested by the stream, where the source has them.
    """

    def __init__(self, buffer_bytes: int, num_buffers: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._num_buffers = num_buffers
        self.clear()

    def clear(self) -> None:
        """No buffer is held: a collective that was abandoned may still read the old ones."""
        self._buffers: list[torch.Tensor] = []
        self._groups: Sequence[Group] = ()
        self._operations: dict[tuple[int, int], list[_Operation]] = {}  # by group and buffer

    def fill(
        self, groups: Sequence[Group], number: int, count: int, stream: CheckedStream, wire: RoundMetadata
    ) -> tuple[list[torch.Tensor], list[Loan]]:
        """The bytes of group `number` of `groups`, which the source yields next, ready to be sent.

        Args:
            groups: all groups of the round; the same object as long as they are the same.
            number: which one.
            count: how many were filled in this round: the buffer of the group that is as many back as there are buffers is used.
            stream: where the bytes come from.
            wire: what the groups were made for.

        Returns:
            A buffer for each operation, and the tensors of the source's that are among them.

        Raises:
            PlanError: what the source yields differs from its metadata.
        """
        if groups is not self._groups:
            self._groups, self._operations = groups, {}
        slot = count % self._num_buffers
        known = self._operations.get((number, slot))
        if known is None:
            with torch.inference_mode(mode=False):  # else it could not be written outside of it in a later round
                buffer = self._buffer(slot)
                known = [self._plan(pieces, buffer, wire) for pieces in operations(groups[number])]
            self._operations[number, slot] = known
        buffers: list[torch.Tensor] = []
        lent: list[Loan] = []
        for operation in known:
            if not operation.targets:
                buffers.append(stream.piece(operation.pieces[0]))
                lent += stream.lent()
                continue
            for piece, target, is_small in operation.targets:
                if is_small:
                    stream.copy_whole(piece.index, target)
                else:
                    target.copy_(stream.piece(piece))
            if stream.is_digested and operation.small_indexes:
                totals = torch.zeros(len(operation.small_indexes), dtype=torch.int64)
                operation.small.add_to(totals)
                stream.take_digests(operation.small_indexes, unsigned(totals))
            buffers.append(operation.buffer)
        return buffers, lent

    def _buffer(self, slot: int) -> torch.Tensor:
        while len(self._buffers) <= slot:
            self._buffers.append(torch.empty(self._buffer_bytes, dtype=torch.uint8))
        return self._buffers[slot]

    @staticmethod
    def _plan(pieces: tuple[Piece, ...], buffer: torch.Tensor, wire: RoundMetadata) -> _Operation:
        used = buffer[pieces[0].offset : pieces[-1].offset + pieces[-1].num_bytes]
        operation = _Operation(pieces, used, SmallDigests(buffer.device))
        if pieces[0].num_bytes >= DIRECT_BYTES:
            return operation
        for piece in pieces:
            index, dtype = piece.index, wire.dtypes[piece.index]
            data = buffer[piece.offset : piece.offset + piece.num_bytes]
            is_whole = piece.num_bytes == wire.sizes_bytes[index]
            is_small = is_whole and SmallDigests.takes(data) and _can_be_copied(dtype)
            if is_small:
                operation.small.add(len(operation.small_indexes), data)
                operation.small_indexes.append(index)
                data = data.view(dtype).view(wire.shapes[index])
            operation.targets.append((piece, data, is_small))
        return operation


@cache
def _can_be_copied(dtype: torch.dtype) -> bool:
    """Whether torch copies elements of `dtype`; those of less than a byte it does not."""
    try:
        torch.empty(1, dtype=dtype).copy_(torch.empty(1, dtype=dtype))
    except NotImplementedError:
        return False
    return True
