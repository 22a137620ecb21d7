"""A round's deadline, first failure and posts."""

import threading
import time
from types import SimpleNamespace

import pytest

from wt_common import PeerLostError, PlanError, RoundTimeoutError, StaleSessionError, TransportError
from wt_common.session import Committed, Go
from wt_worker.round import Round

GO = Go(round=3, epoch=1, rank=1, world_size=2, remaining_s=1)


@pytest.fixture
def round_():
    return Round(3, 10, threading.Condition())


@pytest.fixture
def short():
    """A round of which little time is left."""
    return Round(3, 0.1, threading.Condition())


@pytest.fixture
def clock(monkeypatch):
    """The round's clock; it stands still unless the test moves `now`."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("wt_worker.round.time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def post(round_, message):
    with round_.changed:
        round_.posts[type(message)] = message
        round_.changed.notify_all()


def never():
    return False


# --- failure ---------------------------------------------------------------------------------------------------


def test_round_begins_with_nothing(clock):
    """A new round has its deadline, no failure and no post."""
    round_ = Round(3, 10, threading.Condition())
    assert (round_.number, round_.deadline, round_.failure, round_.told) == (3, 110, None, False)
    assert (round_.posts, round_.num_entered, round_.seconds) == ({}, 0, {})


def test_first_failure_wins(round_):
    """Only the first failure counts, with whose word it was, and it learns the round's number."""
    first = PlanError("first")
    round_.fail(first, told=True)
    round_.fail(TransportError("second"))
    assert (round_.failure, round_.told, first.round) == (first, True, 3)


def test_own_failure_is_not_told(round_):
    """A failure found here is one that the sender must hear of, whatever the sender says later."""
    round_.fail(PlanError("first"))
    round_.fail(PeerLostError("gone"), told=True)
    assert round_.told is False


def test_failure_keeps_the_round_it_names(round_):
    """A failure that names its round is not renamed."""
    round_.fail(StaleSessionError("x", round=1))
    assert round_.failure.round == 1


def test_failure_ends_a_wait_at_once(round_, in_thread):
    """Whoever waits is freed by a failure from any thread, and raises it."""
    waiting = threading.Event()

    def not_ready():
        waiting.set()
        return False

    waiter = in_thread(lambda: round_.wait(not_ready, "nothing"))
    assert waiting.wait(10)
    round_.fail(PlanError("no room"))
    with pytest.raises(PlanError, match="no room"):
        waiter.value()


def test_failure_comes_before_what_is_ready(round_):
    """In a failed round nothing is ready any more, messages that have come included."""
    post(round_, GO)
    round_.fail(PlanError("no room"))
    with pytest.raises(PlanError):
        round_.wait(lambda: True, "")
    with pytest.raises(PlanError):
        round_.receive(Go)


def test_nothing_fails_a_committed_round(round_):
    """The verdict is final: what goes wrong after it does not undo it."""
    post(round_, Committed(round=3))
    round_.fail(PeerLostError("gone"), told=True)
    assert round_.receive(Committed) == Committed(round=3)
    assert (round_.failure, round_.told) == (None, False)


def test_second_hand_failure_gives_way_to_first_hand_words(round_, in_thread, monkeypatch):
    """A collective that breaks says less than the sender does: its words count if they come at once."""
    monkeypatch.setattr("wt_worker.round._FIRST_HAND_S", 10)
    failing = in_thread(lambda: round_.fail_second_hand(TransportError("connection reset")))
    round_.fail(PlanError("no room"), told=True)
    failing.value()
    assert isinstance(round_.failure, PlanError)
    assert not round_.second_hand


def test_second_hand_failure_counts_where_nobody_says_more(round_):
    """What a collective noticed is the failure when nothing better comes, and soon."""
    started = time.monotonic()
    round_.fail_second_hand(TransportError("connection reset"))
    assert time.monotonic() - started < 5
    assert round_.failure.message == "connection reset"
    assert (round_.told, round_.second_hand) == (False, True)


# --- waiting ---------------------------------------------------------------------------------------------------


def test_wait_returns_when_it_is_ready(round_, in_thread):
    """A wait ends as soon as its condition holds, and is not ended by another change."""
    state = set()
    waiter = in_thread(lambda: round_.wait(lambda: "go" in state, "go"))
    for change in ("other", "go"):
        assert waiter.thread.is_alive()
        with round_.changed:
            state.add(change)
            round_.changed.notify_all()
    waiter.value()


def test_wait_names_what_is_missing_at_the_deadline(short):
    """At the deadline a wait is a RoundTimeoutError, a TimeoutError, that says in which round and for what."""
    started = time.monotonic()
    with pytest.raises(
        RoundTimeoutError, match="round 3 passed its deadline; still waiting for the last word"
    ) as caught:
        short.wait(never, "the last word")
    assert 0.09 <= time.monotonic() - started < 5
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.side == "worker"


def test_wait_may_outlast_the_deadline(short, in_thread):
    """With extra seconds a wait goes on past the deadline, and a message that comes then is taken."""
    waiter = in_thread(lambda: short.receive(Committed, extra_s=10))
    with pytest.raises(RoundTimeoutError):
        short.wait(never, "")
    assert waiter.thread.is_alive()
    post(short, Committed(round=3))
    assert waiter.value() == Committed(round=3)


def test_moved_deadline_counts(round_):
    """The sender says what is left of the round, and waits end by that."""
    round_.deadline = time.monotonic() + 0.05
    started = time.monotonic()
    with pytest.raises(RoundTimeoutError):
        round_.receive(Go)
    assert time.monotonic() - started < 5


def test_what_is_ready_needs_no_time():
    """After the deadline a wait still returns what is there."""
    Round(1, 0, threading.Condition()).wait(lambda: True, "")


def test_receive_returns_the_message_of_its_kind(round_, in_thread):
    """A receive waits for its kind of message and leaves others alone; it may be asked for again."""
    receiving = in_thread(lambda: round_.receive(Committed))
    post(round_, GO)
    assert receiving.thread.is_alive()
    post(round_, Committed(round=3))
    assert receiving.value() == Committed(round=3)
    assert round_.receive(Go) == GO == round_.receive(Go)


def test_receive_names_the_message_it_missed(short):
    """The error of a receive says which message of the trainer's did not come."""
    with pytest.raises(RoundTimeoutError, match="still waiting for the trainer's 'committed'"):
        short.receive(Committed)


# --- seconds ---------------------------------------------------------------------------------------------------


def test_timed_adds_up_the_seconds_of_a_phase(clock):
    """A phase's seconds are added up over its parts, also of one that raised."""
    round_ = Round(3, 10, threading.Condition())
    with round_.timed("agree"):
        clock.now += 1

    def fail():
        with round_.timed("agree"):
            clock.now += 2
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with round_.timed("receive"):
        clock.now += 4
    assert round_.seconds == {"agree": 3, "receive": 4}
