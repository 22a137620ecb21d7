"""A plan, bound to the tensors that serve: written in place, digested in place, and checked to be the same tensors still."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from wt_worker.placement.installed import InstalledDigests
from wt_worker.placement.plan import Box, Copy, NamePlan, Plan

__all__ = ["Anchors", "Binding", "Landing", "misfit", "share_memory"]

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Landing:
    """Elements of a checkpoint parameter, and the tensor that they go into."""

    copy: Copy
    tensor: torch.Tensor

    def part(self) -> tuple[torch.Tensor, Box]:
        """What it writes, and what of the checkpoint parameter that holds."""
        return self.region(self.copy), self.copy.source

    def region(self, copy: Copy) -> torch.Tensor:
        """The view of the tensor that `copy`, a part of this one's, writes."""
        return copy.destination.of(self.tensor)


def misfit(plan: Plan, parameter: str, tensor: torch.Tensor) -> str | None:
    """Why `tensor`, which serves as `parameter`, is not laid out as its loader saw it; None if it is."""
    expected = plan.by_parameter[parameter]
    for what, want, got in (
        ("shape", expected.shape, tuple(tensor.shape)),
        ("dtype", expected.dtype_name, str(tensor.dtype).rpartition(".")[2]),
        ("strides", expected.strides, tuple(tensor.stride())),
    ):
        if want != got:
            return f"{parameter} is served with {what} {got}, and loaded with {want}"
    return None


def share_memory(tensors: Mapping[str, torch.Tensor], one: str, other: str) -> bool:
    """Whether two of `tensors` begin in the same memory; one that is not among them, or has none, does not."""
    return one in tensors and other in tensors and tensors[one].data_ptr() == tensors[other].data_ptr() != 0


class Anchors:
    """Where in a model its tensors hang, to find out quickly whether they still do.

    Walking through a model's modules costs ten times as much as looking again where everything was. No tensor's bytes are read.

    Args:
        model: whose.
        names: of parameters and buffers.
        modules: of modules that must be the same ones, too.
    """

    def __init__(self, model: torch.nn.Module, names: Iterable[str], modules: Iterable[str] = ()) -> None:
        # What hangs where: dictionaries, their keys, and what is to be found there. Lists, which are compared without a loop.
        self._above: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._there: list[object] = []
        self._tensors: list[torch.Tensor] = []
        self._modules = {"": model}
        for name in names:
            path, _, leaf = name.rpartition(".")
            own = vars(self._module(path))  # what torch walks through
            tensors = own["_parameters"] if leaf in own["_parameters"] else own["_buffers"]
            assert tensors[leaf] is not None  # it has a name
            self._add(tensors, leaf)
            self._tensors.append(tensors[leaf])
        for name in modules:
            self._module(name)
        self._layouts = _layouts(self._tensors)

    def _module(self, path: str) -> torch.nn.Module:
        if path not in self._modules:
            above, _, key = path.rpartition(".")
            modules = vars(self._module(above))["_modules"]
            self._add(modules, key)
            self._modules[path] = modules[key]
        return self._modules[path]

    def _add(self, above: dict[str, Any], key: str) -> None:
        self._above.append(above)
        self._keys.append(key)
        self._there.append(above[key])

    def hold(self) -> bool:
        """Whether under each name there is the same object, with the same memory and layout."""
        found = map(dict.get, self._above, self._keys)
        return all(map(operator.is_, found, self._there)) and _layouts(self._tensors) == self._layouts


class Binding:
    """The part of `plan` that is written in place.

    Args:
        plan: what lands where.
        tensors: the tensors that serve, by parameter; laid out as the plan says (`misfit`).
        parameters: which of them are written in place. A checkpoint parameter is, if all that it goes to is.
    """

    def __init__(self, plan: Plan, tensors: Mapping[str, torch.Tensor], parameters: Collection[str]) -> None:
        self.plan = plan
        self.parameters = frozenset(parameters)
        self._tensors = {name: tensors[name].detach() for name in self.parameters}
        self._layout = {name: _layout(tensors[name]) for name in self.parameters}
        self._landings: dict[str, tuple[Landing, ...]] = {}
        for name in plan.names:
            if name.problem is None and self.parameters.issuperset(name.parameters):
                self._landings[name.name] = tuple(Landing(copy, self._tensors[copy.parameter]) for copy in name.copies)

    def __contains__(self, name: str) -> bool:
        return name in self._landings

    def landings(self, name: str) -> tuple[Landing, ...] | None:
        """Where checkpoint parameter `name` goes; empty if no byte of it belongs here, None if it is not written in place."""
        return self._landings.get(name)

    def is_bound_to(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether `tensors` are the tensors that it was bound to: the same memory, laid out in the same way."""
        for name, (pointer, shape, stride, dtype) in self._layout.items():
            tensor = tensors.get(name)
            if (
                tensor is None
                or tensor.data_ptr() != pointer
                or tensor.shape != shape
                or tensor.stride() != stride
                or tensor.dtype != dtype
            ):
                return False
        return True

    def fill(self) -> None:
        """The constants of the plan are in place."""
        for name in self.parameters & self.plan.fills_of.keys():
            for fill in self.plan.fills_of[name]:
                fill.write(self._tensors[name])

    def digests(self, names: Sequence[NamePlan]) -> list[list[int]]:
        """Of each of `names`, the digest of each of its parts as installed, as if the others were zero."""
        landings = [self._landings[name.name] for name in names]
        found = iter(InstalledDigests([[each.part()] for parts in landings for each in parts]).now())
        return [list(islice(found, len(parts))) for parts in landings]

    def digest_of(self, name: NamePlan) -> int:
        """Of all its parts together."""
        return sum(self.digests([name])[0]) & _MASK


def _layouts(tensors: Sequence[torch.Tensor]) -> list[list[object]]:
    """What `_layout` says of each, in a fraction of the time."""
    # vLLM's parameters take ten times as long to say what they are. Public, in all but the module's name.
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        return [list(map(say, tensors)) for say in _SAYS]


_SAYS: tuple[Callable[[torch.Tensor], object], ...] = (
    torch.Tensor.data_ptr,
    torch.Tensor.stride,
    operator.attrgetter("shape"),
    operator.attrgetter("dtype"),
)


def _layout(tensor: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
