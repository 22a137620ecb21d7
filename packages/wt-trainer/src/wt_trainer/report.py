"""What `send_weights()` returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from wt_common import Outcome

__all__ = ["TransferReport", "WorkerReport"]

_MAX_NAMES = 3  # of each list, in the text of a report


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """One worker rank's part of a round.

    `num_bytes` is what it received, `seconds` its own phases, `not_synced` the model's parameters, and buffers that a
    checkpoint fills, that the round did not touch (a trainer may leave some out on purpose; nobody should overlook it),
    `not_in_place` the layers that were not written in place, by the reason: they are installed by the model's own loader, which
    is slower, and verified as received. `buffer_bytes` is the memory that it took to receive into, beside the model's own; what a
    loader takes is not in it.
    """

    engine: str
    rank: int
    num_bytes: int
    seconds: dict[str, float]
    not_synced: list[str]
    not_in_place: dict[str, list[str]] = field(default_factory=dict)
    buffer_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferReport:
    """How a committed round went; identical on every trainer rank.

    Attributes:
        round: number of the round in its session, from 1.
        version: the weight version that the engines now publish; None where the client takes none, or no engine publishes one.
        outcome: `committed`; a round that ends otherwise raises.
        backend: registry name of the backend.
        num_parameters: parameters sent.
        num_cast: of these, how many the sender cast to the workers' dtype (float32 master weights to bfloat16, say).
        num_bytes: bytes sent once on the wire by the data senders together (each worker receives as many).
        seconds: wall seconds per phase on the sender (`pause`, `start`, `update`, `finish`, `resume`), and `total`.
        buffer_bytes: the most memory that the sender took for what it sends, beside the source's own tensors: buffers of small
            parameters, and gathered or cast ones on their way.
        workers: one entry per worker rank.
        verify: which digests were compared before the commit (see `SessionFields.verify`).
        ignored: parameters that were sent, and of which some engine has taken nothing, as is allowed: see `ParamMeta.optional`
            and `ignore` of the init info. A name that the engine ties to another one is among them.
        unknown: parameters that go through a model's loader in a way that was not followed, so that nobody knows what it has
            taken of them.
        aliases: names for which nothing was sent since another name has the same tensor (tied), each with that name.
        notes: what the user should know about a round that committed all the same (a label or cache that could not be reset).
    """

    round: int
    version: str | None
    outcome: Outcome
    backend: str
    num_parameters: int
    num_cast: int
    num_bytes: int
    seconds: dict[str, float]
    workers: tuple[WorkerReport, ...]
    verify: str
    buffer_bytes: int = 0
    ignored: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    aliases: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = field(default=())

    @property
    def not_synced(self) -> tuple[str, ...]:
        """What some worker rank still has from before: parameters, and buffers that a checkpoint fills; each once."""
        return (*dict.fromkeys(name for worker in self.workers for name in worker.not_synced),)

    @property
    def gb_per_s(self) -> float:
        """Payload bytes over the seconds of the whole round, in 10^9 bytes per second."""
        return self.num_bytes / self.seconds["total"] / 1e9

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` is its inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, payload: dict[str, Any]) -> TransferReport:
        """The report that `to_dict` described."""
        return cls(
            **{
                **payload,
                "outcome": Outcome(payload["outcome"]),
                "workers": tuple(WorkerReport(**worker) for worker in payload["workers"]),
                "ignored": tuple(payload["ignored"]),
                "unknown": tuple(payload["unknown"]),
                "notes": tuple(payload["notes"]),
            }
        )

    def __str__(self) -> str:
        text = (
            f"round {self.round} {self.outcome}, version {self.version}: {self.num_bytes / 1e6:.1f} MB to "
            f"{len(self.workers)} worker(s) in {self.seconds['total'] * 1e3:.0f} ms ({self.gb_per_s:.2f} GB/s)"
        )
        for what, names in (("not synced", self.not_synced), ("ignored", self.ignored)):
            if names:
                text += f"; {what}: {', '.join(names[:_MAX_NAMES])}"
                text += f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        return text
