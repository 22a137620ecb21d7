"""A round's deadline, failures, posts and calls."""

import threading
import time
from types import SimpleNamespace

import pytest

from wt_common import (
    AgreementError,
    Outcome,
    PeerLostError,
    PlanError,
    RoundTimeoutError,
    StaleSessionError,
    TransportError,
    WeightTransferError,
)
from wt_common.session import Credit, Installed, Ready
from wt_trainer.round import Cause, Round
from wt_trainer.session import Peer


@pytest.fixture
def round_():
    return Round(3, 10, threading.Condition())


@pytest.fixture
def clock(monkeypatch):
    """The round's clock; it stands still unless the test moves `now`."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("wt_trainer.round.time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def short():
    """A round of which little time is left."""
    return Round(3, 0.1, threading.Condition())


@pytest.fixture
def peers(hello):
    return [Peer(hello(rank=rank, size=2, hostname=f"host-{rank}"), connection=None) for rank in range(2)]


def post(round_, peer, message):
    with round_.changed:
        round_.posts.setdefault(type(message), {})[peer.key] = message
        round_.changed.notify_all()


def never():
    return False


# --- time ------------------------------------------------------------------------------------------------------


def test_round_counts_from_its_making(clock):
    """Elapsed and remaining seconds add up to the timeout; at first nothing has failed and no outcome is decided."""
    round_ = Round(3, 10, threading.Condition())
    clock.now += 4
    assert (round_.elapsed_s, round_.remaining_s, round_.deadline) == (4, 6, 110)
    assert (round_.number, round_.phase, round_.outcome, round_.failure) == (3, "init", None, None)


def test_remaining_time_is_never_negative():
    """After the deadline nothing remains."""
    assert Round(1, -5, threading.Condition()).remaining_s == 0


def test_timed_adds_up_the_seconds_of_a_phase(clock):
    """A phase's seconds are added up over its parts, also of one that raised; the round says which phase it is in."""
    round_ = Round(3, 10, threading.Condition())
    with round_.timed("update"):
        assert round_.phase == "update"
        clock.now += 1

    def fail():
        with round_.timed("update"):
            clock.now += 2
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with round_.timed("finish"):
        clock.now += 4
    assert round_.seconds == {"update": 3, "finish": 4}
    assert round_.elapsed_s == 7


# --- failure ---------------------------------------------------------------------------------------------------


def test_first_failure_wins(round_):
    """Only the first failure counts, and it learns the round's number and time."""
    first = PlanError("first")
    round_.fail(first)
    round_.fail(PlanError("second"))
    assert round_.failure is first
    assert first.round == 3
    assert first.elapsed_s >= 0
    with pytest.raises(PlanError, match="first"):
        round_.check()


def test_failure_keeps_what_it_knows_already(round_):
    """A failure that names its round and time is not renamed."""
    round_.fail(StaleSessionError("x", round=1, elapsed_s=7))
    assert (round_.failure.round, round_.failure.elapsed_s) == (1, 7)


def test_failure_ends_a_wait_at_once(round_, in_thread):
    """Whoever waits is freed by a failure from any thread, and raises it."""
    waiting = threading.Event()

    def not_ready():
        waiting.set()
        return False

    waiter = in_thread(lambda: round_.wait(not_ready, lambda: "nothing"))
    assert waiting.wait(10)
    round_.fail(PlanError("no room"))
    with pytest.raises(PlanError, match="no room"):
        waiter.value()


def test_failure_comes_before_what_is_ready(round_):
    """In a failed round nothing is ready any more."""
    round_.fail(PlanError("no room"))
    with pytest.raises(PlanError):
        round_.wait(lambda: True, lambda: "")


def test_check_raises_failure_or_deadline(clock):
    """`check` passes a round that is well, and raises the failure, or that the time is over."""
    round_ = Round(3, 10, threading.Condition())
    clock.now += 9.9
    round_.check()
    clock.now += 0.1
    with pytest.raises(RoundTimeoutError, match="did not end within 10 s"):
        round_.check()
    round_.fail(PlanError("x"))
    with pytest.raises(PlanError):
        round_.check()


# --- waiting ---------------------------------------------------------------------------------------------------


def test_wait_returns_when_it_is_ready(round_, in_thread):
    """A wait ends as soon as its condition holds, and is not ended by another change."""
    state = set()
    waiter = in_thread(lambda: round_.wait(lambda: "go" in state, lambda: "go"))
    for change in ("other", "go"):
        assert waiter.thread.is_alive()
        with round_.changed:
            state.add(change)
            round_.changed.notify_all()
    waiter.value()


