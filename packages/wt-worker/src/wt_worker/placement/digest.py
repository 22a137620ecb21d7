"""The digest of a box of a parameter, computed where the box lies, in whatever layout, without its surroundings.

Words are multiplied as they are found in memory, with factors that are laid out to match: rows of the box that are a whole number
of blocks apart have the same ones. Elements smaller than a word, unless they can be read as words, are computed apart for each of
the word's lanes: what they are worth is a power of 256.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from functools import cache
from math import gcd, prod

import torch

from wt_common.digest import BLOCK_WORDS
from wt_worker.digest import block_factors, block_sums, tensor_digest, to_unsigned, word_factors
from wt_worker.placement.plan import Box, row_major

__all__ = ["box_digest", "box_factors", "word_rows"]

CPU_WORDS = 1 << 17
"""At once: their products are 1 MiB. Fewer cost more in calls, more leave the cache."""

DEVICE_WORDS = 1 << 23
"""At once, where a cache does not limit it: 64 MiB of products."""

LONG_ROW_WORDS = 1 << 14
"""A row of this length is worth calls of its own on the CPU."""

MAX_STEP = 16
"""Words of a row are at most so far apart, or each is a row of its own: a row's span has to fit into a block."""

NARROW_WORDS = 256
"""So much at most is read of each row whose words do not follow one another in memory."""

MAX_PLANES = 256
"""A box of more dimensions is read as so many boxes of two, at most."""

SIGNED = {1: torch.int8, 2: torch.int16}
UNSIGNED = {1: torch.uint8, 2: torch.uint16}


@torch.no_grad()
def box_digest(region: torch.Tensor, offset: int, strides: tuple[int, ...]) -> int:
    """The digest, below 2^64, of the box of a parameter that `region` holds, as if the parameter's other bytes were zero.

    Element (i, j, ...) of `region`, which may be any strided view, is element `offset + i*strides[0] + j*strides[1] + ...` of the
    flat parameter; strides are positive, and no two elements are the same one. Digests of disjoint boxes that cover a parameter
    add up modulo 2^64 to its `tensor_digest`. It runs on the device's current stream, which is waited for.

    Raises:
        ValueError: the box has not one positive stride for each of the region's dimensions, or a negative offset.
    """
    if len(strides) != region.ndim or offset < 0 or any(stride < 1 for stride in strides):
        message = f"a box of shape {tuple(region.shape)} has offset {offset} and strides {strides}"
        raise ValueError(
            f"{message}, expected one positive stride for each dimension and an offset that is not negative"
        )
    if not region.numel():
        return 0
    region, strides = _ordered(region.detach().resolve_conj().resolve_neg(), strides)
    if region.stride()[-1:] in {(), (1,)} and strides == row_major(region.shape):
        return tensor_digest(region, offset * region.itemsize)
    sums: list[torch.Tensor] = []
    blocks: list[torch.Tensor] = []
    for words, first, steps, worth in _in_words(region, offset, strides):
        for row_sums, row_blocks in _row_sums(*_merged(*_ordered(words, steps), first)):
            sums.append(row_sums.flatten() if worth == 1 else row_sums.flatten() * worth)
            blocks.append(row_blocks.flatten())
    table = block_factors(region.device, 1 + max(int(each.max()) for each in blocks))
    return to_unsigned((torch.cat(sums) * table.index_select(0, torch.cat(blocks).to(region.device))).sum())


