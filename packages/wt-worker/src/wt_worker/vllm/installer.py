"""Installs into a vLLM model: in place where that is proved to be right, through its loaders elsewhere, in one round.

A layer's way, from the first round on:

1. The loader is traced, before a byte moves. A layer that is not on the list (`derived.py`), or whose parameters are not pure
   copies, goes through the loader for good (*loader*). One that the loader writes behind vLLM's back is *replayed*: its
   parameters are filled as the trace says, and vLLM processes them as after a load.
2. All others go through the loader until they are proved. After each such round the bytes that serve are digested through the
   plan, and compared with those that came; and whatever else the model refers to is searched for copies of them.
3. From then on they are written *in place*, as long as their tensors are the same ones (`Anchors`) and no expert has
   moved.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from wt_common.session import Metadata
from wt_worker.checkpoint import load_format
from wt_worker.installers.base import InstallResult, Prepared
from wt_worker.placement.binding import Anchors, Binding, Landing, misfit, share_memory
from wt_worker.placement.describe import LayerDescription, PlanDescription
from wt_worker.placement.plan import Plan
from wt_worker.placement.trace import REPLACED, STRAY, Target, TraceError, unplannable
from wt_worker.vllm.derived import is_attention, model_reason, refuse, verdict
from wt_worker.vllm.detached import refuse_detached_views, refuse_other_shapes, rounded_names
from wt_worker.vllm.layers import Layer, LayerStates, share_reasons, shared_layers
from wt_worker.vllm.proof import Proof, live_tensors
from wt_worker.vllm.reload import LayerwiseReload, loader_error, partial_text, plan_error
from wt_worker.vllm.replay import Replay

__all__ = ["VLLMInstaller"]

_EXPERT_MAPS = ("_expert_map", "expert_map", "expert_physical_to_global", "expert_global_to_physical")
_MAX_PLANS = 4  # sources that alternate: the model's own, an adapter's base, a part of it

logger = logging.getLogger(__name__)


class VLLMInstaller:
    """`Installer` for a vLLM model; see the module.

    Attributes:
        check_cover: refuse a round that writes a part of a layer. Whoever turns this off answers for
            it: vLLM serves uninitialised memory then.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any, model_config: Any, device: torch.device) -> None:  # noqa: ARG002  # all of its tensors say where they are
        self.check_cover = True
        self.route_id = 0
        self._model = model
        self._vllm_config = vllm_config
        self._model_config = model_config
        self._reload = LayerwiseReload(model, vllm_config, model_config)
        self._states: dict[str, LayerStates] = {}
        self._state: LayerStates | None = None  # of the round at hand
        self._touched = False
        self._replays: dict[str, Replay] = {}
        self._proof: Proof | None = None
        # vLLM gives every parameter the same random row then: each looks like a copy of the others, and proves nothing.
        self._is_random = load_format(vllm_config) == "dummy"

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

    def _has_changed(self, state: LayerStates) -> bool:
        """Whether a tensor that serves is another one than when `state` was last bound, or an expert has moved."""
        if state.experts_have_moved():
            logger.info("experts have moved: what was proved of the model is forgotten")
            return True
        if state.bound is None or state.anchors is None or state.anchors.hold():
            return False
        if state.bound.is_bound_to(live_tensors(self._model)):  # by other objects, perhaps
            self._anchor(state, state.bound.parameters)
            return False
        logger.info("tensors of the model were replaced: what was proved of them is forgotten")
        return True

    def _anchor(self, state: LayerStates, parameters: Collection[str]) -> None:
        state.recomputed = self._reload.recomputed()
        state.anchors = Anchors(self._model, parameters, [module for module, _ in state.recomputed])

    def _new_state(self, metadata: Metadata) -> LayerStates:
        rows = []
        for name, dtype_name, shape in zip(metadata.names, metadata.dtype_names, metadata.shapes, strict=True):
            dtype = getattr(torch, dtype_name, None)
            if not isinstance(dtype, torch.dtype):
                raise plan_error(name, f"{name}: torch has no dtype {dtype_name!r}")
            rows.append((name, dtype, shape))
        optional = [metadata.names[place] for place in metadata.optional]
        announced = {name: (dtype, shape) for name, dtype, shape in rows}
        rows += [(alias, *announced[name]) for alias, name in metadata.aliases.items()]
        try:
            plan, made = self._reload.trace(rows, optional, metadata.aliases)
        except TraceError as error:
            if not error.reads_values:
                _, announced_shape = announced.get(error.name, (None, None))
                raise loader_error(self._model, error.name, error.__cause__ or error, announced_shape) from error
            targets = [Target(name, name.rpartition(".")[0], tensor) for name, tensor in self._model.named_parameters()]
            plan, made = unplannable(rows, targets, str(error)), []
        refuse_detached_views(self._model)
        plan = plan.with_aliases(metadata.aliases, partial(share_memory, live_tensors(self._model)))
        layers = self._judge(plan, f"its loader makes tensors of its own ({made[0]})" if made else None)
        refuse_other_shapes(self._model, plan, layers)
        strays = {name.name for name in plan.names if name.problem}
        parameters = [name for name, _ in self._model.named_parameters() if name not in strays]
        known = plan.by_parameter
        rounded, tied = rounded_names(self._model, plan), self._tied(plan)
        casts = _casts(plan, rounded)
        return LayerStates(
            plan=plan,
            layers=layers,
            casts=casts | {name: casts[of] for name, of in tied.items() if of in casts},
            untouched=(
                *(name for name in parameters if name in known and known[name].num_written == 0),
                *sorted(plan.fillable),
            ),
            tied=tied,
            rounded=rounded,
            expert_maps=[
                (module, leaf, tensor.clone())
                for module in self._model.modules()
                for leaf in _EXPERT_MAPS
                if isinstance(tensor := getattr(module, leaf, None), torch.Tensor)
            ],
        )

    def _tied(self, plan: Plan) -> dict[str, str]:
        """Names that the loader drops since the model serves them from the memory of another parameter; each with that one's."""
        live = dict(self._model.named_parameters(remove_duplicate=False))
        taken = {name.name: name for name in plan.names}
        first = {id(live[name]): name for name in reversed(live) if name in taken and taken[name].copies}
        dropped = [name for name, each in taken.items() if name in live and not (each.copies or each.problem)]
        return {name: first[id(live[name])] for name in dropped if id(live[name]) in first}

    def _judge(self, plan: Plan, of_all: str | None) -> dict[str, Layer]:
        """Every layer that has parameters, with the reason why it may not be written in place; `of_all` is one for all."""
        modules = dict(self._model.named_modules())
        live = live_tensors(self._model)
        of_all = model_reason(self._model, self._vllm_config) or of_all
        layers: dict[str, Layer] = {}
        for parameter in plan.parameters:
            if parameter.layer not in layers:
                layer = Layer(parameter.layer, modules[parameter.layer])
                on_list, layer.is_inert = verdict(layer.module)
                layer.reason = of_all or on_list
                layers[parameter.layer] = layer
            layer = layers[parameter.layer]
            if plan.kind(parameter.name) == "untouched" and not parameter.problem:
                continue
            layer.parameters.append(parameter.name)
            found = parameter.problem or plan.cover.get(parameter.name)
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
        share_reasons(shared_layers(plan, layers))
        for layer in layers.values():
            if layer.is_replayed and not _can_be_replayed(plan, layer):
                raise plan_error(
                    layer.parameters[0],
                    f"{layer.parameters[0]} would keep its old value: the model's loader does not go through the parameter's "
                    f"own, which is all that vLLM's layerwise reload sees, and cannot be replayed either ({layer.reason})",
                )
        return layers

    @staticmethod
    def _judge_strays(plan: Plan, layers: Mapping[str, Layer]) -> None:
        """A parameter that the loader makes anew at every load reaches the one that serves only if its layer is loaded too."""
        problems = [(name.name, name.problem) for name in plan.names]
        problems += [(parameter.name, parameter.problem) for parameter in plan.parameters]
        for name, problem in problems:
            if problem is None or not problem.startswith((STRAY, REPLACED)):
                continue
            layer = layers.get(name.rpartition(".")[0])
            if layer is None or not any(
                plan.by_parameter[each].num_written for each in layer.parameters if each != name
            ):
                raise plan_error(
                    name,
                    f"{name} is {problem}: vLLM's reload would put the old one back, and the new value would be lost",
                )
            layer.reason = layer.reason or f"{name} is {problem}"

    def _refuse_gaps(self, plan: Plan, layers: Mapping[str, Layer]) -> None:
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

    def _prepared(self, state: LayerStates) -> Prepared:
        in_place = [layer for layer in state.layers.values() if layer.is_in_place]
        parameters = [name for layer in in_place for name in layer.parameters]
        state.loaded = [layer for layer in state.layers.values() if layer.parameters and not layer.is_in_place]
        not_in_place: dict[str, list[str]] = {}
        for layer in state.loaded:
            not_in_place.setdefault(layer.reason or "not proved yet", []).append(layer.name)
        binding = state.bound = Binding(state.plan, live_tensors(self._model), parameters)
        self._anchor(state, parameters)
        num_layers = sum(map(len, not_in_place.values()))
        logger.info("%d layers are written in place, %d are not: %s", len(in_place), num_layers, _short(not_in_place))
        return Prepared(
            casts=state.casts,
            binding=binding,
            not_in_place=not_in_place,
            not_synced=state.untouched,
            tied=state.tied,
        )

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
        proves = Proof.needed(state) and not self._is_random
        self._proof = Proof(self._model, self._model_config, state) if proves else None
        is_whole = not (state.bound and state.bound.parameters)
        if not state.loaded and not is_whole:
            return
        for layer in state.loaded:
            layer.came, layer.is_equal = {}, False
        replayed = {layer.name: layer.module for layer in state.loaded if layer.is_replayed}
        self._reload.begin(None if is_whole else [layer.module for layer in state.loaded], list(replayed.values()))
        self._replays = {name: Replay(self._reload, state.plan, state.layers[name]) for name in replayed}

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
        for name, came in batch:
            plan = state.names[name]
            tensor = came.to(state.rounded.get(name, came.dtype))
            if self._proof is not None:
                self._proof.note(plan, tensor)
            replays = [self._replays[each.name] for each in state.layers_of(plan) if each.name in self._replays]
            for replay in replays:
                replay.take(plan, tensor)
            if not replays:
                # A loader may write into what it is given.
                loaded += [(name, tensor), *((alias, tensor.clone()) for alias in plan.aliases)]
        if loaded:
            self._reload.load(loaded)

    @torch.no_grad()
    def finish(self) -> InstallResult:
        """Every layer serves what came for it."""
        state = self._state_now()
        assert state.prepared is not None  # the round was prepared
        for replay in self._replays.values():
            replay.finish()
        untouched, recomputed = state.untouched, state.recomputed
        if self._reload.is_open:
            try:
                self._reload.finish(check_cover=self.check_cover)
            finally:
                self._touched |= self._reload.touched
            if any(parameter.num_written is None for parameter in state.plan.parameters):
                written = self._reload.written
                names = [*(name for name, _ in self._model.named_parameters()), *sorted(state.plan.fillable)]
                untouched = tuple(name for name in names if name not in written)
            recomputed = self._reload.recomputed()
        self._touched = True
        state.prepared.binding.fill()
        self._reload.recompute(recomputed)
        if self._proof is not None:
            self._proof.check()
        return InstallResult(not_synced=untouched)

    def commit(self) -> None:
        """What the round has shown of its layers counts."""
        state, self._state = self._state, None
        self._touched = self._is_random = False
        if state is None:
            return
        if state.settle() or self._proof is not None:
            state.prepared = None  # other layers are written in place from now on, or for another reason not
        self._proof = None

    def abort(self) -> bool:
        """Layers that were loaded whole serve the new weights, those in place a mix, all others their old ones."""
        touched = self._touched
        if self._reload.is_open:
            touched |= self._reload.abort()
        self._touched = touched  # until the next round begins
        self._replays = {}
        self._proof = None
        if self._state is not None:
            self._state.prepared = None  # it may be bound to tensors that the round has replaced
        self._state = None
        return touched

    def _state_now(self) -> LayerStates:
        if self._state is None:
            raise RuntimeError("no round is open: call prepare() first")
        return self._state