def test_wait_names_what_is_missing_at_the_deadline(short):
    """At the deadline a wait is a RoundTimeoutError, a TimeoutError, that says for what, in which round, how long."""
    started = time.monotonic()
    with pytest.raises(RoundTimeoutError, match=r"within 0\.1 s; still waiting for the last word") as caught:
        short.wait(never, lambda: "the last word")
    assert time.monotonic() - started < 5
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.round == 3
    assert caught.value.elapsed_s >= 0.1
    assert caught.value.side == "trainer"


def test_what_is_ready_needs_no_time():
    """After the deadline a wait still returns what is there."""
    Round(1, 0, threading.Condition()).wait(lambda: True, lambda: "")


def test_collect_returns_the_posts_of_all(round_, peers, in_thread):
    """`collect` waits for one post of its kind from each peer, and returns them by peer."""
    collecting = in_thread(lambda: round_.collect(Ready, peers))
    post(round_, peers[0], Credit(round=3, limit=1))
    post(round_, peers[0], Ready(round=3, knows_metadata=True))
    assert collecting.thread.is_alive()
    post(round_, peers[1], Ready(round=3, knows_metadata=False))
    assert collecting.value() == {
        peers[0].key: Ready(round=3, knows_metadata=True),
        peers[1].key: Ready(round=3, knows_metadata=False),
    }


def test_collect_takes_what_came_before(round_, peers):
    """A post that is there already is not waited for."""
    post(round_, peers[0], Ready(round=3, knows_metadata=True))
    assert list(round_.collect(Ready, peers[:1])) == [peers[0].key]


def test_collect_from_nobody_is_empty(round_):
    """Without peers there is nothing to wait for."""
    assert round_.collect(Ready, []) == {}


def test_call_that_returns_without_reaching_a_peer_is_an_agreement_error(round_, peers, monkeypatch):
    """Where the call has returned and a post does not follow at once, the round need not wait for its deadline."""
    monkeypatch.setattr("wt_trainer.round._POST_S", 0.1)
    post(round_, peers[0], Ready(round=3, knows_metadata=True))
    call = round_.run("update_weights", lambda: None)
    with pytest.raises(
        AgreementError, match=r"update_weights has returned, but it did not reach worker rank 1 .*host-1"
    ):
        round_.collect(Ready, peers, call)
    assert round_.elapsed_s < 5


def test_post_that_comes_a_moment_after_the_call_counts(round_, peers, in_thread):
    """A worker's post and the call's reply take two ways: either may be first."""
    call = round_.run("update_weights", lambda: None)
    collecting = in_thread(lambda: round_.collect(Ready, peers, call))
    call.join()
    for peer in peers:
        post(round_, peer, Ready(round=3, knows_metadata=True))
    assert len(collecting.value()) == 2


def test_collect_names_who_is_missing(short, peers):
    """At the deadline the error names the peers that posted nothing, and not the others."""
    post(short, peers[0], Installed(round=3, num_bytes=0, seconds={}, not_synced=[]))
    with pytest.raises(RoundTimeoutError) as caught:
        short.collect(Installed, iter(peers))
    assert "'installed' from worker rank 1 of engine e0 (host-1)" in str(caught.value)
    assert "host-0" not in str(caught.value)


def test_collect_ends_with_a_failure(round_, peers, in_thread):
    """A failure ends a collect, even when some have posted."""
    collecting = in_thread(lambda: round_.collect(Ready, peers))
    post(round_, peers[0], Ready(round=3, knows_metadata=True))
    round_.fail(PlanError("no room"))
    with pytest.raises(PlanError):
        collecting.value()


# --- calls -----------------------------------------------------------------------------------------------------


def test_call_runs_beside_the_caller(round_):
    """A call is on a daemon thread of its own, named after it, and `join` returns when it has returned."""
    go_on, names = threading.Event(), []

    def work():
        names.append((threading.current_thread().name, threading.current_thread().daemon))
        assert go_on.wait(10)

    call = round_.run("update_weights", work)
    assert not call.done
    go_on.set()
    call.join()
    assert call.done
    assert names == [("wt-call update_weights", True)]


def test_failed_call_fails_the_round_at_once(round_):
    """The error of a call is that of the round, whoever waits for what."""
    error = PlanError("no room")

    def work():
        raise error

    round_.run("start_weight_update", work)
    with pytest.raises(PlanError) as caught:
        round_.wait(never, lambda: "something else")
    assert caught.value is error
    assert (error.side, error.round) == ("trainer", 3)


def test_second_hand_failure_counts_where_nothing_better_comes(round_):
    """What is noticed of somebody else's failure fails the round, a moment later."""
    noticed = TransportError("the collective broke")
    round_.fail(noticed, Cause.SECOND_HAND)
    assert round_.failure is noticed


