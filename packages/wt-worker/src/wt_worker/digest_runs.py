"""Digests of many runs of bytes on a GPU at once.

wt-trainer and wt-worker each have this module, the same but for the package's name (`nox -s lint` checks it): the two packages
share what is on the wire, not code.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from wt_common.digest import BLOCK_WORDS
from wt_worker.digest import block_factors, word_factors

__all__ = ["CHUNK_BLOCKS", "TILE_WORDS", "RunDigests", "kernel", "run_table"]

TILE_WORDS = 2048
"""Words of a block that a program of the kernel reads; their factors stay in its registers, from one block to the next."""

CHUNK_BLOCKS = 32
"""Blocks that it goes through: 256 KiB in all make up for its start, and leave enough programs to fill a GPU."""


class RunDigests:
    """One launch for all of them: a launch for each of a model's tensors would take longer than reading them.

    It keeps addresses only, no tensor: whoever calls `add_to` knows that the bytes are still there.

    Args:
        device: where all runs are.
        runs: place in the totals; bytes, as a tensor that `takes` accepts; and at which byte of the parameter they begin.
    """

    def __init__(self, device: torch.device, runs: Sequence[tuple[int, torch.Tensor, int]]) -> None:
        self._device = device
        self._num_programs = 0
        if not runs:
            return
        table, counts, self._num_blocks = run_table(
            [(place, data.data_ptr(), data.nbytes // 4, offset // 4) for place, data, offset in runs]
        )
        self._num_programs = sum(counts)
        self._aligned = all(row[0] % 16 == 0 and row[1] % 4 == 0 for row in table)
        self._runs = torch.tensor(table, dtype=torch.int64).to(device)
        numbers = torch.arange(len(runs), dtype=torch.int32).repeat_interleave(torch.tensor(counts))
        self._program_runs = numbers.to(device)

    @staticmethod
    def takes(data: torch.Tensor, offset_bytes: int) -> bool:
        """Whether `data`, which is contiguous and begins at that byte of its parameter, is made of whole words, on a GPU."""
        return bool(
            data.is_cuda
            and data.nbytes
            and (data.nbytes | offset_bytes | data.data_ptr()) % 4 == 0
            and kernel() is not None
        )

    def add_to(self, totals: torch.Tensor) -> None:
        """In `totals`, of int64 on the same device, each digest is added at its place. Nothing is waited for."""
        if not self._num_programs:
            return
        found = kernel()
        assert found is not None  # or no run would have been taken
        with torch.cuda.device(self._device):
            found.run_sums[(self._num_programs,)](
                self._runs,
                self._program_runs,
                word_factors(self._device),
                block_factors(self._device, self._num_blocks),
                totals,
                aligned=self._aligned,
                TILE=TILE_WORDS,
                CHUNK=CHUNK_BLOCKS,
            )


def run_table(runs: Sequence[tuple[int, int, int, int]]) -> tuple[list[list[int]], list[int], int]:
    """What the kernel reads: a row and a number of programs for each run, and how many blocks their parameters have at most.

    Args:
        runs: place, address, number of words, place of the first word in the parameter.
    """
    table: list[list[int]] = []
    counts: list[int] = []
    num_blocks = first_program = 0
    for place, address, count, first in runs:
        begin, end = first // BLOCK_WORDS, (first + count - 1) // BLOCK_WORDS + 1
        first_tile, num_tiles = 0, BLOCK_WORDS // TILE_WORDS
        if end - begin == 1:  # not more than its words
            first_tile = first % BLOCK_WORDS // TILE_WORDS
            num_tiles = (first + count - 1) % BLOCK_WORDS // TILE_WORDS + 1 - first_tile
        table.append([address, first, count, place, first_program, num_tiles, first_tile])
        counts.append(num_tiles * -(-(end - begin) // CHUNK_BLOCKS))
        first_program += counts[-1]
        num_blocks = max(num_blocks, end)
    return table, counts, num_blocks


@cache
def kernel() -> Any:
    """The module of the kernel, or None where there is no Triton: digests are then computed with torch, which is slower."""
    try:
        return importlib.import_module("wt_worker.digest_kernel")
    except ImportError:
        return None
