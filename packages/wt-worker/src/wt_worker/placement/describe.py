"""What a plan does with each layer of a model, in plain values: for people, and for whoever asks from another process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from wt_worker.placement.plan import Plan

__all__ = ["LayerDescription", "PlanDescription"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDescription:
    """One module whose own parameters are written.

    Attributes:
        name: the module's.
        class_name: its class's.
        kinds: by the parameter's name within the module, how it is written: `Plan.kind`.
        in_place: True where it is written in place now, None where it will be once a round has proved it, False where it goes
            through the model's loader.
        reason: why it goes through the loader; None where it does not.
    """

    name: str
    class_name: str
    kinds: dict[str, str]
    in_place: bool | None
    reason: str | None

    @classmethod
    def of(
        cls, plan: Plan, name: str, class_name: str, parameters: Iterable[str], *, is_proved: bool, reason: str | None
    ) -> LayerDescription:
        """The layer `name` of `plan`, of which `parameters` are written.

        Where it goes through the loader for a reason of its own, the reasons of parameters that are no pure copies are added.
        """
        kinds, reasons = {}, [] if reason is None else [reason]
        for parameter in parameters:
            kinds[parameter.removeprefix(f"{name}.")] = plan.kind(parameter)
            problem = plan.by_parameter[parameter].problem
            if problem is not None and reason is not None and problem not in reason:
                reasons.append(f"{parameter}: {problem}")
        return cls(
            name=name,
            class_name=class_name,
            kinds=kinds,
            in_place=False if reasons else (is_proved or None),
            reason="; ".join(reasons) or None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDescription:
    """One rank's model.

    Attributes:
        digest: the plan's.
        num_names: checkpoint parameters that it was made for.
        layers: those that are written, in the model's order.
        ignored: checkpoint parameters of which this rank takes nothing.
        untouched: the model's parameters that none of them is for.
    """

    digest: str
    num_names: int
    layers: tuple[LayerDescription, ...]
    ignored: tuple[str, ...]
    untouched: tuple[str, ...]

    @classmethod
    def of(cls, plan: Plan, layers: Iterable[LayerDescription], untouched: Iterable[str]) -> PlanDescription:
        """The description of `plan`, with these layers."""
        return cls(
            digest=plan.digest,
            num_names=len(plan.names),
            layers=tuple(layers),
            ignored=tuple(name.name for name in plan.names if name.problem is None and not name.parameters),
            untouched=tuple(untouched),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        fields = asdict(self)
        return {**fields, **{key: list(fields[key]) for key in ("layers", "ignored", "untouched")}}
