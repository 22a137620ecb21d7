"""What an engine asks of whatever puts received weights into its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from wt_common.session import Metadata

__all__ = ["InstallResult", "Installer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallResult:
    """What one round did to the model.

    Attributes:
        num_parameters: parameters of the model that were written (fused ones count once).
        not_synced: names of the model's other parameters, which still hold what they held before.
    """

    num_parameters: int
    not_synced: tuple[str, ...]


class Installer(Protocol):
    """Puts one round of weights into a model at a time.

    A round, all on the worker's own thread or all on one helper of it:

    0. `check(metadata)`, before a byte moves.
    1. `begin()`. From here on the model cannot generate.
    2. For each parameter `place(name, dtype)`, whose bytes are then written to where it says; those that have no place go to
       `install(batch)`, any number of times. Together they cover whatever the round updates.
    3. `finish()`. The model serves the new weights.
    4. `abort()`, instead of or after any of these, whenever the round fails, also when another
       rank failed and this one did not. The model can serve again; the result says which weights.

    After 3 or 4 the next `begin()` starts from a clean state, whatever went wrong before.
    """

    check_cover: bool
    """Whether something installed in part only is refused. Off for tests that withhold a parameter on purpose."""

    def check(self, metadata: Metadata) -> dict[str, str]:
        """The model has a place for every parameter that `metadata` announces, as far as can be told before a load.

        Returns:
            By name, the dtype in which the model holds a parameter that `metadata` declares in another floating dtype, as
            far as that is known. What arrives in the declared dtype all the same is cast when it is installed.

        Raises:
            PlanError: it has not; the text names the parameter. Nothing was touched.
        """

    def begin(self) -> None:
        """The model takes weights and cannot generate until `finish` or `abort`."""

    def place(self, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        """Where in the model the bytes of parameter `name`, sent as `dtype`, can be copied to: 1-D uint8 on the CPU.

        None where it must go through `install`. All of it is written before `finish`, unless the round fails.
        """

    def install(self, batch: Sequence[tuple[str, torch.Tensor]]) -> None:
        """The tensors of `batch`, under their checkpoint names, are on their way into the model.

        They belong to the installer from now on: it may keep them until the round ends, and may
        write into them. Nobody else reads or writes them any more.

        Raises:
            PlanError: the model has no place for a tensor, or it came twice.
        """

    def finish(self) -> InstallResult:
        """The model serves what was installed.

        Raises:
            PlanError: something was installed in part only. The round is aborted by then.
        """

    def abort(self) -> bool:
        """The model can serve: with its old weights where they were not replaced as a whole.

        May be called at any time and any number of times.

        Returns:
            Whether any byte of the model may have changed since `begin` (the model is poisoned
            unless another full round follows); False is a promise that none did.
        """
