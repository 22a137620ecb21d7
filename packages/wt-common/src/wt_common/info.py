"""The base classes users subclass and the request classes, as vLLM documents them."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "MAX_TIMEOUT_S",
    "WeightTransferInitInfo",
    "WeightTransferInitRequest",
    "WeightTransferUpdateInfo",
    "WeightTransferUpdateRequest",
]

MAX_TIMEOUT_S = 1_000_000.0
"""Most seconds that a timeout may have, about 11 days: poll() of the system counts milliseconds in 31 bits, 24 days."""


@dataclass
class WeightTransferInitInfo(ABC):  # noqa: B024  # abstract by meaning: a backend's subclass adds the fields
    """Base of what a backend's sender ships to the worker at the handshake; the worker stores it.

    Whatever the two sides must agree on for the life of the session is a field of the subclass.
    """


@dataclass
class WeightTransferUpdateInfo(ABC):  # noqa: B024  # abstract by meaning: a backend's subclass adds the fields
    """Base of what a backend's sender ships with each `update_weights` call: per-round metadata only."""


@dataclass
class WeightTransferInitRequest:
    """The init call as the inference engine's API takes it. Its repr is without the payload, which has the session's secret."""

    init_info: dict[str, Any] = field(default_factory=dict, repr=False)


@dataclass
class WeightTransferUpdateRequest:
    """The update call as the inference engine's API takes it: one dict for all workers, or one per worker rank."""

    update_info: dict[str, Any] | list[dict[str, Any]] = field(default_factory=dict)
