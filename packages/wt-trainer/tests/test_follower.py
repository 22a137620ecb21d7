"""Another trainer rank's end of the session; the sender is a plain socket."""

import socket
import time

import pytest
import torch

from wt_common import PeerLostError, PlanError, RoundTimeoutError, StaleSessionError, TransportError
from wt_common.errors import error_to_wire
from wt_common.session import (
    Abort,
    Credit,
    DigestAgain,
    DigestedAgain,
    Enter,
    Failed,
    FrameDecoder,
    Go,
    Metadata,
    Position,
    RoundOutcome,
    StoreSet,
    encode_message,
)
from wt_trainer import follower as module
from wt_trainer.connection import Connection
from wt_trainer.digest import tensor_digest
from wt_trainer.follower import FollowerSession
from wt_trainer.metadata import RoundMetadata
from wt_trainer.round import Cause
from wt_trainer.stream import LentMemory

WAIT_S = 10


class Sender:
    """The socket at the other end."""

    def __init__(self, sock):
        self.sock = sock
        self.decoder = FrameDecoder()

    def send(self, *messages):
        self.sock.sendall(b"".join(map(encode_message, messages)))

    def receive(self):
        while (message := self.decoder.next()) is None:
            data = self.sock.recv(65536)
            if not data:
                raise EOFError
            self.decoder.feed(data)
        return message


@pytest.fixture
def both():
    """A follower's session and its sender."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    theirs.settimeout(WAIT_S)
    session = FollowerSession(Connection(ours))
    yield session, Sender(theirs)
    session.close()
    theirs.close()


def go(number):
    return Go(round=number, epoch=1, rank=0, world_size=2, remaining_s=1)


METADATA = RoundMetadata(("a", "b"), ("float32", "int8"), ((2,), ()), (8, 1), (0, 0))


def fence(session, sender):
    """Return once everything that the sender has sent so far is taken."""
    key = f"fence {time.monotonic()}"
    sender.send(StoreSet(epoch=99, key=key, value=""))
    session.store.get(99, key, time.monotonic() + WAIT_S)


def test_messages_of_the_round_are_received(both):
    """What the sender says in the round in progress is there for who asks."""
    session, sender = both
    with session.running(1, WAIT_S) as round_:
        sender.send(go(1))
        assert session.go(round_, METADATA) == go(1)
        sender.send(Enter(round=1, group=4))
        round_.wait(lambda: round_.num_entered == 5, lambda: "the fifth group")


def test_messages_that_come_before_the_round_are_kept(both):
    """A sender that is a step ahead is heard: its message waits until this rank begins the round."""
    session, sender = both
    sender.send(go(1))
    fence(session, sender)
    with session.running(1, WAIT_S) as round_:
        assert session.go(round_, METADATA) == go(1)


def test_messages_of_the_next_round_are_kept_while_one_ends(both):
    """What belongs to the next round is not lost where this rank has not quite left the one before."""
    session, sender = both
    with session.running(1, WAIT_S) as round_:
        sender.send(RoundOutcome(round=1, report={}), go(2))
        assert session.outcome(round_).report == {}
        fence(session, sender)
    with session.running(2, WAIT_S) as round_:
        assert session.go(round_, METADATA) == go(2)


def test_messages_of_an_earlier_round_do_not_matter(both):
    """What comes late for a round that is over changes nothing in the next."""
    session, sender = both
    with session.running(2, WAIT_S) as round_:
        sender.send(go(1), Abort(round=1, error=error_to_wire(PlanError("late"))), go(2))
        assert session.go(round_, METADATA) == go(2)
        round_.check()


def test_sender_whose_metadata_differ_is_a_plan_error(both):
    """Where the sender answers with its metadata, the error names the first parameter that differs, and how."""
    session, sender = both
    with session.running(1, WAIT_S) as round_:
        sender.send(Metadata(round=1, names=["a", "b"], dtype_names=["float32"] * 2, shapes=[[2], []], roots=[0, 0]))
        with pytest.raises(PlanError, match=r"place 1: expected 'b' float32 .* on rank 0, got 'b' int8") as caught:
            session.go(round_, METADATA)
    assert (caught.value.param, caught.value.side) == ("b", "trainer")


def test_outcome_is_the_senders_word(both):
    """How a round ended is what the sender says, also when it comes before this rank waits for it."""
    session, sender = both
    error = error_to_wire(PlanError("no room"))
    sender.send(RoundOutcome(round=1, error=error, run_to=3))
    fence(session, sender)
    with session.running(1, WAIT_S) as round_:
        outcome = session.outcome(round_)
    assert (outcome.error, outcome.report, outcome.run_to) == (error, None, 3)


def test_outcome_comes_even_after_a_failure(both):
    """A rank whose round has failed still waits for the sender's word, so that all ranks raise the same."""
    session, sender = both
    with session.running(1, WAIT_S) as round_:
        round_.fail(PlanError("ours"))
        sender.send(RoundOutcome(round=1, error=error_to_wire(PlanError("theirs"))))
        assert session.outcome(round_).error["message"] == "theirs"


