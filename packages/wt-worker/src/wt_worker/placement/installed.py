"""The digests of what is installed, read where it serves, round after round."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from wt_worker.digest import SmallDigests, digest_total, unsigned
from wt_worker.placement.digest import box_digest, box_factors
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
        factors: dict[tuple[torch.device, int, Box], torch.Tensor | None] = {}
        for place, parts in enumerate(subjects):
            for region, box in parts:
                self._add(place, region, box, factors)

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
        for device in self._small.keys() | self._runs.keys():
            totals = torch.zeros(self._count, dtype=torch.int64, device=device)
            if device in self._small:
                self._small[device].add_to(totals)
            if runs := self._runs.get(device):
                places = torch.tensor([place for place, _, _ in runs], device=device)
                totals.index_add_(0, places, torch.stack([digest_total(data, offset) for _, data, offset in runs]))
            found = unsigned(totals)
            result = [(one + other) & _MASK for one, other in zip(result, found, strict=True)] if any(result) else found
        for place, region, box in self._boxes:
            result[place] = (result[place] + box_digest(region, box.offset, box.strides)) & _MASK
        return result
