"""The sender's port: who is let in, and what happens to who is not; and the peers of a session."""

import logging
import os
import resource
import signal
import socket
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from wt_common import (
    AgreementError,
    ConfigurationError,
    PeerLostError,
    PlanError,
    StaleSessionError,
    TransportError,
)
from wt_common.errors import error_from_wire, error_to_wire
from wt_common.session import (
    FRAME_HEADER,
    MAX_FRAME_BYTES,
    MAX_UNAUTHENTICATED_FRAME_BYTES,
    Abort,
    Accepted,
    Auth,
    Challenge,
    Committed,
    Credit,
    Ended,
    Enter,
    Failed,
    Finishing,
    Installed,
    Joined,
    Leave,
    Placed,
    Position,
    Ready,
    Refused,
    RoundOutcome,
    Sent,
    State,
    StoreSet,
    Welcome,
    answer_challenge,
    encode_message,
    proof,
)
from wt_trainer import session as module
from wt_trainer.connection import connect
from wt_trainer.session import Session, local_address_towards

WAIT_S = 10
LOGGER = "wt_trainer.session"


@pytest.fixture
def impatient(monkeypatch):
    """A session that gives strangers half a second."""
    monkeypatch.setattr(module, "_HANDSHAKE_S", 0.5)


def warnings_of(caplog):
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


def lost(session, peer_key):
    with session.changed:
        return session._peers[peer_key].lost is not None


# --- strangers -------------------------------------------------------------------------------------------------


def _wrong_secret(peer, session):
    auth, _ = answer_challenge(peer.receive(Challenge), secret="0e" * 32, session=session.id)
    peer.send(auth)


def _reflected_challenge(peer, session):
    """Answers with the listener's own nonce, and the proof that the listener would give."""
    nonce = peer.receive(Challenge).nonce
    peer.send(Auth(nonce=nonce, proof="00" * 32))


def _replayed(peer, session):
    """An honest proof, over the nonce of another connection."""
    auth, _ = answer_challenge(
        Challenge(session=session.id, nonce="12" * 16), secret=session.secret, session=session.id
    )
    peer.receive(Challenge)
    peer.send(auth)


def _proof_that_is_not_text(peer, session):
    """What neither `hmac` nor an encoder takes."""
    peer.receive(Challenge)
    body = b'{"type":"auth","nonce":"\\ud800","proof":"\xc3\xa9"}'
    peer.sock.sendall(FRAME_HEADER.pack(len(body)) + body)


def _hello_first(peer, session):
    peer.receive(Challenge)
    peer.send(Accepted())


def _no_hello(peer, session):
    peer.authenticate(session.secret, session.id)
    peer.send(Ready(round=0, knows_metadata=True))


def _garbage(peer, session):
    peer.sock.sendall(b"\x16\x03\x01" + os.urandom(200))


def _http(peer, session):
    peer.sock.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")


def _huge(peer, session):
    peer.sock.sendall(FRAME_HEADER.pack(MAX_UNAUTHENTICATED_FRAME_BYTES + 1))


def _huge_after_authentication(peer, session):
    peer.authenticate(session.secret, session.id)
    peer.sock.sendall(FRAME_HEADER.pack(MAX_FRAME_BYTES + 1))


def _unknown_message(peer, session):
    peer.sock.sendall(FRAME_HEADER.pack(18) + b'{"type":"gravity"}')


def _hang_up(peer, session):
    peer.sock.shutdown(socket.SHUT_WR)


STRANGERS = [
    _wrong_secret,
    _reflected_challenge,
    _replayed,
    _proof_that_is_not_text,
    _hello_first,
    _no_hello,
    _garbage,
    _http,
    _huge,
    _huge_after_authentication,
    _unknown_message,
    _hang_up,
]


@pytest.mark.parametrize("stranger", STRANGERS, ids=lambda stranger: stranger.__name__.strip("_"))
def test_stranger_is_refused_at_once(session, dial, join, caplog, monkeypatch, stranger):
    """Who does not follow the handshake is closed at once, logged at WARNING with the port, and changes nothing."""
    caplog.set_level(logging.DEBUG, LOGGER)
    monkeypatch.setattr(module, "_HANDSHAKE_S", WAIT_S / 2)
    started = time.monotonic()
    peer = dial(session)
    stranger(peer, session)
    assert peer.at_end()
    assert time.monotonic() - started < module._HANDSHAKE_S, "the session waited for more"
    (record,) = warnings_of(caplog)
    assert f"refused a connection to the session's port {session.port}: " in record.getMessage()
    assert (session.workers, session.followers, session.refusal) == ([], [], None)
    join(session)
    assert len(session.workers) == 1


def _silent(peer, session):
    pass


def _half_a_header(peer, session):
    peer.sock.sendall(b"\x00\x00")


def _half_a_message(peer, session):
    peer.sock.sendall(encode_message(Auth(nonce="12", proof="34"))[:-1])


def _silent_after_authentication(peer, session):
    peer.authenticate(session.secret, session.id)


def _half_a_hello(peer, session):
    peer.authenticate(session.secret, session.id)
    peer.sock.sendall(FRAME_HEADER.pack(MAX_FRAME_BYTES) + b"{")


SLOW = [_silent, _half_a_header, _half_a_message, _silent_after_authentication, _half_a_hello]


