"""The error tree of weight transfer, and how an error crosses the wire.

An error raised on one side is the same class on the other: a side that fails sends `error_to_wire(exc)`, the other
raises `error_from_wire(payload)`. Texts say subject, expected, got, next step; everything a program needs is an
attribute.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar

__all__ = [
    "AgreementError",
    "BackendUnavailableError",
    "ConfigurationError",
    "FailureCode",
    "IntegrityError",
    "Outcome",
    "PeerLostError",
    "Phase",
    "PlanError",
    "PoisonedError",
    "RoundTimeoutError",
    "Side",
    "SourceModeError",
    "StaleSessionError",
    "TransportError",
    "WeightTransferError",
    "error_from_wire",
    "error_to_wire",
]


class Outcome(StrEnum):
    """How a round ended. There is no fourth way."""

    COMMITTED = "committed"
    """Every byte is installed on every worker."""
    UNCHANGED = "unchanged"
    """The round failed before a byte of any model was touched: send again."""
    POISONED = "poisoned"
    """Some bytes were installed, some not: only a full round repairs it."""


class Side(StrEnum):
    """The two ends of a transfer."""

    TRAINER = "trainer"
    WORKER = "worker"


class Phase(StrEnum):
    """The phases of a round, in order, and `abort`, which ends any of them."""

    INIT = "init"
    START = "start"
    UPDATE = "update"
    FINISH = "finish"
    ABORT = "abort"


class FailureCode(StrEnum):
    """One code per class of error; it is what crosses the wire."""

    AGREEMENT = "agreement"
    BACKEND_UNAVAILABLE = "backend_unavailable"
    CONFIGURATION = "configuration"
    INTEGRITY = "integrity"
    PEER_LOST = "peer_lost"
    PLAN = "plan"
    POISONED = "poisoned"
    SOURCE_MODE = "source_mode"
    STALE_SESSION = "stale_session"
    TIMEOUT = "timeout"
    TRANSPORT = "transport"


class WeightTransferError(Exception):
    """Base of every error this library raises on purpose.

    Attributes:
        side: which side found the error.
        rank: rank of the process that found it, in its own side's numbering (trainer rank, or rank in the engine).
        engine: id of the inference engine concerned, if one is.
        phase: phase of the round in which it was found.
        param: checkpoint name of the parameter concerned, if one is.
        backend: registry name of the backend.
        round: number of the round.
        elapsed_s: seconds since the round (or the init) began.
        outcome: how the round ended; None while that is not decided, or when no round was running.
    """

    code: ClassVar[FailureCode] = FailureCode.TRANSPORT

    def __init__(
        self,
        message: str,
        *,
        side: Side | str | None = None,
        rank: int | None = None,
        engine: str | None = None,
        phase: Phase | str | None = None,
        param: str | None = None,
        backend: str | None = None,
        round: int | None = None,
        elapsed_s: float | None = None,
        outcome: Outcome | str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.side = None if side is None else Side(side)
        self.rank = rank
        self.engine = engine
        self.phase = None if phase is None else Phase(phase)
        self.param = param
        self.backend = backend
        self.round = round
        self.elapsed_s = None if elapsed_s is None else float(elapsed_s)
        self.outcome = None if outcome is None else Outcome(outcome)

    def __str__(self) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self.attributes().items())
        return f"{self.message} [{facts}]" if facts else self.message

    def attributes(self) -> dict[str, Any]:
        """The attributes that are set, as plain JSON values."""
        values = {
            "side": self.side,
            "rank": self.rank,
            "engine": self.engine,
            "phase": self.phase,
            "param": self.param,
            "backend": self.backend,
            "round": self.round,
            "elapsed_s": None if self.elapsed_s is None else round(self.elapsed_s, 3),
            "outcome": self.outcome,
        }
        return {
            name: value.value if isinstance(value, StrEnum) else value
            for name, value in values.items()
            if value is not None
        }

    def fill(self, **attributes: Any) -> WeightTransferError:
        """Set the attributes that are still unset, and return self (an inner layer knows some, an outer one more)."""
        for name, value in attributes.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        return self


class ConfigurationError(WeightTransferError, ValueError):
    """What the user passed or set cannot work; nothing was sent."""

    code = FailureCode.CONFIGURATION


class SourceModeError(WeightTransferError, TypeError):
    """The weight source lacks the iterator that the backend needs; the text names the method."""

    code = FailureCode.SOURCE_MODE


class AgreementError(WeightTransferError, RuntimeError):
    """The two sides differ in what they must agree on (schema, world size, identity); nothing was moved."""

    code = FailureCode.AGREEMENT


class PlanError(WeightTransferError, ValueError):
    """A parameter cannot be sent or installed as declared (name, order, shape, dtype, coverage)."""

    code = FailureCode.PLAN


class BackendUnavailableError(WeightTransferError, RuntimeError):
    """The backend's library or hardware is missing on this side."""

    code = FailureCode.BACKEND_UNAVAILABLE


class RoundTimeoutError(WeightTransferError, TimeoutError):
    """The deadline of the round (or of the init) passed; the text names who was being waited for."""

    code = FailureCode.TIMEOUT


class TransportError(WeightTransferError, RuntimeError):
    """The wire or the control plane failed: a refused RPC, a broken socket, a collective's error."""

    code = FailureCode.TRANSPORT


class PeerLostError(WeightTransferError, RuntimeError):
    """A process of the other side, or another rank of this one, is gone."""

    code = FailureCode.PEER_LOST


class StaleSessionError(WeightTransferError, RuntimeError):
    """The call or message belongs to a session that a later init replaced, or to a round that is over."""

    code = FailureCode.STALE_SESSION


class IntegrityError(WeightTransferError, RuntimeError):
    """What is installed is not what was sent."""

    code = FailureCode.INTEGRITY


class PoisonedError(WeightTransferError, RuntimeError):
    """A delta was refused because the model is poisoned; a full round repairs it."""

    code = FailureCode.POISONED


_CLASSES: dict[FailureCode, type[WeightTransferError]] = {
    cls.code: cls
    for cls in (
        AgreementError,
        BackendUnavailableError,
        ConfigurationError,
        IntegrityError,
        PeerLostError,
        PlanError,
        PoisonedError,
        RoundTimeoutError,
        SourceModeError,
        StaleSessionError,
        TransportError,
    )
}

_MAX_MESSAGE_CHARS = 4000  # an error must fit a frame beside other fields; no message of ours comes near it


def error_to_wire(exc: BaseException) -> dict[str, Any]:
    """`exc` as a JSON object: code, message and the attributes that are set.

    An exception that is not ours becomes code `transport` with its class name in front of its text.
    """
    if isinstance(exc, WeightTransferError):
        return {"code": exc.code.value, "message": exc.message[:_MAX_MESSAGE_CHARS], **exc.attributes()}
    text = f"{type(exc).__name__}: {exc}"
    return {"code": FailureCode.TRANSPORT.value, "message": text[:_MAX_MESSAGE_CHARS]}


def error_from_wire(payload: dict[str, Any]) -> WeightTransferError:
    """The exception that `error_to_wire` described; unknown codes (a newer peer's) become `WeightTransferError`."""
    fields = dict(payload)
    message = str(fields.pop("message", "the peer failed and gave no message"))
    try:
        cls = _CLASSES[FailureCode(fields.pop("code", ""))]
    except ValueError:
        cls = WeightTransferError
    known = ("side", "rank", "engine", "phase", "param", "backend", "round", "elapsed_s", "outcome")
    try:
        return cls(message, **{name: fields[name] for name in known if name in fields})
    except (TypeError, ValueError, OverflowError):
        return cls(message)
