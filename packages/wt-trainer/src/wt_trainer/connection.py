"""One socket of the agreement channel: whole messages in both directions, each under a deadline.

wt-trainer and wt-worker each have this module, the same but for the package's name (`nox -s lint` checks it): the two packages
share what is on the wire, not code.
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from wt_common import AgreementError, PeerLostError, RoundTimeoutError, TransportError, WeightTransferError
from wt_common.errors import error_from_wire
from wt_common.session import (
    MAX_FRAME_BYTES,
    Accepted,
    Challenge,
    FrameDecoder,
    Hello,
    Message,
    Refused,
    Welcome,
    answer_challenge,
    encode_message,
)

__all__ = ["SEND_S", "Connection", "close_in_child", "connect"]

M = TypeVar("M", bound=Message)

_CHUNK_BYTES = 1 << 16  # a message is mostly shorter, and a buffer of 1 MiB would cost more than all else of it
_REST_OF_FRAME_S = 30.0  # once a frame has begun, the rest of at most 64 MiB is due; a peer that stalls longer is lost
SEND_S = 5.0  # a peer that does not empty its socket for this long is not reading
_CONNECT_S = 10.0  # the sender listens before anybody is told where, so what fails this long is unreachable
_RETRY_S = 0.1  # between two attempts: strangers may occupy the sender's handshake threads
_KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))  # a vanished host shows in a minute

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_child(sock: socket.socket) -> None:
    """Have every process that is forked from this one close its copy, so that our end of file stays ours to send."""
    _sockets.add(sock)


def _close_inherited() -> None:
    for sock in list(_sockets):
        sock.close()


os.register_at_fork(after_in_child=_close_inherited)


class Connection:
    """A connected socket as a stream of messages.

    `send` may be called from any thread. Until `start_reader` is called the caller receives with `receive`; afterwards one
    reader thread does. `close` frees whoever is blocked in either.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        close_in_child(sock)
        self.local_address = str(sock.getsockname()[0])
        self.peer = ":".join(map(str, sock.getpeername()[:2]))
        self._sock = sock
        self._decoder = FrameDecoder()
        self._send_lock = threading.Lock()
        self._closed = False
        self._use_lock = threading.Lock()
        self._num_uses = 0

    def __repr__(self) -> str:
        return f"<Connection to {self.peer}{' closed' if self._closed else ''}>"

    def trust(self) -> None:
        """The peer has proved itself: take frames of full size."""
        self._decoder.max_bytes = MAX_FRAME_BYTES

    def send(self, message: Message, *, timeout_s: float = SEND_S) -> None:
        """Send `message` whole.

        Raises:
            PeerLostError: the connection is closed.
            RoundTimeoutError: not everything could be handed to the kernel in time; the connection is closed, since the
                peer could not find the next message's start.
        """
        data = memoryview(encode_message(message))
        deadline = time.monotonic() + timeout_s
        if not self._send_lock.acquire(timeout=timeout_s):  # another thread's message is stuck: its own timeout closes
            raise RoundTimeoutError(f"session: {self.peer} took no message for {timeout_s:g} s")
        try:
            while data:
                try:
                    data = data[self._sock.send(data) :]
                except BlockingIOError:
                    if not self._wait(select.POLLOUT, deadline):
                        self.close()
                        raise RoundTimeoutError(f"session: {self.peer} took no message for {timeout_s:g} s") from None
                except OSError as exc:
                    raise PeerLostError(f"session: connection to {self.peer} is lost ({exc})") from exc
        finally:
            self._send_lock.release()

    def receive(self, deadline: float | None) -> Message:
        """The next message; `deadline` (monotonic seconds) is for the whole of it, None waits for its first byte for ever.

        Raises:
            PeerLostError: the peer closed the connection, or it broke.
            RoundTimeoutError: the deadline passed, or a frame that had begun was not completed in 30 s.
            TransportError: the bytes are not a message.
        """
        while True:
            message = self._decoder.next()
            if message is not None:
                return message
            if deadline is None and self._decoder.partial:
                deadline = time.monotonic() + _REST_OF_FRAME_S
            if not self._wait(select.POLLIN, deadline):
                raise RoundTimeoutError(f"session: no complete message from {self.peer} in time")
            try:
                data = self._sock.recv(_CHUNK_BYTES)
            except BlockingIOError:
                continue
            except OSError as exc:
                raise PeerLostError(f"session: connection to {self.peer} is lost ({exc})") from exc
            if not data:
                raise PeerLostError(f"session: {self.peer} closed the connection")
            self._decoder.feed(data)

    def start_reader(
        self, on_message: Callable[[Message], None], on_lost: Callable[[Exception], None], name: str
    ) -> None:
        """Have a daemon thread call `on_message` for every message, and `on_lost` once, when there will be no more."""

        def read() -> None:
            try:
                while True:
                    on_message(self.receive(None))
            except (PeerLostError, RoundTimeoutError, TransportError) as exc:
                self.close()
                on_lost(exc)

        threading.Thread(target=read, name=name, daemon=True).start()

    def close(self) -> None:
        """Close the socket; blocked calls of other threads raise `PeerLostError`. Idempotent."""
        with self._use_lock:
            self._closed = True
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            if not self._num_uses:
                self._sock.close()

    def _wait(self, event: int, deadline: float | None) -> bool:
        """Whether the socket became ready for `event` before `deadline`; a closed one counts as ready."""
        with self._use_lock:
            if self._closed:
                raise PeerLostError(f"session: the connection to {self.peer} is closed")
            # The descriptor stays ours: were it closed, poll could look at another socket of its number, and never wake.
            self._num_uses += 1
        try:
            poll = select.poll()
            poll.register(self._sock, event)
            return bool(poll.poll(None if deadline is None else max(0.0, deadline - time.monotonic()) * 1e3))
        except (ValueError, OSError):  # closed meanwhile: the next socket call says so
            return True
        finally:
            self._end_use()

    def _end_use(self) -> None:
        with self._use_lock:
            self._num_uses -= 1
            if self._closed and not self._num_uses:
                self._sock.close()


