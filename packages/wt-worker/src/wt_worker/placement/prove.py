"""What shows that a layer may be written in place: nothing that the model computes with is a copy of it, kept elsewhere.

Equal bytes in the parameters do not show that. An engine keeps state made from them (packed weights, a float32 copy, two
weights concatenated at the first forward), in attributes of any object, that a write into the parameters leaves as it was.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from wt_worker.digest import tensor_digest, word_factors

__all__ = ["Reached", "copies_of", "reachable", "snapshot"]

MAX_DEPTH = 8
"""Attributes of attributes that are followed from a module; vLLM's deepest (a kernel's closure in a quantization method) is 5."""

_SKIPPED_ATTRIBUTES = frozenset({"kv_cache", "_backward_hooks", "_forward_hooks", "_forward_pre_hooks"})
_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})  # where a module keeps what is told first
_SKIPPED_CLASSES = (
    "torch.",
    "transformers.",
    "vllm.config",
    "vllm.transformers_utils",
    "numpy",
    "logging",
    "threading",
)


@dataclass(frozen=True, slots=True)
class Reached:
    """A tensor that a model refers to: its path from the model, the module that it hangs on, and itself."""

    path: str
    module: str
    tensor: torch.Tensor


def reachable(model: torch.nn.Module, *, every_path: bool = False) -> Iterator[Reached]:
    """Every tensor that is reachable from `model`'s modules by attributes, containers and closures.

    Each storage comes once, or, with `every_path`, as often as something refers to it. Registered tensors come first. Caches of
    keys and values are left out: they are emptied after a round, not derived.
    """
    modules = dict(model.named_modules())
    storages: set[int] = set()
    seen: dict[int, Any] = {id(module): module for module in modules.values()}

    def new(tensor: torch.Tensor) -> bool:
        key = tensor.untyped_storage()._cdata  # noqa: SLF001  # its identity
        if tensor.is_meta or not tensor.numel() or (key in storages and not every_path):
            return False
        storages.add(key)
        return True

    for prefix, module in modules.items():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):  # noqa: SLF001  # without duplicates removed
            if tensor is not None and new(tensor):
                yield Reached(f"{prefix}.{name}", prefix, tensor)
    for prefix, module in modules.items():
        others = {name: value for name, value in vars(module).items() if name not in _REGISTERED}
        for path, tensor in _walk(others, prefix, seen, 0):
            if new(tensor):
                yield Reached(path, prefix, tensor)


def snapshot(tensors: Iterable[Reached]) -> dict[str, tuple[str, int]]:
    """By path, the module and the digest of each of `tensors`."""
    return {each.path: (each.module, tensor_digest(each.tensor)) for each in tensors}


def copies_of(parameters: Mapping[str, torch.Tensor], others: Iterable[Reached]) -> list[tuple[str, Reached]]:
    """Which of `parameters` has its first row, in whatever dtype, as a row or column of which of `others`: that is a copy.

    Rows of one element, or of equal ones, tell nothing and are left out.
    """
    rows: dict[tuple[int, int], list[str]] = {}
    for name, tensor in parameters.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        row = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.ndim else 1)[:1].float()
        if row.numel() > 1 and bool((row != row[0, 0]).any()):
            rows.setdefault((row.numel(), int(_keys(row)[0])), []).append(name)
    if not rows:
        return []
    lengths = {length for length, _ in rows}
    found: dict[tuple[str, str], Reached] = {}
    for each in others:
        tensor = each.tensor.detach()
        if not tensor.is_floating_point() or not tensor.ndim:
            continue
        tables = [tensor.reshape(-1, tensor.shape[-1])]
        if tensor.ndim > 1:
            tables.append(tensor.reshape(-1, tensor.shape[-1]).t())
        for table in tables:
            if table.shape[1] not in lengths:
                continue
            for key in set(_keys(table.float()).tolist()):
                for name in rows.get((table.shape[1], key), ()):
                    found[name, each.path] = each
    return [(name, each) for (name, _), each in found.items()]


def _keys(rows: torch.Tensor) -> torch.Tensor:
    """A number for each row of a float32 table, exact: the same bits give the same number."""
    words = rows.contiguous().view(torch.int32)
    factors = word_factors(rows.device)
    keys = torch.zeros(len(words), dtype=torch.int64, device=rows.device)
    for start in range(0, words.shape[1], len(factors)):
        part = words[:, start : start + len(factors)]
        keys = keys * 31 + (part * factors[: part.shape[1]]).sum(dim=1)
    return keys


def _walk(value: Any, path: str, seen: dict[int, Any], depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if depth > MAX_DEPTH or isinstance(value, (str, bytes, int, float, type(None), type, types.ModuleType)):
        return
    if id(value) in seen:
        return
    seen[id(value)] = value  # kept, so that no other object gets its identity
    if isinstance(value, Mapping):
        for key, each in list(value.items()):
            if key not in _SKIPPED_ATTRIBUTES:
                yield from _walk(each, f"{path}.{key}", seen, depth + 1)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for index, each in enumerate(value):
            yield from _walk(each, f"{path}[{index}]", seen, depth + 1)
    elif isinstance(value, functools.partial):
        for name, part in (("func", value.func), ("args", value.args), ("keywords", value.keywords)):
            yield from _walk(part, f"{path}.{name}", seen, depth + 1)
    elif isinstance(value, types.MethodType):
        yield from _walk(value.__self__, f"{path}.__self__", seen, depth + 1)
    elif isinstance(value, types.FunctionType):
        names = value.__code__.co_freevars
        for name, cell in zip(names, value.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            yield from _walk(content, f"{path}.<{name}>", seen, depth + 1)
    elif isinstance(value, torch.nn.Module) or not f"{type(value).__module__}.".startswith(_SKIPPED_CLASSES):
        for name in _slots(type(value)):
            if hasattr(value, name):
                yield from _walk(getattr(value, name), f"{path}.{name}", seen, depth + 1)
        if hasattr(value, "__dict__"):
            yield from _walk(vars(value), path, seen, depth + 1)


def _slots(cls: type) -> tuple[str, ...]:
    """The attributes of its objects that are not in their `__dict__`."""
    return tuple(
        name
        for base in cls.__mro__
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
    )
