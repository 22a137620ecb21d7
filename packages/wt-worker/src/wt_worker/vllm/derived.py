"""Which layers of vLLM may be written in place, and what is made from parameters and must be made again.

Both lists are short on purpose: what is not on the first goes through vLLM's loader, round by round, however slow that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers import attention
from vllm.platforms import current_platform

from wt_common import PlanError
from wt_worker.vllm.cpu import attach_convolution, detached_convolutions, emptied_source, packed_tied_layers, repack

__all__ = [
    "IN_PLACE",
    "RECOMPUTED",
    "Entry",
    "is_attention",
    "model_reason",
    "process_attention",
    "recomputed",
    "recomputed_modules",
    "refuse",
    "verdict",
]


@dataclass(frozen=True, slots=True)
class Entry:
    """Layers with one quantization method that may be written in place.

    Attributes:
        method: name of the method's class in `vllm`; empty for layers that have none.
        why: what is known of its processing, and where that was read.
        exception: why a layer with this method may not, all the same; None if it may.
        is_inert: its processing does nothing on this platform, so that equal bytes alone prove a layer.
    """

    method: str
    why: str
    exception: Callable[[Any], str | None]
    is_inert: Callable[[], bool]


def _never() -> bool:
    return False


def _always() -> bool:
    return True


def _not_on_a_cpu() -> bool:
    return not current_platform.is_cpu()


def _packed(layer: Any) -> str | None:
    """On a CPU, a layer multiplies with what `cpu_linear` holds: a packed copy, or nothing, and then with the weight."""
    if current_platform.is_cpu():
        if getattr(getattr(layer, "cpu_linear", None), "__closure__", None):
            return "multiplies with a packed copy of its weight (cpu_linear)"
        return None
    return None if current_platform.is_cuda() else f"not known on {current_platform.device_type}"


def _repacked_experts(layer: Any) -> str | None:
    backend = getattr(getattr(layer.quant_method, "unquantized_backend", None), "name", "unknown")
    if current_platform.is_cuda() and backend in {"TRITON", "BATCHED_TRITON"}:
        return None
    return f"its experts are repacked for the kernel ({backend})"


def _no_exception(layer: Any) -> str | None:
    return "an attention layer, which vLLM processes on its own" if is_attention(layer) else None


IN_PLACE: tuple[Entry, ...] = (
    Entry(
        "",
        "norms, sinks, state-space parameters: vLLM processes only layers with a method, and attention "
        "(model_loader/utils.py, process_weights_after_loading)",
        _no_exception,
        _always,
    ),
    Entry(
        "UnquantizedLinearMethod",
        "its processing does nothing on CUDA; on a CPU it packs, unless no packed kernel is there (layers/linear.py, "
        "layers/utils.py, dispatch_cpu_unquantized_gemm)",
        _packed,
        _not_on_a_cpu,
    ),
    Entry(
        "UnquantizedEmbeddingMethod",
        "as for linear layers; the weight stays beside the packed copy that a CPU multiplies with "
        "(layers/vocab_parallel_embedding.py)",
        _packed,
        _not_on_a_cpu,
    ),
    Entry(
        "UnquantizedFusedMoEMethod",
        "the Triton kernel takes the weights as they are loaded; all others reorder or swap them "
        "(fused_moe/oracle/unquantized.py)",
        _repacked_experts,
        _never,
    ),
)
"""What may be written in place, once it is proved for the layer at hand."""


@dataclass(frozen=True, slots=True)
class Recomputed:
    """State made from parameters that is made again after every round.

    Attributes:
        what: it, and where it is made.
        find: those of a model: what holds it, as (module's name, function that makes it again).
    """

    what: str
    find: Callable[[torch.nn.Module, Any], Iterator[tuple[str, Callable[[], object]]]]


def _attention_state(model: torch.nn.Module, model_config: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    for name, layer in model.named_modules():
        if is_attention(layer) and not _has_constants_only(layer):
            yield name, lambda layer=layer: process_attention(layer, model_config)  # type: ignore[misc]


def process_attention(layer: Any, model_config: Any) -> None:
    """An attention layer's own state follows the parameters that it is made from, unless they are gone since it was made."""
    if emptied_source(layer) is None:
        layer.process_weights_after_loading(model_config.dtype)


def _has_constants_only(layer: Any) -> bool:
    """Whether processing an attention layer sets numbers that no weight is in: it has none, nor scales, nor does its kernel look.

    That is so for most, and processing each takes 0.1 ms: a twentieth of a round of 16 GB in all.
    """
    if type(layer) is not attention.Attention or getattr(layer, "quant_config", None) is not None:
        return False
    if next(layer.parameters(), None) is not None:
        return False
    kernel = type(getattr(layer, "impl", None))
    owner = next((each for each in kernel.__mro__ if "process_weights_after_loading" in vars(each)), None)
    return owner is not None and owner.__module__ == "vllm.v1.attention.backend"  # whose own does nothing


def _combined_gates(model: torch.nn.Module, _: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    for name, layer in model.named_modules():
        if hasattr(layer, "_combined_gate_weight"):
            yield name, lambda layer=layer: _combine_gates(layer)  # type: ignore[misc]


def _combine_gates(layer: Any) -> None:
    combined = layer._combined_gate_weight  # noqa: SLF001  # nobody else makes it again
    if combined is not None:  # the first forward makes it
        combined.copy_(torch.cat([layer.gate.weight, layer.shared_expert_gate.weight], dim=0))


def _tied_heads(model: torch.nn.Module, _: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    for name, layer in packed_tied_layers(model):
        yield name, lambda layer=layer: repack(layer)  # type: ignore[misc]


def _convolutions(model: torch.nn.Module, _: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    for name, layer in detached_convolutions(model):
        yield name, lambda layer=layer: attach_convolution(layer)  # type: ignore[misc]


RECOMPUTED: tuple[Recomputed, ...] = (
    Recomputed(
        "an attention layer's own state: dequantized MLA factors, float32 sinks, scales as numbers "
        "(attention/attention.py, mla_attention.py, v1/attention/backends/flashinfer.py)",
        _attention_state,
    ),
    Recomputed(
        "a router's and a shared expert's gate, concatenated at the first forward and never again "
        "(fused_moe/runner/moe_runner.py)",
        _combined_gates,
    ),
    Recomputed(
        "on a CPU, the packed copy that a tied output head multiplies with, which vLLM packs once "
        "(vocab_parallel_embedding.py, process_weights_after_loading)",
        _tied_heads,
    ),
    Recomputed(
        "on a CPU that packs convolutions, a mixer's view of its convolution's weight, which vLLM leaves behind "
        "(mamba/mamba_mixer2.py, layers/utils.py, dispatch_cpu_unquantized_gemm)",
        _convolutions,
    ),
)
"""What is made again at the end of every round."""


def is_attention(layer: Any) -> bool:
    """Whether vLLM processes `layer` after all others, and keeps its tensors through a reload."""
    if hasattr(attention, "is_deferred_attention_layer"):
        return bool(attention.is_deferred_attention_layer(layer))
    return isinstance(layer, (attention.Attention, attention.MLAAttention))  # 0.26 and 0.27


def recomputed(model: torch.nn.Module, model_config: Any) -> list[tuple[str, Callable[[], object]]]:
    """What makes everything of `RECOMPUTED` follow the model's parameters, where it is; and the module that holds it."""
    return [found for entry in RECOMPUTED for found in entry.find(model, model_config)]


def recomputed_modules(model: torch.nn.Module, model_config: Any) -> set[str]:
    """The modules whose own state is made again after every round."""
    return {name for name, _ in recomputed(model, model_config)}


def verdict(layer: torch.nn.Module) -> tuple[str | None, bool]:
    """Why `layer` may not be written in place (None if it may), and whether its processing does nothing."""
    method = getattr(layer, "quant_method", None)
    name = "" if method is None else type(method).__name__
    known = method is None or type(method).__module__.partition(".")[0] == "vllm"
    entry = next((entry for entry in IN_PLACE if entry.method == name), None) if known else None
    if entry is None:
        return f"quantization method {name} is not known to leave weights as they are loaded", False
    return entry.exception(layer), entry.is_inert()


def model_reason(model: torch.nn.Module, vllm_config: Any) -> str | None:
    """Why nothing of `model` may be written in place; None if the layers decide."""
    if getattr(model, "_do_torchao_reload", False):
        return "torchao reloads the model as a whole"
    hook = getattr(type(model), "process_weights_after_loading", None)
    if hook is not None:
        return f"{type(model).__name__} processes its weights as a whole after loading"
    offload = getattr(vllm_config, "offload_config", None)
    uva = getattr(getattr(offload, "uva", None), "cpu_offload_gb", 0) or getattr(
        getattr(vllm_config, "cache_config", None), "cpu_offload_gb", 0
    )
    if uva or getattr(getattr(offload, "prefetch", None), "offload_group_size", 0):
        return "weights are offloaded to the host's memory"
    if getattr(vllm_config, "lora_config", None) is not None:
        return "LoRA layers wrap the model's own"
    return None


def refuse(vllm_config: Any) -> None:
    """Raise where neither way of installing gives the right weights.

    Raises:
        PlanError: experts are moved while the server runs, and vLLM's loaders know their first places only.
    """
    parallel = getattr(vllm_config, "parallel_config", None)
    if getattr(parallel, "dcp_q_replicate", False):
        raise PlanError(
            "decode context parallelism with replicated queries: attention layers gather weights over all ranks when they are "
            "processed, which hangs as soon as one rank fails; start the server without dcp_q_replicate",
            side="worker",
            phase="update",
        )
    if getattr(parallel, "enable_eplb", False):
        raise PlanError(
            "expert parallel load balancing is on: experts move at run time, and vLLM's loaders write each where it was at the "
            "start; start the server without --enable-eplb",
            side="worker",
            phase="update",
        )
