"""Puts weights into a plain torch module, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from wt_common import PlanError, Side
from wt_common.session import Metadata
from wt_worker.checkpoint import checkpoint_tensors
from wt_worker.installers.base import InstallResult, Prepared
from wt_worker.placement.binding import Anchors, Binding, Landing, misfit, share_memory
from wt_worker.placement.plan import Copy, Plan
from wt_worker.placement.trace import Target, TraceError, trace, unplannable

__all__ = ["ModuleInstaller"]

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


class ModuleInstaller:
    """`Installer` for a module whose checkpoint names are those of its parameters and persistent buffers, tied ones under any.

    A module with a `load_weights(pairs)` of its own names them as that method does. Either is traced once, and then everything is
    written in place, so pointers stay valid; a copy casts between floating dtypes and moves between devices. What cannot be
    traced, and a parameter that two names go to, is loaded; all is, where the loader reads a value, which it may act upon.
    """

    def __init__(self, model: torch.nn.Module, *, check_cover: bool = True) -> None:
        self.check_cover = check_cover
        self.route_id = 0
        self._model = model
        self._load: Load | None = getattr(model, "load_weights", None)
        self._prepared: tuple[tuple[str, bool], Prepared, Anchors] | None = None
        self._targets = checkpoint_tensors(model)
        self._touched = False
        self._untouched: tuple[str, ...] = ()
        self._filled: dict[str, torch.Tensor] = {}  # what was loaded by name

    def prepare(self, metadata: Metadata, digest: str) -> Prepared:
        """As in the protocol; refuses a round that leaves out a parameter, too."""
        key, known = (digest, self.check_cover), self._prepared
        if known is not None and known[0] == key and known[2].hold():
            return known[1]
        self._targets = checkpoint_tensors(self._model)
        casts = {} if self._load else self._check_by_name(metadata)
        plan = self._trace(metadata)
        tied = _tied(plan) if self._load else {}  # by name, `install` compares them itself
        casts |= _tied_casts(plan, tied)
        untouched = self._find_untouched(plan, metadata)
        if self.check_cover:
            _refuse_gaps(plan, [name for name in untouched if isinstance(self._targets[name], torch.nn.Parameter)])
        reasons = self._reasons(plan)
        in_place = [name for name, reason in reasons.items() if reason is None and plan.kind(name) != "untouched"]
        not_in_place: dict[str, list[str]] = {}
        for name, reason in reasons.items():
            if reason is not None:
                not_in_place.setdefault(reason, []).append(name)
        binding = Binding(plan, self._targets, in_place)
        prepared = Prepared(casts=casts, binding=binding, not_in_place=not_in_place, not_synced=untouched, tied=tied)
        self._prepared = key, prepared, Anchors(self._model, self._targets)
        self._untouched = untouched
        self.route_id += 1
        return prepared

    def begin(self) -> None:
        """Nothing is written yet."""
        self._touched = False
        self._filled.clear()

    def landings(self, name: str) -> tuple[Landing, ...] | None:
        """In the parameters themselves."""
        return self._binding_now().landings(name)

    def touch(self) -> None:
        """The model may differ from now on."""
        self._touched = True

    @torch.no_grad()
    def install(self, batch: Sequence[tuple[str, torch.Tensor]]) -> None:
        """The tensors of `batch` are in the model.

        Raises:
            PlanError: two names that the model ties came with different values; a checkpoint without ties does not fit it.
        """
        self._touched |= bool(batch)
        plan = self._binding_now().plan
        aliases = {name.name: name.aliases for name in plan.names if name.aliases}
        # A loader may write into what it is given.
        batch = [*batch, *((alias, tensor.clone()) for name, tensor in batch for alias in aliases.get(name, ()))]
        if self._load is not None:
            self._load(iter(batch))
            return
        for name, tensor in batch:
            target = self._targets.get(name)
            if target is None:
                continue
            shared = {first: other for first, other in self._filled.items() if _may_share_memory(target, other)}
            before = {first: other.clone() for first, other in shared.items()}
            target.copy_(tensor)
            for first, other in shared.items():
                if not _are_equal(other, before[first]):
                    other.copy_(before[first])
                    raise _plan_error(
                        name,
                        f"parameter {name!r}: the model ties it to {first!r}, the trainer sends other values for it",
                    )
            self._filled[name] = target

    @torch.no_grad()
    def finish(self) -> InstallResult:
        """The model holds the round's weights."""
        binding = self._binding_now()
        self._touched |= not binding.parameters.isdisjoint(binding.plan.fills_of)
        binding.fill()
        return InstallResult(not_synced=self._untouched)

    def commit(self) -> None:
        """Nothing is left to do."""
        self._touched = False

    def abort(self) -> bool:
        """Whether anything was written; the model can serve at any time."""
        return self._touched

    def _binding_now(self) -> Binding:
        if self._prepared is None:
            raise RuntimeError("no round is open: call prepare() first")
        return self._prepared[1].binding

    def _trace(self, metadata: Metadata) -> Plan:
        rows = []
        for name, dtype_name, shape in zip(metadata.names, metadata.dtype_names, metadata.shapes, strict=True):
            rows.append((name, _dtype(name, dtype_name), shape))
        announced = {name: (dtype, shape) for name, dtype, shape in rows}
        rows += [(alias, *announced[name]) for alias, name in metadata.aliases.items()]
        targets = [Target(name, name.rpartition(".")[0], tensor) for name, tensor in self._targets.items()]
        if self._load is None:
            first = {id(target.tensor): target for target in reversed(targets)}  # of a tied one's names
            targets = [*first.values()][::-1]
        probes = []
        if self._load is not None:
            probes = [
                (name, tensor.dtype, tuple(tensor.shape))
                for name, tensor in self._targets.items()
                if not isinstance(tensor, torch.nn.Parameter) and name not in announced
            ]
        try:
            with _unchanged(self._model):
                plan = trace(
                    rows,
                    targets,
                    self._load or self._load_by_name,
                    may_read=False,
                    optional=[metadata.names[place] for place in metadata.optional],
                    aliases=metadata.aliases,
                    probes=probes,
                )
        except TraceError as error:
            if not error.reads_values:
                raise _plan_error(error.name, f"parameter {error.name!r}: {error}") from error
            plan = unplannable(rows, targets, str(error))
        return plan.with_aliases(metadata.aliases, partial(share_memory, self._targets))

    @torch.no_grad()
    def _load_by_name(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            if name in self._targets:  # else the sender hears that nothing is taken, and decides
                self._targets[name].copy_(tensor)

    def _check_by_name(self, metadata: Metadata) -> dict[str, str]:
        """Every name that the model has is of the shape announced; returns the dtypes that differ."""
        casts = {}
        aliases: dict[str, list[str]] = {}
        for alias, of in metadata.aliases.items():
            aliases.setdefault(of, []).append(alias)
        for name, dtype_name, shape in zip(metadata.names, metadata.dtype_names, metadata.shapes, strict=True):
            dtype = _dtype(name, dtype_name)
            wanted = set()
            for each in (name, *aliases.get(name, ())):
                target = self._targets.get(each)
                if target is None:
                    continue
                sends = "the trainer sends" if each == name else f"the trainer sends {name!r} for it,"
                if list(target.shape) != shape:
                    raise _plan_error(
                        each, f"parameter {each!r}: the model has shape {list(target.shape)}, {sends} {shape}"
                    )
                if dtype != target.dtype and not (dtype.is_floating_point and target.dtype.is_floating_point):
                    raise _plan_error(each, f"parameter {each!r}: the model has {target.dtype}, {sends} {dtype}")
                wanted.add(target.dtype)
            # What goes to tensors of two dtypes is rounded there, each by its own.
            if len(wanted) == 1 and wanted != {dtype}:
                casts[name] = str(wanted.pop()).rpartition(".")[2]
        return casts

    def _find_untouched(self, plan: Plan, metadata: Metadata) -> tuple[str, ...]:
        """What of the model is not written, under no name; what has no elements is written by name, or by any loader.

        A buffer that a loader of the model's own does not fill is none of a checkpoint's.
        """
        written = {each.name for each in plan.parameters if each.num_written != 0 or each.problem}
        if self._load is None:
            written |= self._targets.keys() & {*metadata.names, *metadata.aliases}
        else:
            written |= {each.name for each in plan.parameters if not each.num_elements}
            buffers = {name for name in self._targets if not isinstance(self._targets[name], torch.nn.Parameter)}
            written |= buffers - plan.fillable
        covered = {id(self._targets[name]) for name in written}
        return tuple(name for name, target in self._targets.items() if id(target) not in covered)

    def _reasons(self, plan: Plan) -> dict[str, str | None]:
        """By parameter, why it is not written in place; what shares a checkpoint parameter with such a one is not, either."""
        reasons = {name: self._reason(plan, name) for name in plan.by_parameter}
        shared = [name for name in plan.names if len(name.parameters) > 1]
        changed = True
        while changed:
            changed = False
            for name in shared:
                blocked = next((parameter for parameter in name.parameters if reasons[parameter]), None)
                for parameter in name.parameters if blocked else ():
                    if not reasons[parameter]:
                        reasons[parameter], changed = f"{name.name} goes to {blocked} as well", True
        return reasons

    def _reason(self, plan: Plan, name: str) -> str | None:
        """Why parameter `name` is not written in place."""
        if plan.kind(name) == "untouched":
            return None
        return plan.by_parameter[name].problem or plan.cover.get(name) or misfit(plan, name, self._targets[name])


@contextmanager
def _unchanged(model: torch.nn.Module) -> Iterator[None]:
    """After it, `model` has the tensors that it had before, in the same memory."""
    before = [
        (tensors, leaf, tensor, None if tensor is None else tensor.detach())
        for module in model.modules()
        for tensors in (module._parameters, module._buffers)  # noqa: SLF001  # torch has no way that keeps duplicates
        for leaf, tensor in tensors.items()
    ]
    try:
        yield
    finally:
        for tensors, leaf, tensor, data in before:
            tensors[leaf] = tensor  # type: ignore[assignment]  # each in the dict that it came from
            if tensor is not None and data is not None and tensor.data_ptr() != data.data_ptr():
                tensor.data = data


def _tied(plan: Plan) -> dict[str, str]:
    """Names that go to the very elements to which an earlier one goes; each with that one."""
    first: dict[tuple[Copy, ...], str] = {}
    found = {name.name: first.setdefault(name.copies, name.name) for name in plan.names if name.copies}
    return {name: of for name, of in found.items() if of != name}


def _tied_casts(plan: Plan, tied: Mapping[str, str]) -> dict[str, str]:
    """The dtype that the model has for both names of each pair, so that their bytes can be compared."""
    casts = {}
    both = {*tied, *tied.values()}
    for name in plan.names:
        if name.name in both:
            wanted = {plan.by_parameter[copy.parameter].dtype_name for copy in name.copies}
            dtypes = [getattr(torch, each) for each in (*wanted, name.dtype_name)]
            if len(wanted) == 1 and wanted != {name.dtype_name} and all(dtype.is_floating_point for dtype in dtypes):
                casts[name.name] = wanted.pop()
    return casts


def _may_share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the spans of memory of both overlap."""
    spans = [
        (
            each.data_ptr(),
            each.data_ptr()
            + sum((n - 1) * step for n, step in zip(each.shape, each.stride(), strict=True)) * each.itemsize,
        )
        for each in (one, other)
        if each.numel()
    ]
    return len(spans) == 2 and one.device == other.device and spans[0][0] <= spans[1][1] and spans[1][0] <= spans[0][1]


def _refuse_gaps(plan: Plan, missing: Sequence[str]) -> None:
    """No parameter is written in part, and none is left out."""
    partial = [each for each in plan.parameters if 0 < (each.num_written or 0) < each.num_expected]
    if partial:
        name = partial[0].name
        raise _plan_error(
            name,
            f"parameter {name!r}: {partial[0].num_written} of {partial[0].num_expected} elements would be written; send in one "
            "round all checkpoint names that it is made of",
        )
    if missing:
        raise _plan_error(
            missing[0], f"the trainer does not send {len(missing)} of the model's parameters: {list(missing[:5])}"
        )


def _dtype(name: str, dtype_name: str) -> torch.dtype:
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise _plan_error(name, f"parameter {name!r}: torch has no dtype {dtype_name!r}")
    return dtype


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Byte by byte, so that NaN equals itself."""
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one.detach(), other)))


def _plan_error(name: str, message: str) -> PlanError:
    return PlanError(message, side=Side.WORKER, phase="update", param=name)