def test_second_hand_failure_gives_way_to_first_hand(round_, in_thread, monkeypatch):
    """Who failed says best why, also when its words come a little after what others notice."""
    monkeypatch.setattr("wt_trainer.round._FIRST_HAND_S", 10)
    noticing = in_thread(lambda: round_.fail(TransportError("the collective broke"), Cause.SECOND_HAND))
    round_.fail(PlanError("no room"))
    noticing.value()
    assert isinstance(round_.failure, PlanError)


# --- which failure counts --------------------------------------------------------------------------------------


def error_of(cause):
    """An error whose class tells its cause, as far as one does."""
    kinds = {Cause.DEATH: PeerLostError, Cause.FINDING: PlanError, Cause.SILENCE: RoundTimeoutError}
    return kinds.get(cause, TransportError)(cause.name)


@pytest.mark.parametrize("first", Cause)
@pytest.mark.parametrize("second", Cause)
def test_root_cause_counts_whichever_comes_first(round_, in_thread, monkeypatch, first, second):
    """Of two failures within a moment the lower cause counts, the first of equals; a death or a finding is not waited with."""
    monkeypatch.setattr("wt_trainer.round._FIRST_HAND_S", 0.1)
    waiter = in_thread(lambda: round_.wait(never, lambda: "nothing"))
    errors = [error_of(first), error_of(second)]
    failing = [in_thread(lambda: round_.fail(errors[0], first))]
    if first > Cause.FINDING:
        with round_.changed:
            round_.changed.wait_for(lambda: round_._suspected is not None, 10)
    else:
        failing[0].value()
    round_.fail(errors[1], second)
    expected = errors[1] if second < first and first > Cause.FINDING else errors[0]
    with pytest.raises(type(expected)) as caught:
        waiter.value()
    assert caught.value is round_.failure is expected


def test_cause_is_told_by_the_class():
    """A lost peer is a death, a passed deadline silence, a foreign exception unknown, and whatever else a finding."""
    assert [Cause.of(error_of(cause)) for cause in Cause] == [
        Cause.DEATH,
        Cause.FINDING,
        Cause.EXCEPTION,
        Cause.EXCEPTION,
        Cause.SILENCE,
        Cause.EXCEPTION,
    ]


def test_nothing_better_is_waited_for_past_the_deadline():
    """A round whose time is over fails at once, whatever the cause."""
    round_ = Round(3, 0, threading.Condition())
    started = time.monotonic()
    round_.fail(RoundTimeoutError("late"))
    assert time.monotonic() - started < 0.1
    assert isinstance(round_.failure, RoundTimeoutError)


@pytest.mark.parametrize(("cause", "text"), [(Cause.REFUSAL, "500"), (Cause.SECOND_HAND, "still waiting for nothing")])
def test_deadline_that_passes_in_the_grace(short, in_thread, monkeypatch, cause, text):
    """It does not hide what is known, but says more than that a collective broke, which breaks at the deadline too."""
    monkeypatch.setattr("wt_trainer.round._FIRST_HAND_S", 10)
    failing = in_thread(lambda: short.fail(TransportError("500"), cause))
    with pytest.raises(WeightTransferError, match=text) as caught:
        short.wait(never, lambda: "nothing")
    short.fail(RoundTimeoutError("late"))
    failing.value()
    assert (short.failure is caught.value) == (cause is Cause.REFUSAL)


def test_suspicion_does_not_block(round_, until):
    """A thread that reads says what it suspects and goes on; a finding counts at once."""
    started = time.monotonic()
    round_.suspect(TransportError("500"), Cause.REFUSAL)
    assert time.monotonic() - started < 0.1
    assert round_.failure is None
    round_.suspect(PlanError("no room"))
    assert isinstance(round_.failure, PlanError)


def test_only_the_sender_decides(in_thread):
    """On another rank the first failure ends the waits at once; the sender's own words are told apart."""
    round_ = Round(3, 10, threading.Condition(), decides=False)
    started = time.monotonic()
    round_.fail(TransportError("a collective broke"), Cause.SECOND_HAND)
    assert time.monotonic() - started < 0.1
    assert (round_.cause, round_.told) == (Cause.SECOND_HAND, False)
    other = Round(3, 10, threading.Condition(), decides=False)
    other.fail(PlanError("no room"), told=True)
    assert other.told


