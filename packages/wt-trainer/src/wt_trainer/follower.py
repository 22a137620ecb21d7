"""Another trainer rank's end of the agreement channel: one connection to the sender, and the round in progress.

How the trainer ranks end a failed round together, which `leading.py` drives, is written down there.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from wt_common import Outcome, PeerLostError, PlanError, Side, StaleSessionError, WeightTransferError
from wt_common.errors import error_from_wire, error_to_wire
from wt_common.session import (
    Abort,
    DigestAgain,
    DigestedAgain,
    Enter,
    Failed,
    Go,
    Message,
    Metadata,
    Position,
    RoundOutcome,
    StoreSet,
)
from wt_trainer.connection import Connection
from wt_trainer.metadata import RoundMetadata
from wt_trainer.round import Cause, Round
from wt_trainer.store import RendezvousStore
from wt_trainer.threads import run_in_thread

__all__ = ["FollowerSession"]

_SENDER = ("trainer", "", 0)  # the key under which a round files what the sender posts
_OUTCOME_GRACE_S = 0.95  # past the deadline, for the sender to say how the round ended: it does within 0.8 s


class FollowerSession:
    """The connection of a trainer rank above 0 to the sender. All state is guarded by `changed`."""

    def __init__(self, connection: Connection) -> None:
        self.changed = threading.Condition()
        self.store = RendezvousStore(self.changed, self._publish)
        self.address = connection.local_address
        self.round: Round | None = None
        self._early: list[Message] = []  # of a round that the sender has begun and this rank has not
        self._lost: WeightTransferError | None = None
        self._connection = connection
        self._pid = os.getpid()
        connection.start_reader(self._on_message, self._on_lost, name="wt-session-reader sender")

    @contextmanager
    def running(self, number: int, timeout_s: float) -> Iterator[Round]:
        """Within it, round `number` is in progress on this rank.

        Raises:
            StaleSessionError: the connection was closed by this rank.
        """
        with self.changed:
            self.round = round_ = Round(number, timeout_s, self.changed, decides=False)
            if self._lost is not None:
                round_.fail(_copy(self._lost), told=True)
            early, self._early = self._early, []
            for message in early:
                if getattr(message, "round", 0) > number:
                    self._early.append(message)
                else:
                    self._file(round_, message)
        try:
            yield round_
        finally:
            with self.changed:
                self.round = None

    def outcome(self, round_: Round) -> RoundOutcome:
        """How the round ended for everybody, in the sender's words. It may ask for a digest before.

        Raises:
            PeerLostError: the sender is gone.
            WeightTransferError: the sender did not say in time, and this rank's own failure is all that is known.
            RoundTimeoutError: the same, without a failure.
        """
        posts = round_.posts.setdefault(RoundOutcome, {})

        def is_over() -> bool:
            return _SENDER in posts or self._lost is not None

        ends = time.monotonic() + round_.remaining_s + _OUTCOME_GRACE_S
        with self.changed:
            self.changed.wait_for(lambda: is_over() or DigestAgain in round_.posts, ends - time.monotonic())
            asked = round_.posts.pop(DigestAgain, {}).get(_SENDER)
        if isinstance(asked, DigestAgain):
            digest = round_.digest_now(asked.place)
            with suppress(WeightTransferError):  # the reader thread notices that the sender is gone
                self.send(DigestedAgain(round=round_.number, digests=[] if digest is None else [digest]))
        with self.changed:
            self.changed.wait_for(is_over, ends - time.monotonic())
            if _SENDER in posts:
                return posts[_SENDER]  # type: ignore[return-value]  # filed under its own type
            failure = None if round_.failure is None or round_.told else round_.failure
            if self._lost is not None:
                failure = _copy(self._lost)
        error = failure or round_.timeout_error(lambda: "the sender, trainer rank 0, to say how the round ended").fill(
            rank=0
        )
        # Once it has let this rank begin, workers may have bytes.
        raise error.fill(round=round_.number, outcome=Outcome.POISONED if Go in round_.posts else Outcome.UNCHANGED)

    def go(self, round_: Round, metadata: RoundMetadata) -> Go:
        """The sender's leave to begin, once it is there. Raises as `Round.wait` does.

        Raises:
            PlanError: the sender's metadata differ from `metadata`, this rank's.
        """
        posts = round_.posts
        round_.wait(lambda: Go in posts or Metadata in posts, lambda: "the sender to begin")
        if Go in posts:
            return posts[Go][_SENDER]  # type: ignore[return-value]  # filed under its own type
        param, how = metadata.difference(posts[Metadata][_SENDER])  # type: ignore[arg-type]
        raise PlanError(
            f"the source's metadata differ from rank 0's: {how}. Metadata must be the same on every trainer rank",
            side=Side.TRAINER,
            param=param,
        )

    def send(self, message: Message) -> None:
        """Send `message` to the sender."""
        self._connection.send(message)

    def close(self) -> None:
        """Close the connection. Idempotent. A forked child has nothing to close."""
        if os.getpid() != self._pid:
            return
        with self.changed:
            self._lost = self._lost or StaleSessionError("shut down; call trainer_init again", side=Side.TRAINER)
        self._connection.close()

    def report(self, round_: Round) -> None:
        """The sender knows that this rank has failed `round_`, unless it said so itself, or is gone."""
        if round_.failure is None or round_.told:
            return
        message = Failed(
            round=round_.number,
            error=error_to_wire(round_.failure),
            second_hand=round_.cause is Cause.SECOND_HAND,
        )
        run_in_thread("wt-report", lambda: self._answer(message))

    def _answer(self, message: Message) -> None:
        with suppress(WeightTransferError):  # the reader thread fails the round
            self.send(message)

    def _publish(self, message: StoreSet, origin: object) -> None:
        if origin is None:  # set here; what came from the sender has gone to everybody else from there
            with suppress(WeightTransferError):  # the reader thread fails the round
                self.send(message)

    def _on_message(self, message: Message) -> None:
        if isinstance(message, StoreSet):
            self.store.receive(message, origin=self)
            return
        with self.changed:
            if self.round is None or getattr(message, "round", 0) > self.round.number:
                self._early.append(message)
                if isinstance(message, Abort):  # the others wait for it; in a round that has not begun here nothing has
                    self._answer(Position(round=message.round, index=-1))
            else:
                self._file(self.round, message)
                self.changed.notify_all()

    def _file(self, round_: Round, message: Message) -> None:
        """Take a message of `round_`; one of another round is too late to matter."""
        if getattr(message, "round", None) != round_.number:
            return
        if isinstance(message, Abort):
            round_.fail(error_from_wire(message.error), told=True)
            self._answer(Position(round=round_.number, index=round_.begun, stopped=round_.stopped))
        elif isinstance(message, RoundOutcome) and message.error is not None:
            round_.fail(error_from_wire(message.error), told=True)
        elif isinstance(message, Enter):
            round_.num_entered = message.group + 1
        round_.posts.setdefault(type(message), {})[_SENDER] = message

    def _on_lost(self, exc: Exception) -> None:
        with self.changed:
            if self._lost is None:
                self._lost = PeerLostError(f"trainer rank 0, the sender, is gone ({exc})", side=Side.TRAINER, rank=0)
            if self.round is not None:
                self.round.fail(_copy(self._lost), told=True)
            self.changed.notify_all()


def _copy(error: WeightTransferError) -> WeightTransferError:
    """Each round fills in its own number and time."""
    return error_from_wire(error_to_wire(error))