@pytest.mark.usefixtures("impatient")
def test_slow_strangers_are_refused_when_their_time_is_over(session, dial, join, caplog):
    """Who says nothing, or half a message, is closed when the handshake's time is over; others are let in."""
    caplog.set_level(logging.DEBUG, LOGGER)
    started = time.monotonic()
    peers = [dial(session) for _ in SLOW]
    for peer, stranger in zip(peers, SLOW, strict=True):
        stranger(peer, session)
    join(session)
    assert all(peer.at_end() for peer in peers)
    assert 0.5 <= time.monotonic() - started < 5
    assert len(caplog.records) == len(SLOW)
    assert len(warnings_of(caplog)) == 1
    assert len(session.workers) == 1


@pytest.mark.usefixtures("impatient")
def test_trickling_stranger_does_not_move_the_deadline(session, dial, in_thread):
    """The handshake's time is for the whole of it: a byte now and then gains nothing."""
    peer = dial(session)
    stop = threading.Event()

    def trickle():
        for byte in encode_message(Auth(nonce="12" * 500, proof="34")):
            if stop.wait(0.03):
                return
            try:
                peer.sock.send(bytes([byte]))
            except OSError:
                return

    trickling = in_thread(trickle)
    started = time.monotonic()
    assert peer.at_end()
    assert time.monotonic() - started < 5
    stop.set()
    trickling.value()


def test_strangers_are_logged_once_at_warning(session, dial, caplog):
    """Many strangers at once are one WARNING; the rest is DEBUG, so that a scan of ports does not fill a log."""
    caplog.set_level(logging.DEBUG, LOGGER)
    peers = [dial(session) for _ in range(40)]
    for peer in peers:
        _garbage(peer, session)
    assert all(peer.at_end() for peer in peers)
    assert len(caplog.records) == 40
    assert len(warnings_of(caplog)) == 1
    assert {record.levelno for record in caplog.records} == {logging.WARNING, logging.DEBUG}


@pytest.fixture
def many_files():
    """Room for a thousand connections in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2048 if hard == resource.RLIM_INFINITY else min(2048, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_thousand_silent_connections_do_not_keep_a_peer_out(session, dial, join):
    """A thousand strangers occupy few threads, for a bounded time: a peer that comes again is let in."""
    strangers = [dial(session) for _ in range(1000)]
    started = time.monotonic()
    most = 0
    while not session.workers:
        names = [thread.name for thread in threading.enumerate()]
        most = max(most, names.count(f"wt-session-handshake {session.id}"))
        try:
            join(session)
        except EOFError:  # full; a worker comes again, too
            assert time.monotonic() - started < 5, "the peer was kept out"
            time.sleep(0.05)
    assert 0 < most <= 64
    assert all(stranger.at_end() for stranger in strangers)


def idle(session, address):
    """A connection from `address` of this host that the session has accepted, and that says nothing."""
    sock = socket.create_connection(("127.0.0.1", session.port), timeout=WAIT_S, source_address=(address, 0))
    assert sock.recv(4)
    return sock


@pytest.fixture
def patient(monkeypatch):
    """A session that gives strangers as long as a test may take."""
    monkeypatch.setattr(module, "_HANDSHAKE_S", WAIT_S)


@pytest.mark.usefixtures("patient")
def test_idle_strangers_of_the_own_address_keep_no_peer_out(session, join):
    """Where strangers have taken all places, also from a peer's own address, the oldest of them is closed for the peer."""
    with ExitStack() as strangers:
        held = [strangers.enter_context(idle(session, "127.0.0.1")) for _ in range(module._MAX_PENDING_HANDSHAKES)]
        started = time.monotonic()
        join(session)
        assert time.monotonic() - started < module._HANDSHAKE_S / 2, "the strangers' time was waited for"
        assert at_end(held[0])
    assert len(session.workers) == 1


@pytest.mark.usefixtures("patient")
def test_strangers_of_one_address_push_out_nobody_of_another(session, dial, hello):
    """A peer that is still in its handshake stays while strangers of another address come and push out one another."""
    peer = dial(session)
    challenge = peer.receive(Challenge)
    with ExitStack() as strangers:
        for _ in range(2 * module._MAX_PENDING_HANDSHAKES):
            strangers.enter_context(idle(session, "127.0.0.2"))
        auth, _ = answer_challenge(challenge, secret=session.secret, session=session.id)
        peer.send(auth)
        peer.receive(Welcome)
        peer.send(hello())
        peer.receive(Accepted)
    assert len(session.workers) == 1


def at_end(sock):
    """Whether the other end has closed; what it said before is left out."""
    with suppress(ConnectionError):
        while sock.recv(1 << 16):
            pass
    return True


@pytest.mark.parametrize(("files", "places"), [(64, 8), (256, 32), (4096, 64)], ids=str)
def test_strangers_get_few_of_the_files(monkeypatch, files, places):
    """However few files this process may open, most of them are not for strangers; a session never has none for them."""
    monkeypatch.setattr(module.resource, "getrlimit", lambda _: (files, files))
    assert module._num_places() == places
    monkeypatch.setattr(module.resource, "getrlimit", lambda _: (4, 4))
    assert module._num_places() == 1


def test_running_out_of_files_does_not_close_the_port(session, join, caplog):
    """While this process can open no more files nobody is let in, and afterwards those who waited are."""
    caplog.set_level(logging.DEBUG, LOGGER)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers = []
    with socket.socket() as waiting:
        waiting.settimeout(WAIT_S)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64 + len(list(Path("/proc/self/fd").iterdir())), hard))
        try:
            with suppress(OSError):
                while True:
                    fillers.append(os.dup(0))
            waiting.connect(("127.0.0.1", session.port))
            deadline = time.monotonic() + WAIT_S
            while "Too many open files" not in caplog.text:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            for filler in fillers:
                os.close(filler)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert waiting.recv(4)
    join(session)
    assert len(session.workers) == 1


