"""Installs into a vLLM model: in place where that is proved to be right, through its loaders elsewhere, in one round.

A layer's way, from the first round on:

1. The loader is traced, before a byte moves. A layer that is not on the list (`derived.py`), or whose parameters are not pure
   copies, goes through the loader for good (*loader*). One that the loader writes behind vLLM's back is *replayed*: its
   parameters are filled as the trace says, and vLLM processes them as after a load.
2. All others go through the loader until they are proved. After each such round the bytes that serve are digested through the
   plan, and compared with those that came; and whatever else the model refers to is searched for copies of them.
3. From then on they are written *in place*, as long as their tensors are the same ones (`Binding.is_bound_to`) and no expert has
   moved.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from wt_common.session import Metadata
from wt_worker.digest import tensor_digest
from wt_worker.installers.base import InstallResult, Prepared
from wt_worker.placement.binding import Binding, Landing, misfit
from wt_worker.placement.describe import LayerDescription, PlanDescription
from wt_worker.placement.digest import box_digest
from wt_worker.placement.plan import NamePlan, Plan
from wt_worker.placement.prove import Reached, copies_of, reachable, snapshot
from wt_worker.placement.trace import STRAY, Target, TraceError, unplannable
from wt_worker.vllm.derived import is_attention, model_reason, recompute, recomputed_modules, refuse, verdict
from wt_worker.vllm.reload import LayerwiseReload, loader_error, partial_text, plan_error

__all__ = ["VLLMInstaller"]

_EXPERT_MAPS = ("_expert_map", "expert_map", "expert_physical_to_global", "expert_global_to_physical")
_MAX_PLANS = 4  # sources that alternate: the model's own, an adapter's base, a part of it

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Layer:
    """One module that has parameters, and how they are installed."""

    name: str
    module: torch.nn.Module
    parameters: list[str]
    reason: str | None = None
    """Why it goes through the loader, for good; None if it may be written in place."""
    is_inert: bool = False
    is_replayed: bool = False
    is_proved: bool = False
    is_equal: bool = False
    """Whether the round that is in hand gave it the bytes that came."""
    came: dict[str, list[int]] = field(default_factory=dict)
    """By checkpoint name, the digests of its parts in the loader's round in hand."""
    came_before: dict[str, list[int]] = field(default_factory=dict)
    """And in the one that committed last."""


