"""Proves layers by a round that goes through the loader, and watches what holds copies of any layer's parameters.

Before the round: what serves is digested, and whatever else the model refers to is searched for copies of parameters. After it:
what serves must be what came; what else has changed, and is made by nobody we know, keeps the layers around it on the loader;
and a copy that did not follow its parameter is an error, in this round and in every later one. So is a view of memory that its
parameter has left in the round.

Copies of parameters that go through the loader are searched for before the first two rounds: one may be made by the first
forward. Before the second, those are found too whose parameter serves packed or emptied: by its row that came in the first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch

from wt_worker.digest import tensor_digest
from wt_worker.placement.binding import Binding, misfit
from wt_worker.placement.digest import box_digest
from wt_worker.placement.plan import Copy, NamePlan, Plan
from wt_worker.placement.prove import Reached, copies_of, reachable, snapshot
from wt_worker.vllm.derived import recomputed_modules
from wt_worker.vllm.layers import LayerStates
from wt_worker.vllm.reload import plan_error

__all__ = ["Proof", "live_tensors"]

_NUM_SEARCHES = 2  # see above


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
        self._came: dict[str, torch.Tensor] = {}  # first rows
        self._proves = any(layer.is_pending for layer in states.layers.values())
        self._searches_loaded = _searches_loaded(states)
        self._views: list[tuple[str, str, torch.UntypedStorage]] = []
        if self._proves or self._searches_loaded:
            self._search()
        self._copies = self._digest_copies() if states.copies else {}

    @classmethod
    def needed(cls, states: LayerStates) -> bool:
        """Whether there is anything to prove or to watch."""
        return bool(states.copies) or any(layer.is_pending for layer in states.loaded) or _searches_loaded(states)

    def note(self, name: NamePlan, tensor: torch.Tensor) -> None:
        """`tensor` has come, and goes to the loader."""
        layers = self._states.layers_of(name)
        if any(layer.is_pending for layer in layers):
            came = _digests(self._states.plan, name, tensor)
            for layer in layers:
                layer.came[name.name] = came
        if self._searches_loaded or self._states.first_rows:
            for copy in name.copies:
                row = _first_row(self._states.plan, copy, tensor)
                if row is not None and self._states.layer_of(copy.parameter).reason is not None:
                    self._came[copy.parameter] = row

    def check(self) -> None:
        """After the round.

        Raises:
            PlanError: a copy of a parameter, or a view of the memory that it had, has not followed it, so that the model computes
                with old weights.
        """
        self._check_views()
        self._check_copies()
        states = self._states
        if self._searches_loaded:
            states.num_searches += 1
        # Needed for one more search, and to watch what that has found.
        states.first_rows = self._came if _searches_loaded(states) or states.copies else {}
        if not self._proves:
            return
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
        paths: dict[int, list[str]] = {}
        for each in reachable(self._model, every_path=True):
            paths.setdefault(each.tensor.untyped_storage().data_ptr(), []).append(each.path)
        others = self._others()
        # Where there is nothing to prove, candidates were searched for in an earlier round.
        parameters = {name: live[name] for name in states.candidates()} if self._proves else {}
        for who in ("round", "nobody", "loader"):
            found = copies_of(parameters, [each for kind, _, each in others if kind == who])
            for name, copy in found:
                layer = states.layer_of(name)
                self._watch(name, copy, paths, is_loaded=False)
                layer.is_inert = False  # only other values will show whether the copy follows
                if who != "round":
                    layer.reason = layer.reason or f"{copy.path} holds a copy of {name}"
        self._find_views(paths, live)
        if self._searches_loaded:
            self._search_loaded([each for _, _, each in others], paths, live)
        states.share_reasons()
        if not self._proves:
            return
        self._before = snapshot(each for kind, _, each in others if kind == "nobody")
        binding = Binding(states.plan, live, list(states.candidates()))
        for layer in states.layers.values():
            if layer.is_pending and not layer.is_inert:
                names = [name.name for parameter in layer.parameters for name, _ in self._copies_into(parameter)]
                layer.was = self._digests_of(binding, names)

    def _search_loaded(self, others: list[Reached], paths: dict[int, list[str]], live: dict[str, torch.Tensor]) -> None:
        """Find copies of parameters that go through the loader: by what serves, and by what came last."""
        written = {name: live[name] for name in self._states.loaded_parameters() if name in live}
        memory = {tensor.untyped_storage().data_ptr() for tensor in written.values()}
        others = [each for each in others if each.tensor.untyped_storage().data_ptr() not in memory]
        for parameters in (written, self._states.first_rows):
            for name, copy in copies_of(parameters, others):
                self._watch(name, copy, paths, is_loaded=True)

    def _watch(self, name: str, copy: Reached, paths: dict[int, list[str]], *, is_loaded: bool) -> None:
        """`copy`, under each path to its memory, must follow parameter `name`."""
        for path in paths[copy.tensor.untyped_storage().data_ptr()]:
            self._states.copies.setdefault((name, path), is_loaded)

    def _find_views(self, paths: dict[int, list[str]], live: dict[str, torch.Tensor]) -> None:
        """Note who else refers to the memory of a parameter."""
        names = {*self._states.candidates(), *self._states.loaded_parameters()} & live.keys()
        for name in names:
            storage = live[name].untyped_storage()
            self._views += [(name, path, storage) for path in paths.get(storage.data_ptr(), ()) if path not in names]

    def _check_views(self) -> None:
        if not self._views:
            return
        live = live_tensors(self._model)
        left = [each for each in self._views if not _is_in(live.get(each[0]), each[2])]
        now = {each.path: each.tensor for each in reachable(self._model, every_path=True)} if left else {}
        for name, path, storage in left:
            if _is_in(now.get(path), storage):
                raise plan_error(
                    name,
                    f"{path} is a view of memory that {name} has left in this round: the model would compute with the old "
                    "weights in it; restart the server, and report this model",
                    phase="finish",
                )

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
        """By parameter and path, the digests of both; of a parameter that serves emptied or packed, of the row that came."""
        live = live_tensors(self._model)
        now = {each.path: each.tensor for each in reachable(self._model, every_path=True)}
        rows = self._came or self._states.first_rows
        return {
            (name, path): (tensor_digest(rows[name] if name in rows else live[name]), tensor_digest(now[path]))
            for name, path in self._states.copies
            if (name in rows or name in live) and path in now
        }

    def _check_copies(self) -> None:
        if not self._copies:
            return
        after = self._digest_copies()
        for key, (parameter, copy) in self._copies.items():
            if key not in after or after[key][0] == parameter:
                continue
            name, path = key
            if after[key][1] == copy:
                raise plan_error(
                    name,
                    f"{path} holds a copy of {name} that neither vLLM's reload nor this package makes again: the model would "
                    "compute with the old weights; restart the server, and report this model",
                    phase="finish",
                )
            if self._states.copies[key]:
                del self._states.copies[key]  # whoever made it again will do so in every round


def _searches_loaded(states: LayerStates) -> bool:
    """Whether copies of parameters that go through the loader are still searched for."""
    return states.num_searches < _NUM_SEARCHES and any(states.loaded_parameters())


def _is_in(tensor: torch.Tensor | None, storage: torch.UntypedStorage) -> bool:
    """Whether `tensor` is there, and in `storage`."""
    return tensor is not None and tensor.untyped_storage().data_ptr() == storage.data_ptr()


def _first_row(plan: Plan, copy: Copy, tensor: torch.Tensor) -> torch.Tensor | None:
    """The first row of the parameter that `copy` puts a part of `tensor` into, in its dtype; None if some of it is elsewhere."""
    parameter = plan.by_parameter[copy.parameter]
    length = parameter.shape[-1] if parameter.shape else 1
    if copy.destination.offset or copy.destination.strides[-1] != 1 or not copy.source.num_elements:
        return None
    row = copy.source.of(tensor.contiguous().reshape(-1))
    row = row[(0,) * (row.ndim - 1)][:length]
    return row.to(getattr(torch, parameter.dtype_name), copy=True) if len(row) == length else None


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
