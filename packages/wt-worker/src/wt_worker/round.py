"""One round on a worker rank: its deadline, its first failure, and what the sender has said."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from wt_common import RoundTimeoutError, Side, WeightTransferError
from wt_common.session import Committed, Message

__all__ = ["Round"]

M = TypeVar("M", bound=Message)

_FIRST_HAND_S = 0.2  # a collective's failure waits this long for the sender's words, or its end, on the session


class Round:
    """Everything that may end a wait of the worker meets here: a message, a failure, the deadline.

    Args:
        number: the round's number in its session.
        timeout_s: seconds from now to the deadline.
        changed: the session's condition, which guards all fields.
    """

    def __init__(self, number: int, timeout_s: float, changed: threading.Condition) -> None:
        self.number = number
        self.changed = changed
        self.deadline = time.monotonic() + timeout_s
        self.failure: WeightTransferError | None = None
        self.told = False  # whether the failure came from the sender, or is its loss: it need not hear of it again
        self.second_hand = False  # whether it is only noticed that somebody else failed
        self.posts: dict[type[Message], Message] = {}
        self.num_entered = 0
        self.buffer_bytes = 0  # what was received into, beside the model's own memory
        self.seconds: dict[str, float] = {}

    def fail(self, error: WeightTransferError, *, told: bool = False) -> None:
        """End every wait of this round with `error`; only the first failure counts, and none after the verdict."""
        with self.changed:
            if self.failure is None and Committed not in self.posts:
                self.failure, self.told = error.fill(round=self.number), told
            self.changed.notify_all()

    def fail_second_hand(self, error: WeightTransferError) -> None:
        """Fail the round with what was noticed of somebody else's failure, unless that one's own words come at once."""
        with self.changed:
            self.changed.wait_for(lambda: self.failure is not None, _FIRST_HAND_S)
            self.second_hand = self.failure is None
            self.fail(error)

    def wait(self, ready: Callable[[], bool], missing: str, *, extra_s: float = 0.0) -> None:
        """Return once `ready()` holds; `missing` says what is being waited for, `extra_s` how long past the deadline.

        Raises:
            WeightTransferError: the round's first failure, whoever's it is.
            RoundTimeoutError: the deadline passed.
        """
        with self.changed:
            while True:
                if self.failure is not None:
                    raise self.failure
                if ready():
                    return
                left = self.deadline + extra_s - time.monotonic()
                if left <= 0:
                    raise RoundTimeoutError(
                        f"round {self.number} passed its deadline; still waiting for {missing}", side=Side.WORKER
                    )
                self.changed.wait(left)

    def check(self, missing: str) -> None:
        """Raise if the round has failed or its deadline has passed; `missing` says what took the time."""
        self.wait(lambda: self.deadline > time.monotonic(), missing)

    def receive(self, kind: type[M], *, extra_s: float = 0.0) -> M:
        """The sender's `kind` message of this round, once it is there. Raises as `wait` does."""
        self.wait(lambda: kind in self.posts, f"the trainer's {kind.type!r}", extra_s=extra_s)
        return self.posts[kind]  # type: ignore[return-value]  # filed under its own type

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """The seconds spent inside are added up under `phase`, for the report."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - started
