"""What the tests share: the sender's end of a session, made of plain sockets and the wire's own functions."""

import secrets
import socket
import threading
import time
from contextlib import ExitStack, suppress

import pytest

from wt_common import SCHEMA
from wt_common.broadcast import SessionInitInfo
from wt_common.session import (
    MAX_FRAME_BYTES,
    Accepted,
    Auth,
    Challenge,
    FrameDecoder,
    Hello,
    Welcome,
    encode_message,
    proof,
)

WAIT_S = 10  # for what must come; a test that reaches it fails


class PlainPeer:
    """One connection as the sender sees it: a blocking socket, and the wire's functions."""

    def __init__(self, sock):
        sock.settimeout(WAIT_S)
        self.sock = sock
        self.decoder = FrameDecoder()
        self.hello = None

    def send(self, *messages):
        for message in messages:
            self.sock.sendall(encode_message(message))

    def receive(self, kind=None):
        """The next message, which must be a `kind`; EOFError at the end of the stream."""
        while (message := self.decoder.next()) is None:
            try:
                data = self.sock.recv(1 << 20)
            except ConnectionError:
                data = b""
            if not data:
                raise EOFError
            self.decoder.feed(data)
        assert kind is None or isinstance(message, kind), message
        return message

    def rest(self):
        """Every message up to the end of the stream, which must come."""
        messages = []
        try:
            while True:
                messages.append(self.receive())
        except EOFError:
            return messages

    def hang_up(self):
        """The worker sees the end of the stream."""
        with suppress(OSError):  # the worker was first
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.sock.close()


class PlainSender:
    """A listening socket and its secret; who connects is let in by `accept`."""

    nonce = "12" * 16

    def __init__(self, stack, session=None, secret="0f" * 32):
        self.session = session or secrets.token_hex(8)
        self.secret = secret
        self._stack = stack
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(WAIT_S)
        stack.callback(self.listener.close)

    def info(self, cls=SessionInitInfo, **fields):
        """The init info that this sender ships, as the dict that arrives at a worker, or as a `cls`."""
        address, port = self.listener.getsockname()
        payload = {
            "session_address": address,
            "session_port": port,
            "session_secret": self.secret,
            "session": self.session,
            "schema": list(SCHEMA),
            "timeout_s": WAIT_S,
            **fields,
        }
        return payload if cls is dict else cls(**payload)

    def take(self):
        """The next connection, without a word said."""
        peer = PlainPeer(self.listener.accept()[0])
        self._stack.callback(peer.close)
        return peer

    def challenge(self, secret=None):
        """The next connection, both sides' proofs exchanged; returned are it and whether the worker's was right."""
        peer = self.take()
        peer.send(Challenge(session=self.session, nonce=self.nonce))
        auth = peer.receive(Auth)
        secret = secret or self.secret
        peer.send(Welcome(proof=proof(secret, "listener", self.session, self.nonce, auth.nonce)))
        return peer, auth.proof == proof(secret, "connector", self.session, self.nonce, auth.nonce)

    def accept(self, reply=None):
        """The next connection, its hello answered."""
        peer, knows = self.challenge()
        assert knows, "the worker does not know the secret"
        peer.hello = peer.receive(Hello)
        peer.decoder.max_bytes = MAX_FRAME_BYTES
        peer.send(Accepted() if reply is None else reply)
        return peer


@pytest.fixture
def open_sender():
    """Opens senders; they and their connections close with the test."""
    with ExitStack() as stack:
        yield lambda **options: PlainSender(stack, **options)


@pytest.fixture
def sender(open_sender):
    return open_sender()


@pytest.fixture
def in_thread():
    """Runs a call on a thread; the result has `value()`, which waits for it and raises what it raised."""
    threads = []

    class Running:
        def __init__(self, call):
            self._call = call
            self._result = None
            self._error = None
            self.thread = threading.Thread(target=self._run, daemon=True)
            self.thread.start()
            threads.append(self.thread)

        def _run(self):
            try:
                self._result = self._call()
            except BaseException as exc:  # for whoever asks
                self._error = exc

        def value(self, timeout_s=WAIT_S):
            self.thread.join(timeout_s)
            assert not self.thread.is_alive(), "the call did not return"
            if self._error is not None:
                raise self._error
            return self._result

    yield Running
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "a thread outlived its test"


@pytest.fixture
def until():
    """Waits for a condition that no event announces: the reader's thread may be a step behind."""

    def wait(condition, text="the condition"):
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, f"{text} did not come"
            time.sleep(0.005)

    return wait
