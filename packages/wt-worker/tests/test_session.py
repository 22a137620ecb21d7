"""A worker's end of the agreement channel, against a listening socket that the test scripts."""

import socket
import threading
import time
from contextlib import ExitStack

import pytest

from wt_common import (
    SCHEMA,
    AgreementError,
    PeerLostError,
    PlanError,
    RoundTimeoutError,
    StaleSessionError,
    TransportError,
    WeightTransferError,
)
from wt_common.errors import error_from_wire, error_to_wire
from wt_common.session import (
    FRAME_HEADER,
    Abort,
    Accepted,
    AskState,
    Auth,
    Challenge,
    Committed,
    Ended,
    Enter,
    Go,
    Held,
    Hello,
    Holding,
    Leave,
    Ready,
    Refused,
    State,
    StoreSet,
)
from wt_worker.session import WorkerSession

WAIT_S = 10
HELLO = Hello(
    role="worker",
    engine="e0/0",
    rank=0,
    size=1,
    schema=list(SCHEMA),
    device="cpu",
    hostname="host",
    pid=1,
    versions={},
)
READY = Ready(round=1, knows_metadata=True)


def go(number):
    return Go(round=number, epoch=1, rank=1, world_size=2, remaining_s=1)


def abort(number, error):
    return Abort(round=number, error=error_to_wire(error))


def fence(peer):
    """Return once the worker's reader has dealt with all that was sent before."""
    peer.send(AskState(round=0))
    peer.receive(State)


@pytest.fixture
def connecting(in_thread):
    """Starts to connect to a sender; a session that comes of it is left with the test."""
    starting = []

    def start(sender, state=lambda: (False, False), on_held=lambda session, held: True, **fields):
        starting.append(in_thread(lambda: WorkerSession.connect(sender.info(**fields), HELLO, state, on_held)))
        return starting[-1]

    yield start
    for running in starting:
        try:
            running.value().leave(TransportError("the test is over"))
        except WeightTransferError:
            continue


@pytest.fixture
def join(sender, connecting):
    """Makes a session with the sender; returned are it and the sender's end."""

    def connect(**options):
        running = connecting(sender, **options)
        peer = sender.accept()
        return running.value(), peer

    return connect


# --- connecting ------------------------------------------------------------------------------------------------


def test_connect_returns_when_the_hello_is_taken(sender, connecting):
    """Both sides prove themselves and the sender takes the hello; until then the worker waits."""
    running = connecting(sender)
    peer, knows = sender.challenge()
    assert knows
    assert peer.receive(Hello) == HELLO
    assert running.thread.is_alive()
    peer.send(Accepted())
    session = running.value()
    assert (session.id, session.local_address) == (sender.session, "127.0.0.1")
    assert (session.round, session.last_round, session.lost) == (None, 0, None)
    assert repr(session).startswith(f"<WorkerSession {sender.session}, <Connection to 127.0.0.1:")


def test_listener_that_does_not_know_the_secret_is_refused(sender, connecting):
    """Whoever listens without the secret is an AgreementError at once, and hears nothing of who the worker is."""
    running = connecting(sender)
    peer, knows = sender.challenge(secret="ee" * 32)
    assert not knows
    with pytest.raises(AgreementError, match="does not know the secret") as caught:
        running.value()
    assert caught.value.phase == "init"
    assert peer.rest() == []


def test_worker_that_does_not_know_the_secret_is_not_let_in(sender, connecting, in_thread):
    """A sender hangs up on a wrong proof; the worker comes again until its time is over, and says hello to nobody."""
    heard = []

    def turn_away():
        sender.listener.settimeout(1)
        try:
            while True:
                peer = sender.take()
                peer.send(Challenge(session=sender.session, nonce=sender.nonce))
                heard.append(peer.receive(Auth))
                peer.close()
        except TimeoutError:
            return

    turning_away = in_thread(turn_away)
    running = connecting(sender, session_secret="ee" * 32, timeout_s=0.5)
    with pytest.raises(PeerLostError, match="cannot connect to the trainer's sender") as caught:
        running.value()
    assert (caught.value.side, caught.value.phase) == ("worker", "init")
    turning_away.value()
    assert len(heard) > 1


