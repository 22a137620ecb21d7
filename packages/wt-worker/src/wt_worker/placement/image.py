"""A tensor that a loader makes on the way from a checkpoint to a parameter: which element of it came from where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from wt_worker.placement.plan import Box, Copy, row_major

__all__ = ["Image"]

MAX_PATCHES = 4096
"""In one write: heads or experts that a loader takes apart and puts together again; more than that is not followed."""

_Range = tuple[int, int]


@dataclass(slots=True)
class _Patch:
    """Along each dimension of the image the range that it covers; the checkpoint tensor; and where in that its elements are."""

    ranges: tuple[_Range, ...]
    index: int
    source: Box  # one stride for each dimension of the image


class Image:
    """A dense tensor, covered by patches that came from checkpoint tensors.

    Attributes:
        where: the source line that made it.
        is_target: a loader copied into it, rather than computing it.
        is_read: something was copied out of it.
    """

    def __init__(self, tensor: torch.Tensor, dims: list[tuple[int, int]], *, where: str, is_target: bool) -> None:
        self.where = where
        self.is_target = is_target
        self.is_read = False
        self._tensor = tensor  # keeps the storage
        self._base = int(tensor.storage_offset())
        self._dims = dims  # (size, stride) from the outermost in memory to the innermost
        self._patches: list[_Patch] = []

    @classmethod
    def of(cls, tensor: torch.Tensor, *, where: str, is_target: bool = False) -> Image:
        """`tensor`, of which nothing is known yet."""
        dims = [(n, step) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
        return cls(tensor, sorted(dims, key=lambda dim: -dim[1]), where=where, is_target=is_target)

    @property
    def indices(self) -> frozenset[int]:
        """The checkpoint tensors that are in it."""
        return frozenset(patch.index for patch in self._patches)

    def write(self, view: torch.Tensor, patches: Sequence[tuple[Box, int, Box]]) -> bool:
        """The image's part `view` now has the elements of `patches`: (window of the view, checkpoint tensor, box in that).

        Returns:
            False where that cannot be expressed, or something was there already.
        """
        pieces: list[tuple[Box, int, Box]] = []
        for window, index, source in patches:
            merged = Copy(source, "", _window_of(view, window)).normalized()
            refined = self._refine(merged.destination, merged.source)
            if refined is None:
                return False
            pieces += self._pieces(refined[0], index, refined[1])
        if len(pieces) > MAX_PATCHES:
            return False
        for window, index, source in pieces:
            placed = self._split(window.offset, window.shape, window.strides, range(len(window.shape)))
            if placed is None:
                return False
            ranges, strides = [], []
            for (size, _), start, found in zip(self._dims, *placed, strict=True):
                if len(found) > 1 or any(step != 1 for _, step, _ in found):
                    return False
                count = found[0][0] if found else 1
                if size < start + count:
                    return False
                ranges.append((start, start + count))
                strides.append(source.strides[found[0][2]] if found else 0)
            if any(_overlap(patch.ranges, ranges) for patch in self._patches):
                return False
            shape = tuple(stop - start for start, stop in ranges)
            self._patches.append(_Patch(tuple(ranges), index, Box(source.offset, shape, tuple(strides))))
        return True

    def _refine(self, window: Box, source: Box) -> tuple[Box, Box] | None:
        """A patch, its window in elements of the storage, with each of its dimensions within one of the image's."""
        rows = row_major(window.shape)
        placed = self._split(window.offset, window.shape, window.strides, rows)
        if placed is None:
            return None
        dims = []
        for (_, unit), parts in zip(self._dims, placed[1], strict=True):
            for n, step, row in parts:
                of = next(dim for dim, each in enumerate(rows) if window.shape[dim] > 1 and row >= each)
                dims.append((row, n, step * unit, row // rows[of] * source.strides[of]))
        dims.sort(reverse=True)
        shape = tuple(n for _, n, _, _ in dims)
        return (
            Box(window.offset, shape, tuple(step for _, _, step, _ in dims)),
            Box(source.offset, shape, tuple(step for _, _, _, step in dims)),
        )

    def _pieces(self, window: Box, index: int, source: Box) -> Iterator[tuple[Box, int, Box]]:
        """A refined patch, cut up until no two of its dimensions lie in one of the image's."""
        placed = self._split(window.offset, window.shape, window.strides, range(len(window.shape)))
        crowded = [found for found in placed[1] if len(found) > 1] if placed else []
        if not crowded:
            yield window, index, source
            return
        dim = min(row for _, _, row in crowded[0])  # the outermost of those that share a dimension
        for row in range(min(window.shape[dim], MAX_PATCHES + 1)):
            yield from self._pieces(_without(window, dim, row), index, _without(source, dim, row))

    def read(self, view: torch.Tensor) -> list[tuple[Box, int, Box]] | None:
        """Where the elements of `view` came from: (window of the view, checkpoint tensor, box in that).

        Elements that came from nowhere are left out. None where it cannot be told.
        """
        self.is_read = True
        rows = row_major(view.shape)
        split = self._split(int(view.storage_offset()), view.shape, view.stride(), rows)
        if split is None:
            return None
        starts, factors = split
        found = []
        for patch in self._patches:
            offset, dims = patch.source.offset, []
            at = 0  # in the view
            for dim, (start, parts) in enumerate(zip(starts, factors, strict=True)):
                low, high = patch.ranges[dim]
                last = start + sum((n - 1) * step for n, step, _ in parts)
                jump = patch.source.strides[dim]
                if start >= low and last < high:
                    dims += [(n, step * jump, row) for n, step, row in parts]
                    offset += (start - low) * jump
                    continue
                if last < low or start >= high:
                    break
                if len(parts) != 1:
                    return None
                n, step, row = parts[0]
                first = max(0, -(-(low - start) // step))
                count = min(n, -(-(high - start) // step)) - first
                if count <= 0:
                    break
                dims.append((count, step * jump, row))
                offset += (start + first * step - low) * jump
                at += first * row
            else:
                dims.sort(key=lambda each: -each[2])
                sizes = tuple(n for n, _, _ in dims)
                window = Box(at, sizes, tuple(row for _, _, row in dims))
                found.append((window, patch.index, Box(offset, sizes, tuple(jump for _, jump, _ in dims))))
        return found

    def _split(
        self, offset: int, shape: Sequence[int], strides: Sequence[int], rows: Sequence[int]
    ) -> tuple[list[int], list[list[tuple[int, int, int]]]] | None:
        """A view in the image's coordinates: where it starts, and along each dimension its (count, step, row) parts.

        `row` is what `rows` says of the view's dimension, times how often that went on from an inner dimension of the image.
        """
        rest = offset - self._base
        starts = []
        for _, step in self._dims:
            starts.append(rest // step)
            rest %= step
        if rest or offset < self._base:
            return None
        factors: list[list[tuple[int, int, int]]] = [[] for _ in self._dims]
        for n, step, row in zip(shape, strides, rows, strict=True):
            left, stride, at = n, step, row
            dim = len(self._dims) - 1
            while left > 1:
                while dim >= 0 and (stride % self._dims[dim][1] or stride >= self._dims[dim][0] * self._dims[dim][1]):
                    dim -= 1
                if dim < 0 or stride == 0:
                    return None
                size, unit = self._dims[dim]
                jump = stride // unit
                used = starts[dim] + sum((count - 1) * each for count, each, _ in factors[dim])
                room = -(-(size - used) // jump)
                if left <= room:
                    factors[dim].append((left, jump, at))
                    break
                # It goes on in the next outer dimension: only from a start at its edge, in steps that divide it.
                if used != 0 or size % jump or left % room or dim == 0:
                    return None
                factors[dim].append((room, jump, at))
                left, stride, at = left // room, stride * room, at * room
                if stride != self._dims[dim - 1][1]:
                    return None
        return starts, factors


def _window_of(view: torch.Tensor, window: Box) -> Box:
    """`window`, given in row-major elements of `view`, in elements of its storage."""
    rows = row_major(view.shape)
    offset, rest = int(view.storage_offset()), window.offset
    for row, step in zip(rows, view.stride(), strict=True):
        offset += rest // row * step
        rest %= row
    strides = []
    for n, at in zip(window.shape, window.strides, strict=True):
        dim = next((d for d, row in enumerate(rows) if view.shape[d] > 1 and at >= row), None)
        strides.append(0 if n == 1 or dim is None else at // rows[dim] * view.stride(dim))
    return Box(offset, window.shape, tuple(strides))


def _without(box: Box, dim: int, row: int) -> Box:
    """Place `row` along `dim` of `box`."""
    strides = (*box.strides[:dim], *box.strides[dim + 1 :])
    return Box(box.offset + row * box.strides[dim], (*box.shape[:dim], *box.shape[dim + 1 :]), strides)


def _overlap(one: Sequence[_Range], other: Sequence[_Range]) -> bool:
    return all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True))
