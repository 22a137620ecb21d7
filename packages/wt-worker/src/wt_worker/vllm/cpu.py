"""On vLLM's CPU platform layers compute with packed copies of their weights; these follow here.

Nothing here does anything on other platforms.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.platforms import current_platform

from wt_worker.vllm.cover import tied_storages

__all__ = [
    "attach_convolution",
    "detached_convolutions",
    "emptied_source",
    "forget_moe_kernels",
    "packed_tied_layers",
    "repack",
    "repack_tied_weights",
]


def forget_moe_kernels(model: torch.nn.Module) -> dict[torch.nn.Module, Any]:
    """Experts get a new kernel when they are processed; returned are the old ones, by layer.

    From 0.28 on, vLLM takes an existing kernel for a sign that the experts' weights need not be
    packed again, which is so on CUDA; on a CPU the weights would be used unpacked.
    """
    kernels: dict[torch.nn.Module, Any] = {}
    if current_platform.is_cpu():
        for layer in model.modules():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, UnquantizedFusedMoEMethod) and method.moe_kernel is not None:
                kernels[layer] = method.moe_kernel
                method.moe_kernel = None
    return kernels


def packed_tied_layers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The layers, with their names, that multiply by a packed copy of a tied weight.

    It is made when vLLM processes the layer, and a tied output head is not processed: its weight arrives
    under the name of the embedding.
    """
    if not current_platform.is_cpu():
        return
    tied = tied_storages(model)
    for name, layer in model.named_modules():
        weight = getattr(layer, "weight", None)
        if hasattr(layer, "cpu_linear") and isinstance(weight, torch.nn.Parameter) and weight.untyped_storage() in tied:
            yield name, layer


def detached_convolutions(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The mixers, with their names, that compute with a view which their convolution's weight has left behind.

    Mamba2 makes the buffer `conv_weights`, a view of `conv1d.weight`. On a CPU that packs convolutions, vLLM then gives the
    weight other memory for the packed bytes, at the first load; the buffer keeps the old memory, and is what the forward reads.
    The layer keeps the weight of its last load, not packed, as well (`layers/utils.py`, `_cpu_unpacked_conv_weight`).
    """
    for name, layer in model.named_modules():
        view, convolution = layer._buffers.get("conv_weights"), layer._modules.get("conv1d")  # noqa: SLF001  # without torch's search
        if view is None or not isinstance(getattr(convolution, "_cpu_unpacked_conv_weight", None), torch.Tensor):
            continue
        if view.untyped_storage().data_ptr() != convolution.weight.untyped_storage().data_ptr():
            yield name, layer


def attach_convolution(layer: Any) -> None:
    """The view of `layer`, one of `detached_convolutions`, has the weight that was loaded last."""
    layer.conv_weights.copy_(layer.conv1d._cpu_unpacked_conv_weight)  # noqa: SLF001  # nobody else keeps it


def emptied_source(attention: torch.nn.Module) -> torch.nn.Module | None:
    """The projection whose weight `attention` has emptied after it took from it what it computes with; None if it has not.

    Latent attention does so on a CPU with AMX (`attention/mla_attention.py`). vLLM's reload would copy the new weight into the
    empty one, and the next processing of the attention layer would read the empty one: both raise, in every round.
    """
    source = attention._modules.get("kv_b_proj")  # noqa: SLF001  # without torch's search
    weight = None if source is None else source._parameters.get("weight")  # noqa: SLF001  # as above
    if source is None or weight is None or weight.is_meta or weight.numel():
        return None
    return None if getattr(getattr(source, "cpu_linear", None), "__closure__", None) else source  # it is packed


def repack_tied_weights(model: torch.nn.Module) -> None:
    """Every layer that multiplies by a tied weight does so by the live one."""
    for _, layer in packed_tied_layers(model):
        repack(layer)


def repack(layer: torch.nn.Module) -> None:
    """`layer` multiplies by the weight that it has now."""
    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