def test_refused_hello_is_the_senders_error(sender, connecting):
    """A sender that does not take the hello says why: its error is raised here, and the worker does not come again."""
    running = connecting(sender)
    refusal = AgreementError("rank 0 of e0/0 is connected twice", side="trainer", engine="e0/0", rank=0)
    peer = sender.accept(Refused(error=error_to_wire(refusal)))
    with pytest.raises(AgreementError, match="connected twice") as caught:
        running.value()
    assert (caught.value.side, caught.value.engine) == ("trainer", "e0/0")
    assert peer.rest() == []
    sender.listener.settimeout(0.3)
    with pytest.raises(TimeoutError):
        sender.take()


def test_another_session_is_refused(open_sender, connecting):
    """A listener that serves another session is not the one that the init named."""
    sender = open_sender(session="ffff")
    running = connecting(sender, session="0000")
    sender.take().send(Challenge(session="ffff", nonce=sender.nonce))
    with pytest.raises(TransportError, match="expected 0000, the listener serves ffff"):
        running.value()


def test_connect_tries_again_while_the_listener_drops_it(sender, connecting):
    """A sender whose port is full hangs up, before a word or after its challenge; the worker comes again and is let in."""
    running = connecting(sender)
    sender.take().close()
    peer = sender.take()
    peer.send(Challenge(session=sender.session, nonce=sender.nonce))
    peer.close()
    sender.take().close()
    sender.accept()
    assert running.value().lost is None


def test_connect_does_not_wait_for_ever(sender, connecting):
    """A sender that takes the connection and says nothing is a PeerLostError within the timeout."""
    started = time.monotonic()
    running = connecting(sender, timeout_s=0.2)
    with pytest.raises(PeerLostError, match="cannot connect"):
        running.value()
    assert time.monotonic() - started < 5


# --- rounds ----------------------------------------------------------------------------------------------------


def test_messages_of_the_round_are_filed(join):
    """What the sender says in a round is there for whoever asks, each kind under its own name."""
    session, peer = join()
    round_ = session.begin_round(1)
    assert session.round is round_
    peer.send(go(1), Enter(round=1, group=0), Enter(round=1, group=1), Committed(round=1))
    assert round_.receive(Go) == go(1)
    assert round_.receive(Committed) == Committed(round=1)
    assert round_.num_entered == 2


def test_messages_wake_who_waits(join, in_thread):
    """A message ends a wait that began before it came."""
    session, peer = join()
    round_ = session.begin_round(1)
    receiving = in_thread(lambda: round_.receive(Go))
    entering = in_thread(lambda: round_.wait(lambda: round_.num_entered > 2, "group 2"))
    peer.send(Enter(round=1, group=2), go(1))
    assert receiving.value() == go(1)
    entering.value()


def test_abort_may_be_there_before_its_round(join):
    """The update call takes another way than the abort: the round that it begins has failed, in the sender's words; only that.

    The abort is answered at once, since the call may never come.
    """
    session, peer = join()
    peer.send(abort(1, PlanError("x")), abort(3, PlanError("the source failed")))
    for number in (1, 3):
        assert peer.receive(Ended) == Ended(round=number, touched=False)
    fence(peer)
    for number, expected in ((2, None), (3, "the source failed")):
        round_ = session.begin_round(number)
        assert (round_.failure and round_.failure.message, round_.told) == (expected, expected is not None)


def test_messages_of_another_round_are_ignored(join):
    """What belongs to an earlier or a later round, or comes between rounds, changes nothing in this one."""
    session, peer = join()
    peer.send(go(2))
    fence(peer)
    session.begin_round(1)
    round_ = session.begin_round(2)
    for number in (1, 3):
        peer.send(go(number), Enter(round=number, group=5), Committed(round=number), abort(number, PlanError("x")))
    assert peer.receive(Ended) == Ended(round=3, touched=False)
    fence(peer)
    assert (round_.posts, round_.num_entered, round_.failure) == ({}, 0, None)
    peer.send(go(2))
    assert round_.receive(Go) == go(2)
    session.end_round()
    peer.send(abort(2, PlanError("late")))
    fence(peer)
    assert round_.failure is None
    assert session.round is None


