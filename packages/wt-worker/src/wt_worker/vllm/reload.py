"""Weights go in through vLLM's own loaders, and a failed round leaves a model that serves.

vLLM's layerwise reload moves every layer's parameters to the meta device, keeps what its loaders
are given until as many elements have come as the layer has, then loads and post-processes that
layer and copies the result into the storage that served before. Three things are added here,
because vLLM 0.26 to 0.33 lacks them:

* **Cover.** vLLM counts elements and processes at the end whatever it has, uninitialised memory
  included. A recorder sees which elements the loaders write, so that a layer which would get a part
  of its own is refused: before a byte moves (`check`), and again at the end (`finish`).
* **Abort.** vLLM has no way back from a failed round: layers stay on the meta device, and the next
  round goes on with the old one's counts and tensors.
* **CPU.** There, a tied output head and mixture-of-experts layers would keep kernels built from
  the old weights (`wt_worker.vllm.cpu`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none, set_current_vllm_config
from vllm.model_executor.layers import attention
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from wt_common import PlanError
from wt_common.session import Metadata
from wt_worker.installers.base import InstallResult
from wt_worker.vllm.cover import Target, WriteRecorder
from wt_worker.vllm.cpu import forget_moe_kernels, repack_tied_weights

__all__ = ["LayerwiseInstaller"]

_REHEARSAL = -(1 << 62)  # a count from which no layer's number of elements is ever reached

_logger = logging.getLogger(__name__)


class LayerwiseInstaller:
    """Installs through `model.load_weights`, with vLLM's layerwise reload; see `Installer`.

    Takes every model that vLLM can reload, with up to one layer in memory twice. A model whose loader
    writes parameters on its own (gpt-oss) is refused, since vLLM's reload would keep their old values.
    Biases and expert maps stay where they are (vLLM's `SKIP_TENSORS`; biases since 0.27): loaders
    write them at once, so that a round which fails after one of them is poisoned.

    Attributes:
        check_cover: refuse a round that loads a part of a layer. Whoever turns this off answers for
            it: vLLM serves uninitialised memory then.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any, model_config: Any, device: torch.device) -> None:
        self.check_cover = True
        self.device = device
        self._model = model
        self._vllm_config = vllm_config
        self._model_config = model_config
        self._recorder: WriteRecorder | None = None  # there while a round is open
        self._touched = False
        self._names: set[str] = set()
        self._skipped_names: set[str] = set()
        self._moe_kernels: dict[torch.nn.Module, Any] = {}

    def check(self, metadata: Metadata) -> dict[str, str]:
        """Raises what `install` and `finish` would raise for such a round; the model is as before.

        A rehearsal with tensors that have no content, for metadata that are new: it takes about
        0.6 ms a name (12 layers of 64 experts, one core). It passes if a loader wants to know a
        value, and for a tensor larger than expected, of which loaders take the part that they need.

        Returns:
            Nothing: only the loaders know which dtype a checkpoint name ends up in, and cast by themselves.

        Raises:
            PlanError: the model has no place for a name or shape, or a layer would get a part only.
        """
        batch = []
        for name, dtype_name, shape in zip(metadata.names, metadata.dtype_names, metadata.shapes, strict=True):
            dtype = getattr(torch, dtype_name, None)
            if not isinstance(dtype, torch.dtype):
                raise _plan_error(name, f"{name}: torch has no dtype {dtype_name!r}")
            device = "meta" if prod(shape) > 1 else "cpu"  # loaders ask scalars for their value
            batch.append((name, torch.zeros(shape, dtype=dtype, device=device)))
        self.begin()
        recorder = self._open_round()
        recorder.is_rehearsal = True
        try:
            for layer in self._model.modules():
                get_layerwise_info(layer).load_numel = _REHEARSAL
            self.install(batch)
            _refuse_wrong_result(recorder, check_cover=self.check_cover)
        except PlanError as error:
            if "meta tensor" not in str(error.__cause__):
                raise
            _logger.debug("not known before the round: a loader reads values", exc_info=True)
        finally:
            self.abort()
        return {}

    def begin(self) -> None:
        """Every layer is on the meta device and takes weights; no earlier round's is left."""
        self.abort()
        self._touched = False
        self._names.clear()
        self._moe_kernels = {}
        with self._vllm_context():
            if any(get_layerwise_info(layer).can_load() for layer in self._model.modules()):
                self._restore()  # somebody else's round, left open
            self._recorder = WriteRecorder(self._model, _is_kept)
            try:
                initialize_layerwise_reload(self._model)
                self._recorder.watch(self._model)
                self._skipped_names = _skipped_names(self._model)
                self._moe_kernels = forget_moe_kernels(self._model)
            except BaseException:
                self.abort()
                raise

    def place(self, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        """None: vLLM's loaders take whole tensors."""

    def install(self, batch: Sequence[tuple[str, torch.Tensor]]) -> None:
        """The tensors are in vLLM's hands, and every layer that is complete serves them.

        Raises:
            PlanError: a name came a second time in this round (vLLM would count its elements
                twice and take the layer for complete), or the model's loader refused a tensor.
        """
        recorder = self._open_round()
        for name, _ in batch:
            if name in self._names:
                raise _plan_error(name, f"{name} came twice in one round; send every name once")
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
            raise _plan_error(
                last,
                f"the loader of {type(self._model).__name__} failed at {last}, or shortly before it: "
                f"{type(error).__name__}: {error}; compare names, shapes and dtypes with the "
                "checkpoint that the server was started from",
            ) from error

    def finish(self) -> InstallResult:
        """Every layer that was loaded serves its new weights, every other its old ones.

        Raises:
            PlanError: a layer was loaded in part, or tied parameters were sent with different
                values. The round is aborted by then.
        """
        recorder = self._open_round()
        try:
            with self._vllm_context():
                _refuse_wrong_result(recorder, check_cover=self.check_cover)
                for layer in self._model.modules():
                    if _is_loaded(layer):
                        self._touched = True
                    else:
                        self._keep_old(layer)
                with recorder:
                    finalize_layerwise_reload(self._model, self._model_config)
                self._touched |= recorder.has_written_live
                repack_tied_weights(self._model)
            if recorder.conflicts:
                name = recorder.conflicts[0]
                raise _plan_error(
                    name,
                    f"{name} is tied to another parameter here, and was sent with other values: send "
                    "equal ones, or start the server from a checkpoint that has both, and different",
                    phase="finish",
                )
        except BaseException:
            self.abort()
            raise
        self._recorder = None
        loadable = {target.name for target in recorder.targets.values()}
        loaded = {target.name for target in recorder.targets.values() if target.boxes}
        names = [name for name, _ in self._model.named_parameters() if name in loadable]
        not_synced = tuple(name for name in names if name not in loaded)
        return InstallResult(num_parameters=len(names) - len(not_synced), not_synced=not_synced)

    def abort(self) -> bool:
        """Layers that are complete serve the new weights, all others their old ones, untouched."""
        if self._recorder is not None:
            self._touched |= self._recorder.has_written_live or any(
                target.is_processed() for target in self._recorder.targets.values()
            )
            with self._vllm_context():
                self._restore()
            self._recorder = None
        return self._touched

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
        for layer in self._model.modules():
            self._keep_old(layer)
        finalize_layerwise_reload(self._model, self._model_config)
        repack_tied_weights(self._model)

    def _keep_old(self, layer: torch.nn.Module) -> None:
        """Finalizing will put the layer's old tensors back, not process what it was given."""
        info = get_layerwise_info(layer)
        if info.kernel_tensors is None:  # complete: what is there is new, and stays
            return
        info.loaded_weights.clear()
        info.load_numel = 0
        info.load_numel_total = 0  # nothing is missing then, which vLLM would warn about
        if layer in self._moe_kernels:
            layer.quant_method.moe_kernel = self._moe_kernels[layer]  # type: ignore[union-attr]


def _is_loaded(layer: torch.nn.Module) -> bool:
    info = get_layerwise_info(layer)
    return info.kernel_tensors is None or info.load_numel not in {0, _REHEARSAL}


def _is_kept(target: Target) -> bool:
    """Whether the load that is writing `target` is kept: vLLM does so before it calls the loader."""
    loads = get_layerwise_info(target.layer).loaded_weights
    return bool(loads) and loads[-1][0] == target.leaf


def _is_attention(layer: torch.nn.Module) -> bool:
    """Whether vLLM makes the tensors afresh when some of them (scales of the cache) were loaded."""
    if hasattr(attention, "is_deferred_attention_layer"):
        return bool(attention.is_deferred_attention_layer(layer))
    return isinstance(layer, (attention.Attention, attention.MLAAttention))  # 0.26 and 0.27


def _skipped_names(model: torch.nn.Module) -> set[str]:
    """Further names of an embedding that is its model's output head too, as the same module.

    vLLM skips them, but from 0.30 on raises unless the first name is in the same batch.
    """
    names = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, VocabParallelEmbedding):
            names[f"{prefix}.weight"] = module
    first = {module: name for name, module in reversed(names.items())}
    return names.keys() - first.values()


