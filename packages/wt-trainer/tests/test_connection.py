"""Whole messages over a real socket, each under a deadline."""

import os
import select
import signal
import socket
import threading
import time

import pytest

from wt_common import AgreementError, PeerLostError, PlanError, RoundTimeoutError, TransportError
from wt_common.errors import error_to_wire
from wt_common.session import (
    FRAME_HEADER,
    MAX_UNAUTHENTICATED_FRAME_BYTES,
    Accepted,
    Auth,
    Challenge,
    Enter,
    FrameDecoder,
    Go,
    Refused,
    StoreSet,
    Welcome,
    encode_message,
    proof,
)
from wt_trainer import connection as module
from wt_trainer.connection import Connection, connect

WAIT_S = 10
SECRET = "0f" * 32
SESSION = "0123456789abcdef"


def soon():
    return time.monotonic() + WAIT_S


def big(num_bytes):
    """A message of about that size."""
    return StoreSet(epoch=1, key="k" * num_bytes, value="AAAA")


def read_all(sock):
    """Every message of a stream, to its end."""
    decoder, messages = FrameDecoder(), []
    decoder.max_bytes = 1 << 30
    while data := sock.recv(1 << 20):
        decoder.feed(data)
        while (message := decoder.next()) is not None:
            messages.append(message)
    assert not decoder.partial, "the stream ended in the middle of a message"
    return messages


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_S)
        yield listener


@pytest.fixture
def pair(listener):
    """A connection and the plain blocking socket at its other end."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # so that a message of 1 MiB fits no buffer
    ours = socket.socket()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    ours.connect(listener.getsockname())
    theirs, _ = listener.accept()
    theirs.settimeout(WAIT_S)
    connection = Connection(ours)
    yield connection, theirs
    connection.close()
    theirs.close()


# --- sending and receiving -------------------------------------------------------------------------------------


def test_messages_arrive_whole_and_in_order(pair):
    """What is sent is what the other end reads, message by message."""
    connection, theirs = pair
    messages = [Enter(round=1, group=group) for group in range(100)]
    for message in messages:
        connection.send(message)
    connection.close()
    assert read_all(theirs) == messages


def test_message_larger_than_every_buffer_arrives(pair, in_thread):
    """A message that does not fit the kernel's buffers is sent in parts, as the other end reads."""
    connection, theirs = pair
    reading = in_thread(lambda: read_all(theirs))
    connection.send(big(4 << 20))
    connection.close()
    assert reading.value() == [big(4 << 20)]


def test_threads_do_not_mix_their_messages(pair, in_thread):
    """Messages sent at once from several threads stay whole, each thread's in order."""
    connection, theirs = pair
    reading = in_thread(lambda: read_all(theirs))

    def send(number):
        for group in range(50):
            connection.send(StoreSet(epoch=number, key=f"{group} " + "k" * 20_000, value="AAAA"))

    for sender in [in_thread(lambda number=number: send(number)) for number in range(4)]:
        sender.value()
    connection.close()
    messages = reading.value()
    for number in range(4):
        groups = [int(message.key.split()[0]) for message in messages if message.epoch == number]
        assert groups == list(range(50))


def test_receive_returns_messages_one_by_one(pair):
    """Several messages in one packet, and one message in several, come out one by one."""
    connection, theirs = pair
    theirs.sendall(b"".join(encode_message(Enter(round=1, group=group)) for group in range(3)))
    for group in range(3):
        assert connection.receive(soon()) == Enter(round=1, group=group)
    data = encode_message(Accepted())
    theirs.sendall(data[:7])
    threading.Timer(0.05, theirs.sendall, [data[7:]]).start()
    assert connection.receive(soon()) == Accepted()


def test_stranger_may_not_send_more_than_a_handshake(pair):
    """A frame above 64 KiB is a TransportError, from its header alone, until the peer is trusted."""
    connection, theirs = pair
    theirs.sendall(FRAME_HEADER.pack(MAX_UNAUTHENTICATED_FRAME_BYTES + 1))
    with pytest.raises(TransportError, match="65536"):
        connection.receive(soon())


