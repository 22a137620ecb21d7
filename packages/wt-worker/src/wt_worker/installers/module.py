"""Copies tensors into a plain torch module by parameter name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from wt_common import PlanError, Side
from wt_common.session import Metadata
from wt_worker.installers.base import InstallResult

__all__ = ["ModuleInstaller"]


class ModuleInstaller:
    """`Installer` for a module whose checkpoint names are its `named_parameters()`, tied ones under any of their names.

    Writes in place, so pointers stay valid; a copy casts between floating dtypes and moves between devices.
    """

    def __init__(self, model: torch.nn.Module, *, check_cover: bool = True) -> None:
        self.check_cover = check_cover
        self._targets = dict(model.named_parameters(remove_duplicate=False))
        self._written: set[str] = set()
        self._filled: dict[int, str] = {}  # the name under which each parameter was written

    def check(self, metadata: Metadata) -> dict[str, str]:
        """Every name has a parameter of its shape, every parameter a name; returns the dtypes that differ. Raises PlanError."""
        casts = {}
        for name, dtype_name, shape in zip(metadata.names, metadata.dtype_names, metadata.shapes, strict=True):
            target = self._targets.get(name)
            if target is None:
                raise _plan_error(name, f"parameter {name!r}: the model has none of this name")
            if list(target.shape) != shape:
                raise _plan_error(
                    name, f"parameter {name!r}: the model has shape {list(target.shape)}, the trainer sends {shape}"
                )
            dtype = getattr(torch, dtype_name, None)
            if not isinstance(dtype, torch.dtype):
                raise _plan_error(name, f"parameter {name!r}: torch has no dtype {dtype_name!r}")
            if dtype != target.dtype and not (dtype.is_floating_point and target.dtype.is_floating_point):
                raise _plan_error(name, f"parameter {name!r}: the model has {target.dtype}, the trainer sends {dtype}")
            if dtype != target.dtype:
                casts[name] = str(target.dtype).rpartition(".")[2]
        missing = self._not_covered(metadata.names)
        if missing and self.check_cover:
            raise _plan_error(
                missing[0], f"the trainer does not send {len(missing)} of the model's parameters: {missing[:5]}"
            )
        return casts

    def begin(self) -> None:
        """Nothing is written yet."""
        self._written.clear()
        self._filled.clear()

    def place(self, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        """The parameter itself, where it is contiguous on the CPU, of that dtype, and not written under a tied name."""
        parameter = self._targets[name]
        target = parameter.detach()
        is_filled = id(parameter) in self._filled
        if is_filled or target.dtype != dtype or not target.is_contiguous() or target.device.type != "cpu":
            return None
        self._written.add(name)
        self._filled[id(parameter)] = name
        return target.reshape(-1).view(torch.uint8)

    @torch.no_grad()
    def install(self, batch: Sequence[tuple[str, torch.Tensor]]) -> None:
        """The tensors of `batch` are in the model.

        Raises:
            PlanError: two names that the model ties came with different values; a checkpoint without ties does not fit it.
        """
        for name, tensor in batch:
            target = self._targets[name]
            first = self._filled.setdefault(id(target), name)
            self._written.add(name)
            if first == name:
                target.copy_(tensor)
            elif not _are_equal(target, tensor.to(target.device, target.dtype)):
                raise _plan_error(
                    name, f"parameter {name!r}: the model ties it to {first!r}, the trainer sends other values for it"
                )

    def finish(self) -> InstallResult:
        """The model holds the round's weights."""
        return InstallResult(num_parameters=len(self._written), not_synced=tuple(self._not_covered(self._written)))

    def abort(self) -> bool:
        """Whether anything was written; the model can serve at any time."""
        return bool(self._written)

    def _not_covered(self, names: Sequence[str] | set[str]) -> list[str]:
        covered = {id(self._targets[name]) for name in names if name in self._targets}
        return [name for name, target in self._targets.items() if id(target) not in covered]


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Byte by byte, so that NaN equals itself."""
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one.detach(), other)))


def _plan_error(name: str, message: str) -> PlanError:
    return PlanError(message, side=Side.WORKER, phase="update", param=name)