@pytest.mark.parametrize("number", [0, 1, 2])
def test_stale_round_number_is_refused(join, number):
    """A round's number is above that of every earlier one, of one that is over too; the round in progress is untouched."""
    session, peer = join()
    session.begin_round(1)
    session.end_round()
    round_ = session.begin_round(2)
    with pytest.raises(StaleSessionError, match=f"round {number} is over; expected one above 2") as caught:
        session.begin_round(number)
    assert (caught.value.side, caught.value.round) == ("worker", number)
    assert (session.round, session.last_round) == (round_, 2)
    peer.send(go(2))
    round_.receive(Go)


def test_numbers_may_leave_gaps(join):
    """A round that never reached this worker has used up its number."""
    session, _ = join()
    assert session.begin_round(7).number == 7
    assert session.begin_round(100).number == 100


def test_round_has_the_sessions_timeout(join):
    """Until the sender says what is left, a round may take the whole timeout."""
    session, _ = join(timeout_s=3)
    started = time.monotonic()
    assert started + 3 <= session.begin_round(1).deadline <= time.monotonic() + 3


def test_abort_fails_the_round_with_the_senders_error(join, in_thread):
    """An abort ends every wait with the error that it carries, class and attributes; the sender need not hear of it."""
    session, peer = join()
    round_ = session.begin_round(1)
    waiting = in_thread(lambda: round_.receive(Go))
    peer.send(abort(1, PlanError("no room", side="worker", rank=3, engine="e1/0", param="w")))
    with pytest.raises(PlanError, match="no room") as caught:
        waiting.value()
    assert (caught.value.rank, caught.value.engine, caught.value.param, caught.value.round) == (3, "e1/0", "w", 1)
    assert round_.told


def test_next_round_is_well_after_an_abort(join):
    """A failed round does not fail the next."""
    session, peer = join()
    session.begin_round(1)
    peer.send(abort(1, PlanError("no room")))
    fence(peer)
    session.end_round()
    round_ = session.begin_round(2)
    peer.send(go(2))
    assert round_.receive(Go) == go(2)


# --- the sender's end ------------------------------------------------------------------------------------------


def test_end_of_file_fails_the_round(join, in_thread):
    """A sender that is gone fails the round in progress at once, and it need not be told."""
    session, peer = join()
    round_ = session.begin_round(1)
    waiting = in_thread(lambda: round_.receive(Go))
    peer.hang_up()
    with pytest.raises(PeerLostError, match="the trainer is gone") as caught:
        waiting.value()
    assert caught.value.side == "worker"
    assert isinstance(session.lost, PeerLostError)
    assert round_.told


def test_rounds_of_a_lost_session_fail_at_once(join, until):
    """A round that begins when the sender is gone has failed already, as has the next."""
    session, peer = join()
    peer.hang_up()
    until(lambda: session.lost is not None)
    for number in (1, 2):
        round_ = session.begin_round(number)
        with pytest.raises(PeerLostError, match="the trainer is gone") as caught:
            round_.receive(Go)
        assert (caught.value.round, round_.told) == (number, True)
        session.end_round()


def test_garbage_ends_the_session(join, in_thread):
    """A stream that is no message is as good as its end."""
    session, peer = join()
    round_ = session.begin_round(1)
    waiting = in_thread(lambda: round_.receive(Go))
    peer.sock.sendall(FRAME_HEADER.pack(18) + b'{"type":"gravity"}')
    with pytest.raises(PeerLostError, match="unreadable message"):
        waiting.value()
    assert peer.rest() == []


def test_verdict_outlives_the_sender(join, until):
    """A commit that was heard is a commit, although the sender went right after it and the worker was slow to look."""
    session, peer = join()
    round_ = session.begin_round(1)
    peer.send(Committed(round=1))
    peer.hang_up()
    until(lambda: session.lost is not None)
    assert round_.receive(Committed) == Committed(round=1)


# --- questions and keys ----------------------------------------------------------------------------------------


def test_question_is_answered_while_a_call_runs(join, in_thread):
    """The sender learns the worker's state although the worker's thread is in the middle of something."""
    states = iter([(True, False), (False, True)])
    session, peer = join(state=lambda: next(states))
    waiting = in_thread(lambda: session.begin_round(1).receive(Go))
    peer.send(AskState(round=1))
    assert peer.receive() == State(round=1, open=True, poisoned=False)
    assert waiting.thread.is_alive()
    peer.send(go(1), AskState(round=8))
    assert peer.receive() == State(round=8, open=False, poisoned=True)
    waiting.value()