def test_outcome_that_does_not_come_is_a_timeout(both, monkeypatch):
    """A sender that says nothing costs the round's time and a moment more."""
    monkeypatch.setattr(module, "_OUTCOME_GRACE_S", 0.1)
    session, _ = both
    with session.running(1, 0.1) as round_:
        started = time.monotonic()
        with pytest.raises(RoundTimeoutError, match="the sender, trainer rank 0, to say how") as caught:
            session.outcome(round_)
    assert time.monotonic() - started < 5
    assert (caught.value.rank, caught.value.outcome) == (0, "unchanged")


@pytest.mark.parametrize("is_early", [True, False])
def test_sender_may_ask_for_a_digest_before_it_says_how_the_round_ended(both, in_thread, is_early):
    """The answer is of the memory that the parameter was sent from, as it is now, or nothing; then the outcome is waited for."""
    session, sender = both
    tensor = torch.arange(8.0)
    with session.running(1, WAIT_S) as round_:
        round_.lent[4] = LentMemory(tensor.view(torch.uint8))
        tensor.data.neg_()
        if is_early:
            sender.send(DigestAgain(round=1, place=4))
            fence(session, sender)
        outcome = in_thread(lambda: session.outcome(round_))
        if not is_early:
            sender.send(DigestAgain(round=1, place=4))
        assert sender.receive() == DigestedAgain(round=1, digests=[tensor_digest(tensor)])
        sender.send(RoundOutcome(round=1, report={}))
        assert outcome.value().report == {}
    with session.running(2, WAIT_S) as round_:
        sender.send(DigestAgain(round=2, place=4), RoundOutcome(round=2, report={}))
        fence(session, sender)
        assert session.outcome(round_).report == {}


def test_memory_that_is_not_there_has_no_digest(both, in_thread):
    """What was sent from a copy cannot be digested again: the answer is empty."""
    session, sender = both
    with session.running(1, WAIT_S) as round_:
        outcome = in_thread(lambda: session.outcome(round_))
        sender.send(DigestAgain(round=1, place=4))
        assert sender.receive() == DigestedAgain(round=1, digests=[])
        sender.send(RoundOutcome(round=1, report={}))
        assert outcome.value().report == {}


def test_messages_of_several_later_rounds_are_kept(both):
    """A sender whose rounds fail faster than this rank begins them: each round hears its own outcome."""
    session, sender = both
    error = error_to_wire(PlanError("no room"))
    sender.send(*(RoundOutcome(round=number, error=error) for number in (1, 2, 3)))
    fence(session, sender)
    for number in (1, 2, 3):
        with session.running(number, WAIT_S) as round_:
            assert session.outcome(round_).round == number


def test_abort_fails_the_round_and_is_answered_with_the_position(both):
    """An abort ends every wait with the sender's error; the answer says how far this rank has run its source."""
    session, sender = both
    with session.running(1, WAIT_S) as round_:
        round_.begin_parameter(4)
        sender.send(Abort(round=1, error=error_to_wire(PlanError("no room", param="w"))))
        with pytest.raises(PlanError, match="no room") as caught:
            session.go(round_, METADATA)
        assert caught.value.param == "w"
        assert sender.receive() == Position(round=1, index=4)
        with pytest.raises(PlanError):
            round_.begin_parameter(5)


def test_sender_that_dies_fails_the_round_and_the_next(both):
    """The end of the connection fails the round in progress and every later one, each with its own number."""
    session, sender = both
    with session.running(1, WAIT_S) as round_:
        sender.sock.shutdown(socket.SHUT_RDWR)
        with pytest.raises(PeerLostError, match="trainer rank 0, the sender, is gone") as caught:
            session.go(round_, METADATA)
        with pytest.raises(PeerLostError):
            session.outcome(round_)
    assert (caught.value.rank, caught.value.side, caught.value.round) == (0, "trainer", 1)
    with session.running(2, WAIT_S) as round_, pytest.raises(PeerLostError) as caught:
        round_.check()
    assert caught.value.round == 2


def test_abort_of_a_round_that_has_not_begun_is_answered(both):
    """The others need not wait for a rank that has not come: it has begun no parameter, and begins none in that round."""
    session, sender = both
    sender.send(Abort(round=1, error=error_to_wire(PlanError("no room"))))
    assert sender.receive() == Position(round=1, index=-1)
    with session.running(1, WAIT_S) as round_, pytest.raises(PlanError, match="no room"):
        round_.begin_parameter(0)


