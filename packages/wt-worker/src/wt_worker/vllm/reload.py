"""Weights go in through vLLM's own loaders, and a failed round leaves a model that serves.

vLLM's layerwise reload moves layers' parameters to the meta device, keeps what its loaders
are given until as many elements have come as the layer has, then loads and post-processes that
layer and copies the result into the storage that served before. Three things are added here,
because vLLM 0.26 to 0.33 lacks them:

* **Cover.** vLLM counts elements and processes at the end whatever it has, uninitialised memory
  included. A recorder sees which elements the loaders write, so that a layer which got a part
  of its own is refused (`finish`).
* **Abort.** vLLM has no way back from a failed round: layers stay on the meta device, and the next
  round goes on with the old one's counts and tensors.
* **CPU.** There, a tied output head and mixture-of-experts layers would keep kernels built from
  the old weights (`wt_worker.vllm.cpu`), and a weight that latent attention has emptied could not be loaded again: it gets
  memory while a round is open.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none, set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    _layerwise_process,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import materialize_layer

from wt_common import PlanError
from wt_worker.placement.plan import Plan
from wt_worker.placement.trace import error_text
from wt_worker.vllm.cover import Target, WriteRecorder
from wt_worker.vllm.cpu import emptied_source, forget_moe_kernels, repack_tied_weights
from wt_worker.vllm.derived import is_attention, process_attention, recomputed
from wt_worker.vllm.tracing import skipped_names, trace_model

__all__ = ["LayerwiseReload", "loader_error", "partial_text", "plan_error"]


class LayerwiseReload:
    """`model.load_weights`, with vLLM's layerwise reload of some of the model's layers, or of all.

    Takes every model that vLLM can reload, with up to one layer in memory twice. Biases and expert maps stay where they are
    (vLLM's `SKIP_TENSORS`; biases since 0.27): loaders write them at once, so that a round which fails after one of them is
    poisoned.

    Attributes:
        is_open: between `begin` and `finish` or `abort`.
        touched: whether a byte of the model may have changed since `begin`.
        written: names of the parameters and buffers that the loaders wrote in the round that ended last.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any, model_config: Any) -> None:
        self.touched = False
        self.written: set[str] = set()
        self._model = model
        self._vllm_config = vllm_config
        self._model_config = model_config
        self._layers: Any = model  # of which vLLM takes the modules
        self._recorder: WriteRecorder | None = None  # there while a round is open
        self._names: set[str] = set()
        self._skipped_names: set[str] = set()
        self._moe_kernels: dict[torch.nn.Module, Any] = {}
        # Attention layers, each with the projection whose weight it has emptied, and that weight.
        self._emptied: list[tuple[torch.nn.Module, torch.nn.Module, torch.nn.Parameter]] = []

    @property
    def is_open(self) -> bool:
        """Whether layers are on the meta device."""
        return self._recorder is not None

    def trace(
        self,
        rows: Sequence[tuple[str, torch.dtype, Sequence[int]]],
        optional: Collection[str],
        aliases: Mapping[str, str],
    ) -> tuple[Plan, list[str]]:
        """Where `load_weights` would put what `rows` announces, and attributes that it sets to tensors of its own making.

        `optional` and `aliases` are as for `trace_model`. The model is as before: layers get their tensors back, and nothing is
        processed. Raises TraceError.
        """
        self.begin(None)
        try:
            with self._vllm_context():
                return trace_model(self._model, rows, optional, aliases)
        finally:
            self._put_back()

    def recomputed(self) -> list[tuple[str, Callable[[], object]]]:
        """What makes again what is made from parameters outside of vLLM's reload, by module; as long as these are the same."""
        with self._vllm_context():
            return recomputed(self._model, self._model_config)

    def recompute(self, makers: Sequence[tuple[str, Callable[[], object]]]) -> None:
        """What is made from parameters outside of vLLM's reload follows them."""
        if not makers:
            return  # the context alone costs more than all else at the end of a round in place
        with torch.no_grad(), self._vllm_context():
            for _, make in makers:
                make()

    def begin(self, layers: Sequence[torch.nn.Module] | None, replayed: Collection[torch.nn.Module] = ()) -> None:
        """`layers`, or all, are on the meta device and take weights; no earlier round's is left.

        The caller will `materialize` and `process` those in `replayed`, which get nothing from `load`.
        """
        self.abort()
        self.touched = False
        self._names.clear()
        self._moe_kernels = {}
        with self._vllm_context():
            if any(get_layerwise_info(layer).can_load() for layer in self._model.modules()):
                self._layers = self._model
                self._restore()  # somebody else's round, left open
            self._layers = self._model if layers is None else _Layers(layers)
            self._recorder = WriteRecorder(self._model, _is_kept)
            self._emptied = [
                (layer, source, source.weight)  # type: ignore[misc]  # it has one
                for layer in self._model.modules()
                if is_attention(layer) and (source := emptied_source(layer)) is not None
            ]
            try:
                initialize_layerwise_reload(self._layers)
                self._give_memory()
                self._recorder.watch(self._model, set(self._layers.modules()) - set(replayed))
                self._skipped_names = skipped_names(self._model)
                self._moe_kernels = forget_moe_kernels(self._layers)
            except BaseException:
                self.abort()
                raise

    def load(self, batch: Sequence[tuple[str, torch.Tensor]]) -> None:
        """The tensors are in vLLM's hands, and every layer that is complete serves them.

        Raises:
            PlanError: a name came a second time in this round (vLLM would count its elements
                twice and take the layer for complete), or the model's loader refused a tensor.
        """
        recorder = self._open_round()
        for name, _ in batch:
            if name in self._names:
                raise plan_error(name, f"{name} came twice in one round; send every name once")
            self._names.add(name)
        last = ""

        def feed() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal last
            for name, tensor in batch:
                if name not in self._skipped_names:
                    last = name
                    yield name, tensor

        try:
            with self._vllm_context(), recorder:
                self._model.load_weights(feed())  # type: ignore[operator]  # vLLM's, not torch's
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise loader_error(self._model, last, error) from error

    def materialize(self, layer: torch.nn.Module) -> None:
        """`layer`, one of those on the meta device, has real tensors, as its loader sees them and without content."""
        with self._vllm_context():
            materialize_layer(layer, get_layerwise_info(layer))

    def process(self, layer: torch.nn.Module) -> None:
        """`layer`, materialized and written by the caller, is processed as after a load, and serves."""
        with self._vllm_context():
            self.touched = True
            _layerwise_process(layer, get_layerwise_info(layer))

    def finish(self, *, check_cover: bool) -> None:
        """Every layer that was loaded serves its new weights, every other its old ones.

        Raises:
            PlanError: a layer was loaded in part, or tied parameters were sent with different
                values. The round is aborted by then.
        """
        recorder = self._open_round()
        try:
            with self._vllm_context():
                _refuse_wrong_result(recorder, check_cover=check_cover)
                for layer in self._layers.modules():
                    if _is_loaded(layer):
                        self.touched = True
                    else:
                        self._keep_old(layer)
                self._keep_attention()
                with recorder:
                    finalize_layerwise_reload(self._layers, self._model_config)
                self.touched |= recorder.has_written_live
            if recorder.conflicts:
                name = recorder.conflicts[0]
                raise plan_error(
                    name,
                    f"{name} is tied to another parameter here, and was sent with other values: send "
                    "equal ones, or start the server from a checkpoint that has both, and different",
                    phase="finish",
                )
        except BaseException:
            self.abort()
            raise
        self._recorder = None
        self.written = {target.name for target in recorder.targets.values() if target.boxes}

    def abort(self) -> bool:
        """Layers that are complete serve the new weights, all others their old ones; whether any byte may have changed."""
        if self._recorder is not None:
            self.touched |= self._recorder.has_written_live or any(
                target.is_processed() for target in self._recorder.targets.values()
            )
            with self._vllm_context():
                self._restore()
            self._recorder = None
        return self.touched

    def _open_round(self) -> WriteRecorder:
        if self._recorder is None:
            raise RuntimeError("no round is open: call begin() first")
        return self._recorder

    @contextmanager
    def _vllm_context(self) -> Iterator[None]:
        """What vLLM's post-processing needs around it; vLLM 0.26 does not set it for an update."""
        with torch.no_grad():
            if get_current_vllm_config_or_none() is not None:
                yield
                return
            with set_current_vllm_config(self._vllm_config):
                yield

    def _restore(self) -> None:
        """Layers that are not complete have their old tensors, and vLLM has forgotten the round."""
        for layer in self._layers.modules():
            self._keep_old(layer)
        self._keep_attention()
        finalize_layerwise_reload(self._layers, self._model_config)
        for attention, _, _ in self._emptied:
            process_attention(attention, self._model_config)  # whose projection was complete
        repack_tied_weights(self._model)

    def _put_back(self) -> None:
        """All layers have their old tensors, as if no round had begun; only where nothing was loaded."""
        with self._vllm_context():
            for layer in self._model.modules():
                info = get_layerwise_info(layer)
                if info.kernel_tensors is not None:
                    self._take_memory(layer)
                    _place_kernel_tensors(layer, info)
                info.reset()
                if layer in self._moe_kernels:
                    layer.quant_method.moe_kernel = self._moe_kernels[layer]  # type: ignore[union-attr]
        if hasattr(self._model, "_original_do_torchao_reload"):
            self._model._do_torchao_reload = self._model._original_do_torchao_reload  # noqa: SLF001  # vLLM's
        self._recorder = None

    def _keep_old(self, layer: torch.nn.Module) -> None:
        """Finalizing will put the layer's old tensors back, not process what it was given."""
        info = get_layerwise_info(layer)
        if info.kernel_tensors is None:  # complete: what is there is new, and stays
            return
        self._take_memory(layer)
        info.loaded_weights.clear()
        info.load_numel = 0
        info.load_numel_total = 0  # nothing is missing then, which vLLM would warn about
        if layer in self._moe_kernels:
            layer.quant_method.moe_kernel = self._moe_kernels[layer]  # type: ignore[union-attr]

    def _give_memory(self) -> None:
        """Weights that attention has emptied can be loaded: vLLM copies what it has loaded into memory that is there for it."""
        for _, source, _ in self._emptied:
            info = get_layerwise_info(source)
            if info.kernel_tensors is not None:  # it is one of the layers on the meta device
                loaded = info.restore_metadata[0]["weight"]
                with info.restore_device:
                    weight = torch.empty_strided(loaded.shape, loaded.stride(), dtype=loaded.dtype)
                info.kernel_tensors[0]["weight"] = torch.nn.Parameter(weight, requires_grad=False)

    def _take_memory(self, layer: torch.nn.Module) -> None:
        """A weight that attention has emptied, and that was not loaded, is empty again."""
        for _, source, weight in self._emptied:
            tensors = get_layerwise_info(source).kernel_tensors
            if source is layer and tensors is not None:
                tensors[0]["weight"] = weight

    def _keep_attention(self) -> None:
        """Finalizing will not process attention layers whose emptied projection was not loaded."""
        for attention, source, _ in self._emptied:
            info = get_layerwise_info(attention)
            if not _is_loaded(source) and info.kernel_tensors is not None:
                _place_kernel_tensors(attention, info)
                info.reset()