def _refuse_wrong_result(recorder: WriteRecorder, *, check_cover: bool) -> None:
    partial = []
    for target in recorder.targets.values():
        if target.is_bypassed:
            raise _plan_error(
                target.name,
                f"{target.name} would keep its old value: the model's loader does not go through the "
                "parameter's own, which is all that vLLM's layerwise reload sees; vLLM cannot update "
                "this model while it runs",
                phase="finish",
            )
        if target.is_optional or _is_attention(target.layer):
            continue
        # What stays in place (a bias) may be left out as a whole; what is on the meta device, not.
        if target.boxes or (target.tensor.is_meta and _is_loaded(target.layer)):
            num_written, num_expected = target.num_written(), target.num_expected()
            if num_written < num_expected:
                partial.append((target.name, f"{num_written} of {num_expected} elements"))
    if partial and check_cover:
        raise _plan_error(
            partial[0][0],
            "; ".join(f"{name} got {got}" for name, got in partial[:5])
            + (f"; and {len(partial) - 5} more" if len(partial) > 5 else "")
            + ": a layer is updated whole or not at all; send in one round all checkpoint names that "
            "it is made of",
            phase="finish",
        )


def _plan_error(name: str, message: str, phase: str = "update") -> PlanError:
    return PlanError(message, side="worker", phase=phase, param=name or None)
