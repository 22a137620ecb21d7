"""What does not serve from the memory that a load fills: found before a byte moves, and refused where nobody makes it follow."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

from wt_common import PlanError
from wt_worker.vllm.cpu import detached_convolutions

__all__ = ["detached_views", "refuse_detached_views"]


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