def test_closing_ends_the_handshakes_in_progress(session, dial, hello):
    """Who is in the middle of its handshake when the session closes is not let in."""
    peer = dial(session)
    auth, _ = answer_challenge(peer.receive(Challenge), secret=session.secret, session=session.id)
    session.close()
    peer.send(auth)
    with suppress(EOFError):  # as good as a refusal
        peer.receive(Welcome)
        peer.send(hello())
        peer.receive(Refused)
    assert peer.at_end()
    assert session.workers == []


# --- peers -----------------------------------------------------------------------------------------------------


def test_peer_is_let_in_and_listed(session, join):
    """A peer that proved itself and said hello is listed with what it said, and the session has proved itself to it."""
    join(session, engine="e1", rank=1, size=2, hostname="h", open=True, poisoned=True)
    (peer,) = session.workers
    assert str(peer) == "worker rank 1 of engine e1 (h)"
    assert peer.key == ("worker", "e1", 1)
    assert (peer.is_worker, peer.hello.open, peer.hello.poisoned, peer.lost) == (True, True, True, None)
    assert session.followers == []


def test_peer_may_send_large_messages(session, join):
    """Once it has proved itself a peer may send more than a stranger, as a rendezvous or metadata need it."""
    peer, other = (join(session, rank=rank, size=2) for rank in range(2))
    other.decoder.max_bytes = MAX_FRAME_BYTES
    message = StoreSet(epoch=1, key="k" * 2 * MAX_UNAUTHENTICATED_FRAME_BYTES, value="")
    peer.send(message)
    assert other.receive() == message


def test_hello_may_be_large(session, join):
    """The hello comes after the proof, and may be larger than what a stranger may send."""
    join(session, versions={"k": "v" * MAX_UNAUTHENTICATED_FRAME_BYTES})
    assert len(session.workers) == 1


def test_listener_proves_itself(session, dial):
    """The session's proof is the listener's, over both nonces."""
    peer = dial(session)
    challenge = peer.receive(Challenge)
    assert challenge.session == session.id
    auth, expected = answer_challenge(challenge, secret=session.secret, session=session.id)
    peer.send(auth)
    assert peer.receive(Welcome).proof == expected
    assert expected == proof(session.secret, "listener", session.id, challenge.nonce, auth.nonce)


def test_session_secret_can_be_given(open_session, dial):
    """A secret that all were given is the handshake's; without one each session has its own, of 256 bits."""
    given = open_session(secret="ab" * 32)
    dial(given).authenticate("ab" * 32, given.id)
    others = [open_session() for _ in range(2)]
    assert len({session.secret for session in others}) == len({session.id for session in others}) == 2
    assert all(len(bytes.fromhex(session.secret)) == 32 for session in others)


def test_workers_are_numbered_by_engine_and_rank(session, join):
    """Whatever the order in which they came, workers are ordered by engine, then by rank as a number."""
    places = [("b", 10), ("b", 2), ("a", 0), ("b", 0)]
    for engine, rank in places:
        join(session, engine=engine, rank=rank, size=11)
    assert [(peer.hello.engine, peer.hello.rank) for peer in session.workers] == [
        ("a", 0),
        ("b", 0),
        ("b", 2),
        ("b", 10),
    ]


def test_trainer_ranks_are_no_workers(session, join):
    """Another trainer rank is a follower: it is listed apart, and sealing does not count it."""
    for rank in (2, 1):
        join(session, role="trainer", engine="", rank=rank, size=0, hostname="t")
    join(session)
    assert [str(peer) for peer in session.followers] == ["trainer rank 1 (t)", "trainer rank 2 (t)"]
    assert [peer.is_worker for peer in session.followers] == [False, False]
    session.seal(1)


def refused(session, dial, hello):
    """The error that a hello was refused with."""
    peer = dial(session)
    peer.authenticate(session.secret, session.id)
    peer.send(hello)
    error = error_from_wire(peer.receive(Refused).error)
    assert peer.at_end()
    return error


def test_second_live_connection_of_a_rank_is_refused(session, join, dial, hello):
    """Two live connections of one rank are an agreement error, told to the second and the trainer; the first stays."""
    first = join(session)
    error = refused(session, dial, hello())
    assert isinstance(error, AgreementError)
    assert "two live connections say they are worker rank 0 of engine e0" in error.message
    assert (error.side, error.phase, error.engine, error.rank) == ("trainer", "init", "e0", 0)
    assert session.refusal.message == error.message
    session.send(session.workers, Committed(round=1))
    assert first.receive() == Committed(round=1)


def test_rank_that_is_gone_can_come_again(session, join, until):
    """A rank whose connection has ended may connect anew, and it is the new connection that counts."""
    join(session).close()
    until(lambda: lost(session, ("worker", "e0", 0)))
    again = join(session)
    assert session.refusal is None
    (peer,) = session.workers
    assert peer.lost is None
    session.send([peer], Committed(round=1))
    assert again.receive() == Committed(round=1)


def test_rank_that_vanishes_in_its_hello_can_come_again(session, join, dial, hello, until):
    """A peer that says hello and is gone before it is answered leaves no ghost that keeps its rank taken."""
    for _ in range(20):
        peer = dial(session)
        peer.authenticate(session.secret, session.id)
        peer.send(hello())
        peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")  # close() resets
        peer.close()
        until(lambda: not any(t.name == f"wt-session-handshake {session.id}" for t in threading.enumerate()))
        until(lambda: all(peer.lost for peer in session.workers), "the end of the vanished peer")
    join(session)
    assert session.refusal is None


