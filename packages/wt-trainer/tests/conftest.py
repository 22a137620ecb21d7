"""What the tests of the session share: peers made of plain sockets and the wire's own functions."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from contextlib import ExitStack
from pathlib import Path

import pytest

from wt_common import SCHEMA
from wt_common.session import (
    Accepted,
    FrameDecoder,
    Hello,
    answer_challenge,
    encode_message,
)
from wt_trainer.session import Session

WAIT_S = 10  # for what must come; a test that reaches it fails


def hello_of(engine="e0", rank=0, size=1, role="worker", **fields):
    """A hello, with what a test does not care about filled in."""
    rest = {"device": "cpu", "hostname": "host", "pid": 1, "versions": {}, "schema": list(SCHEMA)}
    return Hello(**{**rest, "role": role, "engine": engine, "rank": rank, "size": size, **fields})


class PlainPeer:
    """The other end of a session's connection: a blocking socket, and the wire's functions."""

    def __init__(self, address, port):
        self.sock = socket.create_connection((address, port), timeout=WAIT_S)
        self.decoder = FrameDecoder()

    def send(self, message):
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

    def authenticate(self, secret, session):
        """Answer the challenge; EOFError where the listener does not like the answer."""
        auth, expected = answer_challenge(self.receive(), secret=secret, session=session)
        self.send(auth)
        assert self.receive().proof == expected

    def at_end(self):
        """Whether the stream ends; a message that comes before its end is left out."""
        try:
            while True:
                self.receive()
        except EOFError:
            return True

    def close(self):
        self.sock.close()


@pytest.fixture(scope="session", autouse=True)
def dtensor_ranks(request, tmp_path_factory):
    """The run of dtensor_ranks.py, as (process, directory); begun first, where a test asks for it, since it takes longest."""
    if not any("ranks" in item.fixturenames for item in request.session.items):
        yield None
        return
    directory = tmp_path_factory.mktemp("ranks")
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("dtensor_ranks.py")), str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    ) as process:
        yield process, directory
        process.kill()


@pytest.fixture
def hello():
    return hello_of


@pytest.fixture
def open_session():
    """Opens sessions on this host; they close with the test."""
    with ExitStack() as stack:

        def make(port=None, **options):
            session = Session("127.0.0.1", port, **options)
            stack.callback(session.close)
            return session

        yield make


@pytest.fixture
def session(open_session):
    """An open session on this host."""
    return open_session()


@pytest.fixture
def dial():
    """Makes a connection to a session, without a word said; it ends with the test."""
    with ExitStack() as stack:

        def connect(session):
            peer = PlainPeer("127.0.0.1", session.port)
            stack.callback(peer.close)
            return peer

        yield connect


@pytest.fixture
def join(dial):
    """Makes a peer that the session has accepted."""

    def connect(session, **fields):
        peer = dial(session)
        peer.authenticate(session.secret, session.id)
        peer.send(hello_of(**fields))
        peer.receive(Accepted)
        return peer

    return connect


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


def rest():
    """Do nothing until this process is killed, or soon after its test."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(3 * WAIT_S)
    while True:
        signal.pause()


class Forked:
    """A process forked from this one, which runs `body(report, go_on, rest)`.

    `report` sends the test a JSON value, `go_on` waits for the test, and `rest` never returns.
    """

    def __init__(self, body):
        from_child, to_parent = os.pipe()
        from_parent, to_child = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
            self.pid = os.fork()
        if self.pid == 0:

            def report(value):
                os.write(to_parent, json.dumps(value).encode() + b"\n")

            try:
                os.close(to_child)  # so that the test's end is the end of `go_on`
                body(report, lambda: os.read(from_parent, 1), rest)
            except BaseException:  # this process must not go on as the tests
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(to_parent)
        os.close(from_parent)
        self._from_child = os.fdopen(from_child)
        self._to_child = to_child

    def told(self):
        """What it reports next."""
        return json.loads(self._from_child.readline())

    def go_on(self):
        os.write(self._to_child, b"x")

    def kill(self):
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0

    def close(self):
        self.kill()
        self._from_child.close()
        os.close(self._to_child)


@pytest.fixture
def forked():
    """Forks processes; they end with the test."""
    with ExitStack() as stack:

        def fork(body):
            process = Forked(body)
            stack.callback(process.close)
            return process

        yield fork


@pytest.fixture
def until():
    """Waits for a condition that no event announces: the other side's threads may be a step behind."""

    def wait(condition, text="the condition"):
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, f"{text} did not come"
            time.sleep(0.005)

    return wait