def box_factors(device: torch.device, itemsize: int, box: Box) -> torch.Tensor | None:
    """For each word of `box` of a parameter of such elements, in the box's order, its factor, as int64.

    None where the box cuts words apart.
    """
    shape, strides = box.shape or (1,), box.strides or (1,)
    if itemsize >= 4:
        per = itemsize // 4
        offset, shape, strides = box.offset * per, (*shape, per), (*(stride * per for stride in strides), 1)
    else:
        per = 4 // itemsize
        if strides[-1] != 1 or any(place % per for place in (box.offset, shape[-1], *strides[:-1])):
            return None
        offset, shape = box.offset // per, (*shape[:-1], shape[-1] // per)
        strides = (*(stride // per for stride in strides[:-1]), 1)
    places = torch.full((), offset, device="cpu")
    for size, stride in zip(shape, strides, strict=True):
        places = places.unsqueeze(-1) + torch.arange(size, device="cpu") * stride
    table = block_factors(device, 1 + int(places.max()) // BLOCK_WORDS)
    places = places.flatten().to(device)
    return word_factors(device)[places % BLOCK_WORDS] * table[places // BLOCK_WORDS]


def word_rows(
    region: torch.Tensor, offset: int, strides: tuple[int, ...]
) -> list[tuple[torch.Tensor, int, int]] | None:
    """The box as rows of words that follow one another, both in memory and in the parameter; None where it has no such.

    Returns:
        Tensors of int32 with two dimensions, the place of the first word of each in the parameter, and how many words its rows
        are apart there.
    """
    region, strides = _ordered(region.detach(), strides)
    words, first, steps, worth = next(_in_words(region, offset, strides))
    if words.dtype != torch.int32 or worth != 1:
        return None
    words, first, steps = _merged(*_ordered(words, steps), first)
    if steps[-1] != 1 or words.stride(-1) != 1 or prod(words.shape[:-2]) > MAX_PLANES:
        return None
    planes = [(words, first)]
    for stride in steps[:-2]:
        planes = [(plane[index], start + index * stride) for plane, start in planes for index in range(len(plane))]
    return [(plane, start, steps[-2]) for plane, start in planes]


def _ordered(region: torch.Tensor, strides: tuple[int, ...]) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The same box without dimensions of one element, the others in the parameter's order."""
    dims = sorted((dim for dim, size in enumerate(region.shape) if size > 1), key=lambda dim: -strides[dim])
    ones = [dim for dim, size in enumerate(region.shape) if size == 1]
    shape = [region.shape[dim] for dim in dims]
    return region.permute([*dims, *ones]).view(shape), tuple(strides[dim] for dim in dims)


def _in_words(
    region: torch.Tensor, offset: int, strides: tuple[int, ...]
) -> Iterator[tuple[torch.Tensor, int, tuple[int, ...], int]]:
    """Boxes of integers, with offset and strides in words, and what their words' sum is to be multiplied with."""
    size = region.itemsize
    if size >= 4:
        per = size // 4
        words = region.view(torch.int32) if per == 1 else region.unsqueeze(-1).view(torch.int32)
        yield words, offset * per, tuple(stride * per for stride in strides) + (1,) * (per > 1), 1
        return
    per = 4 // size
    places = (offset, region.storage_offset(), *strides[:-1], *region.stride()[:-1], region.shape[-1] if strides else 1)
    if (
        all(place % per == 0 for place in places)
        and (strides[-1], region.stride(-1)) == (1, 1)
        and region.data_ptr() % 4 == 0
    ):
        yield region.view(torch.int32), offset // per, (*(stride // per for stride in strides[:-1]), 1), 1
        return
    for lane_box, first, steps in _lanes(region, offset, strides, per):
        lane = first % per
        dtype = SIGNED[size] if lane == per - 1 else UNSIGNED[size]  # a word's sign is that of its last element
        yield lane_box.view(dtype), first // per, tuple(step // per for step in steps), 256 ** (lane * size)


def _lanes(
    region: torch.Tensor, offset: int, strides: tuple[int, ...], per: int
) -> Iterator[tuple[torch.Tensor, int, tuple[int, ...]]]:
    """Boxes whose elements are all at the same place of a word, of which `per` make one."""
    for dim, stride in enumerate(strides):
        if stride % per and region.shape[dim] > 1:
            apart = per // gcd(stride, per)
            wider = (*strides[:dim], stride * apart, *strides[dim + 1 :])
            for index in range(min(apart, region.shape[dim])):
                part = region[(slice(None),) * dim + (slice(index, None, apart),)]
                yield from _lanes(part, offset + index * stride, wider, per)
            return
    yield region, offset, strides


def _merged(words: torch.Tensor, strides: tuple[int, ...], offset: int) -> tuple[torch.Tensor, int, tuple[int, ...]]:
    """The same box in as few dimensions as can be, two at least, of which the last is a row."""
    merged: list[tuple[int, int, int]] = []  # size, stride in memory, stride in the parameter
    for size, here, there in zip(words.shape, words.stride(), strides, strict=True):
        if merged and merged[-1][1:] == (here * size, there * size):
            merged[-1] = (merged[-1][0] * size, here, there)
        else:
            merged.append((size, here, there))
    if not merged or merged[-1][2] > MAX_STEP:
        merged.append((1, 1, 1))
    if len(merged) == 1:
        merged.insert(0, (1, BLOCK_WORDS, BLOCK_WORDS))
    shape, here_strides, there_strides = zip(*merged, strict=True)
    return words.as_strided(shape, here_strides), offset, there_strides


def _row_sums(
    words: torch.Tensor, offset: int, strides: tuple[int, ...]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Sums of words times their factors in a block, and, on the CPU, the block that each sum is of."""
    if words.ndim > 2:
        dim = min(range(words.ndim - 1), key=lambda dim: words.shape[dim])
        for index in range(words.shape[dim]):
            inner = strides[:dim] + strides[dim + 1 :]
            yield from _row_sums(words.select(dim, index), offset + index * strides[dim], inner)
        return
    stride, step = strides
    if (
        words.is_cpu
        and words.dtype == torch.int32
        and words.shape[1] >= LONG_ROW_WORDS
        and step == words.stride(1) == 1
    ):
        for row in words:
            block, place = divmod(offset, BLOCK_WORDS)
            sums = block_sums(row, place)
            yield sums, torch.arange(block, block + len(sums), device="cpu")
            offset += stride
        return
    fits = BLOCK_WORDS // step
    if len(words) == 1 and (lines := words.shape[1] // fits) > 1:  # cut where the factors begin again
        head = words[0, : lines * fits].view(lines, fits)
        yield from _row_sums(head, offset, (fits * step, step))
        words, offset = words[:, lines * fits :], offset + lines * fits * step
        if not words.numel():
            return
    period = BLOCK_WORDS // gcd(stride, BLOCK_WORDS)  # rows so far apart have the same factors
    periods = len(words) // period
    if periods > 1:
        yield from _repeated(words[: periods * period].view(periods, period, -1), offset, stride, step)
        words, offset = words[periods * period :], offset + periods * period * stride
    if len(words):
        yield from _repeated(words.unsqueeze(0), offset, stride, step)


def _repeated(words: torch.Tensor, offset: int, stride: int, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same of rows of words, whose factors are the same ones in each of several periods."""
    device = words.device
    periods, rows, columns = words.shape
    limit = CPU_WORDS if words.is_cpu else DEVICE_WORDS
    # Where rows are not contiguous in memory, reading many of them makes up for reading little of each.
    wide = min(columns, (BLOCK_WORDS - 1) // step + 1, limit if words.stride(2) == 1 else NARROW_WORDS)
    high = min(rows, limit // wide)
    deep = min(periods, limit // (wide * high))
    order = sorted(range(3), key=words.stride().__getitem__, reverse=True)
    back = [order.index(dim) for dim in range(3)]
    scratch = torch.empty(deep * high * wide, dtype=torch.int64, device=device)
    repeats = torch.arange(periods, device="cpu").unsqueeze(1) * (rows * stride // BLOCK_WORDS)  # blocks
    for column in range(0, columns, wide):
        strip = words[:, :, column : column + wide]
        width = strip.shape[2]
        starts = torch.arange(rows, device="cpu") * stride + (offset + column * step)
        places, blocks = starts % BLOCK_WORDS, repeats + starts // BLOCK_WORDS
        places_there = places.to(device)
        split = (places + (width - 1) * step >= BLOCK_WORDS).nonzero().flatten()  # rows of two blocks
        split_list = split.tolist()
        if split_list:  # and the words that are in the second one
            second = places[split].unsqueeze(1) + torch.arange(width, device="cpu") * step >= BLOCK_WORDS
            second = second.to(device)
        table = _factor_rows(device, width, step)
        sums = torch.empty(periods, rows, dtype=torch.int64, device=device)
        more = torch.empty(periods, len(split), dtype=torch.int64, device=device)
        for row in range(0, rows, high):
            factors = table.index_select(0, places_there[row : row + high]).unsqueeze(0).permute(order)
            here = slice(bisect_left(split_list, row), bisect_left(split_list, row + high))
            for period in range(0, periods, deep):
                chunk = strip[period : period + deep, row : row + high].permute(order)
                products = scratch[: chunk.numel()].view(chunk.shape).copy_(chunk).mul_(factors).permute(back)
                torch.sum(products, 2, out=sums[period : period + deep, row : row + high])
                if here.start < here.stop:
                    both = products.index_select(1, split[here].to(device) - row)
                    more[period : period + deep, here] = (both * second[here]).sum(2)
        yield sums, blocks
        if split_list:
            yield more, blocks[:, split] + 1
            yield -more, blocks[:, split]


@cache
def _around(device: torch.device) -> torch.Tensor:
    """The factors of two blocks' words."""
    return word_factors(device).repeat(2)


def _factor_rows(device: torch.device, num_columns: int, step: int) -> torch.Tensor:
    """For each place in a block, the factors of a row that starts there; beyond its end they begin again."""
    return _around(device).as_strided((BLOCK_WORDS, num_columns), (1, step))