def test_other_schema_major_is_refused(session, dial, hello):
    """A peer of another major is refused with both versions; a higher minor is taken."""
    error = refused(session, dial, hello(schema=[2, 0]))
    assert isinstance(error, AgreementError)
    assert "this side speaks 1.0, the other 2.0" in error.message
    assert session.refusal.message == error.message
    assert session.workers == []


def test_higher_minor_is_taken(session, join):
    """A peer of a newer minor of this major is let in."""
    join(session, schema=[1, 9])
    assert len(session.workers) == 1


def test_unknown_role_is_refused(session, dial, hello):
    """A hello of neither a worker nor a trainer is refused with what it said."""
    assert "got 'spectator'" in refused(session, dial, hello(role="spectator")).message


def test_first_refusal_is_kept(session, dial, hello):
    """Of several refusals the trainer hears the first."""
    first = refused(session, dial, hello(schema=[2, 0]))
    refused(session, dial, hello(role="spectator"))
    assert session.refusal.message == first.message


def test_refusal_wakes_who_waits_for_the_init(session, dial, hello, in_thread):
    """The init call ends with a refusal at once, while the client's call is still on its way."""
    go_on = threading.Event()

    def init():
        with session.running(0, WAIT_S) as round_:
            round_.run("init", lambda: go_on.wait(WAIT_S)).join(unless=lambda: session.refusal)

    waiting = in_thread(init)
    refused(session, dial, hello(schema=[2, 0]))
    with pytest.raises(AgreementError, match=r"other 2\.0"):
        waiting.value()
    go_on.set()


# --- sealing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("expected", [3, None])
def test_whole_engines_are_sealed(session, join, expected):
    """Engines of which every rank came are sealed, counted where the number is known."""
    for engine, rank, size in (("a", 1, 2), ("a", 0, 2), ("b", 0, 1)):
        join(session, engine=engine, rank=rank, size=size)
    session.seal(expected)
    assert "sealed, 3 peers" in repr(session)


@pytest.mark.parametrize(
    ("ranks", "expected", "text"),
    [
        ([], None, "no worker connected"),
        ([], 2, "expected 2 worker ranks, got 0. Connected: nobody"),
        ([("a", 1, 3)], None, r"engine a has 3 ranks, of which \[0, 2\] did not connect"),
        ([("a", 1, 3)], None, r"Connected: worker rank 1 of engine a \(host\)"),
        ([("a", 0, 1), ("b", 0, 2)], 3, r"engine b has 2 ranks, of which \[1\] did not connect"),
        ([("a", 0, 1), ("b", 0, 2)], 3, "expected 3 worker ranks, got 2"),
        ([("a", 0, 1)], 2, "expected 2 worker ranks, got 1"),
        ([("a", 0, 1), ("b", 0, 1)], 1, "expected 1 worker ranks, got 2"),
        ([("a", 0, 1), ("a", 1, 2)], None, r"engine a: .*ranks \[0, 1\] and sizes \[1, 2\]"),
    ],
    ids=lambda value: str(value) if isinstance(value, list) else "",
)
def test_incomplete_list_says_who_came_and_who_is_missing(session, join, ranks, expected, text):
    """A list that is not whole is an agreement error that says what is missing and who came."""
    for engine, rank, size in ranks:
        join(session, engine=engine, rank=rank, size=size)
    with pytest.raises(AgreementError, match=text) as caught:
        session.seal(expected)
    assert (caught.value.side, caught.value.phase) == ("trainer", "init")


def test_late_hello_is_refused(session, join, dial, hello):
    """Who is in its handshake when the list is sealed is not added: it is told to wait for the trainer's next init."""
    join(session)
    late = dial(session)
    late.authenticate(session.secret, session.id)
    session.seal(None)
    late.send(hello(engine="late"))
    error = error_from_wire(late.receive(Refused).error)
    assert late.at_end()
    assert isinstance(error, AgreementError)
    assert "came after the list was sealed" in error.message
    assert len(session.workers) == 1


def test_sealed_session_does_not_listen(session, join, until):
    """Nobody can come any more once the list is sealed, and the port is free; the peers stay, and rounds run."""
    peer = join(session)
    session.seal(1)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", session.port), timeout=WAIT_S)
    until(lambda: not any(each.name == f"wt-session-accept {session.id}" for each in threading.enumerate()))
    socket.create_server(("127.0.0.1", session.port)).close()
    with session.running(1, WAIT_S) as round_:
        peer.send(Ready(round=1, knows_metadata=True))
        round_.collect(Ready, session.workers)


def test_late_rank_is_told_at_once_that_nobody_listens(session, join, hello):
    """A rank that comes after the list is sealed hears at once that it can take part from the next init on."""
    join(session)
    session.seal(1)
    started = time.monotonic()
    with pytest.raises(PeerLostError, match="takes part from the next trainer_init on") as caught:
        connect("127.0.0.1", session.port, secret=session.secret, session=session.id, hello=hello(), timeout_s=WAIT_S)
    assert time.monotonic() - started < WAIT_S / 5
    assert caught.value.side == "worker"


@pytest.mark.parametrize(
    "fields",
    [
        {"rank": 5, "size": 1},
        {"rank": -1, "size": 2},
        {"rank": 0, "size": 10**7},
        {"rank": 10**40, "size": 10**41},
        {"rank": 0, "size": 0},
        {"role": "trainer", "engine": "", "rank": 0},
        {"role": "trainer", "engine": "", "rank": 2},
    ],
    ids=str,
)
def test_impossible_rank_is_refused(open_session, dial, hello, fields):
    """A rank outside its engine or trainer, or a size that no cluster has, is refused, and the list stays as it is."""
    session = open_session(num_trainer_ranks=2)
    error = refused(session, dial, hello(**fields))
    assert "expected ranks" in error.message
    assert (session.workers, session.followers) == ([], [])


