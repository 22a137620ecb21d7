"""What an engine asks of whatever puts received weights into its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from wt_common.session import Metadata
from wt_worker.placement.binding import Binding, Landing

__all__ = ["InstallResult", "Installer", "Prepared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """How one round's parameters will be installed.

    Attributes:
        casts: by name, the dtype in which the model holds a parameter that is declared in another floating dtype, as far as
            that is known. What arrives in the declared dtype all the same is cast when it is installed.
        binding: what is written in place.
        not_in_place: the model's other layers, by the reason.
        not_synced: names of the model's parameters, and of buffers that a checkpoint fills, that the round will not write, as far
            as that is known.
        tied: names that the model serves from the memory of another one, whether the loader drops them or writes that again;
            each with that one.
    """

    casts: dict[str, str] = field(default_factory=dict)
    binding: Binding
    not_in_place: dict[str, list[str]] = field(default_factory=dict)
    not_synced: tuple[str, ...] = ()
    tied: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallResult:
    """What one round did to the model.

    Attributes:
        not_synced: names of the model's parameters, and of buffers that a checkpoint fills, that were not written, and still hold
            what they held before.
    """

    not_synced: tuple[str, ...]


class Installer(Protocol):
    """Puts one round of weights into a model at a time; one for each model, for the life of the engine.

    A round, all on the worker's own thread or all on one helper of it:

    0. `prepare(metadata, digest)`, before a byte moves.
    1. `begin()`. From here on the model cannot generate.
    2. For each parameter `landings(name)`, whose bytes are then written there; those that are not written in place go to
       `install(batch)`, any number of times. Together they cover whatever the round updates.
    3. `finish()`. The model serves the new weights.
    4. `commit()`, when every rank has verified that it installed what was sent; or
       `abort()`, instead of or after any of these, whenever the round fails, also when another
       rank failed and this one did not. The model can serve again; the result says which weights.

    After 4 the next round starts from a clean state, whatever went wrong before.
    """

    check_cover: bool
    """Whether something installed in part only is refused. Off for tests that withhold a parameter on purpose."""

    route_id: int
    """Another number whenever `landings` may answer differently than before."""

    def prepare(self, metadata: Metadata, digest: str) -> Prepared:
        """The model has a place for every parameter that `metadata` announces; `digest` names them.

        Raises:
            PlanError: it has not; the text names the parameter. Nothing was touched.
        """

    def begin(self) -> None:
        """The model takes weights and cannot generate until `finish` or `abort`."""

    def landings(self, name: str) -> tuple[Landing, ...] | None:
        """Where the elements of parameter `name` are to be copied to; None where it must go through `install`.

        All of it is written before `finish`, unless the round fails.
        """

    def touch(self) -> None:
        """Landings are about to be written."""

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

    def commit(self) -> None:
        """What was installed is what was sent."""

    def abort(self) -> bool:
        """The model can serve: with its old weights where they were not replaced as a whole.

        May be called at any time and any number of times.

        Returns:
            Whether any byte of the model may have changed since `begin` (the model is poisoned
            unless another full round follows); False is a promise that none did.
        """