def test_trusted_peer_may_send_large_messages(pair, in_thread):
    """Once trusted, a peer's large message is taken."""
    connection, theirs = pair
    connection.trust()
    sending = in_thread(lambda: theirs.sendall(encode_message(big(3 << 20))))
    assert connection.receive(soon()) == big(3 << 20)
    sending.value()


def test_garbage_is_a_transport_error(pair):
    """Bytes that are no message are a TransportError."""
    connection, theirs = pair
    theirs.sendall(b"\x00\x00\x00\x04rest")
    with pytest.raises(TransportError, match="unreadable"):
        connection.receive(soon())


def test_connection_says_who_is_there(pair):
    """Own address, the peer's address, and whether it is closed, can be seen."""
    connection, theirs = pair
    assert connection.local_address == "127.0.0.1"
    assert connection.peer == f"127.0.0.1:{theirs.getsockname()[1]}"
    assert repr(connection) == f"<Connection to {connection.peer}>"
    connection.close()
    assert repr(connection) == f"<Connection to {connection.peer} closed>"


def test_socket_is_prepared(pair):
    """Small messages are not held back, and a vanished host is noticed without a message."""
    sock = pair[0]._sock
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    idle, interval, count = (
        sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
        for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
    )
    assert idle + interval * count <= 60


# --- deadlines -------------------------------------------------------------------------------------------------


def seconds_of(error, call):
    """Seconds until `call` raised `error`."""
    started = time.monotonic()
    with pytest.raises(error):
        call()
    return time.monotonic() - started


def test_silent_peer_costs_the_deadline(pair):
    """A receive from a peer that says nothing ends at its deadline."""
    connection, _ = pair
    assert 0.1 <= seconds_of(RoundTimeoutError, lambda: connection.receive(time.monotonic() + 0.1)) < 5


def test_half_a_message_costs_the_deadline(pair):
    """A receive of a message that is begun and not ended ends at its deadline."""
    connection, theirs = pair
    theirs.sendall(encode_message(Accepted())[:-1])
    assert 0.1 <= seconds_of(RoundTimeoutError, lambda: connection.receive(time.monotonic() + 0.1)) < 5


def test_trickled_message_does_not_move_the_deadline(pair, in_thread):
    """The deadline is for the whole message: a peer that sends a byte now and then gains nothing."""
    connection, theirs = pair
    stop = threading.Event()

    def trickle():
        for byte in encode_message(big(1000)):
            if stop.wait(0.03):
                return
            theirs.sendall(bytes([byte]))

    trickling = in_thread(trickle)
    assert 0.2 <= seconds_of(RoundTimeoutError, lambda: connection.receive(time.monotonic() + 0.2)) < 5
    stop.set()
    trickling.value()


def test_message_that_is_there_needs_no_time(pair):
    """A message that has arrived is received after the deadline too."""
    connection, theirs = pair
    theirs.sendall(encode_message(Accepted()))
    assert select.select([connection._sock], [], [], WAIT_S)[0]
    assert connection.receive(time.monotonic() - 1) == Accepted()


def test_peer_that_does_not_read_costs_the_timeout(pair):
    """A send that the peer does not take ends at its timeout and closes the connection: half a message is out."""
    connection, theirs = pair
    seconds = seconds_of(RoundTimeoutError, lambda: connection.send(big(1 << 20), timeout_s=0.2))
    assert 0.2 <= seconds < 5
    with pytest.raises(AssertionError, match="in the middle of a message"):
        read_all(theirs)
    with pytest.raises(PeerLostError):
        connection.send(Accepted())


def test_short_send_does_not_wait_for_a_long_one(pair, in_thread):
    """A last word to a peer that is not reading has its own timeout, also while another thread is blocked in a send."""
    connection, _ = pair
    blocked = in_thread(lambda: connection.send(big(1 << 20), timeout_s=WAIT_S))
    assert _filled(connection._sock)
    assert seconds_of(RoundTimeoutError, lambda: connection.send(Accepted(), timeout_s=0.2)) < 5
    connection.close()
    with pytest.raises(PeerLostError):
        blocked.value()