def connect(
    address: str,
    port: int,
    *,
    secret: str,
    session: str | None,
    hello: Hello,
    timeout_s: float,
    renew: Callable[[Hello], Hello] = lambda hello: hello,
) -> Connection:
    """A connection to the sender that serves `session`: both have proved that they know the secret, the hello is taken.

    The sender listens before it says which session it serves, and until its list is sealed. So a port that refuses us ends this
    at once. Where `session` is None nobody has said so yet, and the sender may still be on its way: it is waited for.

    `renew` gives the hello that is sent, when it is known that the sender is there: by then the state may be another one.

    Raises:
        PeerLostError: nobody listens there, or it does not let us in within `timeout_s` (10 s at most where `session` is given).
        AgreementError: whoever listens does not know the secret, or the sender refuses the hello; the text says why.
    """
    deadline = time.monotonic() + (timeout_s if session is None else min(_CONNECT_S, timeout_s))
    while True:
        connection = None
        try:
            left = max(_RETRY_S, deadline - time.monotonic())
            connection = Connection(socket.create_connection((address, port), timeout=left))
            _handshake(connection, secret, session, lambda: renew(hello), deadline)
        except (OSError, PeerLostError, RoundTimeoutError) as exc:
            if connection is not None:
                connection.close()
            is_final = session is not None and connection is None and isinstance(exc, ConnectionRefusedError)
            if is_final or time.monotonic() + _RETRY_S >= deadline:
                raise PeerLostError(
                    f"session: cannot connect to the trainer's sender at {address}:{port} ({exc}); "
                    f"{_explain(exc, was_reached=connection is not None)}",
                    side=hello.role,
                    phase="init",
                ) from exc
            time.sleep(_RETRY_S)
        except WeightTransferError:
            if connection is not None:
                connection.close()
            raise
        else:
            return connection


def _explain(exc: Exception, *, was_reached: bool) -> str:
    """What has happened where a connection ended so, and what to do."""
    if was_reached:
        return (
            "it is reached, but ends the connection or says nothing: it does not take this process's secret, it is frozen, or "
            "strangers take up its port. Its log says which; keep strangers away from the port (docs/security.md)"
        )
    if isinstance(exc, ConnectionRefusedError):
        return (
            "nobody listens there. A sender listens only until its trainer_init has seen all ranks: a rank that comes later "
            "takes part from the next trainer_init on. Otherwise the trainer is gone, or master_address is another host's as "
            "seen from here"
        )
    return "master_address must be an address of the sender that this process reaches, and no firewall may drop its master_port"


def _handshake(
    connection: Connection, secret: str, session: str | None, hello: Callable[[], Hello], deadline: float
) -> None:
    auth, expected = answer_challenge(_expect(connection, Challenge, deadline), secret=secret, session=session)
    connection.send(auth)
    if not hmac.compare_digest(_expect(connection, Welcome, deadline).proof, expected):
        raise AgreementError(f"session: whoever listens on {connection.peer} does not know the secret", phase="init")
    connection.trust()
    connection.send(hello())
    reply = connection.receive(deadline)
    if isinstance(reply, Refused):
        raise error_from_wire(reply.error)
    if not isinstance(reply, Accepted):
        raise AgreementError(f"session: expected 'accepted', got {reply.type!r}", phase="init")


def _expect(connection: Connection, kind: type[M], deadline: float) -> M:
    message = connection.receive(deadline)
    if not isinstance(message, kind):
        raise AgreementError(f"session: expected {kind.type!r}, got {message.type!r}", phase="init")
    return message
