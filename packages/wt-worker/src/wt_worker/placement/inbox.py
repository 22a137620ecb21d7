"""Where a round's groups are received: in the model's own memory where the plan allows it, else in one bounded buffer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from wt_common.packing import PIECE_ALIGNMENT_BYTES, Group, Piece, operations

__all__ = ["Arrival", "Inbox"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """Where one group is received.

    Attributes:
        buffers: one for each operation of the group.
        data: for each piece, where its bytes are then.
        direct: for each piece, whether that is where they belong.
        after: the last group whose place this one takes; it must have been taken away before. -1: none.
    """

    buffers: list[torch.Tensor]
    data: list[torch.Tensor]
    direct: list[bool]
    after: int = -1

    @classmethod
    def staged(cls, group: Group, buffer: torch.Tensor) -> Arrival:
        """All of `group` in `buffer`, at the pieces' offsets."""
        buffers = [buffer[pieces[0].offset : _end(pieces)] for pieces in operations(group)]
        data = [buffer[piece.offset : piece.offset + piece.num_bytes] for piece in group.pieces]
        return cls(buffers, data, [False] * len(data))


class Inbox:
    """The places of all groups of a round, one after the other in a buffer that is used again when it ends.

    Args:
        groups: all of the round.
        find: where in the model's own memory the bytes of a piece may be received, which must be all of its bytes in a row; None
            where they may not.
        device: where the buffer is.
        num_buffers: how many groups of `max_group_bytes` the buffer holds at most.
        max_group_bytes: most bytes in a group.

    Attributes:
        arrivals: the place of each group.
        limits: at k, how many groups may be under way or taken when k are taken.
        num_bytes: what the buffer takes.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        find: Callable[[Piece], torch.Tensor | None],
        device: torch.device,
        *,
        num_buffers: int,
        max_group_bytes: int,
    ) -> None:
        places = [[_Place(pieces, find) for pieces in operations(group)] for group in groups]
        sizes = [sum(place.num_bytes for place in each) for each in places]
        offsets, afters, self.num_bytes = ring(sizes, num_buffers * _aligned(max_group_bytes))
        buffer = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        self.arrivals: list[Arrival] = []
        for each, start, after in zip(places, offsets, afters, strict=True):
            arrival = Arrival([], [], [], after)
            at = start
            for place in each:
                place.add_to(arrival, buffer, at)
                at += place.num_bytes
            self.arrivals.append(arrival)
        self.limits: list[int] = []
        limit = 0
        for taken in range(len(groups) + 1):
            while limit < len(groups) and afters[limit] < taken:
                limit += 1
            self.limits.append(limit)


class _Place:
    """Of one operation: in the model, or so many bytes of the buffer."""

    def __init__(self, pieces: tuple[Piece, ...], find: Callable[[Piece], torch.Tensor | None]) -> None:
        self._pieces = pieces
        self._target = find(pieces[0]) if len(pieces) == 1 else None
        self.num_bytes = 0 if self._target is not None else _aligned(_end(pieces) - pieces[0].offset)

    def add_to(self, arrival: Arrival, buffer: torch.Tensor, at: int) -> None:
        if self._target is not None:
            arrival.buffers.append(self._target)
            arrival.data.append(self._target)
            arrival.direct.append(True)
            return
        first = self._pieces[0].offset
        arrival.buffers.append(buffer[at : at + _end(self._pieces) - first])
        for piece in self._pieces:
            start = at + piece.offset - first
            arrival.data.append(buffer[start : start + piece.num_bytes])
            arrival.direct.append(False)


def ring(sizes: Sequence[int], capacity: int) -> tuple[list[int], list[int], int]:
    """Places in a ring of at most `capacity` bytes for things that are put there, and taken away again, in order.

    Returns:
        Where each begins; the last one that must be gone before it is put there (-1: none), which never decreases; and how many
        bytes of the ring are used at all.
    """
    offsets: list[int] = []
    afters: list[int] = []
    held: deque[tuple[int, int, int]] = deque()  # start, end, number; in the order of the ring, from the oldest on
    position = used = 0
    after = -1
    for number, size in enumerate(sizes):
        if position + size > capacity:
            position = 0
        end = position + size
        while size and held and any(start < end and position < stop for start, stop, _ in held):
            after = held.popleft()[2]
        offsets.append(position)
        afters.append(after)
        if size:
            held.append((position, end, number))
        position, used = end, max(used, end)
    return offsets, afters, used


def _end(pieces: tuple[Piece, ...]) -> int:
    return pieces[-1].offset + pieces[-1].num_bytes


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // PIECE_ALIGNMENT_BYTES) * PIECE_ALIGNMENT_BYTES