def _filled(sock):
    """Whether the socket has come to take no more, which another thread sees to."""
    deadline = soon()
    while select.select([], [sock], [], 0)[1]:
        assert time.monotonic() < deadline
    return True


# --- the end of a connection -----------------------------------------------------------------------------------


def test_end_of_file_is_a_lost_peer(pair):
    """A peer that closes is a PeerLostError, after what it has said."""
    connection, theirs = pair
    theirs.sendall(encode_message(Accepted()))
    theirs.close()
    assert connection.receive(soon()) == Accepted()
    with pytest.raises(PeerLostError, match="closed the connection"):
        connection.receive(soon())


def test_end_of_file_in_a_message_is_a_lost_peer(pair):
    """A peer that dies in the middle of a message is lost, and the message is none."""
    connection, theirs = pair
    theirs.sendall(encode_message(Accepted())[:-1])
    theirs.close()
    with pytest.raises(PeerLostError):
        connection.receive(soon())


def test_reset_is_a_lost_peer(pair):
    """A reset connection is a PeerLostError, for who receives and for who sends."""
    connection, theirs = pair
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")  # close() resets
    theirs.close()
    with pytest.raises(PeerLostError, match="lost"):
        connection.receive(soon())
    with pytest.raises(PeerLostError):
        connection.send(Accepted())


def test_close_frees_a_blocked_receive(pair, in_thread):
    """A thread that waits for a message without a deadline is freed by `close`, with a PeerLostError."""
    connection, _ = pair
    receiving = in_thread(lambda: connection.receive(None))
    connection.close()
    with pytest.raises(PeerLostError):
        receiving.value()


def test_close_frees_a_blocked_send(pair, in_thread):
    """A thread whose message is not taken is freed by `close`, with a PeerLostError."""
    connection, _ = pair
    sending = in_thread(lambda: connection.send(big(1 << 20), timeout_s=WAIT_S))
    assert _filled(connection._sock)
    connection.close()
    with pytest.raises(PeerLostError):
        sending.value()


def test_closed_connection_is_a_lost_peer(pair):
    """After `close`, which may be called again, everything is a PeerLostError, and the other end sees the end."""
    connection, theirs = pair
    connection.close()
    connection.close()
    assert theirs.recv(1) == b""
    with pytest.raises(PeerLostError):
        connection.send(Accepted())
    with pytest.raises(PeerLostError):
        connection.receive(soon())
    with pytest.raises(PeerLostError):
        connection.receive(None)


# --- the reader ------------------------------------------------------------------------------------------------


class Reader:
    """What a reader thread has reported."""

    def __init__(self, connection):
        self.messages = []
        self.lost = []
        self.over = threading.Event()
        connection.start_reader(self.messages.append, self._on_lost, name="reader")

    def _on_lost(self, exc):
        self.lost.append(exc)
        self.over.set()


def test_reader_reports_every_message_and_one_end(pair):
    """The reader hands over all messages in order, says once that there will be no more, and closes the socket."""
    connection, theirs = pair
    reader = Reader(connection)
    messages = [Enter(round=1, group=group) for group in range(20)]
    theirs.sendall(b"".join(map(encode_message, messages)))
    theirs.close()
    assert reader.over.wait(WAIT_S)
    assert reader.messages == messages
    (exc,) = reader.lost
    assert isinstance(exc, PeerLostError)
    assert connection._sock.fileno() == -1


def test_reader_ends_at_garbage(pair):
    """A peer that sends garbage is lost: the stream has no next message, and the peer sees the end."""
    connection, theirs = pair
    reader = Reader(connection)
    theirs.sendall(encode_message(Accepted()) + b"\x00\x00\x00\x02[]")
    assert reader.over.wait(WAIT_S)
    assert reader.messages == [Accepted()]
    assert isinstance(reader.lost[0], TransportError)
    assert theirs.recv(1) == b""


def test_reader_ends_with_close(pair):
    """Closing from another thread ends the reader, which says so."""
    connection, _ = pair
    reader = Reader(connection)
    connection.close()
    assert reader.over.wait(WAIT_S)
    assert isinstance(reader.lost[0], PeerLostError)


