"""How received weights get into a model: one module per way."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from wt_worker.installers.base import Installer
from wt_worker.installers.module import ModuleInstaller

__all__ = ["choose_installer"]


def choose_installer(model: torch.nn.Module, vllm_config: Any, model_config: Any, device: torch.device) -> Installer:
    """An installer for `model`: vLLM's if `vllm_config` is vLLM's, else the one for plain modules."""
    if type(vllm_config).__module__.partition(".")[0] == "vllm":
        module = importlib.import_module("wt_worker.vllm.installer")
        installer: Installer = module.VLLMInstaller(model, vllm_config, model_config, device)
        return installer
    return ModuleInstaller(model)