class _Layers:
    """What vLLM's reload asks of a model, for some of its layers and none of their children."""

    def __init__(self, layers: Iterable[torch.nn.Module]) -> None:
        self._layers = list(layers)

    def modules(self) -> Iterator[torch.nn.Module]:
        return iter(self._layers)


def loader_error(
    model: torch.nn.Module, name: str, error: BaseException, shape: Sequence[int] | None = None
) -> PlanError:
    """What is raised where the model's loader failed at `name`, which was announced with `shape`."""
    announced = "" if shape is None else f", announced with shape {list(shape)}"
    return plan_error(
        name,
        f"the loader of {type(model).__name__} failed at {name}{announced}, or shortly before it: {error_text(error)}; compare "
        "names, shapes and dtypes with the checkpoint that the server was started from",
    )


def plan_error(name: str, message: str, phase: str = "update") -> PlanError:
    """A PlanError of the worker about parameter `name`."""
    return PlanError(message, side="worker", phase=phase, param=name or None)


def _is_loaded(layer: torch.nn.Module) -> bool:
    info = get_layerwise_info(layer)
    return info.kernel_tensors is None or info.load_numel != 0


def _is_kept(target: Target) -> bool:
    """Whether the load that is writing `target` is kept: vLLM does so before it calls the loader."""
    loads = get_layerwise_info(target.layer).loaded_weights
    return bool(loads) and loads[-1][0] == target.leaf


