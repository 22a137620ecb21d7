"""What a round sends, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import zip_longest
from math import prod

import torch

from wt_common import PlanError, Side
from wt_common.session import Metadata, metadata_digest
from wt_trainer.source import WeightSource

__all__ = ["RoundMetadata"]


@dataclass(frozen=True)
class RoundMetadata:
    """Names, dtypes, full shapes and sizes of a round's parameters, and the trainer rank (root) that sends each.

    `aliases` are as in `WeightSource`; `optional` has the places of parameters that a worker need not take.

    Computed once: a source's metadata does not change. `digest` names it from the second round on.
    """

    names: tuple[str, ...]
    dtype_names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    sizes_bytes: tuple[int, ...]
    roots: tuple[int, ...]
    aliases: dict[str, str] = field(default_factory=dict)
    optional: tuple[int, ...] = ()
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        rows = zip(self.names, self.dtype_names, self.shapes, self.roots, strict=True)
        object.__setattr__(self, "digest", metadata_digest(rows, self.aliases, self.optional))

    @cached_property
    def num_elements(self) -> tuple[int, ...]:
        """How many elements each parameter has."""
        return tuple(prod(shape) for shape in self.shapes)

    @cached_property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtype of each parameter."""
        known = {name: getattr(torch, name) for name in set(self.dtype_names)}
        return tuple(known[name] for name in self.dtype_names)

    @classmethod
    def of(cls, source: WeightSource, num_ranks: int, ignore: Sequence[str] = ()) -> RoundMetadata:
        """The metadata of `source` on a trainer of `num_ranks`. A parameter's first owner sends it, rank 0 if all own it.

        Those whose names match one of the patterns `ignore` are optional, too.

        Raises:
            PlanError: there is no parameter, a name comes twice, an alias is of no parameter, or an owner is no trainer rank.
        """
        metas = list(source.metadata)
        names = tuple(meta.name for meta in metas)
        if not names:
            raise PlanError("the source's metadata names no parameter", side=Side.TRAINER)
        known = set(names)
        if len(known) != len(names):
            seen: set[str] = set()
            twice = next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise PlanError(f"parameter {twice!r} comes twice in the source's metadata", side=Side.TRAINER, param=twice)
        for meta in metas:
            if meta.owners is not None and max(meta.owners) >= num_ranks:
                raise PlanError(
                    f"parameter {meta.name!r}: owners {meta.owners} name a rank outside the {num_ranks} trainer ranks; "
                    "owners are trainer ranks, and all trainer ranks must call (see num_trainer_ranks)",
                    side=Side.TRAINER,
                    param=meta.name,
                )
        aliases = dict(source.aliases)
        for alias, name in aliases.items():
            if alias in known or name not in known:
                raise PlanError(
                    f"alias {alias!r} of {name!r}: expected a name that the source's metadata lacks, for one that it has",
                    side=Side.TRAINER,
                    param=alias,
                )
        return cls(
            names=names,
            dtype_names=tuple(str(meta.dtype).rpartition(".")[2] for meta in metas),
            shapes=tuple(meta.shape for meta in metas),
            sizes_bytes=tuple(meta.num_bytes for meta in metas),
            roots=tuple(0 if meta.owners is None or 0 in meta.owners else meta.owners[0] for meta in metas),
            aliases=aliases,
            optional=tuple(
                place
                for place, meta in enumerate(metas)
                if meta.optional or any(fnmatchcase(meta.name, pattern) for pattern in ignore)
            ),
        )

    def cast(self, casts: dict[str, str]) -> RoundMetadata:
        """These parameters in the dtypes that `casts` names."""
        if not casts:
            return self
        dtype_names = tuple(casts.get(name, dtype) for name, dtype in zip(self.names, self.dtype_names, strict=True))
        sizes_bytes = tuple(
            prod(shape) * getattr(torch, dtype).itemsize for shape, dtype in zip(self.shapes, dtype_names, strict=True)
        )
        return replace(self, dtype_names=dtype_names, sizes_bytes=sizes_bytes)

    def difference(self, other: Metadata) -> tuple[str, str]:
        """Where these metadata, this rank's, first differ from `other`, the sender's: the parameter's name, and how."""
        ours = list(zip(self.names, self.dtype_names, map(list, self.shapes), self.roots, strict=True))
        theirs = list(zip(other.names, other.dtype_names, other.shapes, other.roots, strict=True))
        for index, (mine, sent) in enumerate(zip_longest(ours, theirs)):
            if mine != sent:
                name = (sent or mine)[0]
                return name, f"place {index}: expected {_describe(sent)} as on rank 0, got {_describe(mine)}"
        for alias in sorted(self.aliases.keys() | other.aliases.keys()):
            mine_of, sent_of = self.aliases.get(alias), other.aliases.get(alias)
            if mine_of != sent_of:
                return alias, f"alias {alias!r}: expected one of {sent_of!r} as on rank 0, got one of {mine_of!r}"
        for place in sorted({*self.optional} ^ {*other.optional}):
            name = self.names[place]
            return name, f"{name!r} is optional on {'this rank' if place in self.optional else 'rank 0'} only"
        return "", "only in their digests"

    def message(self, round_number: int) -> Metadata:
        """It as the session carries it."""
        return Metadata(
            round=round_number,
            names=list(self.names),
            dtype_names=list(self.dtype_names),
            shapes=[list(shape) for shape in self.shapes],
            roots=list(self.roots),
            aliases=self.aliases,
            optional=list(self.optional),
        )


def _describe(row: tuple[str, str, list[int], int] | None) -> str:
    if row is None:
        return "nothing"
    name, dtype_name, shape, root = row
    return f"{name!r} {dtype_name} {shape} sent by rank {root}"
