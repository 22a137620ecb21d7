"""The rendezvous of a communicator, carried by the session: no port of its own, and nothing unauthenticated.

wt-trainer and wt-worker each have this module, the same but for the package's name (`nox -s lint` checks it): the two packages
share what is on the wire, not code.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable

from wt_common import RoundTimeoutError
from wt_common.session import StoreSet

__all__ = ["RendezvousStore"]


class RendezvousStore:
    """Keys that any member of a communicator sets and every member reads.

    Setting a key publishes it to all peers; reading waits for it. Epochs keep communicators apart: what a late member of
    an abandoned communicator sets is never read by the next.
    """

    def __init__(self, changed: threading.Condition, publish: Callable[[StoreSet, object], None]) -> None:
        self._changed = changed
        self._publish = publish
        self._values: dict[tuple[int, str], bytes] = {}

    def set(self, epoch: int, key: str, value: bytes) -> None:
        """Set `key` of `epoch` here and at every peer."""
        self.receive(StoreSet(epoch=epoch, key=key, value=base64.b64encode(value).decode()), origin=None)

    def receive(self, message: StoreSet, origin: object) -> None:
        """Take a key that `origin` (None is this process) has set, and pass it on to everybody else."""
        with self._changed:
            newest = max((epoch for epoch, _ in self._values), default=message.epoch)
            if message.epoch > newest:
                self._values.clear()
            self._values[message.epoch, message.key] = base64.b64decode(message.value)
            self._changed.notify_all()
        self._publish(message, origin)

    def get(self, epoch: int, key: str, deadline: float, abandoned: Callable[[], bool] = lambda: False) -> bytes:
        """The value of `key` in `epoch`, once somebody has set it.

        Raises:
            RoundTimeoutError: nobody did before `deadline` (monotonic seconds), or before `abandoned()`, which is looked at
                whenever the condition is notified.
        """
        with self._changed:
            left = max(0.0, deadline - time.monotonic())
            self._changed.wait_for(lambda: (epoch, key) in self._values or abandoned(), left)
            if (epoch, key) not in self._values:
                raise RoundTimeoutError(f"rendezvous: nobody published {key!r} of communicator {epoch} in time")
            return self._values[epoch, key]

    def has(self, epoch: int, key: str) -> bool:
        """Whether `key` of `epoch` is set."""
        with self._changed:
            return (epoch, key) in self._values
