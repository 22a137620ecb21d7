"""How parameters are grouped on the wire: one rule, computed by each side from the same numbers.

A *group* is what a receiver has one buffer for. It holds *pieces*, byte ranges of parameters in metadata order, and is moved in
one or several *operations*. Both sides compute all of it from the parameters' sizes and the bounds in the init info, so no layout
is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["DIRECT_BYTES", "PIECE_ALIGNMENT_BYTES", "Group", "Piece", "operations", "plan_groups"]

PIECE_ALIGNMENT_BYTES = 64
"""Each piece starts at a multiple of this in a group's buffer, so that a receiver can view it as any dtype
(the largest torch element is 16 bytes; 64 is a cache line)."""


DIRECT_BYTES = 1 << 20
"""A piece of at least this size is an operation of its own, sent from where it lies; smaller neighbours are packed into one. Over
gloo an operation costs about 0.2 ms, as much as copying 1 MiB."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `[start, start + num_bytes)` of parameter `index`, at `offset` in the group's buffer."""

    index: int
    start: int
    num_bytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class Group:
    """Pieces that one root sends, and the size of the buffer that holds them all."""

    root: int
    pieces: tuple[Piece, ...]
    num_bytes: int


def plan_groups(
    sizes_bytes: Sequence[int],
    *,
    max_bytes: int,
    max_pieces: int,
    roots: Sequence[int] | None = None,
) -> tuple[Group, ...]:
    """The groups that carry parameters of `sizes_bytes`, in order.

    Greedy in metadata order: a group ends *before* the piece that would take it past `max_bytes` or `max_pieces`, or
    that another root sends, so a group never exceeds its bounds. A parameter larger than `max_bytes` is cut into pieces of
    `max_bytes`, each a group of its own, its tail starting a new group. Empty parameters have no piece.

    Args:
        sizes_bytes: bytes of each parameter.
        max_bytes: most bytes in one group's buffer.
        max_pieces: most pieces in one group.
        roots: communicator rank that sends each parameter; None is rank 0 for all.

    Raises:
        ValueError: a bound is not positive, or a size is negative.
    """
    if max_bytes < 1 or max_pieces < 1:
        raise ValueError(f"max_bytes and max_pieces must be positive, got {max_bytes} and {max_pieces}")
    groups: list[Group] = []
    pieces: list[Piece] = []
    used = root = 0

    def flush() -> None:
        nonlocal pieces, used
        if pieces:
            groups.append(Group(root, tuple(pieces), used))
        pieces, used = [], 0

    for index, size in enumerate(sizes_bytes):
        if size < 0:
            raise ValueError(f"sizes_bytes[{index}] must be at least 0, got {size}")
        owner = 0 if roots is None else roots[index]
        start = 0
        while start < size:
            num_bytes = min(size - start, max_bytes)
            offset = -(-used // PIECE_ALIGNMENT_BYTES) * PIECE_ALIGNMENT_BYTES
            if owner != root or len(pieces) == max_pieces or offset + num_bytes > max_bytes:
                flush()
                root, offset = owner, 0
            pieces.append(Piece(index, start, num_bytes, offset))
            used = offset + num_bytes
            start += num_bytes
    flush()
    return tuple(groups)


def operations(group: Group) -> Iterator[tuple[Piece, ...]]:
    """The pieces of each operation that moves `group`, in order; it moves from its first's offset to its last's end."""
    run: list[Piece] = []
    for piece in group.pieces:
        if run and (piece.num_bytes >= DIRECT_BYTES or run[-1].num_bytes >= DIRECT_BYTES):
            yield tuple(run)
            run = []
        run.append(piece)
    yield tuple(run)