def test_keys_go_both_ways(join):
    """What is set here goes to the sender, and what the sender sends can be read here and is not sent back."""
    session, peer = join()
    session.store.set(1, "0/mine", b"\x00\x01")
    assert peer.receive() == StoreSet(epoch=1, key="0/mine", value="AAE=")
    peer.send(StoreSet(epoch=1, key="0/theirs", value="AAI="))
    assert session.store.get(1, "0/theirs", time.monotonic() + WAIT_S) == b"\x00\x02"
    fence(peer)  # its answer is the next message: nothing came before it


# --- sending and leaving ---------------------------------------------------------------------------------------


def test_messages_are_sent(join):
    """What is sent arrives, from any thread."""
    session, peer = join()
    session.send(READY)
    session.notify(READY)
    assert [peer.receive(), peer.receive()] == [READY, READY]


def test_sending_to_a_lost_sender_raises_and_notifying_does_not(join, until):
    """`send` is for what must arrive; `notify` is a last word that may be lost."""
    session, peer = join()
    peer.hang_up()
    until(lambda: session.lost is not None)
    session.notify(READY)
    with pytest.raises(PeerLostError):
        session.send(READY)


def test_notifying_a_frozen_sender_costs_little(join):
    """A sender that does not read holds up a last word for half a second at most; the connection is then over."""
    session, peer = join()
    started = time.monotonic()
    session.notify(StoreSet(epoch=1, key="k" * (24 << 20), value="AAAA"))
    assert time.monotonic() - started < 5
    with pytest.raises((PeerLostError, RoundTimeoutError)):
        session.send(READY)
    assert peer.sock.fileno() >= 0


def test_leave_says_why_and_hangs_up(join, until):
    """The sender hears why the worker goes, and then the end; leaving again says nothing more."""
    session, peer = join()
    session.leave(StaleSessionError("a later init replaced this session", side="worker"))
    session.leave(TransportError("another reason"))
    (message,) = peer.rest()
    assert isinstance(message, Leave)
    error = error_from_wire(message.error)
    assert (type(error), error.message) == (StaleSessionError, "a later init replaced this session")
    until(lambda: session.lost is not None)
    session.leave(TransportError("another reason"))
    with pytest.raises(PeerLostError):
        session.send(READY)


def test_leave_after_the_sender_is_gone_does_nothing(join, until):
    """There is nobody to tell."""
    session, peer = join()
    peer.hang_up()
    until(lambda: session.lost is not None)
    session.leave(TransportError("why"))


def test_left_session_fails_its_round_and_frees_its_threads(join, in_thread, until):
    """Who still waits in a session that is left raises, and its reader ends."""
    session, _ = join()
    round_ = session.begin_round(1)
    waiting = in_thread(lambda: round_.receive(Go))
    session.leave(TransportError("why"))
    with pytest.raises(PeerLostError):
        waiting.value()
    name = f"wt-session-reader {session.id}"
    until(lambda: name not in {thread.name for thread in threading.enumerate()}, "the reader's end")


def test_reader_ends_whoever_gets_its_descriptor(join, until):
    """A session that is left frees its reader for good, although the next socket takes the number of the closed one."""
    with ExitStack() as stack:
        for _ in range(30):
            session, _ = join()
            session.leave(TransportError("why"))
            for each in socket.socketpair():
                stack.enter_context(each)
        name = f"wt-session-reader {session.id}"
        until(lambda: name not in {thread.name for thread in threading.enumerate()}, "the readers' end")


def test_sender_says_whether_it_holds_the_server(join):
    """What the sender says of it is passed on, in a round and between rounds; it hears whether a hold counts."""
    heard, counts = [], [True, False]

    def on_held(session, held):
        heard.append((session, held))
        return counts.pop(0)

    session, peer = join(on_held=on_held)
    peer.send(Held(round=1, held=True))
    assert peer.receive() == Holding(round=1, held=True)
    peer.send(Held(round=1, held=False))
    fence(peer)
    assert heard == [(session, True), (session, False)]
    assert session.round is None
