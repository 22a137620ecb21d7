"""What does not serve as a load fills it, by memory, shape or dtype: found before a byte moves, or refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

from wt_common import PlanError
from wt_worker.placement.plan import Plan
from wt_worker.vllm.cpu import detached_convolutions, emptied_source
from wt_worker.vllm.derived import is_attention
from wt_worker.vllm.layers import Layer

__all__ = ["detached_views", "refuse_detached_views", "refuse_other_shapes", "rounded_names"]


def detached_views(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Buffers that were views of a parameter before it was processed, and are no longer; and that parameter.

    vLLM does not record such a buffer for its reload, since its memory is the parameter's (`reload/meta.py`). That holds as long
    as the parameter keeps its memory. A buffer that is not recorded, and has as many elements as a parameter below its module was
    loaded with, is taken for one.
    """
    prefixes = {layer: prefix for prefix, layer in model.named_modules()}
    for prefix, layer in model.named_modules():
        recorded = get_layerwise_info(layer).restore_metadata[1]
        leaves = layer._non_persistent_buffers_set - recorded.keys() - SKIP_TENSORS  # noqa: SLF001  # torch has no other way
        for leaf in sorted(leaves):
            view = layer._buffers.get(leaf)  # noqa: SLF001  # as above
            if view is None or not view.numel():
                continue
            memory = {each.untyped_storage().data_ptr() for each in layer.parameters()}
            if view.untyped_storage().data_ptr() in memory:
                continue
            for below in layer.modules():
                for name, loaded in get_layerwise_info(below).restore_metadata[0].items():
                    if loaded.numel() == view.numel():
                        yield f"{prefix}.{leaf}", f"{prefixes[below]}.{name}"


def rounded_names(model: torch.nn.Module, plan: Plan) -> dict[str, torch.dtype]:
    """By checkpoint name, the narrower dtype that its values had in the first load, where the parameter serves in a wider one.

    vLLM moves no bias to the meta device, so that its loader sees what serves. On a CPU with AMX that is a float32 copy of what
    was loaded (`layers/utils.py`), and values that were not rounded would be another model than a fresh load. A linear layer
    makes its bias, which has an `output_dim`, in the dtype that it keeps as `params_dtype`.
    """
    first: dict[str, torch.dtype] = {}
    for prefix, layer in model.named_modules():
        bias, made = layer._parameters.get("bias"), getattr(layer, "params_dtype", None)  # noqa: SLF001  # without torch's search
        if bias is None or not isinstance(made, torch.dtype) or not hasattr(bias, "output_dim"):
            continue
        if made.is_floating_point and made != bias.dtype and torch.promote_types(made, bias.dtype) == bias.dtype:
            first[f"{prefix}.bias"] = made
    found = {}
    for name in plan.names:
        dtypes = {first.get(parameter) for parameter in name.parameters}
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        if dtype is not None and getattr(torch, name.dtype_name).is_floating_point:
            found[name.name] = dtype
    return found


def refuse_other_shapes(model: torch.nn.Module, plan: Plan, layers: Mapping[str, Layer]) -> None:
    """Raise where a parameter serves in another shape than it is loaded with, and its layer's own processing does not do that.

    vLLM's reload copies what was loaded and processed into what served before. If the shapes differ, it fails in the middle of a
    round, and in every later one.

    Raises:
        PlanError: it names the first such parameter.
    """
    live = dict(model.named_parameters(remove_duplicate=False))
    emptied = {id(emptied_source(layer)) for layer in model.modules() if is_attention(layer)}
    for layer in layers.values():
        is_unprocessed = layer.is_inert or getattr(layer.module, "_cpu_skip_gemm_dispatch", False)
        if not is_unprocessed or id(layer.module) in emptied or is_attention(layer.module):
            continue
        for name in layer.parameters:
            shape = plan.by_parameter[name].shape
            if name in live and tuple(live[name].shape) != shape:
                raise PlanError(
                    f"{name} is loaded with shape {shape} and serves with {tuple(live[name].shape)}, and its own layer does not "
                    "change it: what else is made from it cannot be known, and vLLM's reload would fail in the middle of a "
                    "round; this model cannot be updated on this platform, report it",
                    side="worker",
                    phase="update",
                    param=name,
                )


def refuse_detached_views(model: torch.nn.Module) -> None:
    """Raise where the model computes with memory that a reload does not reach, and that nobody fills after a round.

    Raises:
        PlanError: it names the first such buffer.
    """
    followed = {f"{name}.conv_weights" for name, _ in detached_convolutions(model)}
    for view, parameter in detached_views(model):
        if view not in followed:
            raise PlanError(
                f"{view} was a view of {parameter}, which was given other memory after the load: a reload does not reach the "
                "view, and the model would go on with the old weights in it; this model cannot be updated on this platform, "
                "report it",
                side="worker",
                phase="update",
                param=parameter,
            )
