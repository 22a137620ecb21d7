"""The digest of `wt_common.digest` on GPUs, in Triton: as fast as memory is read. Imported where there is Triton only.

wt-trainer and wt-worker each have this module, the same but for the package's name (`nox -s lint` checks it): the two packages
share what is on the wire, not code.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["run_sums"]


@triton.jit
def run_sums(
    runs,
    program_runs,
    word_factors,
    block_factors,
    totals,
    aligned: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Add to `totals` what one tile of one run is worth, in some of the run's blocks.

    `runs` has a row for each run: address, place of its first word in the parameter, number of words, place in `totals`,
    its first program, how many tiles of a block it has, the first of them. `program_runs` has the run of each program. With
    `aligned` every run and its first word are at multiples of 16 bytes.
    """
    program = tl.program_id(0)
    run = tl.load(program_runs + program)
    row = runs + run.to(tl.int64) * 7
    address = tl.load(row)
    first = tl.load(row + 1)
    count = tl.load(row + 2)
    place = tl.load(row + 3)
    local = program - tl.load(row + 4)
    num_tiles = tl.load(row + 5)
    tile = tl.load(row + 6) + local % num_tiles
    begin = first // 65536 + local // num_tiles * CHUNK
    end = tl.minimum(begin + CHUNK, (first + count - 1) // 65536 + 1)
    words = address.to(tl.pointer_type(tl.int32))
    columns = tile * TILE + tl.arange(0, TILE)
    sums = tl.zeros([TILE], dtype=tl.int64)
    for block in range(begin, end):
        start = block * 65536 + tile * TILE - first
        factor = tl.load(block_factors + block)
        if (start >= 0) & (start + TILE <= count):
            places = words + start + tl.arange(0, TILE)
            if aligned:  # 16 bytes at once
                places = tl.multiple_of(places, 16)
            word = tl.load(places)
            sums += word.to(tl.int64) * factor
        else:
            at = start + tl.arange(0, TILE)
            word = tl.load(words + at, mask=(at >= 0) & (at < count), other=0)
            sums += word.to(tl.int64) * factor
    total = tl.sum(sums * tl.load(word_factors + columns))
    tl.atomic_add(totals + place, total, sem="relaxed")