def _can_be_replayed(plan: Plan, layer: Layer) -> bool:
    """Whether filling its parameters as the plan says, in any order, gives what its loader gives, and vLLM then installs them."""
    parameters = [plan.by_parameter[name] for name in layer.parameters]
    return not any(each.problem or each.is_optional or plan.cover.get(each.name) for each in parameters)


def _casts(plan: Plan, rounded: Mapping[str, torch.dtype]) -> dict[str, str]:
    """By name, the floating dtype of the parameters that it goes to, where all have one and it is declared in another.

    For those of `rounded`, it is the dtype that they are rounded to.
    """
    casts = {}
    for name in plan.names:
        wanted = {plan.by_parameter[copy.parameter].dtype_name for copy in name.copies}
        if name.name in rounded:
            wanted = {str(rounded[name.name]).rpartition(".")[2]}
        if name.problem or len(wanted) != 1 or wanted == {name.dtype_name}:
            continue
        dtypes = [getattr(torch, each) for each in (*wanted, name.dtype_name)]
        if all(dtype.is_floating_point for dtype in dtypes):
            casts[name.name] = wanted.pop()
    return casts


def _short(not_in_place: Mapping[str, list[str]]) -> str:
    return "; ".join(f"{len(names)} ({names[0]}, ...): {reason}" for reason, names in not_in_place.items()) or "-"
