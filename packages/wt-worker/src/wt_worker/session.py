"""A worker rank's end of the agreement channel: one connection to the sender, and the round in progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from wt_common import PeerLostError, Side, StaleSessionError, WeightTransferError
from wt_common.broadcast import SessionInitInfo
from wt_common.errors import error_from_wire, error_to_wire
from wt_common.session import Abort, AskState, Ended, Enter, Go, Held, Hello, Holding, Leave, Message, State, StoreSet
from wt_worker.connection import Connection, connect
from wt_worker.round import Round
from wt_worker.store import RendezvousStore

__all__ = ["WorkerSession"]

_NOTIFY_S = 0.5  # for a last word to a sender that may be frozen


class WorkerSession:
    """The connection to one sender, from its init to the next.

    `connect` returns when both sides have proved that they know the secret and the sender has taken the hello. A reader thread
    then files what the sender says under the round in progress; the end of the connection fails that round. All state is
    guarded by `changed`.
    """

    def __init__(
        self,
        connection: Connection,
        info: SessionInitInfo,
        state: Callable[[], tuple[bool, bool]],
        on_held: Callable[[WorkerSession, bool], bool],
        on_lost: Callable[[WorkerSession], None] = lambda _: None,
    ) -> None:
        self.id = info.session
        self.changed = threading.Condition()
        self.store = RendezvousStore(self.changed, self._publish)
        self.round: Round | None = None
        self.last_round = 0
        self._early_abort: Abort | None = None  # of a round whose update call is still on its way
        self.lost: WeightTransferError | None = None
        self._repairs = False  # whether the sender has announced a finish call without a round
        self.started = time.monotonic()
        self.local_address = connection.local_address
        self._connection = connection
        self._timeout_s = info.timeout_s
        self._state = state
        self._on_held = on_held
        self._on_lost_idle = on_lost
        connection.start_reader(self._on_message, self._on_lost, name=f"wt-session-reader {self.id}")

    def __repr__(self) -> str:
        return f"<WorkerSession {self.id}, {self._connection!r}, round {self.last_round}>"

    @classmethod
    def connect(
        cls,
        info: SessionInitInfo,
        hello: Hello,
        state: Callable[[], tuple[bool, bool]],
        on_held: Callable[[WorkerSession, bool], bool],
        on_lost: Callable[[WorkerSession], None] = lambda _: None,
        renew: Callable[[Hello], Hello] = lambda hello: hello,
    ) -> WorkerSession:
        """A session with the sender that `info` names.

        `renew` gives the hello that is sent, once the sender has proved itself. On the reader thread, `state()` is asked for
        (open, poisoned), `on_held` hears whether the sender holds the server, and says whether that counts, and `on_lost` hears
        that the sender is gone, if that was not in a round. The last two get the session that they belong to: it may be over by
        then.

        Raises:
            PeerLostError: nobody listens there, or it does not let us in within 10 s.
            AgreementError: whoever listens does not know the secret, or the sender refuses the hello; the text says why.
        """
        connection = connect(
            info.session_address,
            info.session_port,
            secret=info.session_secret,
            session=info.session,
            hello=hello,
            timeout_s=info.timeout_s,
            renew=renew,
        )
        return cls(connection, info, state, on_held, on_lost)

    def begin_round(self, number: int) -> Round:
        """The round in progress from now on, its deadline the session's `timeout_s` until the sender says what is left.

        Raises:
            StaleSessionError: `number` is not above that of every earlier round.
        """
        with self.changed:
            if number <= self.last_round:
                raise StaleSessionError(
                    f"round {number} is over; expected one above {self.last_round} (session {self.id})",
                    side=Side.WORKER,
                    round=number,
                )
            self.last_round = number
            self._repairs = False
            self.round = Round(number, self._timeout_s, self.changed)
            if self._early_abort is not None and self._early_abort.round == number:
                self.round.fail(error_from_wire(self._early_abort.error), told=True)
            if self.lost is not None:
                self.round.fail(PeerLostError(self.lost.message, side=Side.WORKER), told=True)
            return self.round

    def end_round(self) -> None:
        """No round is in progress."""
        with self.changed:
            self.round = None

    def take_repair(self) -> bool:
        """Whether the sender has announced a finish call without a round. It counts once."""
        with self.changed:
            repairs, self._repairs = self._repairs, False
            return repairs

    def send(self, message: Message) -> None:
        """Send `message`; raises `WeightTransferError` when the sender is gone or not reading."""
        self._connection.send(message)

    def notify(self, message: Message) -> None:
        """Send `message` if the sender takes it at once; for a round that has failed already."""
        with suppress(WeightTransferError):
            self._connection.send(message, timeout_s=_NOTIFY_S)

    def leave(self, reason: WeightTransferError, *, replaced: bool = False) -> None:
        """Tell the sender why, and whether another one has the worker now; close the connection. Idempotent."""
        if self.lost is None:
            self.notify(Leave(error=error_to_wire(reason), replaced=replaced))
        self._connection.close()

    def _publish(self, message: StoreSet, origin: object) -> None:
        if origin is None:  # set here; what came from the sender has gone to everybody else from there
            self.send(message)

    def _on_message(self, message: Message) -> None:
        if isinstance(message, StoreSet):
            self.store.receive(message, origin=self)
            return
        if isinstance(message, Held):
            counts = self._on_held(self, message.held)
            if message.held:
                self.notify(Holding(round=message.round, held=counts))
            return
        if isinstance(message, AskState):
            if message.repairs:
                with self.changed:
                    self._repairs = True
            is_open, is_poisoned = self._state()
            self.notify(State(round=message.round, open=is_open, poisoned=is_poisoned))
            return
        if isinstance(message, Abort) and self._is_early(message):
            self.notify(
                Ended(round=message.round, touched=False)
            )  # the sender need not wait for a call that may not come
            return
        with self.changed:
            if self.round is None or getattr(message, "round", None) != self.round.number:
                return  # of a round that is over on this side; nothing waits for it
            if isinstance(message, Abort):
                self.round.fail(error_from_wire(message.error), told=True)
            elif isinstance(message, Enter):
                self.round.num_entered = message.group + 1
            else:
                if isinstance(message, Go):
                    self.round.deadline = time.monotonic() + message.remaining_s
                    self.round.num_entered = max(message.entered, self.round.num_entered)
                self.round.posts[type(message)] = message
            self.changed.notify_all()

    def _is_early(self, abort: Abort) -> bool:
        """Whether the update call of that round has not come; it will find the round aborted."""
        with self.changed:
            if abort.round <= self.last_round:
                return False
            self._early_abort = abort
            return True

    def _on_lost(self, exc: Exception) -> None:
        with self.changed:
            self.lost = PeerLostError(f"the trainer is gone ({exc})", side=Side.WORKER)
            round_ = self.round
            if round_ is not None:  # with an error of its own, since it gets the round's number
                round_.fail(PeerLostError(self.lost.message, side=Side.WORKER), told=True)
            self.changed.notify_all()
        if round_ is None:
            self._on_lost_idle(self)
