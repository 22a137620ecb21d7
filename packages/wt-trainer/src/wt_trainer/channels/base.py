"""What a channel is: how the engines open one, move groups of bytes through it, and end it.

wt-trainer and wt-worker each have this module, the same but for the package's name (`nox -s lint` checks it): the two packages
share what is on the wire, not code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from wt_trainer.store import RendezvousStore

__all__ = ["Channel", "Mark", "Membership", "Transfer", "mark_now"]

Mark = torch.cuda.Event | None
"""A point in a device's work; None on the CPU, whose work is done when a call returns."""


def mark_now(device: torch.device) -> Mark:
    """What `device` has been given to do on the current stream up to here."""
    if device.type != "cuda":
        return None
    mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
    mark.record(torch.cuda.current_stream(device))
    return mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Which communicator a channel belongs to, and its place there.

    Attributes:
        store: the session's rendezvous.
        epoch: of the communicator; another one after every failure, so that nothing left from an earlier one is met.
        root: the trainer rank that sends, which keeps apart the channels of several senders in one epoch.
        rank: 0 on that trainer rank, 1 and above on the workers.
        world_size: 1 + all worker ranks.
        address: of this host, towards the others.
        device: where the bytes are.
        deadline: in seconds of the monotonic clock, until which the others are waited for.
        abandoned: whether the round has failed, so that they need not be waited for any more.
    """

    store: RendezvousStore
    epoch: int
    root: int
    rank: int
    world_size: int
    address: str
    device: torch.device
    deadline: float
    abandoned: Callable[[], bool]


class Transfer(Protocol):
    """One broadcast that was begun."""

    def done(self) -> bool:
        """Whether its bytes are where they belong: they may be read, written, and freed. Never blocks.

        Raises:
            TransportError: they will never be.
        """


class Channel(Protocol):
    """Moves bytes from one root to its receivers.

    1. Every member constructs it with its `Membership`, which waits for all others to `deadline`.
    2. Every member calls `broadcast` with buffers of the same sizes, in the same order, and polls what that returns.
    3. `close()`, at any time and from any thread.

    After any failure a channel is dead: close it and open another, with a new epoch.

    Attributes:
        receives_in_place: whether a receive that was abandoned writes no more once `close` has returned, so that bytes may be
            received into memory that serves. Otherwise they are staged.
        blocks: whether `broadcast` returns only when the bytes are there, and `close` does not end it before.
    """

    receives_in_place: ClassVar[bool]
    blocks: ClassVar[bool]

    def __init__(self, membership: Membership) -> None: ...

    @staticmethod
    def settings() -> dict[str, str]:
        """What all members must have alike, by name; the sender compares it before a byte moves.

        Raises:
            BackendUnavailableError: the channel cannot be opened in this process; the text says what it lacks.
        """

    @staticmethod
    def versions() -> dict[str, str]:
        """What should be alike, and is said where it is not."""

    def broadcast(self, buffers: Sequence[torch.Tensor], deadline: float, *, after: Mark = None) -> Transfer:
        """`buffers` get on every rank what they hold on rank 0, as soon as the device has reached `after`.

        Args:
            buffers: each 1-D uint8, contiguous, on the channel's device.
            deadline: in seconds of the monotonic clock; a channel that blocks does so no longer.
            after: what must be done before the buffers are touched.

        Raises:
            RoundTimeoutError, TransportError: not everybody took part in time, or the communicator broke.
        """

    def close(self) -> None:
        """Leave the communicator within about a second. Idempotent."""
