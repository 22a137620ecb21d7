"""Which elements of a model's tensors its loaders write, seen from below the loaders."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from wt_worker.placement.plan import Box, count_elements

__all__ = ["Target", "WriteRecorder", "tied_storages"]


@dataclass(slots=True)
class Target:
    """A parameter or buffer that loaders can write, and the boxes of it that they wrote."""

    name: str
    leaf: str
    layer: torch.nn.Module
    tensor: torch.Tensor
    is_optional: bool
    """A non-persistent buffer: vLLM keeps the old one where no new one came."""
    boxes: set[Box] = field(default_factory=set)
    """In bytes of the storage."""
    is_bypassed: bool = False
    """A loader wrote the meta tensor on its own, so that vLLM will not write the real one."""

    def is_processed(self) -> bool:
        """Whether vLLM has replaced the meta tensor, as it does just before it writes the old one."""
        now = getattr(self.layer, self.leaf, None)
        return self.tensor.is_meta and isinstance(now, torch.Tensor) and not now.is_meta

    def num_written(self) -> int:
        """Elements written, each counted once."""
        return count_elements(self.boxes) // self.tensor.itemsize

    def num_expected(self) -> int:
        """Elements that a checkpoint fills; vLLM 0.31 and later says which parameters are padded."""
        return int(getattr(self.tensor, "weight_loader_numel", self.tensor.numel()))


class WriteRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """While entered, notes what is written into the model's tensors.

    Loaders write by `copy_`, and padding (the last rows of a vocabulary) by `fill_` or `zero_`; any
    other operation in place counts as a change, not as cover. vLLM calls each loader once on the
    meta tensors, which is what is seen here, and once more when it processes the layer.

    `is_kept(target)` says whether the load that is writing is one that vLLM will repeat.

    Attributes:
        targets: what is watched, by storage.
        has_written_live: whether a watched tensor that the model serves from was written.
        conflicts: tied parameters that were written twice, with different values.
    """

    def __init__(self, model: torch.nn.Module, is_kept: Callable[[Target], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.targets: dict[torch.UntypedStorage, Target] = {}
        self._is_kept = is_kept
        self.has_written_live = False
        self.conflicts: list[str] = []
        self._tied = tied_storages(model)
        self._written_tied: set[torch.UntypedStorage] = set()

    def watch(self, model: torch.nn.Module, layers: Collection[torch.nn.Module]) -> None:
        """Writes into the tensors that `layers` of `model` have now are noted from now on."""
        for prefix, layer in model.named_modules():
            if layer not in layers:
                continue
            optional = layer._non_persistent_buffers_set  # noqa: SLF001 -- torch has no other way
            for leaf, tensor in (
                *layer.named_parameters(recurse=False),
                *layer.named_buffers(recurse=False),
            ):
                name = f"{prefix}.{leaf}" if prefix else leaf
                target = Target(name, leaf, layer, tensor, leaf in optional)
                self.targets.setdefault(tensor.untyped_storage(), target)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        operation = func.overloadpacket.__name__
        if operation.endswith("_") and args and isinstance(args[0], torch.Tensor):
            self._note(operation, *args)
        return func(*args, **(kwargs or {}))

    def _note(self, operation: str, written: torch.Tensor, source: Any = None, *_: Any) -> None:
        """Note one operation in place."""
        storage = written.untyped_storage()
        if isinstance(source, torch.Tensor) and _is_same(written, source):
            return  # vLLM copies onto itself what it never moved: that is no write, and nothing was sent
        if storage in self._tied and isinstance(source, torch.Tensor):
            if storage in self._written_tied and not torch.equal(written, source):
                self.conflicts.append(self._tied[storage])
            self._written_tied.add(storage)
        target = self.targets.get(storage)
        if target is None:
            return
        is_live = not target.tensor.is_meta
        if is_live:
            self.has_written_live = True
        elif not self._is_kept(target):
            target.is_bypassed = True
        if operation in {"copy_", "fill_", "zero_"} and written.numel():
            size = written.itemsize
            strides = tuple(step * size for step in written.stride())
            start = int(written.storage_offset()) * size
            target.boxes.add(Box(start, (*written.shape, size), (*strides, 1)))


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are the same elements of the same memory, in the same order."""
    if one.is_meta or one.untyped_storage() is not other.untyped_storage():
        return False
    return (one.storage_offset(), one.shape, one.stride()) == (other.storage_offset(), other.shape, other.stride())


def tied_storages(model: torch.nn.Module) -> dict[torch.UntypedStorage, str]:
    """Storages of the parameters that more than one layer has, with the last of their names."""
    seen: set[int] = set()
    tied = {}
    for prefix, layer in model.named_modules():
        for leaf, parameter in layer.named_parameters(recurse=False):
            if id(parameter) in seen:
                tied[parameter.untyped_storage()] = f"{prefix}.{leaf}"
            seen.add(id(parameter))
    return tied
