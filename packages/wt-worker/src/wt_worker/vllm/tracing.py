"""Traces a vLLM model's `load_weights`, on the model that serves, and leaves that as it was."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from wt_worker.checkpoint import persistent_buffers
from wt_worker.placement.plan import Plan
from wt_worker.placement.trace import REPLACED, Target, trace

__all__ = ["SET_BY_VLLM", "checkpoint_buffers", "skipped_names", "trace_model"]


def trace_model(
    model: torch.nn.Module,
    rows: Sequence[tuple[str, torch.dtype, Sequence[int]]],
    optional: Collection[str] = (),
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Plan, list[str]]:
    """Where `model.load_weights` puts the checkpoint tensors that `rows` announces, and attributes that it sets to new tensors.

    `optional` and `aliases` are as for `trace`; the model's own persistent buffers are its probes, except those that vLLM sets.

    To be called with the model prepared for a layerwise reload: on the meta device, with loaders that would process a layer when
    it is complete. The original loaders are called in their stead.

    Raises:
        TraceError: the loader raised.
    """
    skipped = skipped_names(model)
    registered = {(module, leaf): tensor for module, leaf, tensor in _tensors(model)}
    attributes = {module: dict(vars(module)) for module in model.modules()}
    announced = {name for name, _, _ in rows}
    probes = [
        (name, buffer.dtype, tuple(buffer.shape))
        for name, buffer in checkpoint_buffers(model).items()
        if name not in announced
    ]
    counts: dict[int, int] = {}
    replaced: list[tuple[torch.nn.Module, str]] = []
    made: list[str] = []
    with _original_loaders(model, counts):
        try:
            plan = trace(
                rows,
                list(_targets(model)),
                lambda pairs: model.load_weights(pair for pair in pairs if pair[0] not in skipped),  # type: ignore[operator]
                counts,
                optional=optional,
                aliases=aliases,
                probes=probes,
            )
        finally:
            replaced += _put_back(model, registered)
            made += _put_back_attributes(model, attributes)
    if replaced:
        plan = _with_replaced(model, plan, replaced)
    return plan, made


SET_BY_VLLM = {
    "_q_scale": "scales of attention, 1 unless a checkpoint has others, which then come under names of their own (attention.py)",
    "_k_scale": "the same",
    "_v_scale": "the same",
    "_prob_scale": "the same",
    "expert_map": "which expert is on which rank (fused_moe/routed_experts.py)",
    "expert_mask": "the same",
}
"""Ends of the names of persistent buffers that vLLM computes by itself, and why no trainer need send them."""


def checkpoint_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's persistent buffers that a checkpoint may fill: not those that vLLM sets itself."""
    ends = tuple(SET_BY_VLLM)
    return {name: buffer for name, buffer in persistent_buffers(model).items() if not name.endswith(ends)}


def skipped_names(model: torch.nn.Module) -> set[str]:
    """Further names of an embedding that is its model's output head too, as the same module.

    vLLM skips them, but from 0.30 on raises unless the first name is in the same batch.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    names = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, VocabParallelEmbedding):
            names[f"{prefix}.weight"] = module
    first = {module: name for name, module in reversed(names.items())}
    return names.keys() - first.values()


def _tensors(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):  # noqa: SLF001  # torch has no way that keeps duplicates
            for leaf, tensor in tensors.items():
                if tensor is not None:
                    yield module, leaf, tensor


def _targets(model: torch.nn.Module) -> Iterator[Target]:
    """Whole parameters before views of them, parameters before buffers: the first stands for a storage."""
    found: list[tuple[tuple[bool, int], Target]] = []
    for prefix, module in model.named_modules():
        optional = module._non_persistent_buffers_set  # noqa: SLF001  # torch has no other way
        for is_buffer, tensors in ((False, module._parameters), (True, module._buffers)):  # noqa: SLF001  # as above
            for leaf, tensor in tensors.items():
                if tensor is not None:
                    name = f"{prefix}.{leaf}" if prefix else leaf
                    expected = getattr(tensor, "weight_loader_numel", None)  # vLLM 0.31 and later: without padding
                    target = Target(name, prefix, tensor, expected, leaf in optional)
                    found.append(((is_buffer, -tensor.numel()), target))
    found.sort(key=lambda each: each[0])
    seen: set[int] = set()
    for _, target in found:
        if id(target.tensor) not in seen:
            seen.add(id(target.tensor))
            yield target


@contextmanager
def _original_loaders(model: torch.nn.Module, counts: dict[int, int]) -> Iterator[None]:
    """Within it, each tensor has its own loader, which `counts`, by the tensor's id, says to be running."""
    before: list[tuple[torch.Tensor, Any]] = []
    for _, _, tensor in _tensors(model):
        loader = getattr(tensor, "weight_loader", None)
        if loader is not None and id(tensor) not in counts:
            before.append((tensor, loader))
            while getattr(loader, "__name__", "") == "online_process_loader":
                loader = loader.__wrapped__
            tensor.weight_loader = _counted(loader, counts, id(tensor))  # type: ignore[attr-defined]  # vLLM's
        counts.setdefault(id(tensor), 0)
    try:
        yield
    finally:
        for tensor, loader in before:
            tensor.weight_loader = loader  # type: ignore[attr-defined]  # vLLM's


def _counted(loader: Callable[..., Any], counts: dict[int, int], key: int) -> Callable[..., Any]:
    @functools.wraps(loader)
    def load(*args: Any, **kwargs: Any) -> Any:
        counts[key] += 1
        try:
            return loader(*args, **kwargs)
        finally:
            counts[key] -= 1

    return load


def _put_back(
    model: torch.nn.Module, registered: dict[tuple[torch.nn.Module, str], torch.Tensor]
) -> Iterator[tuple[torch.nn.Module, str]]:
    """What the loader replaced or added is gone, and what it had replaced, which is returned, is back."""
    for module, leaf, tensor in list(_tensors(model)):
        before = registered.get((module, leaf))
        if before is tensor:
            continue
        is_parameter = leaf in module._parameters  # noqa: SLF001  # as above
        store: dict[str, Any] = module._parameters if is_parameter else module._buffers  # noqa: SLF001  # as above
        if before is None:
            del store[leaf]
        else:
            store[leaf] = before
            yield module, leaf


def _put_back_attributes(model: torch.nn.Module, attributes: dict[torch.nn.Module, dict[str, Any]]) -> Iterator[str]:
    """Attributes that the loader set are as before; returned are those that were, or had become, tensors of a module."""
    for prefix, module in model.named_modules():
        before = attributes.get(module, {})
        for name in {*before, *vars(module)}:
            then, now = before.get(name), vars(module).get(name)
            if now is then:
                continue
            if name in before:
                vars(module)[name] = then
            else:
                del vars(module)[name]
            if any(isinstance(each, torch.Tensor) for each in (then, now)):
                yield f"{prefix}.{name}"


def _with_replaced(model: torch.nn.Module, plan: Plan, replaced: list[tuple[torch.nn.Module, str]]) -> Plan:
    """`plan`, in which the parameters that the loader replaced have that as their problem."""
    prefixes = {module: prefix for prefix, module in model.named_modules()}
    names = {f"{prefixes[module]}.{leaf}" for module, leaf in replaced if module in prefixes}
    return replace(
        plan,
        parameters=tuple(
            replace(each, problem=each.problem or REPLACED) if each.name in names else each for each in plan.parameters
        ),
    )