@pytest.mark.parametrize("is_first", [True, False], ids=["watched before", "watched after"])
def test_failure_is_told_to_who_watches_once(round_, is_first):
    """Who watches a round hears once that it has failed, also where it had failed before."""
    heard = []
    if is_first:
        round_.watch(lambda: heard.append(round_.failure.message))
    round_.fail(PlanError("no room"))
    round_.fail(PlanError("second"))
    if not is_first:
        round_.watch(lambda: heard.append(round_.failure.message))
    assert heard == ["no room"]


# --- calls that fail -------------------------------------------------------------------------------------------


def test_failed_call_gives_way_to_the_failed_peers_own_words(round_, monkeypatch):
    """A worker that fails says why on its connection, while its call says so too, perhaps sooner: its words count."""
    monkeypatch.setattr("wt_trainer.round._FIRST_HAND_S", 10)
    failing = threading.Event()

    def work():
        failing.set()
        raise TransportError("500 on POST /update_weights")

    call = round_.run("update_weights", work)
    assert failing.wait(10)
    round_.fail(PlanError("no room", param="w"))
    with pytest.raises(PlanError, match="no room"):
        call.join()


def test_call_that_may_fail_fails_nothing(round_):
    """The failure of a call that is made on the chance does not fail the round; `join` returns."""

    def work():
        raise KeyError

    call = round_.run("finish_weight_update", work, may_fail=True)
    call.join()
    round_.check()


def test_failed_round_makes_no_call(round_):
    """In a round that has failed, or whose time is over, no further call is begun."""
    calls = []
    round_.fail(PlanError("no room"))
    with pytest.raises(PlanError):
        round_.run("start_weight_update", lambda: calls.append(1))
    with pytest.raises(RoundTimeoutError, match="the call start_weight_update"):
        Round(1, 0, threading.Condition()).run("start_weight_update", lambda: calls.append(1))
    assert calls == []


def test_failed_round_begins_no_parameter(round_):
    """The round knows how far its source was run; once it has failed, no further parameter is taken."""
    assert round_.begun == -1
    round_.begin_parameter(0)
    round_.begin_parameter(4)
    round_.fail(PlanError("no room"))
    with pytest.raises(PlanError):
        round_.begin_parameter(5)
    assert round_.begun == 4


@pytest.mark.parametrize("error", [KeyError("w"), SystemExit(2)], ids=repr)
def test_foreign_error_of_a_call_is_chained(round_, error):
    """What a user's client raises, even an exit, is a TransportError that names the call and has it as its cause."""

    def work():
        raise error

    call = round_.run("update_weights", work)
    with pytest.raises(TransportError, match=f"^update_weights failed .{type(error).__name__}: ") as caught:
        call.join()
    assert caught.value.__cause__ is error


def test_call_that_hangs_is_named_and_never_joined(short, until):
    """A call that does not return costs the round's time and no more; the error names it, its thread is left alone."""
    go_on = threading.Event()
    call = short.run("finish_weight_update", lambda: go_on.wait(10))
    started = time.monotonic()
    with pytest.raises(RoundTimeoutError, match="still waiting for the reply to finish_weight_update"):
        call.join()
    assert time.monotonic() - started < 5
    assert not call.done
    go_on.set()
    until(lambda: call.done)


def test_error_of_an_abandoned_call_changes_nothing(short, until):
    """A call that fails after its round has failed leaves the round's first failure."""
    go_on = threading.Event()

    def work():
        go_on.wait(10)
        raise KeyError

    call = short.run("finish_weight_update", work)
    with pytest.raises(RoundTimeoutError) as caught:
        call.join()
    short.fail(caught.value)
    go_on.set()
    until(lambda: call.done)
    assert short.failure is caught.value


def test_join_raises_what_unless_gives(round_, until):
    """A join ends as soon as `unless` has an error, with that error, while the call still runs."""
    go_on, refusal = threading.Event(), []
    call = round_.run("init_weight_transfer_engine", lambda: go_on.wait(10))

    def refuse():
        with round_.changed:
            refusal.append(PlanError("refused"))
            round_.changed.notify_all()

    threading.Thread(target=refuse).start()
    with pytest.raises(PlanError, match="refused"):
        call.join(unless=lambda: refusal[0] if refusal else None)
    assert not call.done
    go_on.set()
    until(lambda: call.done)


def test_join_raises_what_unless_gives_even_after_the_call(round_, until):
    """A call that went well does not hide that `unless` has an error."""
    call = round_.run("init_weight_transfer_engine", lambda: None)
    until(lambda: call.done)
    with pytest.raises(PlanError, match="refused"):
        call.join(unless=lambda: PlanError("refused"))


def test_outcome_is_one_of_three():
    """A round ends in one of three ways, and there is no fourth."""
    assert [str(outcome) for outcome in Outcome] == ["committed", "unchanged", "poisoned"]