def test_position_says_that_the_source_stopped(both):
    """Where this rank's iterator raised, the others must not run further than it got."""
    session, sender = both
    with session.running(1, WAIT_S) as round_:
        round_.begin_parameter(4)
        round_.stopped = True
        sender.send(Abort(round=1, error=error_to_wire(PlanError("no room"))))
        assert sender.receive() == Position(round=1, index=4, stopped=True)


def test_outcome_ends_every_wait(both):
    """A round that failed before this rank was let in is over for it at once."""
    session, sender = both
    with session.running(1, WAIT_S) as round_:
        sender.send(RoundOutcome(round=1, error=error_to_wire(PlanError("no room"))))
        started = time.monotonic()
        with pytest.raises(PlanError, match="no room"):
            session.go(round_, METADATA)
        assert time.monotonic() - started < WAIT_S / 2
        assert round_.told


@pytest.mark.parametrize(
    ("error", "cause", "second_hand"),
    [
        (PlanError("ours"), None, False),
        (TransportError("gloo"), Cause.SECOND_HAND, True),
        (RoundTimeoutError("late"), None, False),
    ],
    ids=["own", "collective", "timeout"],
)
def test_own_failure_is_reported_at_once(both, error, cause, second_hand):
    """The sender hears of it from the thread that noticed it, and whether it is another's failure that was noticed."""
    session, sender = both
    with session.running(1, WAIT_S) as round_:
        round_.watch(lambda: session.report(round_))
        round_.fail(error, cause)
        failed = sender.receive()
    assert isinstance(failed, Failed)
    assert (failed.round, failed.error["message"], failed.second_hand) == (1, error.message, second_hand)


def test_what_the_sender_said_is_not_reported_back(both):
    """An abort is answered with the position, and with nothing else."""
    session, sender = both
    with session.running(1, WAIT_S) as round_:
        round_.watch(lambda: session.report(round_))
        sender.send(Abort(round=1, error=error_to_wire(PlanError("no room"))))
        assert isinstance(sender.receive(), Position)
        session.send(Credit(round=1, limit=1))
        assert isinstance(sender.receive(), Credit)


def test_own_failure_is_raised_where_the_sender_does_not_say(both, monkeypatch):
    """The cause that this rank knows says more than that the sender is silent."""
    monkeypatch.setattr(module, "_OUTCOME_GRACE_S", 0.1)
    session, _ = both
    with session.running(1, 0.1) as round_:
        round_.fail(PlanError("ours"))
        with pytest.raises(PlanError, match="ours") as caught:
            session.outcome(round_)
    assert caught.value.outcome == "unchanged"


@pytest.mark.parametrize(("begun", "outcome"), [(False, "unchanged"), (True, "poisoned")])
def test_outcome_is_known_where_the_sender_dies(both, begun, outcome):
    """Before it has let this rank begin no worker has bytes; afterwards one may."""
    session, sender = both
    with session.running(1, WAIT_S) as round_:
        if begun:
            sender.send(go(1))
            session.go(round_, METADATA)
        sender.sock.shutdown(socket.SHUT_RDWR)
        with pytest.raises(PeerLostError, match="trainer rank 0, the sender, is gone") as caught:
            session.outcome(round_)
    assert (caught.value.rank, caught.value.outcome, caught.value.round) == (0, outcome, 1)


def test_own_keys_are_sent_and_the_senders_are_not_sent_back(both):
    """A rendezvous key set here goes to the sender; one that came from it does not go back."""
    session, sender = both
    sender.send(StoreSet(epoch=1, key="theirs", value="AAE="))
    assert session.store.get(1, "theirs", time.monotonic() + WAIT_S) == b"\x00\x01"
    session.store.set(1, "ours", b"\x02")
    assert sender.receive() == StoreSet(epoch=1, key="ours", value="Ag==")


def test_messages_are_sent_to_the_sender(both):
    """What this rank posts goes to the sender."""
    session, sender = both
    session.send(Credit(round=1, limit=2))
    assert sender.receive() == Credit(round=1, limit=2)


def test_close_ends_everything(both):
    """After `close`, which may be called again, the sender sees the end and a round is stale."""
    session, sender = both
    session.close()
    session.close()
    with pytest.raises(EOFError):
        sender.receive()
    with pytest.raises(PeerLostError):
        session.send(Credit(round=1, limit=1))
    with session.running(1, WAIT_S) as round_, pytest.raises(StaleSessionError, match="trainer_init again"):
        round_.check()


def test_a_silent_sender_is_waited_for_once(both, monkeypatch):
    """A sender that is frozen past the deadline costs this rank the grace once, and the error says who was waited for."""
    session, _ = both
    monkeypatch.setattr(module, "_OUTCOME_GRACE_S", 1.0)
    with session.running(1, 0.1) as round_:
        started = time.monotonic()
        with pytest.raises(RoundTimeoutError, match="trainer rank 0"):
            session.outcome(round_)
        assert 1.0 < time.monotonic() - started < 1.9
