"""Where each byte of each checkpoint parameter lands in a model: what tracing its loader found, as data.

A plan holds for one rank, one model and one list of (name, dtype, shape). It says nothing about the state of the tensors that
serve: `prove.py` does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any

import torch

__all__ = ["Box", "Copy", "Fill", "NamePlan", "ParameterPlan", "Plan", "count_elements", "row_major"]


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of `shape`."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class Box:
    """Elements of a flat tensor: element (i, j, ...) of the box is element `offset + i * strides[0] + j * strides[1] + ...`."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All elements of a contiguous tensor of `shape`, in order, as one dimension."""
        return cls(0, (prod(shape),), (1,))

    @property
    def num_elements(self) -> int:
        """How many elements it has."""
        return prod(self.shape)

    @property
    def span(self) -> int:
        """From the first element to behind the last one; 0 if it is empty."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))

    @property
    def is_run(self) -> bool:
        """Whether its elements follow one another without a gap, in their order."""
        return self.shape in ((), (1,)) or (len(self.shape) == 1 and self.strides == (1,))

    @property
    def key(self) -> int:
        """A number below 2^62 that is the same for the same box in any process."""
        text = json.dumps([self.offset, self.shape, self.strides]).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 2

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of these elements of `tensor`'s storage, counted from the tensor's first one."""
        return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements `source` of a checkpoint tensor go, one by one, to `destination` of `parameter`, cast to its dtype.

    Both boxes have the same shape. `destination` counts in elements of the parameter's storage, from the parameter's first one.
    """

    source: Box
    parameter: str
    destination: Box

    def normalized(self) -> Copy:
        """The same, in as few dimensions as it takes."""
        dims: list[tuple[int, int, int]] = []  # size, source stride, destination stride
        for n, step, jump in zip(self.source.shape, self.source.strides, self.destination.strides, strict=True):
            if n == 1:
                continue
            if dims and dims[-1][1] == n * step and dims[-1][2] == n * jump:
                dims[-1] = (dims[-1][0] * n, step, jump)
            else:
                dims.append((n, step, jump))
        shape, steps, jumps = (tuple(column) for column in zip(*dims, strict=True)) if dims else ((1,), (1,), (1,))
        source = Box(self.source.offset, shape, steps)
        return Copy(source, self.parameter, Box(self.destination.offset, shape, jumps))

    def clip(self, start: int, stop: int) -> Iterator[Copy]:
        """The parts of it whose source elements are all in `[start, stop)`; together they have each such element."""
        source = self.source
        first, last = source.offset, source.offset + source.span
        if first >= stop or last <= start:
            return
        if first >= start and last <= stop:
            yield self
            return
        dim = max(range(len(source.shape)), key=lambda d: source.strides[d] if source.shape[d] > 1 else -1)
        step, n = source.strides[dim], source.shape[dim]
        inner = source.span - (n - 1) * step
        begin = max(0, -((first + inner - 1 - start) // step))  # the first row that reaches into the range
        end = min(n, -(-(stop - first) // step))  # behind the last one
        whole_begin = max(begin, -(-(start - first) // step))
        whole_end = min(end, (stop - inner - first) // step + 1)
        if whole_begin >= whole_end:
            whole_begin = whole_end = end
        for row in range(begin, whole_begin):
            yield from self._rows(dim, row, row + 1).clip(start, stop)
        if whole_begin < whole_end:
            yield self._rows(dim, whole_begin, whole_end)
        for row in range(whole_end, end):
            yield from self._rows(dim, row, row + 1).clip(start, stop)

    def _rows(self, dim: int, begin: int, end: int) -> Copy:
        def cut(box: Box) -> Box:
            shape = (*box.shape[:dim], end - begin, *box.shape[dim + 1 :])
            return Box(box.offset + begin * box.strides[dim], shape, box.strides)

        return Copy(cut(self.source), self.parameter, cut(self.destination))


@dataclass(frozen=True, slots=True)
class Fill:
    """The loader writes `value` to `region` of `parameter`, whatever the checkpoint holds (the padding of a vocabulary)."""

    parameter: str
    region: Box
    value: float

    def write(self, tensor: torch.Tensor) -> None:
        """It is in `tensor`, which is the parameter, wherever that lies."""
        self.region.of(tensor).fill_(self.value)


@dataclass(frozen=True, slots=True)
class NamePlan:
    """One checkpoint parameter.

    Attributes:
        name, dtype_name, shape: as it is announced.
        copies: where its elements go on this rank; none at all where no byte of it belongs here.
        problem: why it cannot be placed without the model's loader (operation and source line); None if it can.
        constants: parameters that get a constant on this rank, in its stead.
        aliases: further names under which the loader takes it, and what they take is among `copies`.
    """

    name: str
    dtype_name: str
    shape: tuple[int, ...]
    copies: tuple[Copy, ...] = ()
    problem: str | None = None
    constants: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    @property
    def parameters(self) -> tuple[str, ...]:
        """Where it goes, each once."""
        return (*dict.fromkeys((*(copy.parameter for copy in self.copies), *self.constants)),)

    @property
    def is_whole(self) -> bool:
        """Whether its elements, each once and in any order, are all placed by one copy."""
        return len(self.copies) == 1 and self.copies[0].source.num_elements == prod(self.shape)


@dataclass(frozen=True, slots=True)
class ParameterPlan:
    """One parameter or buffer of the model as its loader sees it: before any processing.

    Attributes:
        layer: the module that has it.
        num_expected: elements that a checkpoint fills, which leaves out padding that the model declares.
        num_written: elements that the loader writes, each counted once, whatever it writes there; None if that is not known.
        problem: why it is not a pure copy of checkpoint parameters and constants; None if it is.
        is_bypassed: its loader was not called: the model's loader wrote it directly.
        is_optional: a buffer that need not be in a checkpoint.
        is_emptied: a load begins with memory that holds nothing, so that it must be written if its layer is.
    """

    name: str
    layer: str
    dtype_name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    num_expected: int
    num_written: int | None = 0
    problem: str | None = None
    is_bypassed: bool = False
    is_optional: bool = False
    is_emptied: bool = False

    @property
    def num_elements(self) -> int:
        """How many elements it has."""
        return prod(self.shape)


@dataclass(frozen=True)
class Plan:
    """Where everything lands, on this rank.

    Attributes:
        names, parameters, fills: of the checkpoint, of the model, and what is constant.
        fillable: those of the model's buffers that nothing is sent for, and that the loader would fill from a checkpoint.
    """

    names: tuple[NamePlan, ...]
    parameters: tuple[ParameterPlan, ...]
    fills: tuple[Fill, ...] = ()
    fillable: frozenset[str] = frozenset()

    @cached_property
    def by_parameter(self) -> dict[str, ParameterPlan]:
        """Parameters by name."""
        return {parameter.name: parameter for parameter in self.parameters}

    @cached_property
    def copies_into(self) -> dict[str, tuple[tuple[NamePlan, Copy], ...]]:
        """By parameter, what is copied there."""
        found: dict[str, list[tuple[NamePlan, Copy]]] = {}
        for name in self.names:
            for copy in name.copies:
                found.setdefault(copy.parameter, []).append((name, copy))
        return {parameter: tuple(copies) for parameter, copies in found.items()}

    @cached_property
    def fills_of(self) -> dict[str, tuple[Fill, ...]]:
        """By parameter, its constants."""
        found: dict[str, list[Fill]] = {}
        for fill in self.fills:
            found.setdefault(fill.parameter, []).append(fill)
        return {parameter: tuple(fills) for parameter, fills in found.items()}

    @cached_property
    def cover(self) -> dict[str, str | None]:
        """By parameter that is written at all: None if each element is written exactly once, else what is wrong."""
        written = {**dict.fromkeys(self.copies_into), **dict.fromkeys(self.fills_of)}
        return {name: self._cover_problem(self.by_parameter[name]) for name in written}

    def kind(self, parameter: str) -> str:
        """How `parameter` is written: `whole`, `contiguous` or `strided`, with `+filled` and `+cast`; `loader`; `untouched`."""
        plan = self.by_parameter[parameter]
        copies = self.copies_into.get(parameter, ())
        fills = self.fills_of.get(parameter, ())
        if plan.problem or any(name.problem for name, _ in copies):
            return "loader"
        if not copies and not fills:
            return "untouched"
        if self.cover[parameter]:
            return "loader"
        runs = all(copy.source.is_run and copy.destination.is_run for _, copy in copies)
        if len(copies) == 1 and not fills and runs and copies[0][0].is_whole:
            kind = "whole"
        else:
            kind = "contiguous" if runs else "strided"
        kind += "+filled" if fills else ""
        return kind + ("+cast" if any(name.dtype_name != plan.dtype_name for name, _ in copies) else "")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` is its inverse."""
        return {
            "names": [asdict(name) for name in self.names],
            "parameters": [asdict(parameter) for parameter in self.parameters],
            "fills": [asdict(fill) for fill in self.fills],
            "fillable": sorted(self.fillable),
        }

    @classmethod
    def from_dict(cls, payload: dict[str, Any]) -> Plan:
        """The plan that `to_dict` described."""
        return cls(
            names=tuple(
                NamePlan(
                    **{
                        **name,
                        "shape": tuple(name["shape"]),
                        "constants": tuple(name["constants"]),
                        "aliases": tuple(name["aliases"]),
                        "copies": tuple(
                            Copy(_box(copy["source"]), copy["parameter"], _box(copy["destination"]))
                            for copy in name["copies"]
                        ),
                    }
                )
                for name in payload["names"]
            ),
            parameters=tuple(
                ParameterPlan(**{**each, "shape": tuple(each["shape"]), "strides": tuple(each["strides"])})
                for each in payload["parameters"]
            ),
            fills=tuple(Fill(each["parameter"], _box(each["region"]), each["value"]) for each in payload["fills"]),
            fillable=frozenset(payload["fillable"]),
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hex, of its JSON: plans of equal digest place everything alike."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def with_aliases(self, aliases: Mapping[str, str], shares_memory: Callable[[str, str], bool]) -> Plan:
        """It with what each name of `aliases` takes added to what the name that it stands for takes.

        What an alias puts where the other name puts the same elements already is left out, and so is an alias of which nothing
        remains.

        Args:
            aliases: names of the plan, each with another one.
            shares_memory: whether two parameters are served from the same memory.
        """
        by_name = {name.name: name for name in self.names}
        for alias, of in aliases.items():
            if alias not in by_name:
                continue
            extra, name = by_name.pop(alias), by_name[of]
            copies = tuple(
                copy
                for copy in extra.copies
                if not any(
                    (copy.source, copy.destination) == (other.source, other.destination)
                    and (copy.parameter == other.parameter or shares_memory(copy.parameter, other.parameter))
                    for other in name.copies
                )
            )
            if copies or extra.problem or extra.constants:
                by_name[of] = replace(
                    name,
                    copies=(*name.copies, *copies),
                    problem=name.problem or extra.problem,
                    constants=(*dict.fromkeys((*name.constants, *extra.constants)),),
                    aliases=(*name.aliases, alias),
                )
        return replace(self, names=tuple(by_name.values())).without_problems()

    def without_problems(self) -> Plan:
        """It without the copies of names that have a problem, so that nobody replays them."""
        return replace(self, names=tuple(replace(name, copies=()) if name.problem else name for name in self.names))

    def _boxes(self, parameter: str) -> list[Box]:
        boxes = {copy.destination for _, copy in self.copies_into.get(parameter, ())}
        return [*boxes, *(fill.region for fill in self.fills_of.get(parameter, ()))]

    def _cover_problem(self, parameter: ParameterPlan) -> str | None:
        boxes = self._boxes(parameter.name)
        written = sum(box.num_elements for box in boxes)
        names = [name.name for name, _ in self.copies_into.get(parameter.name, ())]
        twice = len(boxes) < len(self.copies_into.get(parameter.name, ())) + len(self.fills_of.get(parameter.name, ()))
        if twice or written != count_elements(boxes):
            return f"elements are written twice, by {', '.join(sorted(set(names))[:4])}"
        if written != parameter.num_elements:
            return f"{written} of {parameter.num_elements} elements are written"
        return None


def _box(fields: dict[str, Any]) -> Box:
    return Box(fields["offset"], tuple(fields["shape"]), tuple(fields["strides"]))


def count_elements(boxes: Iterable[Box]) -> int:
    """Elements that are in any of `boxes`."""
    boxes = [box for box in boxes if box.span]
    spans = sorted((box.offset, box.offset + box.span) for box in boxes)
    if all(stop <= start for (_, stop), (start, _) in pairwise(spans)) and all(map(_is_injective, boxes)):
        return sum(box.num_elements for box in boxes)
    first, last = min(span[0] for span in spans), max(span[1] for span in spans)
    marks = torch.zeros(last - first, dtype=torch.bool)  # interleaved: a byte for each element of the span
    for box in boxes:
        marks.as_strided(box.shape, box.strides, box.offset - first).fill_(True)
    return int(marks.count_nonzero())


def _is_injective(box: Box) -> bool:
    """Whether no element is in `box` twice, judged by its strides alone; False if they do not tell."""
    reach = 0
    for step, n in sorted(zip(box.strides, box.shape, strict=True)):
        if n > 1:
            if step <= reach:
                return False
            reach += (n - 1) * step
    return True
