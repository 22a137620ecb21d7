"""What is known of a vLLM model's layers, for one list of checkpoint parameters: how each is installed, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from wt_worker.installers.base import Prepared
from wt_worker.placement.binding import Anchors, Binding
from wt_worker.placement.plan import NamePlan, Plan

__all__ = ["Layer", "LayerStates", "share_reasons", "shared_layers"]


@dataclass(slots=True)
class Layer:
    """One module that has parameters of its own.

    Attributes:
        name, module: the module.
        parameters: those of its parameters that a round writes.
        reason: why it goes through the loader; None if it may be written in place.
        is_inert: its processing does nothing on this platform, so that equal bytes alone prove it.
        is_replayed: its loader-side parameters are filled as the plan says, since its loader goes behind vLLM's back.
        is_proved: it may be written in place, and was shown to be right.
        was: by checkpoint name, the digests of its parts that served before the round in hand.
        came: and of those that came in it.
        is_equal: whether those that came are what serves now.
    """

    name: str
    module: torch.nn.Module
    parameters: list[str] = field(default_factory=list)
    reason: str | None = None
    is_inert: bool = False
    is_replayed: bool = False
    is_proved: bool = False
    was: dict[str, list[int]] = field(default_factory=dict)
    came: dict[str, list[int]] = field(default_factory=dict)
    is_equal: bool = False

    @property
    def is_in_place(self) -> bool:
        """Whether it is written in place."""
        return self.is_proved and self.reason is None

    @property
    def is_pending(self) -> bool:
        """Whether a round through the loader may prove it."""
        return not self.is_proved and self.reason is None and bool(self.parameters)


@dataclass(slots=True)
class LayerStates:
    """All of a model's layers.

    Attributes:
        plan: where everything lands.
        layers: by name.
        casts: see `Prepared.casts`.
        untouched: the model's parameters, and buffers that a checkpoint fills, that a round does not write.
        tied: see `Prepared.tied`.
        rounded: by name, the dtype that its values are rounded to before they are installed.
        expert_maps: (module, attribute, what it was), as when the plan was made.
        prepared: of the last round; None if the next one is installed in another way.
        loaded: with it, the layers that are not written in place.
        bound: what was bound last, and so the tensors of which something was proved.
        anchors: where these hang; there as soon as something was bound.
        recomputed: what makes again, after a round that is all in place, what is made from parameters; by module.
        is_covered: whether no layer gets a part; it was not asked yet if not.
        copies: (parameter, path of a tensor that holds a copy of it), each of which must follow its parameter; and whether it
            is watched only until it has done so.
        num_searches: how often copies of the parameters that go through the loader were searched for.
        first_rows: of these parameters, the first row as it came last, as long as that search goes on.
    """

    plan: Plan
    layers: dict[str, Layer]
    casts: dict[str, str]
    untouched: tuple[str, ...]
    expert_maps: list[tuple[torch.nn.Module, str, torch.Tensor]]
    tied: dict[str, str] = field(default_factory=dict)
    rounded: dict[str, torch.dtype] = field(default_factory=dict)
    prepared: Prepared | None = None
    loaded: list[Layer] = field(default_factory=list)
    bound: Binding | None = None
    anchors: Anchors | None = None
    recomputed: list[tuple[str, Callable[[], object]]] = field(default_factory=list)
    is_covered: bool = False
    copies: dict[tuple[str, str], bool] = field(default_factory=dict)
    num_searches: int = 0
    first_rows: dict[str, torch.Tensor] = field(default_factory=dict)
    names: dict[str, NamePlan] = field(init=False)
    shared: list[tuple[str, list[Layer]]] = field(init=False)

    def __post_init__(self) -> None:
        self.names = {name.name: name for name in self.plan.names}
        self.shared = shared_layers(self.plan, self.layers)

    def rows(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """The list: names, dtypes' names and shapes, sorted."""
        return sorted((name.name, name.dtype_name, name.shape) for name in self.plan.names)

    def layers_of(self, name: NamePlan) -> list[Layer]:
        """The layers that checkpoint parameter `name` goes to, each once."""
        of = dict.fromkeys(self.plan.by_parameter[parameter].layer for parameter in name.parameters)
        return [self.layers[layer] for layer in of]

    def layer_of(self, parameter: str) -> Layer:
        """The layer that has `parameter`."""
        return self.layers[self.plan.by_parameter[parameter].layer]

    def candidates(self) -> Iterator[str]:
        """The parameters of the layers that are, or may be, written in place."""
        for layer in self.layers.values():
            if layer.reason is None:
                yield from layer.parameters

    def loaded_parameters(self) -> Iterator[str]:
        """The parameters of all other layers, which go through the loader for good."""
        for layer in self.layers.values():
            if layer.reason is not None:
                yield from layer.parameters

    def experts_have_moved(self) -> bool:
        """Whether a map of experts is another one than when the plan was made."""
        for module, leaf, then in self.expert_maps:
            now = getattr(module, leaf, None)
            if not isinstance(now, torch.Tensor) or now.shape != then.shape or not torch.equal(now, then):
                return True
        return False

    def settle(self) -> bool:
        """After a round that committed: the layers that it has proved are written in place from now on; whether there are any."""
        newly = [layer for layer in self.layers.values() if layer.is_pending and layer.is_equal]
        newly = [layer for layer in newly if layer.is_inert or layer.was != layer.came]
        for layer in newly:
            layer.is_proved = True
        for _, layers in self.shared:
            if not all(layer.is_proved for layer in layers):
                for layer in layers:
                    layer.is_proved = False
        return bool(newly)

    def share_reasons(self) -> None:
        """What keeps one layer from being written in place keeps those that share a checkpoint parameter with it."""
        share_reasons(self.shared)


def share_reasons(shared: list[tuple[str, list[Layer]]]) -> None:
    """A checkpoint parameter that goes to several layers goes the same way to all of them."""
    changed = True
    while changed:
        changed = False
        for name, layers in shared:
            blocked = next((layer for layer in layers if layer.reason is not None), None)
            replayed = any(layer.is_replayed for layer in layers)
            for layer in layers:
                if blocked is not None and layer.reason is None:
                    layer.reason, changed = f"{name} goes to {blocked.name} as well", True
                if replayed and not layer.is_replayed:
                    layer.is_replayed = changed = True


def shared_layers(plan: Plan, layers: Mapping[str, Layer]) -> list[tuple[str, list[Layer]]]:
    """The checkpoint parameters that go to more than one layer, and those."""
    found = []
    for name in plan.names:
        of = {plan.by_parameter[parameter].layer for parameter in name.parameters}
        if len(of) > 1:
            found.append((name.name, [layers[layer] for layer in of]))
    return found