def test_followers_are_waited_for(session, join, in_thread):
    """The sender waits until the other trainer ranks are there, and names at its deadline those that are not."""
    with session.running(0, WAIT_S) as round_:
        waiting = in_thread(lambda: session.wait_followers(round_, 2))
        for rank in (1, 2):
            assert waiting.thread.is_alive()
            join(session, role="trainer", engine="", rank=rank, size=3)
        waiting.value()
    with session.running(0, 0.1) as round_, pytest.raises(TimeoutError, match="trainer ranks 3, 4"):
        session.wait_followers(round_, 4)


# --- a round ---------------------------------------------------------------------------------------------------


def test_posts_are_filed_under_their_peer(session, join):
    """What each peer posts in the round in progress is collected by peer."""
    peers = [join(session, rank=rank, size=2) for rank in range(2)]
    with session.running(1, WAIT_S) as round_:
        for rank, peer in enumerate(peers):
            peer.send(Ready(round=1, knows_metadata=bool(rank)))
        posts = round_.collect(Ready, session.workers)
    assert [posts["worker", "e0", rank].knows_metadata for rank in range(2)] == [False, True]


def test_credit_is_counted(session, join):
    """A peer's newest credit is what the round knows."""
    peer = join(session)
    (worker,) = session.workers
    with session.running(1, WAIT_S) as round_:
        for limit in (2, 3):
            peer.send(Credit(round=1, limit=limit))
        round_.wait(lambda: round_.credits.get(worker.key) == 3, lambda: "credit")


def test_failed_peer_fails_the_round(session, join):
    """A peer that cannot go on fails the round with its own error, and who it is."""
    peer = join(session, engine="e7", rank=0)
    with session.running(1, WAIT_S) as round_:
        peer.send(Failed(round=1, error=error_to_wire(PlanError("no room", param="w"))))
        with pytest.raises(PlanError, match="no room") as caught:
            round_.collect(Ready, session.workers)
    error = caught.value
    assert (error.side, error.engine, error.rank, error.param, error.round) == ("worker", "e7", 0, "w", 1)


def test_end_of_file_fails_the_running_round(session, join):
    """A peer that dies fails the round at once: the PeerLostError names engine and rank."""
    join(session, engine="e7", rank=0, size=2)
    dying = join(session, engine="e7", rank=1, size=2)
    with session.running(1, WAIT_S) as round_:
        started = time.monotonic()
        dying.close()
        with pytest.raises(PeerLostError, match=r"worker rank 1 of engine e7 \(host\) is gone") as caught:
            round_.collect(Ready, session.workers)
        assert time.monotonic() - started < 5
    assert (caught.value.side, caught.value.engine, caught.value.rank) == ("worker", "e7", 1)


def test_end_of_file_of_a_trainer_rank_fails_the_round(session, join):
    """Another trainer rank that dies fails the round like a worker."""
    join(session)
    dying = join(session, role="trainer", engine="", rank=2, size=3)
    with session.running(1, WAIT_S) as round_:
        dying.close()
        with pytest.raises(PeerLostError, match="trainer rank 2") as caught:
            round_.collect(Ready, session.workers)
    assert (caught.value.side, caught.value.rank) == ("trainer", 2)


def test_garbage_of_a_peer_fails_the_round(session, join):
    """A peer whose stream cannot be read any more is lost."""
    peer = join(session)
    with session.running(1, WAIT_S) as round_:
        peer.sock.sendall(FRAME_HEADER.pack(2) + b"[]")
        with pytest.raises(PeerLostError, match="unreadable"):
            round_.collect(Ready, session.workers)
    assert peer.at_end()


def test_store_value_that_cannot_be_read_fails_the_round(session, join):
    """A peer that publishes what is no base64 is lost at once, and not silently deaf."""
    peer = join(session)
    body = b'{"type":"store_set","epoch":1,"key":"k","value":"?"}'
    with session.running(1, WAIT_S) as round_:
        peer.sock.sendall(FRAME_HEADER.pack(len(body)) + body)
        with pytest.raises(PeerLostError):
            round_.collect(Ready, session.workers)


def test_round_that_finds_a_peer_gone_has_failed(session, join, until):
    """A peer that died between two rounds fails the next one before anything is done, with that round's number."""
    join(session, rank=0).close()
    until(lambda: lost(session, ("worker", "e0", 0)))
    for number in (1, 2):
        with session.running(number, WAIT_S) as round_, pytest.raises(PeerLostError) as caught:
            round_.check()
        assert caught.value.round == number


def test_peer_that_leaves_says_why(session, join, until):
    """A worker that a later init took away says so, and the next rounds are stale, each with its own number."""
    peer = join(session)
    peer.send(Leave(error=error_to_wire(StaleSessionError("a later init replaced this session", side="worker"))))
    assert peer.at_end()
    until(lambda: lost(session, ("worker", "e0", 0)))
    for number in (1, 2):
        with session.running(number, WAIT_S) as round_, pytest.raises(StaleSessionError, match="later init") as caught:
            round_.check()
        assert (caught.value.round, caught.value.side) == (number, "worker")


def test_peer_that_leaves_for_another_reason_is_lost(session, join):
    """A worker that shuts down is a lost peer, and its reason is in the text."""
    peer = join(session)
    with session.running(1, WAIT_S) as round_:
        peer.send(Leave(error=error_to_wire(PlanError("shut down"))))
        with pytest.raises(PeerLostError, match="shut down"):
            round_.collect(Ready, session.workers)


