"""Which elements of a model's tensors its loaders write, seen from below the loaders."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Target", "WriteRecorder", "tied_storages"]

_Box = tuple[int, tuple[int, ...], tuple[int, ...]]  # first byte, shape and strides, in bytes


@dataclass(slots=True)
class Target:
    """A parameter or buffer that loaders can write, and the boxes of it that they wrote."""

    name: str
    leaf: str
    layer: torch.nn.Module
    tensor: torch.Tensor
    is_optional: bool  # a non-persistent buffer: vLLM keeps the old one if no new one came
    boxes: set[_Box] = field(default_factory=set)

    def is_processed(self) -> bool:
        """Whether vLLM has replaced the meta tensor, which it does just before it writes the old one."""
        return self.tensor.is_meta and not getattr(self.layer, self.leaf, self.tensor).is_meta

    def num_written(self) -> int:
        """Elements written, each counted once."""
        spans = sorted(
            (start, start + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)))
            for start, shape, strides in self.boxes
        )
        if all(last < start for (_, last), (start, _) in pairwise(spans)):
            num_bytes = sum(math.prod(shape) for _, shape, _ in self.boxes)
        else:  # interleaved or repeated
            written = torch.zeros(self.tensor.untyped_storage().nbytes(), dtype=torch.bool)
            for start, shape, strides in self.boxes:
                written.as_strided(shape, strides, start).fill_(True)
            num_bytes = int(written.count_nonzero())
        return num_bytes // self.tensor.itemsize

    def num_expected(self) -> int:
        """Elements that a checkpoint fills: all but the padding that vLLM 0.31 and later declares."""
        return int(getattr(self.tensor, "weight_loader_numel", self.tensor.numel()))


class WriteRecorder(TorchDispatchMode):
    """While entered, notes what is written into the model's tensors.

    Loaders write by `copy_`, and padding (the last rows of a vocabulary) by `fill_` or `zero_`; any
    other operation in place counts as a change but not as cover. vLLM calls each loader once on the
    meta tensors, which is what is seen here, and once more when it processes the layer.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.targets: dict[torch.UntypedStorage, Target] = {}
        self.has_written_live = False
        self.conflicts: list[str] = []
        self._tied = tied_storages(model)
        self._written_tied: set[torch.UntypedStorage] = set()

    def watch(self, model: torch.nn.Module) -> None:
        """Writes into the tensors that `model` has now are noted from now on."""
        for prefix, layer in model.named_modules():
            persistent = layer.state_dict(keep_vars=True).keys()
            for leaf, tensor in (
                *layer.named_parameters(recurse=False),
                *layer.named_buffers(recurse=False),
            ):
                target = Target(
                    name=f"{prefix}.{leaf}" if prefix else leaf,
                    leaf=leaf,
                    layer=layer,
                    tensor=tensor,
                    is_optional=leaf not in persistent,
                )
                self.targets.setdefault(tensor.untyped_storage(), target)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operation = func.overloadpacket.__name__
        if operation.endswith("_") and args and isinstance(args[0], torch.Tensor):
            self._note(operation, *args)
        return func(*args, **(kwargs or {}))

    def _note(self, operation: str, written: torch.Tensor, source: Any = None, *_: Any) -> None:
        storage = written.untyped_storage()
        if storage in self._tied and isinstance(source, torch.Tensor):
            if storage in self._written_tied and not torch.equal(written, source):
                self.conflicts.append(self._tied[storage])
            self._written_tied.add(storage)
        target = self.targets.get(storage)
        if target is None:
            return
        if not target.tensor.is_meta:
            if isinstance(source, torch.Tensor) and source.untyped_storage() is storage:
                return  # vLLM copies what it left in place onto itself
            self.has_written_live = True
        if operation in {"copy_", "fill_", "zero_"} and written.numel():
            size = written.itemsize
            strides = tuple(step * size for step in written.stride())
            box = (written.storage_offset() * size, (*written.shape, size), (*strides, 1))
            target.boxes.add(box)


def tied_storages(model: torch.nn.Module) -> dict[torch.UntypedStorage, str]:
    """Storages that more than one layer has as a parameter, with the last of its names."""
    seen: set[torch.UntypedStorage] = set()
    tied = {}
    for prefix, layer in model.named_modules():
        for leaf, parameter in layer.named_parameters(recurse=False):
            storage = parameter.untyped_storage()
            if storage in seen:
                tied[storage] = f"{prefix}.{leaf}"
            seen.add(storage)
    return tied