@dataclass(slots=True)
class _State:
    """What is known of one list of parameters in this model."""

    plan: Plan
    layers: dict[str, _Layer]
    casts: dict[str, str]
    untouched: tuple[str, ...]
    names: dict[str, NamePlan]
    expert_maps: list[tuple[torch.Tensor, torch.Tensor]]
    prepared: Prepared | None = None
    bound: Binding | None = None
    """What was bound last, and so the tensors of which something was proved."""
    is_covered: bool = False
    """Whether no layer gets a part; it was not asked yet if not."""

    def rows(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """The list: names, dtypes' names and shapes, sorted."""
        return sorted((name.name, name.dtype_name, name.shape) for name in self.plan.names)

    def layers_of(self, name: NamePlan) -> Iterator[_Layer]:
        """The layers that checkpoint parameter `name` goes to."""
        for parameter in name.parameters:
            yield self.layers[self.plan.by_parameter[parameter].layer]


class VLLMInstaller:
    """`Installer` for a vLLM model; see the module.

    Attributes:
        check_cover: refuse a round that writes a part of a layer. Whoever turns this off answers for
            it: vLLM serves uninitialised memory then.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any, model_config: Any, device: torch.device) -> None:
        self.check_cover = True
        self.route_id = 0
        self.device = device
        self._model = model
        self._vllm_config = vllm_config
        self._model_config = model_config
        self._reload = LayerwiseReload(model, vllm_config, model_config)
        self._states: dict[str, _State] = {}
        self._state: _State | None = None  # of the round at hand
        self._touched = False
        self._replays: dict[str, _Replay] = {}
        self._before: dict[str, tuple[str, int]] | None = None  # what could be derived, before the loader's round
        self._copies: list[tuple[str, str, int, int]] = []  # (parameter, path of its copy, digests of both before it)
        self._is_single = int(getattr(getattr(vllm_config, "parallel_config", None), "world_size", 1)) == 1

    # --- before a round ------------------------------------------------------------------------------------

    def prepare(self, metadata: Metadata, digest: str) -> Prepared:
        """As in the protocol. New metadata cost a trace: about 0.4 ms a name.

        Raises:
            PlanError: the model has no place for a name or shape, a layer would get a part only, or neither way of installing
                would give the right weights.
        """
        refuse(self._vllm_config)
        state = self._states.pop(digest, None)
        if state is None or self._has_changed(state):
            state = self._new_state(metadata)
            while len(self._states) >= _MAX_PLANS:
                del self._states[next(iter(self._states))]
        if self.check_cover and not state.is_covered:
            self._refuse_gaps(state.plan, state.layers)
            state.is_covered = True
        self._states[digest] = self._state = state  # the last one is the latest
        if state.prepared is None:
            state.prepared = self._prepared(state)
            self.route_id += 1
        return state.prepared

    def _has_changed(self, state: _State) -> bool:
        """Whether a tensor that serves is another one than when `state` was last bound, or an expert has moved."""
        if any(not torch.equal(now, then) for now, then in state.expert_maps):
            return True
        if state.bound is None or state.bound.is_bound_to(self._live()):
            return False
        logger.info("tensors of the model were replaced: what was proved of them is forgotten")
        return True

    def _live(self) -> dict[str, torch.Tensor]:
        """The tensors that serve, under each of their names."""
        live = dict(self._model.named_parameters(remove_duplicate=False))
        return live | dict(self._model.named_buffers(remove_duplicate=False))

    def _new_state(self, metadata: Metadata) -> _State:
        rows = []
        for name, dtype_name, shape in zip(metadata.names, metadata.dtype_names, metadata.shapes, strict=True):
            dtype = getattr(torch, dtype_name, None)
            if not isinstance(dtype, torch.dtype):
                raise plan_error(name, f"{name}: torch has no dtype {dtype_name!r}")
            rows.append((name, dtype, shape))
        try:
            plan = self._reload.trace(rows)
        except TraceError as error:
            if not error.reads_values:
                cause = error.__cause__
                raise loader_error(self._model, error.name, cause if cause is not None else error) from error
            targets = [Target(name, name.rpartition(".")[0], tensor) for name, tensor in self._model.named_parameters()]
            plan = unplannable(rows, targets, str(error))
        layers = self._judge(plan)
        strays = {name.name for name in plan.names if name.problem}
        live = [name for name, _ in self._model.named_parameters() if name not in strays]
        known = plan.by_parameter
        return _State(
            plan=plan,
            layers=layers,
            casts=_casts(plan),
            untouched=tuple(name for name in live if name in known and known[name].num_written == 0),
            names={name.name: name for name in plan.names},
            expert_maps=[
                (tensor, tensor.clone())
                for module in self._model.modules()
                for leaf in _EXPERT_MAPS
                if isinstance(tensor := getattr(module, leaf, None), torch.Tensor)
            ],
        )

    def _judge(self, plan: Plan) -> dict[str, _Layer]:
        """Every layer that has parameters, with the reason why it may not be written in place."""
        modules = dict(self._model.named_modules())
        live = self._live()
        of_all = model_reason(self._model, self._vllm_config)
        layers: dict[str, _Layer] = {}
        for parameter in plan.parameters:
            if parameter.layer not in layers:
                layer = _Layer(parameter.layer, modules[parameter.layer], [])
                on_list, layer.is_inert = verdict(layer.module)
                layer.reason = of_all or on_list
                layers[parameter.layer] = layer
            layer = layers[parameter.layer]
            if plan.kind(parameter.name) == "untouched" and not parameter.problem:
                continue
            layer.parameters.append(parameter.name)
            problem = next((each.problem for each, _ in plan.copies_into.get(parameter.name, ()) if each.problem), None)
            found = parameter.problem or problem or plan.cover.get(parameter.name)
            layer.is_replayed |= parameter.is_bypassed
            if found is None and parameter.name not in live:
                found = f"{parameter.name} does not serve under this name"
            if found is None:
                found = misfit(plan, parameter.name, live[parameter.name])
            layer.reason = layer.reason or found
        self._judge_strays(plan, layers)
        by_storage: dict[int, str] = {}
        for layer in layers.values():
            for name in layer.parameters:
                if name in live and live[name].numel():
                    other = by_storage.setdefault(live[name].data_ptr(), name)
                    if other != name:
                        layer.reason = layer.reason or f"{name} is served from the memory of {other}"
                        twin = layers[plan.by_parameter[other].layer]
                        twin.reason = twin.reason or f"{other} is served from the memory of {name}"
        _share_reasons(plan, layers)
        for layer in layers.values():
            if layer.is_replayed and any(plan.by_parameter[name].problem for name in layer.parameters):
                raise plan_error(
                    layer.parameters[0],
                    f"{layer.parameters[0]} would keep its old value: the model's loader does not go through the parameter's "
                    f"own, which is all that vLLM's layerwise reload sees, and cannot be replayed either ({layer.reason})",
                )
        return layers

    @staticmethod
    def _judge_strays(plan: Plan, layers: Mapping[str, _Layer]) -> None:
        """A parameter that the loader makes anew at every load reaches the one that serves only if its layer is loaded too."""
        for name in plan.names:
            if name.problem is None or not name.problem.startswith(STRAY):
                continue
            layer = layers.get(name.name.rpartition(".")[0])
            if layer is None or not layer.parameters:
                raise plan_error(
                    name.name,
                    f"{name.name} is {name.problem}: vLLM's reload would put the old one back, and the new value would be lost",
                )
            layer.reason = layer.reason or f"{name.name} is {name.problem}"

    def _refuse_gaps(self, plan: Plan, layers: Mapping[str, _Layer]) -> None:
        """No layer gets a part of its parameters, and no parameter a part of its elements."""
        partial = []
        for parameter in plan.parameters:
            written = parameter.num_written
            layer = layers[parameter.layer]
            if written is None or parameter.problem or parameter.is_optional or is_attention(layer.module):
                continue
            is_begun = written > 0 or (parameter.is_emptied and layer.parameters)
            if is_begun and written < parameter.num_expected:
                partial.append((parameter.name, f"{written} of {parameter.num_expected} elements"))
        if partial:
            raise plan_error(partial[0][0], partial_text(partial))
        if not self._is_single:
            return
        for name in plan.names:
            taken = sum(copy.source.num_elements for copy in name.copies)
            total = torch.Size(name.shape).numel()
            if name.problem is None and 0 < taken < total:
                raise plan_error(
                    name.name,
                    f"{name.name} has {total} elements, and the model takes {taken} of them; compare shapes with the "
                    "checkpoint that the server was started from",
                )

    def _prepared(self, state: _State) -> Prepared:
        in_place = [layer for layer in state.layers.values() if layer.is_proved and layer.reason is None]
        parameters = [name for layer in in_place for name in layer.parameters]
        not_in_place: dict[str, list[str]] = {}
        for layer in state.layers.values():
            if layer.parameters and layer not in in_place:
                not_in_place.setdefault(layer.reason or "not proved yet", []).append(layer.name)
        binding = state.bound = Binding(state.plan, self._live(), parameters)
        num_layers = sum(map(len, not_in_place.values()))
        logger.info("%d layers are written in place, %d are not: %s", len(in_place), num_layers, _short(not_in_place))
        return Prepared(casts=state.casts, binding=binding, not_in_place=not_in_place)

    def describe(self, metadata: Metadata | None = None) -> PlanDescription:
        """How `metadata` would be installed now, or what the last round announced; the next round goes as if nobody had asked.

        Not between `begin` and `commit` or `abort`, if `metadata` are new: their trace would end the round.

        Raises:
            PlanError: `metadata` would be refused, or no round was announced yet.
        """
        if metadata is None:
            state = next(reversed(self._states.values()), None)
            if state is None:
                raise plan_error("", "no round was announced to this engine yet: send one, or say what would be sent")
        else:
            refuse(self._vllm_config)
            rows = sorted(zip(metadata.names, metadata.dtype_names, map(tuple, metadata.shapes), strict=True))
            known = (state for state in self._states.values() if state.rows() == rows)
            state = next(known, None) or self._new_state(metadata)
            if self.check_cover:
                self._refuse_gaps(state.plan, state.layers)
        is_bound = not self._has_changed(state)
        layers = [
            LayerDescription.of(
                state.plan,
                name,
                type(module).__name__,
                state.layers[name].parameters,
                is_proved=state.layers[name].is_proved and is_bound,
                reason=state.layers[name].reason,
            )
            for name, module in self._model.named_modules()
            if name in state.layers and state.layers[name].parameters
        ]
        return PlanDescription.of(state.plan, layers, state.untouched)

    # --- a round -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The layers that are not written in place take weights through the loader."""
        state = self._state_now()
        self._touched = False
        self._replays = {}
        self._before = None
        loaded = [layer for layer in state.layers.values() if layer.parameters and not _is_in_place(layer)]
        if not loaded and state.prepared is not None and state.prepared.binding.parameters:
            return
        for layer in loaded:
            layer.came, layer.is_equal = {}, False
        if any(layer.reason is None for layer in loaded):
            self._before = self._derived(state)
        replayed = {layer.name: layer.module for layer in loaded if layer.is_replayed}
        is_whole = not any(_is_in_place(layer) for layer in state.layers.values())
        self._reload.begin(None if is_whole else [layer.module for layer in loaded], list(replayed.values()))
        self._replays = {name: _Replay(self._reload, state, state.layers[name]) for name in replayed}

    def landings(self, name: str) -> tuple[Landing, ...] | None:
        """In the tensors that serve, where all layers that `name` goes to are written in place."""
        prepared = self._state_now().prepared
        return None if prepared is None else prepared.binding.landings(name)

    def touch(self) -> None:
        """The model may differ from now on."""
        self._touched = True

    @torch.no_grad()
    def install(self, batch: Sequence[tuple[str, torch.Tensor]]) -> None:
        """The tensors are in the loader's hands. Raises PlanError where it refuses one."""
        state = self._state_now()
        loaded = []
        for name, tensor in batch:
            plan = state.names[name]
            layers = list({layer.name: layer for layer in state.layers_of(plan)}.values())
            if any(layer.reason is None for layer in layers):
                came = _digests(state.plan, plan, tensor)
                for layer in layers:
                    layer.came[name] = came
            replays = [self._replays[layer.name] for layer in layers if layer.name in self._replays]
            for replay in replays:
                replay.take(plan, tensor)
            if not replays:
                loaded.append((name, tensor))
        if loaded:
            self._reload.load(loaded)

    @torch.no_grad()
    def finish(self) -> InstallResult:
        """Every layer serves what came for it."""
        state = self._state_now()
        assert state.prepared is not None  # the round was prepared
        for replay in self._replays.values():
            replay.finish()
        written: set[str] = set()
        if self._reload.is_open:
            try:
                self._reload.finish(check_cover=self.check_cover)
            finally:
                self._touched |= self._reload.touched
            written = self._reload.written
        self._touched = True
        state.prepared.binding.fill()
        recompute(self._model, self._model_config)
        if self._before is not None:
            self._compare(state, self._before)
        untouched = state.untouched
        if any(parameter.num_written is None for parameter in state.plan.parameters):
            untouched = tuple(name for name, _ in self._model.named_parameters() if name not in written)
        num_parameters = sum(1 for _ in self._model.parameters()) - len(untouched)
        return InstallResult(num_parameters=num_parameters, not_synced=untouched)

    def commit(self) -> None:
        """What the round has shown of its layers counts."""
        state, self._state = self._state, None
        self._touched = False
        if state is None:
            return
        newly = []
        for layer in state.layers.values():
            if layer.is_proved or layer.reason is not None or not layer.parameters:
                continue
            has_changed = bool(layer.came_before) and layer.came != layer.came_before
            layer.came_before = layer.came
            layer.is_proved = layer.is_equal and (layer.is_inert or has_changed)
            newly += [layer.name] if layer.is_proved else []
        for _, layers in _shared(state.plan, state.layers):
            if not all(layer.is_proved for layer in layers):
                for layer in layers:
                    layer.is_proved = False
        if newly or self._before is not None:
            state.prepared = None  # other layers are written in place from now on, or for another reason not

    def abort(self) -> bool:
        """Layers that are complete serve the new weights, all others their old ones."""
        touched = self._touched
        if self._reload.is_open:
            touched |= self._reload.abort()
        self._touched = touched  # until the next round begins
        self._replays = {}
        self._before = None
        self._state = None
        return touched

    def _state_now(self) -> _State:
        if self._state is None:
            raise RuntimeError("no round is open: call prepare() first")
        return self._state

    # --- proof ---------------------------------------------------------------------------------------------

    def _others(self, state: _State) -> dict[str, list[Reached]]:
        """What the model refers to, beside the parameters that may be written in place, by who makes it again.

        `loader`: the reload of the layer that it hangs on. `round`: `recompute`. `nobody`: nobody that we know.
        """
        live = self._live()
        covered = {
            live[name].untyped_storage().data_ptr()
            for layer in state.layers.values()
            if layer.reason is None
            for name in layer.parameters
        }
        recomputed = recomputed_modules(self._model, self._model_config)
        loaded = {layer.name for layer in state.layers.values() if layer.parameters and layer.reason is not None}
        owners = recomputed | {layer.name for layer in state.layers.values() if layer.parameters}
        result: dict[str, list[Reached]] = {"loader": [], "round": [], "nobody": []}
        for each in reachable(self._model):
            if each.tensor.untyped_storage().data_ptr() not in covered:
                owner = _owner(each.module, owners)
                result["loader" if owner in loaded else "round" if owner in recomputed else "nobody"].append(each)
        return result

    def _derived(self, state: _State) -> dict[str, tuple[str, int]]:
        """Before a round through the loader: what may be derived from parameters, and what surely is.

        A layer of whose weights something has a copy that nobody makes again is not written in place.
        """
        others = self._others(state)
        live = self._live()
        candidates = {
            name: live[name] for layer in state.layers.values() if layer.reason is None for name in layer.parameters
        }
        self._copies = []
        for who in ("round", "nobody"):
            for name, copy in copies_of(candidates, others[who]):
                layer = state.layers[state.plan.by_parameter[name].layer]
                self._copies.append((name, copy.path, tensor_digest(live[name]), tensor_digest(copy.tensor)))
                layer.is_inert = False  # only other values will show whether the copy follows
                if who == "nobody":
                    layer.reason = layer.reason or f"{copy.path} holds a copy of {name}"
        _share_reasons(state.plan, state.layers)
        return snapshot(others["nobody"])

    def _compare(self, state: _State, before: Mapping[str, tuple[str, int]]) -> None:
        """After a round through the loader: which layers have the bytes that came, and what else has changed.

        Raises:
            PlanError: a copy of a parameter has not followed it, so that the model computes with old weights.
        """
        live = self._live()
        others = self._others(state)
        now = {each.path: each.tensor for found in others.values() for each in found}
        for name, path, digest_before, copy_before in self._copies:
            has_changed = tensor_digest(live[name]) != digest_before
            if has_changed and path in now and tensor_digest(now[path]) == copy_before:
                raise plan_error(
                    name,
                    f"{path} holds a copy of {name} that neither vLLM's reload nor this package makes again: the model would "
                    "compute with the old weights; restart the server, and report this model",
                    phase="finish",
                )
        after = snapshot(others["nobody"])
        changed = [path for path, digest in after.items() if before.get(path) != digest]
        for path in changed:
            scope = _scope(after[path][0])
            for layer in state.layers.values():
                if layer.reason is None and f"{layer.name}.".startswith(scope):
                    layer.reason = f"{path} changes with the weights and is made by nobody we know"
        pending = [
            layer for layer in state.layers.values() if layer.reason is None and layer.came and not layer.is_proved
        ]
        parameters = [name for layer in state.layers.values() if layer.reason is None for name in layer.parameters]
        binding = state.bound = Binding(state.plan, live, parameters)
        for layer in pending:
            names = [state.names[name] for name in layer.came if name in binding]
            found = dict(zip((name.name for name in names), binding.digests(names), strict=True))
            layer.is_equal = all(found.get(name) == came for name, came in layer.came.items())
            if not layer.is_equal:
                layer.reason = "its processing moves bytes: what serves is not what came"
        _share_reasons(state.plan, state.layers)


class _Replay:
    """A layer whose loader-side parameters are filled as the trace says, and then processed by vLLM."""

    def __init__(self, reload: LayerwiseReload, state: _State, layer: _Layer) -> None:
        self._reload = reload
        self._plan = state.plan
        self._layer = layer
        self._missing = {
            name.name for parameter in layer.parameters for name, _ in state.plan.copies_into.get(parameter, ())
        }
        self._tensors: dict[str, torch.Tensor] = {}
        self._is_processed = False

    def take(self, name: NamePlan, tensor: torch.Tensor) -> None:
        """Put `tensor` where it belongs in this layer; the last one completes it."""
        if not self._tensors:
            self._reload.materialize(self._layer.module)
            for parameter in self._layer.parameters:
                leaf = parameter.rpartition(".")[2]
                self._tensors[parameter] = getattr(self._layer.module, leaf).detach()
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
                box, tensor = fill.region, self._tensors[parameter]
                tensor.as_strided(box.shape, box.strides, tensor.storage_offset() + box.offset).fill_(fill.value)
        self._reload.process(self._layer.module)


def _is_in_place(layer: _Layer) -> bool:
    return layer.is_proved and layer.reason is None


def _share_reasons(plan: Plan, layers: Mapping[str, _Layer]) -> None:
    """A checkpoint parameter that goes to several layers goes the same way to all of them."""
    shared = _shared(plan, layers)
    changed = True
    while changed:
        changed = False
        for name, found in shared:
            blocked = next((layer for layer in found if layer.reason is not None), None)
            replayed = any(layer.is_replayed for layer in found)
            for layer in found:
                if blocked is not None and layer.reason is None:
                    layer.reason, changed = f"{name} goes to {blocked.name} as well", True
                if replayed and not layer.is_replayed:
                    layer.is_replayed = changed = True


def _shared(plan: Plan, layers: Mapping[str, _Layer]) -> list[tuple[str, list[_Layer]]]:
    """The checkpoint parameters that go to more than one layer, and those."""
    found = []
    for name in plan.names:
        of = {plan.by_parameter[parameter].layer for parameter in name.parameters}
        if len(of) > 1:
            found.append((name.name, [layers[layer] for layer in of]))
    return found


def _casts(plan: Plan) -> dict[str, str]:
    """By name, the floating dtype of the parameters that it goes to, where all have one and it is declared in another."""
    casts = {}
    for name in plan.names:
        wanted = {plan.by_parameter[copy.parameter].dtype_name for copy in name.copies}
        if name.problem or len(wanted) != 1 or wanted == {name.dtype_name}:
            continue
        dtypes = [getattr(torch, each) for each in (*wanted, name.dtype_name)]
        if all(dtype.is_floating_point for dtype in dtypes):
            casts[name.name] = wanted.pop()
    return casts


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


def _short(not_in_place: Mapping[str, list[str]]) -> str:
    return "; ".join(f"{len(names)} ({names[0]}, ...): {reason}" for reason, names in not_in_place.items()) or "-"
