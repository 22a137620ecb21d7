"""Proves layers by a round that goes through the loader, and watches what holds copies of their parameters.

Before the round: what serves is digested, and whatever else the model refers to is searched for copies of parameters. After it:
what serves must be what came; what else has changed, and is made by nobody we know, keeps the layers around it on the loader;
and a copy that did not follow its parameter is an error, in this round and in every later one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch

from wt_worker.digest import tensor_digest
from wt_worker.placement.binding import Binding, misfit
from wt_worker.placement.digest import box_digest
from wt_worker.placement.plan import NamePlan, Plan
from wt_worker.placement.prove import Reached, copies_of, reachable, snapshot
from wt_worker.vllm.derived import recomputed_modules
from wt_worker.vllm.layers import LayerStates
from wt_worker.vllm.reload import plan_error

__all__ = ["Proof", "live_tensors"]


def live_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers that serve, under each of their names."""
    live = dict(model.named_parameters(remove_duplicate=False))
    return live | dict(model.named_buffers(remove_duplicate=False))


class Proof:
    """One round's. Made before it, with the model as it was.

    Args:
        model, model_config: as vLLM has them.
        states: its layers; those that are pending may be proved, or get a reason.
    """

    def __init__(self, model: torch.nn.Module, model_config: Any, states: LayerStates) -> None:
        self._model = model
        self._model_config = model_config
        self._states = states
        self._before: dict[str, tuple[str, int]] = {}
        self._proves = any(layer.is_pending for layer in states.layers.values())
        if self._proves:
            self._search()
        self._copies = self._digest_copies() if states.copies else {}

    @classmethod
    def needed(cls, states: LayerStates) -> bool:
        """Whether there is anything to prove or to watch."""
        return bool(states.copies) or any(layer.is_pending for layer in states.loaded)

    def note(self, name: NamePlan, tensor: torch.Tensor) -> None:
        """`tensor` has come, and goes to the loader."""
        layers = self._states.layers_of(name)
        if any(layer.is_pending for layer in layers):
            came = _digests(self._states.plan, name, tensor)
            for layer in layers:
                layer.came[name.name] = came

    def check(self) -> None:
        """After the round.

        Raises:
            PlanError: a copy of a parameter has not followed it, so that the model computes with old weights.
        """
        self._check_copies()
        if not self._proves:
            return
        states = self._states
        after = snapshot(each for who, _, each in self._others() if who == "nobody")
        for path, digest in after.items():
            if self._before.get(path) != digest:
                scope = _scope(digest[0])
                for layer in states.layers.values():
                    if layer.reason is None and f"{layer.name}.".startswith(scope):
                        layer.reason = f"{path} changes with the weights and is made by nobody we know"
        live = live_tensors(self._model)
        for name in list(states.candidates()):
            layer = states.layer_of(name)
            layer.reason = layer.reason or (
                misfit(states.plan, name, live[name]) if name in live else f"{name} is gone after a load"
            )
        states.share_reasons()
        binding = states.bound = Binding(states.plan, live, list(states.candidates()))
        for layer in states.layers.values():
            if layer.is_pending and layer.came:
                layer.is_equal = self._digests_of(binding, layer.came) == layer.came
                if not layer.is_equal:
                    layer.reason = "its processing moves bytes: what serves is not what came"
        states.share_reasons()

    def _search(self) -> None:
        """Find what may be derived from parameters, and what surely is; digest what serves."""
        states, live = self._states, live_tensors(self._model)
        others = self._others()
        parameters = {name: live[name] for name in states.candidates()}
        for who in ("round", "nobody", "loader"):
            owners = {id(each): owner for kind, owner, each in others if kind == who}
            for name, copy in copies_of(parameters, [each for kind, _, each in others if kind == who]):
                layer = states.layer_of(name)
                if who == "loader" and owners[id(copy)] == layer.name:
                    continue
                states.copies[name, copy.path] = None
                layer.is_inert = False  # only other values will show whether the copy follows
                if who != "round":
                    layer.reason = layer.reason or f"{copy.path} holds a copy of {name}"
        states.share_reasons()
        self._before = snapshot(each for kind, _, each in others if kind == "nobody")
        binding = Binding(states.plan, live, list(states.candidates()))
        for layer in states.layers.values():
            if layer.is_pending and not layer.is_inert:
                names = [name.name for parameter in layer.parameters for name, _ in self._copies_into(parameter)]
                layer.was = self._digests_of(binding, names)

    def _copies_into(self, parameter: str) -> Iterator[tuple[NamePlan, Any]]:
        yield from self._states.plan.copies_into.get(parameter, ())

    def _digests_of(self, binding: Binding, names: Collection[str]) -> dict[str, list[int]]:
        """What serves of each of `names`, as far as it is bound."""
        bound = [self._states.names[name] for name in dict.fromkeys(names) if name in binding]
        return dict(zip((name.name for name in bound), binding.digests(bound), strict=True))

    def _others(self) -> list[tuple[str, str, Reached]]:
        """What the model refers to, beside the candidates: who makes it again, the layer that it hangs on, and itself.

        `loader`: the reload of that layer. `round`: what is made again after every round. `nobody`: nobody that we know.
        """
        states, live = self._states, live_tensors(self._model)
        covered = {live[name].untyped_storage().data_ptr() for name in states.candidates() if name in live}
        recomputed = recomputed_modules(self._model, self._model_config)
        with_parameters = {layer.name for layer in states.layers.values() if layer.parameters}
        loaded = {name for name in with_parameters if states.layers[name].reason is not None}
        found = []
        for each in reachable(self._model):
            if each.tensor.untyped_storage().data_ptr() not in covered:
                owner = _owner(each.module, recomputed | with_parameters)
                who = "loader" if owner in loaded else "round" if owner in recomputed else "nobody"
                found.append((who, owner, each))
        return found

    def _digest_copies(self) -> dict[tuple[str, str], tuple[int, int]]:
        """By parameter and path, the digests of both."""
        live = live_tensors(self._model)
        now = {each.path: each.tensor for each in reachable(self._model)}
        return {
            (name, path): (tensor_digest(live[name]), tensor_digest(now[path]))
            for name, path in self._states.copies
            if name in live and path in now
        }

    def _check_copies(self) -> None:
        if not self._copies:
            return
        after = self._digest_copies()
        for key, (parameter, copy) in self._copies.items():
            if key in after and after[key][0] != parameter and after[key][1] == copy:
                name, path = key
                raise plan_error(
                    name,
                    f"{path} holds a copy of {name} that neither vLLM's reload nor this package makes again: the model would "
                    "compute with the old weights; restart the server, and report this model",
                    phase="finish",
                )


def _digests(plan: Plan, name: NamePlan, tensor: torch.Tensor) -> list[int]:
    """Of the parts of `tensor` that go to this rank, in their parameters' dtype."""
    flat = tensor.contiguous().reshape(-1)
    parts = []
    for copy in name.copies:
        dtype = getattr(torch, plan.by_parameter[copy.parameter].dtype_name)
        parts.append(box_digest(copy.source.of(flat).to(dtype), copy.source.offset, copy.source.strides))
    return parts


def _owner(module: str, owners: Collection[str]) -> str:
    """The nearest of `owners` that `module` is, or is within; an object that a layer keeps may be a module, too."""
    while module and module not in owners:
        module = module.rpartition(".")[0]
    return module


def _scope(module: str) -> str:
    """The numbered layer that `module` is in, else the whole model: where what it derives from may be."""
    parts = module.split(".")
    numbered = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbered[0] + 1]) + "." if numbered else ""
