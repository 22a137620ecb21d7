"""A worker rank's end of the agreement channel: one connection to the sender, and the round in progress."""

from __future__ import annotations

import hmac
import socket
import threading
import time
from contextlib import suppress
from typing import TypeVar

from wt_common import AgreementError, PeerLostError, RoundTimeoutError, Side, StaleSessionError, WeightTransferError
from wt_common.broadcast import SessionInitInfo
from wt_common.errors import error_from_wire, error_to_wire
from wt_common.session import (
    Abort,
    Accepted,
    Challenge,
    Enter,
    Hello,
    Leave,
    Message,
    Refused,
    StoreSet,
    Welcome,
    answer_challenge,
)
from wt_worker.connection import Connection
from wt_worker.round import Round
from wt_worker.store import RendezvousStore

__all__ = ["WorkerSession"]

M = TypeVar("M", bound=Message)

_CONNECT_S = 10.0  # the sender listens before it makes the init call, so what fails this long is unreachable
_RETRY_S = 0.1  # between two attempts: strangers may occupy the sender's handshake threads for 2 s
_NOTIFY_S = 0.5  # for a last word to a sender that may be frozen


class WorkerSession:
    """The connection to one sender, from its init to the next.

    `connect` returns when both sides have proved that they know the secret and the sender has taken the hello. A reader thread
    then files what the sender says under the round in progress; the end of the connection fails that round. All state is
    guarded by `changed`.
    """

    def __init__(self, connection: Connection, info: SessionInitInfo) -> None:
        self.id = info.session
        self.changed = threading.Condition()
        self.store = RendezvousStore(self.changed, self.send)
        self.round: Round | None = None
        self.last_round = 0
        self.lost: WeightTransferError | None = None
        self.started = time.monotonic()
        self.local_address = connection.local_address
        self._connection = connection
        self._timeout_s = info.timeout_s
        connection.start_reader(self._on_message, self._on_lost, name=f"wt-session-reader {self.id}")

    def __repr__(self) -> str:
        return f"<WorkerSession {self.id}, {self._connection!r}, round {self.last_round}>"

    @classmethod
    def connect(cls, info: SessionInitInfo, hello: Hello) -> WorkerSession:
        """A session with the sender that `info` names.

        Raises:
            PeerLostError: nobody listens there, or it does not let us in within 10 s.
            AgreementError: whoever listens does not know the secret, or the sender refuses the hello; the text says why.
        """
        deadline = time.monotonic() + min(_CONNECT_S, info.timeout_s)
        while True:
            connection = None
            try:
                connection = _open_socket(info, deadline)
                _handshake(connection, info, hello, deadline)
                return cls(connection, info)
            except (OSError, PeerLostError, RoundTimeoutError) as exc:
                if connection is not None:
                    connection.close()
                if time.monotonic() + _RETRY_S >= deadline:
                    raise PeerLostError(
                        f"session: cannot connect to the trainer at {info.session_address}:{info.session_port} ({exc}); "
                        "master_address must be an address that this worker reaches",
                        side=Side.WORKER,
                        phase="init",
                    ) from exc
                time.sleep(_RETRY_S)
            except WeightTransferError:
                if connection is not None:
                    connection.close()
                raise

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
            self.round = Round(number, self._timeout_s, self.changed)
            if self.lost is not None:
                self.round.fail(self.lost, told=True)
            return self.round

    def end_round(self) -> None:
        """No round is in progress."""
        with self.changed:
            self.round = None

    def send(self, message: Message) -> None:
        """Send `message`; raises `WeightTransferError` when the sender is gone or not reading."""
        self._connection.send(message)

    def notify(self, message: Message) -> None:
        """Send `message` if the sender takes it at once; for a round that has failed already."""
        with suppress(WeightTransferError):
            self._connection.send(message, timeout_s=_NOTIFY_S)

    def leave(self, reason: WeightTransferError) -> None:
        """Tell the sender why, and close the connection. Idempotent."""
        if self.lost is None:
            self.notify(Leave(error=error_to_wire(reason)))
        self._connection.close()

    def _on_message(self, message: Message) -> None:
        if isinstance(message, StoreSet):
            self.store.receive(message)
            return
        with self.changed:
            if self.round is None or getattr(message, "round", None) != self.round.number:
                return  # of a round that is over on this side; nothing waits for it
            if isinstance(message, Abort):
                self.round.fail(error_from_wire(message.error), told=True)
            elif isinstance(message, Enter):
                self.round.num_entered = message.group + 1
            else:
                self.round.posts[type(message)] = message
            self.changed.notify_all()

    def _on_lost(self, exc: Exception) -> None:
        with self.changed:
            self.lost = PeerLostError(f"the trainer is gone ({exc})", side=Side.WORKER)
            if self.round is not None:
                self.round.fail(self.lost, told=True)
            self.changed.notify_all()


def _open_socket(info: SessionInitInfo, deadline: float) -> Connection:
    left = max(0.1, deadline - time.monotonic())
    return Connection(socket.create_connection((info.session_address, info.session_port), timeout=left))


def _handshake(connection: Connection, info: SessionInitInfo, hello: Hello, deadline: float) -> None:
    challenge = _expect(connection, Challenge, deadline)
    auth, expected = answer_challenge(challenge, secret=info.session_secret, session=info.session)
    connection.send(auth)
    welcome = _expect(connection, Welcome, deadline)
    if not hmac.compare_digest(welcome.proof, expected):
        raise AgreementError(
            f"session: whoever listens on {connection.peer} does not know the secret", side=Side.WORKER, phase="init"
        )
    connection.trust()
    connection.send(hello)
    reply = connection.receive(deadline)
    if isinstance(reply, Refused):
        raise error_from_wire(reply.error)
    if not isinstance(reply, Accepted):
        raise AgreementError(f"session: expected 'accepted', got {reply.type!r}", side=Side.WORKER, phase="init")


def _expect(connection: Connection, kind: type[M], deadline: float) -> M:
    message = connection.receive(deadline)
    if not isinstance(message, kind):
        raise AgreementError(f"session: expected {kind.type!r}, got {message.type!r}", side=Side.WORKER, phase="init")
    return message
