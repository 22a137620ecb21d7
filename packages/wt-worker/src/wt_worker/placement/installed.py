"""The digests of what is installed, read where it serves, round after round."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import torch

from wt_common.digest import BLOCK_WORDS
from wt_worker.digest import SmallDigests, block_factors, digest_total, unsigned, word_factors
from wt_worker.digest_runs import RunDigests, kernel
from wt_worker.placement.digest import box_digest, box_factors, word_rows
from wt_worker.placement.plan import Box

__all__ = ["InstalledDigests"]

_MASK = (1 << 64) - 1


class InstalledDigests:
    """Digests over tensors that stay where they are. What can be known before their bytes are is worked out once.

    Args:
        subjects: what each digest is over: views, and the box of the checkpoint parameter that each holds. Of several the digests
            are added up.
    """

    def __init__(self, subjects: Sequence[Sequence[tuple[torch.Tensor, Box]]]) -> None:
        self._count = len(subjects)
        self._small: dict[torch.device, SmallDigests] = {}
        # (place, bytes in the parameter's order, where they begin in it), and all else:
        self._runs: dict[torch.device, list[tuple[int, torch.Tensor, int]]] = {}
        self._boxes: list[tuple[int, torch.Tensor, Box]] = []
        self._kernels: dict[torch.device, tuple[RunDigests, BoxDigests]] = {}
        self._on_device: dict[
            torch.device, tuple[list[tuple[int, torch.Tensor, int]], list[tuple[int, torch.Tensor, int, int]]]
        ] = {}
        factors: dict[tuple[torch.device, int, Box], torch.Tensor | None] = {}
        for place, parts in enumerate(subjects):
            for region, box in parts:
                if not (region.is_cuda and self._add_to_kernel(place, region, box)):
                    self._add(place, region, box, factors)

    def _add_to_kernel(self, place: int, region: torch.Tensor, box: Box) -> bool:
        """Whether a kernel will digest it, with all else of its device."""
        if kernel() is None or not region.numel():
            return False
        runs, boxes = self._on_device.setdefault(region.device, ([], []))
        offset_bytes = box.offset * region.itemsize
        if region.is_contiguous() and box.is_run and RunDigests.takes(region, offset_bytes):
            runs.append((place, region, offset_bytes))
            return True
        rows = word_rows(region, box.offset, box.strides)
        if rows is None:
            return False
        boxes += [(place, *each) for each in rows]
        return True

    def _add(
        self,
        place: int,
        region: torch.Tensor,
        box: Box,
        factors: dict[tuple[torch.device, int, Box], torch.Tensor | None],
    ) -> None:
        if not region.numel():
            return
        if SmallDigests.takes(region):
            key = region.device, region.itemsize, box
            if key not in factors:
                factors[key] = box_factors(*key)
            found = factors[key]
            if found is not None:
                self._small.setdefault(region.device, SmallDigests(region.device)).add(place, region, found)
                return
        if box.is_run:
            self._runs.setdefault(region.device, []).append((place, region, box.offset * region.itemsize))
        else:
            self._boxes.append((place, region, box))

    @torch.no_grad()
    def now(self) -> list[int]:
        """All of them, over the bytes that are there now. It runs on each device's current stream, which is waited for."""
        result = [0] * self._count
        for device in self._small.keys() | self._runs.keys() | self._on_device.keys():
            totals = torch.zeros(self._count, dtype=torch.int64, device=device)
            if device in self._small:
                self._small[device].add_to(totals)
            if runs := self._runs.get(device):
                places = torch.tensor([place for place, _, _ in runs], device=device)
                totals.index_add_(0, places, torch.stack([digest_total(data, offset) for _, data, offset in runs]))
            if device in self._on_device:
                self._kernels_of(device, totals)
            found = unsigned(totals)
            result = [(one + other) & _MASK for one, other in zip(result, found, strict=True)] if any(result) else found
        for place, region, box in self._boxes:
            result[place] = (result[place] + box_digest(region, box.offset, box.strides)) & _MASK
        return result

    def _kernels_of(self, device: torch.device, totals: torch.Tensor) -> None:
        if device not in self._kernels:
            runs, boxes = self._on_device[device]
            self._kernels[device] = RunDigests(device, runs), BoxDigests(device, boxes)
        for kernel_digests in self._kernels[device]:
            kernel_digests.add_to(totals)


class BoxDigests:
    """Digests of boxes on a GPU, all in one launch; they stay where they are.

    Args:
        device: where all are.
        boxes: place in the totals, and what `word_rows` says of it.
    """

    def __init__(self, device: torch.device, boxes: Sequence[tuple[int, torch.Tensor, int, int]]) -> None:
        self._device = device
        self._num_programs = 0
        if not boxes:
            return
        self._kernel = importlib.import_module("wt_worker.placement.digest_kernel")
        table: list[list[int]] = []
        counts: list[int] = []
        self._num_blocks = 0
        for place, words, first, step in boxes:
            num_rows, num_words = words.shape
            tiles = -(-num_words // self._kernel.TILE_WORDS)
            table.append(
                [words.data_ptr(), num_rows, num_words, words.stride(0), first, step, place, self._num_programs, tiles]
            )
            counts.append(tiles * -(-num_rows // self._kernel.TILE_ROWS))
            self._num_programs += counts[-1]
            last = first + (num_rows - 1) * step + num_words - 1
            self._num_blocks = max(self._num_blocks, last // BLOCK_WORDS + 1)
        self._boxes = torch.tensor(table, dtype=torch.int64).to(device)
        numbers = torch.arange(len(table), dtype=torch.int32).repeat_interleave(torch.tensor(counts))
        self._program_boxes = numbers.to(device)

    def add_to(self, totals: torch.Tensor) -> None:
        """In `totals` each digest is added at its place, on the current stream. Nothing is waited for."""
        if not self._num_programs:
            return
        with torch.cuda.device(self._device):
            self._kernel.box_sums[(self._num_programs,)](
                self._boxes,
                self._program_boxes,
                word_factors(self._device),
                block_factors(self._device, self._num_blocks),
                totals,
                ROWS=self._kernel.TILE_ROWS,
                WORDS=self._kernel.TILE_WORDS,
            )