@pytest.mark.parametrize(
    "message",
    [
        Ready(round=4, knows_metadata=True),
        Installed(round=4, num_bytes=0, seconds={}, not_synced=[]),
        Finishing(round=4),
    ],
    ids=lambda message: message.type,
)
@pytest.mark.parametrize("current", [None, 5], ids=["no round", "another round"])
def test_message_of_a_round_that_is_over_is_answered_with_an_abort(session, join, message, current):
    """Who is in a round that is over is told so, with a stale-session error; the round in progress does not notice."""
    peer = join(session)
    if current is None:
        peer.send(message)
        answer = peer.receive(Abort)
    else:
        with session.running(current, WAIT_S) as round_:
            peer.send(message)
            answer = peer.receive(Abort)
            round_.check()
            assert type(message) not in round_.posts
    assert answer.round == 4
    error = error_from_wire(answer.error)
    assert isinstance(error, StaleSessionError)
    assert "round 4 is over" in error.message


def test_last_words_of_a_round_that_is_over_need_no_answer(session, join):
    """What a peer says when it waits for nothing is not answered, and fails no other round."""
    peer = join(session)
    with session.running(5, WAIT_S) as round_:
        peer.send(Credit(round=4, limit=9))
        peer.send(Failed(round=4, error=error_to_wire(PlanError("late"))))
        peer.send(Ended(round=4, touched=True))
        peer.send(State(round=4, open=True, poisoned=True))
        peer.send(Position(round=4, index=1))
        peer.send(Placed(round=4, takes="a", digested="r", parts=[], not_in_place={}))
        peer.send(Sent(round=4, digests=[1]))
        peer.send(Finishing(round=4))
        assert peer.receive(Abort).round == 4
        round_.check()
        assert round_.credits == {}


def test_what_a_worker_has_placed_is_kept_under_its_parameters(session, join, until):
    """It is filed under what its round sends, in the round or after it; of a round that nobody knows it is nothing."""
    peer = join(session)
    (worker,) = session.workers
    session.expect_placed(4, "digest", is_draft=False)
    session.expect_placed(5, "digest", is_draft=True)
    messages = [
        Placed(round=number, takes="a" * number, digested="r" * number, parts=[], not_in_place={})
        for number in (3, 4, 5)
    ]
    with session.running(5, WAIT_S) as round_:
        for message in messages:
            peer.send(message)
        until(lambda: len(worker.placed) == 2)
        assert worker.placed == {("digest", False): messages[1], ("digest", True): messages[2]}
        assert round_.posts == {}
        newer = Placed(round=5, takes="n", digested="n", parts=[], not_in_place={})
        peer.send(newer)
        until(lambda: worker.placed["digest", True] == newer)


def test_placements_are_bounded_by_their_last_use(session, join, until):
    """Of many parameters those are forgotten for which the worker has not been ready for longest."""
    peer = join(session)
    (worker,) = session.workers
    with session.running(1, WAIT_S):
        for number in range(1, 101):
            session.expect_placed(number, f"digest {number}", is_draft=False)
            peer.send(Placed(round=number, takes="a", digested="r", parts=[], not_in_place={}))
            until(lambda number=number: (f"digest {number}", False) in worker.placed)
            session.expect_placed(1000 + number, "often", is_draft=False)
            if number == 1:
                peer.send(Placed(round=1001, takes="n", digested="n", parts=[], not_in_place={}))
            peer.send(Ready(round=1000 + number, knows_metadata=True))
            until(lambda: next(reversed(worker.placed)) == ("often", False))
            assert len(worker.placed) <= module._MAX_PLACED
    assert len(worker.placed) == module._MAX_PLACED


def test_rounds_end_with_their_bracket(session):
    """Outside `running` no round is in progress, also after an error in it."""

    def fail():
        with session.running(1, WAIT_S):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert session.round is None


def test_send_reaches_every_peer_and_loses_one_that_is_gone(session, join, until):
    """A message goes to all peers, also behind one that is gone, which fails the round."""
    peers = [join(session, rank=rank, size=3) for rank in range(3)]
    with session.running(1, WAIT_S) as round_:
        session.workers[1].connection.close()
        session.send(session.workers, Enter(round=1, group=0))
        with pytest.raises(PeerLostError, match="worker rank 1"):
            round_.check()
    assert peers[0].receive() == peers[2].receive() == Enter(round=1, group=0)


def test_trainer_rank_that_is_a_step_ahead_is_heard(session, join, until):
    """What another trainer rank says before the sender begins the round, its failure too, waits for the round."""
    follower = join(session, role="trainer", engine="", rank=1, size=0)
    follower.send(Joined(round=1, metadata_digest="ab"))
    follower.send(Failed(round=2, error=error_to_wire(PlanError("no source"))))
    until(lambda: len(session._early) == 2)
    with session.running(1, WAIT_S) as round_:
        joined = round_.collect(Joined, session.followers)
        assert [post.metadata_digest for post in joined.values()] == ["ab"]
    with session.running(2, WAIT_S) as round_, pytest.raises(PlanError, match="no source"):
        round_.check()


@pytest.mark.parametrize("moment", ["before", "within"])
def test_rank_that_joins_a_later_round_fails_the_call_on_both(session, join, until, moment):
    """It cannot be in step with the sender: both hear so at once, and go on from the higher number."""
    follower = join(session, role="trainer", engine="", rank=1, size=0)
    if moment == "before":
        follower.send(Joined(round=7, metadata_digest="ab"))
        until(lambda: session._early)
    with session.running(5, WAIT_S) as round_:
        if moment == "within":
            follower.send(Joined(round=7, metadata_digest="ab"))
        with pytest.raises(
            AgreementError, match=r"trainer rank 1 is in its call 7 .*, the sender in its call 5"
        ) as caught:
            round_.collect(Joined, session.followers)
        session.tell_outcome(RoundOutcome(round=5, error=error_to_wire(caught.value), number=session.in_step()))
    outcome = follower.receive(RoundOutcome)
    assert (outcome.round, outcome.number) == (7, 7)
    with session.running(8, WAIT_S) as round_:
        follower.send(Joined(round=8, metadata_digest="ab"))
        round_.collect(Joined, session.followers)


