"""Weights go in through vLLM's own loaders, layer by layer, and a failed round leaves a model that serves.

vLLM's layerwise reload moves every layer's parameters to the meta device, keeps what its loaders
are given until as many elements have come as the layer has, then loads and post-processes that
layer and copies the result into the storage that served before. Three things are added here,
because vLLM 0.26 to 0.33 lacks them:

* **Cover.** vLLM counts elements and processes at the end whatever it has, uninitialised memory
  included. A recorder sees which elements the loaders write, so that a layer which got only a part
  of its own is refused.
* **Abort.** vLLM has no way back from a failed round: layers stay on the meta device, and the next
  round goes on with the old one's counts and tensors.
* **CPU.** On vLLM's CPU platform a tied output head and mixture-of-experts layers would keep
  kernels built from the old weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none, set_current_vllm_config
from vllm.model_executor.layers import attention
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from wt_common import PlanError
from wt_worker.installers.base import InstallResult
from wt_worker.vllm.cover import WriteRecorder, tied_storages

__all__ = ["LayerwiseInstaller"]


class LayerwiseInstaller:
    """Installs through `model.load_weights`, with vLLM's layerwise reload; see `Installer`.

    Works for every model that vLLM can reload, at vLLM's speed, with up to one layer in memory
    twice. Biases, and expert maps and the like, are never moved to the meta device (vLLM's
    `SKIP_TENSORS`): loaders write them at once, so that a round which fails after one is poisoned.

    Attributes:
        check_cover: refuse, at `finish`, a layer of which only a part was loaded. Whoever turns
            this off answers for it: vLLM serves uninitialised memory then.
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
        self._moe_kernels: dict[torch.nn.Module, Any] = {}

    def begin(self) -> None:
        """Every layer is on the meta device and takes weights; nothing of an earlier round is left."""
        self.abort()
        self._touched = False
        self._names.clear()
        self._moe_kernels.clear()
        with self._vllm_context():
            if any(get_layerwise_info(layer).can_load() for layer in self._model.modules()):
                self._restore()  # somebody else's round, left open
            self._recorder = WriteRecorder(self._model)
            try:
                initialize_layerwise_reload(self._model)
                self._recorder.watch(self._model)
                if current_platform.is_cpu():
                    self._forget_moe_kernels()
            except BaseException:
                self.abort()
                raise

    def install(self, batch: Sequence[tuple[str, torch.Tensor]]) -> None:
        """vLLM holds the tensors, and every layer that is complete with them serves them.

        Raises:
            PlanError: a name came a second time in this round (vLLM would count its elements
                twice and take the layer for complete), or the model's loader refused a tensor.
        """
        recorder = self._open_round()
        for name, _ in batch:
            if name in self._names:
                raise PlanError(
                    f"{name} came twice in one round; send every name once",
                    side="worker",
                    phase="update",
                    param=name,
                )
            self._names.add(name)
        last = ""

        def feed() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal last
            for last, tensor in batch:  # noqa: B007 -- read when the loader fails
                yield last, tensor

        try:
            with self._vllm_context(), recorder:
                self._model.load_weights(feed())  # type: ignore[operator]  # not in nn.Module
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise PlanError(
                f"the loader of {type(self._model).__name__} failed at {last}, or at a name shortly "
                f"before it: {type(error).__name__}: {error}; compare names, shapes and dtypes with "
                "the checkpoint that the server was started with",
                side="worker",
                phase="update",
                param=last,
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
                if self.check_cover:
                    _refuse_partial(recorder)
                for layer in self._model.modules():
                    if _is_loaded(layer):
                        self._touched = True
                    else:
                        self._keep_old(layer)
                with recorder:
                    finalize_layerwise_reload(self._model, self._model_config)
                self._touched |= recorder.has_written_live
                self._repack_tied_weights()
            if recorder.conflicts:
                raise PlanError(
                    f"{recorder.conflicts[0]} shares its storage with a parameter that was sent with "
                    "other values; the server ties the two: send equal values, or start it from a "
                    "checkpoint in which they differ",
                    side="worker",
                    phase="finish",
                    param=recorder.conflicts[0],
                )
        except BaseException:
            self.abort()
            raise
        self._recorder = None
        synced = {target.name for target in recorder.targets.values() if target.boxes}
        known = {target.name for target in recorder.targets.values()}
        names = [name for name, _ in self._model.named_parameters() if name in known]
        not_synced = tuple(name for name in names if name not in synced)
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
        """What vLLM's post-processing expects around it; vLLM 0.26 does not set it for an update."""
        with torch.no_grad():
            if get_current_vllm_config_or_none() is not None:
                yield
                return
            with set_current_vllm_config(self._vllm_config):
                yield

    def _restore(self) -> None:
        """Old tensors are back in every layer that is not complete, and vLLM has forgotten the round."""
        for layer in self._model.modules():
            self._keep_old(layer)
        finalize_layerwise_reload(self._model, self._model_config)
        self._repack_tied_weights()

    def _keep_old(self, layer: torch.nn.Module) -> None:
        """Finalizing will put the old tensors of `layer` back instead of processing what it was given."""
        info = get_layerwise_info(layer)
        if info.kernel_tensors is None:  # complete: what is there is new, and stays
            return
        info.loaded_weights.clear()
        info.load_numel = 0
        info.load_numel_total = 0  # nothing is missing then, which vLLM would warn about
        if layer in self._moe_kernels:
            layer.quant_method.moe_kernel = self._moe_kernels[layer]  # type: ignore[union-attr]

    def _forget_moe_kernels(self) -> None:
        """Experts get a new kernel when they are processed.

        vLLM 0.28 and later takes an existing kernel for a sign that the experts' weights need no
        packing again, which is so on CUDA; on a CPU the weights would be used unpacked.
        """
        for layer in self._model.modules():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, UnquantizedFusedMoEMethod) and method.moe_kernel is not None:
                self._moe_kernels[layer] = method.moe_kernel
                method.moe_kernel = None

    def _repack_tied_weights(self) -> None:
        """On a CPU, every layer that multiplies by a tied weight has a packed copy of the live one.

        The copy is made when a layer is processed, and a tied output head is not: its weight
        arrives under the name of the embedding.
        """
        if not current_platform.is_cpu():
            return
        tied = tied_storages(self._model)
        for layer in self._model.modules():
            weight = getattr(layer, "weight", None)
            if hasattr(layer, "cpu_linear") and isinstance(weight, torch.nn.Parameter):
                if weight.untyped_storage() in tied and weight.dim() == 2 and weight.numel():
                    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)


