"""One digest for all weights of a model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from wt_worker.digest import tensor_digests

__all__ = ["model_digest"]


def model_digest(parameters: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256, in hex, over `name digest` of each parameter, sorted by name: one word for all the weights of a model."""
    pairs = list(parameters)
    digests = tensor_digests(tensor for _, tensor in pairs)
    lines = sorted(f"{name} {digest:016x}\n" for (name, _), digest in zip(pairs, digests, strict=True))
    return hashlib.sha256("".join(lines).encode()).hexdigest()
