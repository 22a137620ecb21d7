"""What a rank takes in one round, and what each of its digests is over: the wire's `Placed`, and the numbers that go with it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from math import prod

import torch

from wt_common.session import Placed
from wt_worker.installers.base import Prepared
from wt_worker.placement.binding import Binding
from wt_worker.placement.installed import InstalledDigests
from wt_worker.placement.plan import Box, NamePlan, count_elements

__all__ = ["Shares"]

ALL, SOME, NONE, UNKNOWN = "apnu"
RECEIVED, WHOLE, PARTS, NOTHING = "rwpn"


@dataclass(slots=True)
class Shares:
    """The fields of `Placed`; see there. They do not change."""

    takes: str
    digested: str
    parts: list[list[int]]
    not_in_place: dict[str, list[str]]
    tied: list[list[int]] = field(default_factory=list)
    not_synced: list[str] = field(default_factory=list)
    unset: list[str] = field(default_factory=list)
    _received: frozenset[int] = field(init=False, repr=False)
    _reading: _Reading | None = field(default=None, init=False, repr=False, compare=False)  # of the last round

    def __post_init__(self) -> None:
        self._received = frozenset(index for index, kind in enumerate(self.digested) if kind == RECEIVED)

    @classmethod
    def of(cls, prepared: Prepared, verify: str, unset: Collection[str] = ()) -> Shares:
        """Those of a round that is installed as `prepared` says; unless `verify` is `full`, all digests are over what came.

        `unset` names what of the model still has the random values with which the server was started.
        """
        names = prepared.binding.plan.names
        takes = [_taken(name) for name in names]
        digested = [_digested(name, prepared) for name in names] if verify == "full" else [RECEIVED] * len(names)
        parts = [
            [index, *part]
            for index, name in enumerate(names)
            if takes[index] == SOME or digested[index] == PARTS
            for part in _parts(name)
        ]
        places = {name.name: index for index, name in enumerate(names)} if prepared.tied else {}
        return cls(
            takes="".join(takes),
            digested="".join(digested),
            parts=parts,
            not_in_place=prepared.not_in_place,
            tied=[[places[name], places[of]] for name, of in prepared.tied.items()],
            not_synced=list(prepared.not_synced),
            unset=[name for name in prepared.not_synced if name in unset],
        )

    def message(self, round_number: int) -> Placed:
        """It as the session carries it."""
        return Placed(
            round=round_number,
            takes=self.takes,
            digested=self.digested,
            parts=self.parts,
            not_in_place=self.not_in_place,
            tied=self.tied,
            not_synced=self.not_synced,
            unset=self.unset,
        )

    def received(self, also: list[int]) -> frozenset[int]:
        """The places in the metadata whose received bytes are digested; `also` is `Go.received`."""
        return self._received.union(also) if also else self._received

    def digests(self, received: Mapping[int, int], binding: Binding) -> list[int]:
        """All digests in the wire's order: those of what came, by place in the metadata, and those of what is installed."""
        reading = self._reading
        if reading is None or reading.binding is not binding or reading.received != received.keys():
            reading = self._reading = self._read(frozenset(received), binding)
        installed = reading.installed.now()
        if not received:
            return installed
        rest = iter(installed)
        return [next(rest) if index is None else received[index] for index in reading.order]

    def _read(self, received: frozenset[int], binding: Binding) -> _Reading:
        order: list[int | None] = []
        subjects: list[list[tuple[torch.Tensor, Box]]] = []
        for index, (name, kind) in enumerate(zip(binding.plan.names, self.digested, strict=True)):
            if index in received:
                order.append(index)
            elif kind in (WHOLE, PARTS):
                parts = [landing.part() for landing in binding.landings(name.name) or ()]
                found = [parts] if kind == WHOLE else [[part] for part in parts]
                subjects += found
                order += [None] * len(found)
        return _Reading(binding, received, order, InstalledDigests(subjects))


@dataclass(frozen=True, slots=True)
class _Reading:
    """How the digests are computed: `order` has a place in the metadata for what came, None for what is installed."""

    binding: Binding
    received: frozenset[int]
    order: list[int | None]
    installed: InstalledDigests


def _taken(name: NamePlan) -> str:
    """What of `name` this rank takes."""
    if name.problem is not None:
        return UNKNOWN
    if not name.copies:
        return NONE if prod(name.shape) else ALL
    return ALL if count_elements(copy.source for copy in name.copies) == prod(name.shape) else SOME


def _parts(name: NamePlan) -> list[tuple[int, int]]:
    """Size and key of each part of `name` that this rank takes; of parts that overlap and leave something out, those of all."""
    sources = [copy.source for copy in name.copies]
    if not _is_cut_and_overlaps(name):
        return [(source.num_elements, source.key) for source in sources]
    keys = sorted({source.key for source in sources})
    key = int.from_bytes(blake2b(json.dumps(keys).encode(), digest_size=8).digest(), "big") >> 2
    return [(count_elements(sources), key)]


def _is_cut_and_overlaps(name: NamePlan) -> bool:
    """Whether different parts of `name` have an element in common, and others are in none: their sizes do not add up."""
    different = {copy.source for copy in name.copies}
    total = sum(source.num_elements for source in different)
    return len(different) > 1 and count_elements(different) < min(total, prod(name.shape))


def _digested(name: NamePlan, prepared: Prepared) -> str:
    """What the digest of `name` is over, when it comes in the dtype that was asked for."""
    if name.name not in prepared.binding:
        return RECEIVED
    if not name.copies:
        return NOTHING if prod(name.shape) else WHOLE
    dtype_name = prepared.casts.get(name.name, name.dtype_name)
    parameters = prepared.binding.plan.by_parameter
    if any(parameters[copy.parameter].dtype_name != dtype_name for copy in name.copies):
        return RECEIVED
    if _is_cut_and_overlaps(name):
        return RECEIVED
    sources = [copy.source for copy in name.copies]
    total = sum(source.num_elements for source in sources)
    return WHOLE if total == prod(name.shape) == count_elements(sources) else PARTS
