"""Runs a model's loader once, without a byte of weights, and notes where each element of each checkpoint tensor would go.

Seen from below, at ATen's level, every loader is the same: views of a checkpoint tensor are copied into views of parameters.
Checkpoint tensors are stand-ins on the meta device, so torch itself does the arithmetic of views; what is left to do here is to
recognize both ends of a copy by their storage, and to follow what is copied in between (a `.contiguous()`, a `cat`). Nothing is
written: neither to a model's tensors nor to the stand-ins.

What cannot be followed exactly is never guessed: the checkpoint parameter, or the model's parameter, gets a *problem* with the
operation and the source line, and its layer goes through the loader.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from wt_worker.placement.image import Image
from wt_worker.placement.plan import Box, Copy, Fill, NamePlan, ParameterPlan, Plan, count_elements, row_major

__all__ = ["REPLACED", "STRAY", "Target", "TraceError", "Tracer", "error_text", "trace", "unplannable"]

REPLACED = "replaced by the loader"
"""The problem of a parameter in whose place the loader puts another one."""

STRAY = "copied into a tensor that is no parameter"
"""How the problem of a checkpoint parameter begins that the loader puts into a tensor of its own making."""

_UNKNOWN_NAME = (KeyError, ValueError, AttributeError)
"""What loaders raise at a name that their model does not have. A wrong shape is an AssertionError or a RuntimeError."""

_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_NO_VALUES = (
    "numpy is not available",  # where it is, its error is one of those about the device
    *("meta tensor", "meta device", "'meta' device", "device type meta", "register_meta", "unallocated storage"),
    "incompatible tensor type",
)
"""What torch says, in lower case, when a tensor on the meta device is asked for its values."""


def error_text(error: BaseException) -> str:
    """What `error` says; where it says nothing, as an assertion may, the place that raised it."""
    if str(error):
        return f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
    return f"{type(error).__name__}{where}"


class TraceError(Exception):
    """The loader raised, at `name` or shortly before; the cause is chained.

    `reads_values` says that it raised because a checkpoint tensor has no values here, not because it does not fit the model.
    """

    def __init__(self, name: str, cause: Exception, *, reads_values: bool) -> None:
        super().__init__(f"the loader failed at {name}, or shortly before it: {error_text(cause)}")
        self.name = name
        self.reads_values = reads_values


@dataclass(frozen=True, slots=True)
class Target:
    """A parameter or buffer that a loader may write.

    Attributes:
        name: its full name.
        layer: name of the module that has it.
        tensor: as the loader sees it, on any device; it is not written.
        num_expected: elements that a checkpoint fills; None is all.
        is_optional: need not be in a checkpoint.
    """

    name: str
    layer: str
    tensor: torch.Tensor
    num_expected: int | None = None
    is_optional: bool = False


@dataclass(slots=True)
class _Source:
    """A checkpoint tensor's stand-in."""

    index: int
    tensor: torch.Tensor
    constants: list[tuple[Box, float]] = field(default_factory=list)  # written into it by the loader


