"""A layer whose loader goes behind vLLM's back: filled as the plan says, and then processed by vLLM as after a load."""

from __future__ import annotations

import torch

from wt_worker.placement.binding import Landing
from wt_worker.placement.plan import NamePlan, Plan
from wt_worker.vllm.layers import Layer
from wt_worker.vllm.reload import LayerwiseReload

__all__ = ["Replay"]


class Replay:
    """One layer's, in one round. The reload has begun, and will load nothing into this layer."""

    def __init__(self, reload: LayerwiseReload, plan: Plan, layer: Layer) -> None:
        self._reload = reload
        self._plan = plan
        self._layer = layer
        self._missing = {name.name for parameter in layer.parameters for name, _ in plan.copies_into.get(parameter, ())}
        self._tensors: dict[str, torch.Tensor] = {}
        self._is_processed = False

    def take(self, name: NamePlan, tensor: torch.Tensor) -> None:
        """Put `tensor` where it belongs in this layer; the last one completes it."""
        if not self._tensors:
            self._materialize()
        flat = tensor.contiguous().reshape(-1)
        for copy in name.copies:
            if copy.parameter in self._tensors:
                Landing(copy, self._tensors[copy.parameter]).region(copy).copy_(copy.source.of(flat))
        self._missing.discard(name.name)
        if not self._missing:
            self.finish()

    def finish(self) -> None:
        """What has come is in the model; nothing happens where nothing has."""
        if self._is_processed or not self._tensors:
            return
        self._is_processed = True
        for parameter in self._layer.parameters:
            for fill in self._plan.fills_of.get(parameter, ()):
                fill.write(self._tensors[parameter])
        self._reload.process(self._layer.module)

    def _materialize(self) -> None:
        leaves = {parameter: parameter.rpartition(".")[2] for parameter in self._layer.parameters}
        if any(not getattr(self._layer.module, leaf).is_meta for leaf in leaves.values()):
            self._reload.touched = True  # a bias stays where it serves
        self._reload.materialize(self._layer.module)
        self._tensors = {name: getattr(self._layer.module, leaf).detach() for name, leaf in leaves.items()}