def test_reader_waits_for_an_idle_peer_and_not_for_half_a_message(pair, monkeypatch):
    """Silence between messages may last, but the rest of a message that has begun is due in time."""
    connection, theirs = pair
    monkeypatch.setattr(module, "_REST_OF_FRAME_S", 0.1)
    reader = Reader(connection)
    assert not reader.over.wait(0.3)
    theirs.sendall(encode_message(Accepted())[:-1])
    started = time.monotonic()
    assert reader.over.wait(WAIT_S)
    assert time.monotonic() - started < 5
    assert isinstance(reader.lost[0], RoundTimeoutError)
    assert reader.messages == []


# --- forks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["closes", "is killed"])
def test_forked_child_does_not_keep_a_connection_alive(listener, forked, end):
    """A child forked while the connection is open has no copy of it: the peer sees the end when the parent is done."""

    def parent(report, go_on, rest):
        connection = Connection(socket.create_connection(listener.getsockname()))
        child = os.fork()
        if child == 0:
            rest()
        report(child)
        go_on()
        connection.close()
        rest()

    process = forked(parent)
    theirs, _ = listener.accept()
    with theirs:
        theirs.settimeout(WAIT_S)
        child = process.told()
        if end == "closes":
            process.go_on()
        else:
            process.kill()
        assert theirs.recv(1) == b""
    os.kill(child, signal.SIGKILL)  # raises if the child is gone, and the test has shown nothing


# --- connect ---------------------------------------------------------------------------------------------------


class Listening:
    """One accepted connection of a listener that a test scripts."""

    def __init__(self, listener):
        sock, _ = listener.accept()
        self.sock = sock
        sock.settimeout(WAIT_S)
        self.decoder = FrameDecoder()

    def send(self, message):
        self.sock.sendall(encode_message(message))

    def receive(self):
        while (message := self.decoder.next()) is None:
            data = self.sock.recv(65536)
            assert data, "the connector closed the connection"
            self.decoder.feed(data)
        return message

    def authenticate(self, secret=SECRET):
        self.send(Challenge(session=SESSION, nonce="12" * 16))
        auth = self.receive()
        assert isinstance(auth, Auth)
        self.send(Welcome(proof=proof(secret, "listener", SESSION, "12" * 16, auth.nonce)))
        return auth.proof == proof(SECRET, "connector", SESSION, "12" * 16, auth.nonce)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.sock.close()


@pytest.fixture
def connecting(listener, hello, in_thread):
    """Starts `connect` to the listener."""

    def start(**options):
        options = {"secret": SECRET, "session": SESSION, "hello": hello(), "timeout_s": WAIT_S, **options}
        return in_thread(lambda: connect(*listener.getsockname(), **options))

    return start


def test_connect_returns_when_the_hello_is_taken(listener, connecting, hello):
    """Both sides prove themselves, the hello is said and taken, and then messages of any size go both ways."""
    connector = connecting()
    with Listening(listener) as theirs:
        assert theirs.authenticate()
        assert theirs.receive() == hello()
        theirs.send(Accepted())
        connection = connector.value()
        threading.Thread(target=theirs.send, args=(big(1 << 20),)).start()
        assert connection.receive(soon()) == big(1 << 20)
        connection.send(Enter(round=1, group=2))
        assert theirs.receive() == Enter(round=1, group=2)
        connection.close()


def test_connect_without_a_session_takes_the_listeners(listener, connecting):
    """Who was told the secret and not the session joins the session that is served."""
    connector = connecting(session=None)
    with Listening(listener) as theirs:
        assert theirs.authenticate()
        theirs.receive()
        theirs.send(Accepted())
        connector.value().close()


def test_connect_refuses_another_session(listener, connecting):
    """A listener of another session gets no proof, and the connector says which was expected."""
    connector = connecting(session="ffff")
    with Listening(listener) as theirs:
        theirs.send(Challenge(session=SESSION, nonce="12" * 16))
        with pytest.raises(TransportError, match=f"expected ffff, the listener serves {SESSION}"):
            connector.value()
        assert theirs.sock.recv(1) == b""