@dataclass(slots=True)
class _Written:
    """A target, and what was found of it."""

    target: Target
    storage: int
    problem: str | None = None
    is_bypassed: bool = False
    regions: dict[Box, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Noted:
    """What a tracer has found at some point."""

    copies: dict[int, dict[Copy, None]]
    fills: dict[Fill, None]
    problems: dict[int, str]
    constants: dict[int, dict[str, None]]
    images: dict[int, Image]
    spoilt: dict[int, _Spoilt]
    written: list[tuple[str | None, bool, dict[Box, None]]]


@dataclass(slots=True)
class _Spoilt:
    """A tensor computed from checkpoint tensors by an operation that cannot be followed."""

    tensor: torch.Tensor
    indices: frozenset[int]
    problem: str


def trace(
    rows: Sequence[tuple[str, torch.dtype, Sequence[int]]],
    targets: Iterable[Target],
    load: Callable[[Iterator[tuple[str, torch.Tensor]]], object],
    loading: Mapping[int, int] | None = None,
    *,
    may_read: bool = True,
    optional: Collection[str] = (),
    aliases: Mapping[str, str] = MappingProxyType({}),
    probes: Sequence[tuple[str, torch.dtype, Sequence[int]]] = (),
) -> Plan:
    """Where `load`, given the checkpoint tensors that `rows` announces, puts them.

    A loader that does not know an optional name or an alias raises; the name is then one of which nothing is taken. An alias is
    loaded together with the name that it stands for, since some loaders take it only then.

    Args:
        rows: name, dtype and shape of each.
        targets: what may be written. Where two share a storage, the first stands for both.
        load: a model's `load_weights`: takes (name, tensor) pairs. It is called once; nothing that it writes arrives.
        loading: how many loaders of each target, by the target tensor's id, are running, counted by whoever wrapped them; None
            if they are not wrapped. A target that is written outside is marked as bypassed.
        may_read: a loader that reads a value is told some number, and what it then does is taken for what it always does. Only
            for a caller who compares the plan with a real load.
        optional: which of `rows` the model need not know.
        aliases: which of `rows` stand for which other one.
        probes: what is loaded only to see which of the targets it would go to; see `Plan.fillable`. The plan is as without them.

    Raises:
        TraceError: the loader raised, or read a value that it may not read.
    """
    tracer = Tracer([*rows, *probes], targets, loading, may_read=may_read)
    stand_ins = dict(tracer.stand_ins())
    probed = [name for name, _, _ in probes]
    apart = {*optional, *aliases, *probed}
    last = ""

    def feed(names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal last
        for name in names:
            last = name
            yield name, stand_ins[name]

    def is_known(*names: str, refusals: tuple[type[Exception], ...] = _UNKNOWN_NAME) -> bool:
        before = tracer.save()
        try:
            load(feed(names))
        except refusals:
            if tracer.has_lied and refusals is _UNKNOWN_NAME:
                raise
            tracer.restore(before)
            return False
        return True

    try:
        with tracer.tracing():
            load(feed(name for name in stand_ins if name not in apart))
            if optional and not is_known(*optional):  # one by one, to find out which
                for name in optional:
                    is_known(name)
            for name, of in aliases.items():
                is_known(of, name)
        plan = tracer.plan(without=probed)
        with tracer.tracing():
            for name in probed:
                is_known(name, refusals=(Exception,))
    except Exception as exc:
        reads = tracer.has_lied or any(text in str(exc).lower() for text in _NO_VALUES)
        raise TraceError(last, exc, reads_values=reads) from exc
    untouched = {parameter.name for parameter in plan.parameters if parameter.num_written == 0}
    return replace(plan, fillable=tracer.taken_by(probed) & untouched)


def unplannable(
    rows: Sequence[tuple[str, torch.dtype, Sequence[int]]], targets: Iterable[Target], problem: str
) -> Plan:
    """The plan of a model of which nothing is known but that its loader takes everything."""
    names = [NamePlan(name, _dtype_name(dtype), tuple(shape), (), problem) for name, dtype, shape in rows]
    written = [_Written(target, 0, problem) for target in targets]
    return Plan(tuple(names), tuple(replace(_parameter_plan(each), num_written=None) for each in written))


class Tracer(TorchDispatchMode):
    """The dispatch mode behind `trace`; see there."""

    def __init__(
        self,
        rows: Sequence[tuple[str, torch.dtype, Sequence[int]]],
        targets: Iterable[Target],
        loading: Mapping[int, int] | None = None,
        *,
        may_read: bool = True,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.has_lied = False  # whether the loader was given a value that no checkpoint tensor has
        self._may_read = may_read
        self._rows = list(rows)
        self._loading = loading
        self._sources: dict[int, _Source] = {}  # all by storage, which these keep alive
        for index, (_, dtype, shape) in enumerate(
            self._rows
        ):  # here, since within the mode each costs 60 microseconds more
            tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
            self._sources[_storage(tensor)] = _Source(index, tensor)
        self._images: dict[int, Image] = {}
        self._spoilt: dict[int, _Spoilt] = {}
        self._targets: dict[int, _Written] = {}
        self._all_targets: list[_Written] = []
        for target in targets:
            written = _Written(target, _storage(target.tensor))
            self._all_targets.append(written)
            self._targets.setdefault(written.storage, written)
        self._copies: dict[int, dict[Copy, None]] = {}  # by source, in order, each once
        self._fills: dict[Fill, None] = {}
        self._problems: dict[int, str] = {}
        self._constants: dict[int, dict[str, None]] = {}

    def stand_ins(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The checkpoint, without content."""
        for (name, _, _), source in zip(self._rows, list(self._sources.values()), strict=True):
            yield name, source.tensor

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Within it, what the loader does is noted."""
        with torch.no_grad(), self:
            yield

    def save(self) -> _Noted:
        """What was found so far, for `restore`."""
        return _Noted(
            copies={index: dict(copies) for index, copies in self._copies.items()},
            fills=dict(self._fills),
            problems=dict(self._problems),
            constants={index: dict(names) for index, names in self._constants.items()},
            images=dict(self._images),
            spoilt=dict(self._spoilt),
            written=[(each.problem, each.is_bypassed, dict(each.regions)) for each in self._all_targets],
        )

    def restore(self, noted: _Noted) -> None:
        """What was found since `noted` was saved is forgotten."""
        self._copies, self._fills, self._problems = noted.copies, noted.fills, noted.problems
        self._constants, self._images, self._spoilt = noted.constants, noted.images, noted.spoilt
        for each, (problem, is_bypassed, regions) in zip(self._all_targets, noted.written, strict=True):
            each.problem, each.is_bypassed, each.regions = problem, is_bypassed, regions

    def taken_by(self, names: Collection[str]) -> frozenset[str]:
        """The targets that any of the checkpoint tensors `names` goes to."""
        indexes = [index for index, (name, _, _) in enumerate(self._rows) if name in names]
        return frozenset(copy.parameter for index in indexes for copy in self._copies.get(index, ()))

    def plan(self, without: Collection[str] = ()) -> Plan:
        """What was found; the rows `without` are not in it, and have not been loaded."""
        for image in self._images.values():
            if image.is_target and not image.is_read:
                for index in image.indices:
                    if not self._copies.get(index):
                        self._flag(index, f"{STRAY} ({image.where})")
        by_name = {written.target.name: written for written in self._all_targets}
        for index, problem in self._problems.items():
            # What else the loader did to such a checkpoint parameter is not known, so its other places are as doubtful.
            places = {copy.parameter for copy in self._copies.get(index, ())} | self._constants.get(index, {}).keys()
            for name in places:
                by_name[name].problem = by_name[name].problem or problem
        for written in self._all_targets:
            if _storage(written.target.tensor) != written.storage:
                written.problem = written.problem or "the loader gives it other memory"
        names = [
            NamePlan(
                name,
                _dtype_name(dtype),
                tuple(shape),
                tuple(self._copies.get(index, ())),
                self._problems.get(index),
                tuple(self._constants.get(index, ())),
            )
            for index, (name, dtype, shape) in enumerate(self._rows)
            if name not in without
        ]
        parameters = tuple(_parameter_plan(written) for written in self._all_targets)
        return Plan(tuple(names), parameters, tuple(self._fills)).without_problems()

    # --- operations ----------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kind = _kind(func)
        if kind == "view":
            return func(*args, **(kwargs or {}))
        if kind == "copy_":
            return self._copy(args[0], args[1])
        if kind == "fill_":
            return self._fill(func, args, kwargs or {})
        if kind == "write":
            return self._write(func, args, kwargs or {})
        return self._compute(func, args, kwargs or {})

    def _copy(self, destination: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        to, of = _storage(destination), _storage(source)
        is_known = of in self._sources or of in self._images or of in self._spoilt
        if not is_known and to not in self._targets and to not in self._sources and to not in self._images:
            return torch.ops.aten.copy_.default(destination, source)  # type: ignore[no-any-return]
        if source.shape != destination.shape:
            source = source.expand(destination.shape)
        if to in self._targets:
            self._place(self._targets[to], destination, source)
        elif to in self._sources:
            self._flag(self._sources[to].index, f"the loader writes into it ({_where()})")
        elif of in self._spoilt:
            spoilt = self._spoilt[of]
            self._spoilt[to] = _Spoilt(destination, spoilt.indices, spoilt.problem)
        else:
            image = self._images.get(to) or Image.of(destination, where=_where(), is_target=True)
            self._images[to] = image
            patches, problem = self._patches(source)
            if problem or not image.write(destination, patches):
                indices = image.indices | {index for _, index, _ in patches} | self._indices(of)
                problem = problem or f"aten.copy_ of parts that overlap ({_where()})"
                self._spoil(destination, indices, problem)
                for index in indices:
                    self._flag(index, problem)
        return destination

    def _place(self, written: _Written, destination: torch.Tensor, source: torch.Tensor) -> None:
        """A loader copies `source` into the target's view `destination`."""
        target, of = written.target, _storage(source)
        if target.tensor.is_meta and self._loading is not None and not self._loading.get(id(target.tensor), 0):
            written.is_bypassed = True
        if of not in self._sources and of not in self._images and of not in self._spoilt:
            if of == _storage(destination) and _geometry(source) == _geometry(destination):
                return  # onto itself
            written.problem = written.problem or f"written with computed values: aten.copy_ ({_where()})"
            written.regions[_geometry(destination, relative_to=target.tensor)] = None
            return
        region = _geometry(destination, relative_to=target.tensor)
        written.regions[region] = None
        if destination.dtype != target.tensor.dtype:
            written.problem = written.problem or f"written as {destination.dtype} ({_where()})"
        constant = self._constant(of, source)
        if constant is not None:
            self._fills[Fill(target.name, Copy(region, target.name, region).normalized().source, constant)] = None
            self._constants.setdefault(self._sources[of].index, {})[target.name] = None
            return
        patches, problem = self._patches(source)
        for window, index, box in patches:
            copy = Copy(box, target.name, _within(region, window)).normalized()
            if 0 in copy.source.strides:
                problem = problem or f"one element goes to several places ({_where()})"
            elif copy.source.num_elements:
                self._copies.setdefault(index, {})[copy] = None
        if problem:
            written.problem = written.problem or problem
            for index in self._indices(of):
                self._flag(index, problem)

    def _fill(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor: torch.Tensor = args[0]
        key = _storage(tensor)
        value = 0.0 if len(args) < 2 else args[1]
        if isinstance(value, torch.Tensor):
            of = _storage(value)
            if key in self._targets and (of in self._sources or of in self._images or of in self._spoilt):
                self._place(self._targets[key], tensor, value.expand(tensor.shape))
                return tensor
            value = value.item() if value.device.type != "meta" else None
        elif len(args) > 1 and self.has_lied:
            value = None  # it may be made from what the loader was told
        if key in self._targets:
            written = self._targets[key]
            region = _geometry(tensor, relative_to=written.target.tensor)
            written.regions[region] = None
            if value is None or tensor.dtype != written.target.tensor.dtype:
                written.problem = written.problem or f"filled with a computed value ({_where()})"
            elif tensor.numel():
                box = Copy(region, written.target.name, region).normalized().source
                self._fills[Fill(written.target.name, box, float(value))] = None
            return tensor
        if key in self._sources:
            if value is None:
                self._flag(self._sources[key].index, f"the loader writes into it ({_where()})")
            else:
                self._sources[key].constants.append((_geometry(tensor), float(value)))
            return tensor
        if key in self._images or key in self._spoilt:
            return self._write(func, args, kwargs)
        return func(*args, **kwargs)

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Any other operation that writes into an argument."""
        text = f"{_name(func)} ({_where()})"
        inputs = list(_tensors((args, kwargs)))
        indices = frozenset().union(*(self._indices(_storage(tensor)) for tensor in inputs))
        tensor: torch.Tensor = inputs[0]
        key = _storage(tensor)
        for index in indices:
            self._flag(index, text)
        written = [self._targets[_storage(each)] for each in inputs if _storage(each) in self._targets]
        for each in written:  # some may only be read, which is not told apart
            each.problem = each.problem or f"changed after the copy: {text}"
        if written:
            return tensor
        if key in self._sources:
            return tensor
        if indices:
            self._spoil(tensor, indices, text)
            return tensor
        return func(*args, **kwargs)

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation that makes new tensors, or answers a question."""
        inputs = list(_tensors((args, kwargs)))
        indices = frozenset().union(*(self._indices(_storage(tensor)) for tensor in inputs))
        if not indices:
            return func(*args, **kwargs)
        operation = func.overloadpacket.__name__
        if operation in {"clone", "_to_copy"}:
            kwargs = {
                key: value for key, value in kwargs.items() if key not in {"device", "pin_memory", "non_blocking"}
            }
            out = func(*args, **kwargs)
            return self._follow(out, [(out, args[0])])
        if operation == "cat":
            dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) or 0
            parts = [part for part in args[0] if part.shape != (0,)]
            if all(self._indices(_storage(part)) and part.dtype == parts[0].dtype for part in parts):
                out = func([part.to("meta") for part in args[0]], dim)
                slabs = out.split([part.shape[dim] for part in parts], dim)
                return self._follow(out, list(zip(slabs, parts, strict=True)))
        if operation == "_local_scalar_dense":
            self.has_lied = True
            if not self._may_read:
                raise ValueError(f"reads a value ({_where()})")
            for index in indices:
                self._flag(index, f"the loader reads its value ({_where()})")
            return {torch.bool: False}.get(inputs[0].dtype, 1 if not inputs[0].is_floating_point() else 1.0)
        text = f"{_name(func)} ({_where()})"
        for index in indices:
            self._flag(index, text)
        to_meta = functools.partial(_map_tensors, lambda tensor: tensor.to("meta"))
        kwargs = {key: value for key, value in kwargs.items() if key not in {"device", "pin_memory"}}
        out = func(*to_meta(args), **to_meta(kwargs))
        for tensor in _tensors(out):
            self._spoil(tensor, indices, text)
        return out

    def _follow(self, out: torch.Tensor, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """`out` is new, and each of its views in `parts` has the elements of the tensor beside it."""
        image = Image.of(out, where=_where())
        self._images[_storage(out)] = image
        for view, part in parts:
            patches, problem = self._patches(part)
            if not problem and not torch.can_cast(part.dtype, out.dtype):
                problem = f"cast from {part.dtype} to {out.dtype} on the way ({_where()})"
            if not problem and torch.promote_types(part.dtype, out.dtype) != out.dtype:
                problem = f"rounded to {out.dtype} on the way ({_where()})"
            if not problem and not image.write(view, patches):
                problem = f"parts that overlap ({_where()})"
            if problem:
                indices = frozenset().union(*(self._indices(_storage(each)) for _, each in parts))
                self._spoil(out, indices, problem)
                break
        return out

    # --- where elements come from --------------------------------------------------------------------------

    def _patches(self, source: torch.Tensor) -> tuple[list[tuple[Box, int, Box]], str | None]:
        """The elements of `source`: (window of it, checkpoint tensor, box in that); or why that is not known."""
        key = _storage(source)
        if key in self._spoilt:
            return [], self._spoilt[key].problem
        if source.is_conj() or source.is_neg():
            return [], f"read through a view that changes values ({_where()})"
        if key in self._sources:
            found = self._sources[key]
            if source.dtype != found.tensor.dtype:
                return [], f"read as {source.dtype} ({_where()})"
            if found.constants:
                return [], f"the loader writes into it ({_where()})"
            dense = Box(0, tuple(source.shape), row_major(source.shape))
            return [(dense, found.index, _geometry(source))], None
        if key in self._images:
            patches = self._images[key].read(source)
            if patches is None:
                return [], f"a view that cannot be followed ({_where()})"
            if sum(window.num_elements for window, _, _ in patches) != source.numel():
                return [], f"a tensor that the checkpoint fills in part only ({_where()})"
            return patches, None
        return [], f"computed values ({_where()})"

    def _constant(self, key: int, source: torch.Tensor) -> float | None:
        """The value with which the loader has overwritten all of `source`, a view of a checkpoint tensor."""
        found = self._sources.get(key)
        if found is None:
            return None
        for region, value in reversed(found.constants):
            if region in (_geometry(source), _geometry(found.tensor)):
                return value
        return None

    def _indices(self, key: int) -> frozenset[int]:
        if key in self._sources:
            return frozenset((self._sources[key].index,))
        if key in self._spoilt:
            return self._spoilt[key].indices
        return self._images[key].indices if key in self._images else frozenset()

    def _spoil(self, tensor: torch.Tensor, indices: Iterable[int], problem: str) -> None:
        self._images.pop(_storage(tensor), None)
        self._spoilt[_storage(tensor)] = _Spoilt(tensor, frozenset(indices), problem)

    def _flag(self, index: int, problem: str) -> None:
        self._problems.setdefault(index, problem)


@functools.cache
def _kind(func: Any) -> str:
    operation = func.overloadpacket.__name__
    if operation == "copy_":
        return "copy_"
    if operation in {"fill_", "zero_"}:
        return "fill_"
    schema = func._schema  # noqa: SLF001  # the only way to know what an operation writes
    if schema.is_mutable:
        return "write"
    aliases = any(each.alias_info is not None for each in schema.returns)
    return "view" if aliases or operation in {"_unsafe_view", "lift_fresh"} else "compute"


def _storage(tensor: torch.Tensor) -> int:
    """A storage's identity, for as long as it lives."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  # data_ptr() is 0 on the meta device


def _geometry(tensor: torch.Tensor, relative_to: torch.Tensor | None = None) -> Box:
    base = 0 if relative_to is None else relative_to.storage_offset()
    return Box(int(tensor.storage_offset()) - int(base), tuple(tensor.shape), tuple(tensor.stride()))


def _within(region: Box, window: Box) -> Box:
    """The part of a tensor's `region` that `window`, in elements of that tensor in row-major order, cuts out.

    Each dimension of the window lies in one dimension of the region.
    """
    steps = row_major(region.shape)
    offset, rest = region.offset, window.offset
    for step, jump in zip(steps, region.strides, strict=True):
        offset += rest // step * jump
        rest -= rest // step * step
    strides = []
    for n, at in zip(window.shape, window.strides, strict=True):
        if n == 1:
            strides.append(0)
            continue
        dim = next(d for d, step in enumerate(steps) if region.shape[d] > 1 and at >= step)
        strides.append(at // steps[dim] * region.strides[dim])
    return Box(offset, window.shape, tuple(strides))


def _parameter_plan(written: _Written) -> ParameterPlan:
    target = written.target
    tensor = target.tensor
    return ParameterPlan(
        name=target.name,
        layer=target.layer,
        dtype_name=_dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        num_expected=tensor.numel() if target.num_expected is None else target.num_expected,
        num_written=count_elements(written.regions),
        problem=written.problem,
        is_bypassed=written.is_bypassed,
        is_optional=target.is_optional,
        is_emptied=tensor.is_meta,
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)


def _map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_map_tensors(change, each) for each in value)
    if isinstance(value, dict):
        return {key: _map_tensors(change, each) for key, each in value.items()}
    return value


def _name(func: Any) -> str:
    return f"aten.{func.overloadpacket.__name__}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _where() -> str:
    """File and line, outside torch and this package's tracing, that asked for the operation at hand."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  # cheaper than a whole traceback
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_HERE, _TORCH)) and not name.startswith("<"):
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