@pytest.mark.parametrize("moment", ["before", "within"])
def test_rank_that_joins_a_round_again_fails_the_call_on_both(session, join, until, moment):
    """It counts less calls than it made. Its call belongs to the sender's next one, where that has not begun."""
    follower = join(session, role="trainer", engine="", rank=1, size=0)
    with session.running(5, WAIT_S) as round_:
        follower.send(Joined(round=5, metadata_digest="ab"))
        round_.collect(Joined, session.followers)
    if moment == "before":
        follower.send(Joined(round=5, metadata_digest="ab"))
        until(lambda: session.followers[0].strayed)
    with session.running(6, WAIT_S) as round_:
        if moment == "within":
            follower.send(Joined(round=5, metadata_digest="ab"))
        with pytest.raises(
            AgreementError, match=r"trainer rank 1 is in its call 5 .*, the sender in its call 6"
        ) as caught:
            round_.collect(Joined, session.followers)
        session.tell_outcome(RoundOutcome(round=6, error=error_to_wire(caught.value), number=session.in_step()))
    outcome = follower.receive(RoundOutcome)
    assert (outcome.round, outcome.number) == (5, 6)
    with session.running(7, WAIT_S) as round_:
        follower.send(Joined(round=7, metadata_digest="ab"))
        round_.collect(Joined, session.followers)


def test_rank_that_is_late_or_ahead_is_in_step(session, join, until):
    """A rank that failed its own call and made the next one, and one that comes to a round that is over, have missed nothing."""
    ahead, late = (join(session, role="trainer", engine="", rank=rank, size=0) for rank in (1, 2))
    ahead.send(Failed(round=1, error=error_to_wire(PlanError("no source"))))
    ahead.send(Joined(round=2, metadata_digest="ab"))
    until(lambda: len(session._early) == 2)
    with session.running(1, WAIT_S) as round_, pytest.raises(PlanError, match="no source"):
        round_.check()
    with session.running(2, WAIT_S) as round_:
        late.send(Joined(round=1, metadata_digest="ab"))
        late.send(Joined(round=2, metadata_digest="ab"))
        assert len(round_.collect(Joined, session.followers)) == 2


def test_rank_that_cannot_take_part_fails_the_init(session, join):
    """Its hello says why, and nobody takes it for one that is well."""
    with session.running(0, WAIT_S) as round_:
        join(session, role="trainer", engine="", rank=1, size=0, failure=error_to_wire(KeyError("w")))
        with pytest.raises(TransportError, match="KeyError: 'w'") as caught:
            session.wait_followers(round_, 1)
    assert (caught.value.side, caught.value.rank) == ("trainer", 1)


@pytest.mark.parametrize("phase", ["update", "resume"])
def test_round_is_ended_at_its_deadline_while_the_source_runs(session, phase):
    """The sender's own thread cannot look at the time meanwhile; in another phase it can, and nobody else ends the round."""
    with session.running(1, 0.1) as round_:
        round_.phase = phase
        session.end_at_deadline(round_)
        with round_.changed:
            round_.changed.wait_for(lambda: round_.failure is not None, 0.5 if phase == "resume" else WAIT_S)
        assert (round_.failure is not None) == (phase == "update")


def test_notify_is_not_held_up_by_a_peer_that_does_not_read(session, join):
    """A last word to a frozen peer is dropped in bounded time, and the others get theirs."""
    frozen, well = (join(session, rank=rank, size=2) for rank in range(2))
    frozen.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    session.workers[0].connection._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    big = StoreSet(epoch=1, key="k" * (4 << 20), value="AAAA")  # more than the two buffers hold
    started = time.monotonic()
    session.notify(session.workers[:1], big)
    session.notify(session.workers, Committed(round=1))
    assert time.monotonic() - started < 4
    assert well.receive() == Committed(round=1)
    frozen.close()


# --- the rendezvous --------------------------------------------------------------------------------------------


def test_key_of_one_peer_reaches_all_others(session, join, until):
    """A rendezvous key goes to every other worker and trainer rank, not back to who set it, and can be read here."""
    message = StoreSet(epoch=1, key="k", value="AAE=")
    setter, other = (join(session, rank=rank, size=2) for rank in range(2))
    follower = join(session, role="trainer", engine="", rank=1, size=0)
    setter.send(message)
    assert other.receive() == follower.receive() == message
    assert session.store.get(1, "k", time.monotonic() + WAIT_S) == b"\x00\x01"
    session.send(session.workers, Committed(round=1))
    assert setter.receive() == Committed(round=1)


def test_key_of_the_sender_reaches_all(session, join):
    """A key that the sender sets goes to every peer."""
    peers = [join(session, rank=rank, size=2) for rank in range(2)]
    session.store.set(1, "k", b"\x00\x01")
    assert [peer.receive() for peer in peers] == [StoreSet(epoch=1, key="k", value="AAE=")] * 2


# --- opening and closing ---------------------------------------------------------------------------------------


