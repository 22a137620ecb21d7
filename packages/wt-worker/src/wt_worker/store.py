"""The rendezvous of a communicator, carried by the session: no port of its own, and nothing unauthenticated."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable

from wt_common import RoundTimeoutError, Side
from wt_common.session import StoreSet

__all__ = ["RendezvousStore"]


class RendezvousStore:
    """Keys that any member of a communicator sets and every member reads.

    Setting a key sends it to the sender, which passes it on to all others; reading waits for it. Epochs keep communicators
    apart: what was set for an abandoned one is never read by the next.
    """

    def __init__(self, changed: threading.Condition, publish: Callable[[StoreSet], None]) -> None:
        self._changed = changed
        self._publish = publish
        self._values: dict[tuple[int, str], bytes] = {}

    def set(self, epoch: int, key: str, value: bytes) -> None:
        """Set `key` of `epoch` here and everywhere."""
        message = StoreSet(epoch=epoch, key=key, value=base64.b64encode(value).decode())
        self.receive(message)
        self._publish(message)

    def receive(self, message: StoreSet) -> None:
        """Take a key that another member has set."""
        with self._changed:
            if any(epoch < message.epoch for epoch, _ in self._values):
                self._values.clear()
            self._values[message.epoch, message.key] = base64.b64decode(message.value)
            self._changed.notify_all()

    def get(self, epoch: int, key: str, deadline: float) -> bytes:
        """The value of `key` in `epoch`, once somebody has set it.

        Raises:
            RoundTimeoutError: nobody did before `deadline` (monotonic seconds).
        """
        with self._changed:
            left = max(0.0, deadline - time.monotonic())
            if not self._changed.wait_for(lambda: (epoch, key) in self._values, left):
                raise RoundTimeoutError(
                    f"rendezvous: nobody published {key!r} of communicator {epoch} in time", side=Side.WORKER
                )
            return self._values[epoch, key]

    def has(self, epoch: int, key: str) -> bool:
        """Whether `key` of `epoch` is set."""
        with self._changed:
            return (epoch, key) in self._values