def _is_loaded(layer: torch.nn.Module) -> bool:
    info = get_layerwise_info(layer)
    return info.kernel_tensors is None or info.load_numel > 0


def _is_attention(layer: torch.nn.Module) -> bool:
    """Whether vLLM makes the layer's tensors afresh when it has loaded some (scales of the cache)."""
    if hasattr(attention, "is_deferred_attention_layer"):
        return bool(attention.is_deferred_attention_layer(layer))
    return isinstance(layer, (attention.Attention, attention.MLAAttention))  # 0.26 and 0.27


def _refuse_partial(recorder: WriteRecorder) -> None:
    partial = []
    for target in recorder.targets.values():
        if target.is_optional or _is_attention(target.layer):
            continue
        # What stays live (a bias) may be left out as a whole; what was on the meta device may not.
        if target.boxes or (target.tensor.is_meta and _is_loaded(target.layer)):
            num_written, num_expected = target.num_written(), target.num_expected()
            if num_written < num_expected:
                partial.append((target.name, f"{num_written} of {num_expected} elements"))
    if partial:
        raise PlanError(
            "; ".join(f"{name}: got {got}" for name, got in partial[:5])
            + (f"; and {len(partial) - 5} more" if len(partial) > 5 else "")
            + ": a layer is updated whole or not at all; send all checkpoint names that it is made of "
            "in one round",
            side="worker",
            phase="finish",
            param=partial[0][0],
        )
