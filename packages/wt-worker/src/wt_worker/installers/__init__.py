"""How received weights get into a model: one module per way."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from wt_worker.installers.base import Installer
from wt_worker.installers.module import ModuleInstaller

__all__ = ["choose_installer"]


def choose_installer(
    model: torch.nn.Module, vllm_config: Any, model_config: Any, device: torch.device, *, check_cover: bool
) -> Installer:
    """An installer for `model`: vLLM's own loader if `vllm_config` is vLLM's, else copying by name."""
    if type(vllm_config).__module__.partition(".")[0] == "vllm":
        reload = importlib.import_module("wt_worker.vllm.reload")
        installer: Installer = reload.LayerwiseInstaller(model, vllm_config, model_config, device)
        installer.check_cover = check_cover
        return installer
    return ModuleInstaller(model, check_cover=check_cover)