def test_connect_refuses_a_listener_that_does_not_know_the_secret(listener, connecting):
    """A listener with another secret gets no hello: it is an AgreementError, and the connection is closed."""
    connector = connecting()
    with Listening(listener) as theirs:
        theirs.authenticate(secret="0e" * 32)
        with pytest.raises(AgreementError, match="does not know the secret"):
            connector.value()
        assert theirs.sock.recv(1) == b""


def test_connect_raises_the_refusal(listener, connecting):
    """A hello that is refused is the listener's own error, and is not tried again."""
    connector = connecting()
    with Listening(listener) as theirs:
        theirs.authenticate()
        theirs.receive()
        theirs.send(Refused(error=error_to_wire(PlanError("no room", side="trainer"))))
        with pytest.raises(PlanError, match="no room") as caught:
            connector.value()
        assert caught.value.side == "trainer"


@pytest.mark.parametrize("place", ["challenge", "welcome", "accepted"])
def test_connect_refuses_a_message_out_of_place(listener, connecting, place):
    """A listener that says something else than the handshake's next message is an AgreementError that names both."""
    connector = connecting()
    go = Go(round=1, epoch=1, rank=1, world_size=2, remaining_s=1)
    with Listening(listener) as theirs:
        if place == "welcome":
            theirs.send(Challenge(session=SESSION, nonce="12" * 16))
        elif place == "accepted":
            theirs.authenticate()
        theirs.send(go)
        with pytest.raises(AgreementError, match=f"expected '{place}', got 'go'"):
            connector.value()


def test_connect_tries_again_when_it_is_not_let_in(listener, connecting):
    """A listener that is full closes at once, and the connector comes again until it is let in."""
    connector = connecting()
    for _ in range(2):
        with Listening(listener):
            pass
    with Listening(listener) as theirs:
        theirs.authenticate()
        theirs.receive()
        theirs.send(Accepted())
        connector.value().close()


def test_connect_names_an_address_where_nobody_listens(hello):
    """Nobody there is a PeerLostError in bounded time that names the address and what it must be."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(PeerLostError, match=f"127.0.0.1:{port}.*master_address") as caught:
            connect("127.0.0.1", port, secret=SECRET, session=SESSION, hello=hello(), timeout_s=0.3)
    assert time.monotonic() - started < 5
    assert (caught.value.side, caught.value.phase) == ("worker", "init")


def test_connect_does_not_wait_for_ever_for_a_silent_listener(listener, hello):
    """A listener that accepts and says nothing is a PeerLostError in bounded time, which does not blame the address."""
    started = time.monotonic()
    with pytest.raises(PeerLostError, match=r"cannot connect.*it is reached, but .*strangers") as caught:
        connect(*listener.getsockname(), secret=SECRET, session=SESSION, hello=hello(), timeout_s=0.3)
    assert time.monotonic() - started < 5
    assert "master_address" not in caught.value.message


def test_who_has_only_a_secret_waits_for_the_sender(hello, in_thread, monkeypatch):
    """Nobody has told it that the sender listens: it tries again for its own timeout, however long that is."""
    monkeypatch.setattr(module, "_CONNECT_S", 0.0)
    was_refused = threading.Event()
    really = socket.create_connection

    def create_connection(*args, **options):
        try:
            return really(*args, **options)
        except ConnectionRefusedError:
            was_refused.set()
            raise

    monkeypatch.setattr(socket, "create_connection", create_connection)
    with socket.socket() as late:
        late.settimeout(WAIT_S)
        late.bind(("127.0.0.1", 0))
        options = {"secret": SECRET, "session": None, "hello": hello(), "timeout_s": WAIT_S}
        connector = in_thread(lambda: connect(*late.getsockname(), **options))
        assert was_refused.wait(WAIT_S)
        late.listen()
        with Listening(late) as theirs:
            theirs.authenticate()
            theirs.receive()
            theirs.send(Accepted())
            connector.value().close()
