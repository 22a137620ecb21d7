"""What a checkpoint has of a model, and how a server got its first weights."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["checkpoint_tensors", "load_format", "persistent_buffers"]


def checkpoint_tensors(model: torch.nn.Module, *, remove_duplicate: bool = False) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers of `model`; tied ones under each of their names, unless duplicates are removed."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=remove_duplicate))
    return found | persistent_buffers(model, remove_duplicate=remove_duplicate)


def persistent_buffers(model: torch.nn.Module, *, remove_duplicate: bool = True) -> dict[str, torch.Tensor]:
    """The buffers of `model` that its checkpoint has; those of a module that has several names under each, if they are kept."""
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=remove_duplicate):
        temporary = module._non_persistent_buffers_set  # noqa: SLF001  # torch has no other way
        for leaf, buffer in module.named_buffers(recurse=False):
            if leaf not in temporary:
                found[f"{prefix}.{leaf}" if prefix else leaf] = buffer
    return found


def load_format(vllm_config: Any) -> str:
    """How the server got its first weights, in vLLM's words; empty where that is not known."""
    found = getattr(getattr(vllm_config, "load_config", None), "load_format", "")
    return str(getattr(found, "value", found))