def _refuse_wrong_result(recorder: WriteRecorder, *, check_cover: bool) -> None:
    partial = []
    for target in recorder.targets.values():
        if target.is_bypassed:
            raise plan_error(
                target.name,
                f"{target.name} would keep its old value: the model's loader does not go through the "
                "parameter's own, which is all that vLLM's layerwise reload sees; vLLM cannot update "
                "this model while it runs",
                phase="finish",
            )
        if target.is_optional or is_attention(target.layer):
            continue
        # What stays in place (a bias) may be left out as a whole; what is on the meta device, not.
        if target.boxes or (target.tensor.is_meta and _is_loaded(target.layer)):
            num_written, num_expected = target.num_written(), target.num_expected()
            if num_written < num_expected:
                partial.append((target.name, f"{num_written} of {num_expected} elements"))
    if partial and check_cover:
        raise plan_error(partial[0][0], partial_text(partial), phase="finish")


def partial_text(partial: Sequence[tuple[str, str]]) -> str:
    """What is wrong with a round that writes these parameters in part: (name, how much of it)."""
    return (
        "; ".join(f"{name} got {got}" for name, got in partial[:5])
        + (f"; and {len(partial) - 5} more" if len(partial) > 5 else "")
        + ": a layer is updated whole or not at all; send in one round all checkpoint names that it is made of"
    )