def test_close_ends_everything(session, join, dial):
    """After `close`, which may be called again, peers see the end, nobody is let in, and no round can begin."""
    peer = join(session)
    assert len(session.workers) == 1
    assert "open, 1 peers" in repr(session)
    session.close()
    session.close()
    assert peer.at_end()
    assert "closed" in repr(session)
    with pytest.raises(ConnectionRefusedError):
        dial(session)
    with pytest.raises(StaleSessionError, match="trainer_init again"):
        session.running(1, WAIT_S).__enter__()


def test_close_leaves_no_thread(open_session, join, until):
    """Closing frees the accepting thread and every reader."""
    before = set(threading.enumerate())
    session = open_session()
    peers = [join(session, rank=rank, size=2) for rank in range(2)]
    until(lambda: len(set(threading.enumerate()) - before) == 3, "one accepting and two reading threads")
    mine = set(threading.enumerate()) - before
    session.close()
    assert all(peer.at_end() for peer in peers)
    until(lambda: not any(thread.is_alive() for thread in mine), "the end of the threads")


def test_close_in_a_round_does_not_blame_the_peers(session, join, until):
    """When the sender itself closes, the round ends as stale, and no peer is reported lost."""
    peer = join(session)
    with session.running(1, WAIT_S) as round_:
        session.close()
        assert peer.at_end()
        until(lambda: lost(session, ("worker", "e0", 0)))
        with pytest.raises(StaleSessionError, match="shut down in mid-round"):
            round_.check()


def test_port_can_be_chosen(open_session):
    """A given port is listened on; one that is taken is a ConfigurationError that names address and port."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1 port {port}") as caught:
            Session("127.0.0.1", port)
        assert (caught.value.side, caught.value.phase) == ("trainer", "init")
    session = open_session(port)
    assert (session.address, session.port) == ("127.0.0.1", port)


def test_address_of_another_host_is_refused():
    """An address that is not this host's is a ConfigurationError that says what master_address must be."""
    with pytest.raises(ConfigurationError, match=r"cannot listen on 192\.0\.2\.1 port any .*master_address must be"):
        Session("192.0.2.1")  # of the range that is reserved for documentation


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_session_over_ipv6():
    """An IPv6 address is listened on and reached."""
    try:
        session = Session("::1")
    except ConfigurationError as exc:
        pytest.skip(f"no IPv6 loopback: {exc.message}")
    with socket.create_connection(("::1", session.port), timeout=WAIT_S) as sock:
        assert sock.recv(4)
    session.close()


def test_address_towards_a_host_is_ours():
    """The address towards a host is the one that a connection to it would have; a host that is unknown is skipped."""
    assert local_address_towards(["127.0.0.1"]) == "127.0.0.1"
    assert local_address_towards(["no-such-host.invalid", "127.0.0.1"]) == "127.0.0.1"


ROUTES = {
    "here": ("127.0.0.1", True),
    "near": ("10.0.0.2", False),
    "also-near": ("10.0.0.2", False),
    "far": ("172.16.0.2", False),
}


@pytest.mark.parametrize(
    ("hosts", "address"),
    [
        (["here"], "127.0.0.1"),
        (["here", "near"], "10.0.0.2"),
        (["near", "here", "also-near"], "10.0.0.2"),
    ],
    ids=str,
)
def test_address_is_one_that_all_hosts_reach(monkeypatch, hosts, address):
    """A server on this host reaches each of its addresses; one elsewhere does not reach loopback."""
    monkeypatch.setattr(module, "_address_used_for", ROUTES.__getitem__)
    assert local_address_towards(hosts) == address


def test_hosts_without_an_address_in_common_are_refused(monkeypatch):
    """Where servers lie in different networks, nobody knows which address all of them reach: the user is asked."""
    monkeypatch.setattr(module, "_address_used_for", ROUTES.__getitem__)
    with pytest.raises(
        ConfigurationError, match=r"10\.0\.0\.2 towards near, 172\.16\.0\.2 towards far; set master_address"
    ) as caught:
        local_address_towards(["here", "near", "far"])
    assert (caught.value.side, caught.value.phase) == ("trainer", "init")


def test_own_addresses_are_told_from_others():
    """Loopback and an address of a network card are this host's, another host's is not."""
    assert module._address_used_for("127.0.0.2")[1]
    own = local_address_towards([])
    assert module._address_used_for(own)[1]
    with suppress(OSError):  # a machine without a route to anywhere
        assert not module._address_used_for("192.0.2.1")[1]


@pytest.mark.parametrize("hosts", [[], ["no-such-host.invalid"]], ids=str)
def test_address_without_a_known_host_can_be_listened_on(hosts):
    """Without a host to reach, the address is still one of this host's."""
    Session(local_address_towards(hosts)).close()


# --- forks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["closes", "is killed"])
def test_forked_child_keeps_neither_connections_nor_the_port(forked, dial, hello, end):
    """A child forked while the session is open does not keep it alive: peers see the end, the port is free again."""

    def parent(report, go_on, rest):
        session = Session("127.0.0.1")
        report([session.port, session.secret, session.id])
        go_on()
        child = os.fork()
        if child == 0:
            rest()
        report(child)
        go_on()
        session.close()
        rest()

    process = forked(parent)
    port, secret, session_id = process.told()
    peer = dial(SimpleNamespace(port=port))
    peer.authenticate(secret, session_id)
    peer.send(hello())
    peer.receive(Accepted)
    process.go_on()
    child = process.told()
    if end == "closes":
        process.go_on()
    else:
        process.kill()
    assert peer.at_end()
    with pytest.raises(ConnectionRefusedError):
        dial(SimpleNamespace(port=port))
    os.kill(child, signal.SIGKILL)  # raises if the child is gone, and the test has shown nothing
