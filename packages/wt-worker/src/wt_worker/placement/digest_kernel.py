"""Digests of boxes on GPUs, in Triton. Imported where there is Triton only."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["TILE_ROWS", "TILE_WORDS", "box_sums"]

TILE_WORDS = 512
TILE_ROWS = 32
"""What a program reads: 64 KiB."""


@triton.jit
def box_sums(
    boxes,
    program_boxes,
    word_factors,
    block_factors,
    totals,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Add to `totals` what one tile of one box is worth.

    `boxes` has a row for each box: address, number of rows, words in a row, words from row to row in memory, place of the first
    word in the parameter, words from row to row there, place in `totals`, its first program, tiles side by side.
    """
    program = tl.program_id(0)
    box = tl.load(program_boxes + program)
    row = boxes + box.to(tl.int64) * 9
    address = tl.load(row)
    num_rows = tl.load(row + 1)
    num_words = tl.load(row + 2)
    step = tl.load(row + 3)
    first = tl.load(row + 4)
    parameter_step = tl.load(row + 5)
    place = tl.load(row + 6)
    local = program - tl.load(row + 7)
    num_tiles = tl.load(row + 8)
    column = local % num_tiles * WORDS + tl.arange(0, WORDS)
    begin = local // num_tiles * ROWS
    end = tl.minimum(begin + ROWS, num_rows)
    words = address.to(tl.pointer_type(tl.int32))
    inside = column < num_words
    sums = tl.zeros([WORDS], dtype=tl.int64)
    for index in range(begin, end):
        word = tl.load(words + index * step + column, mask=inside, other=0)
        at = first + index * parameter_step + column
        factor = tl.load(word_factors + (at & 65535)) * tl.load(block_factors + (at >> 16), mask=inside, other=0)
        sums += word.to(tl.int64) * factor
    tl.atomic_add(totals + place, tl.sum(sums), sem="relaxed")
