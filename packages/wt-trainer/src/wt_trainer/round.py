"""One round on a trainer rank: its deadline, why it failed, what each peer has posted, and the calls on side threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Self, TypeVar

from wt_common import (
    AgreementError,
    Outcome,
    PeerLostError,
    RoundTimeoutError,
    Side,
    TransportError,
    WeightTransferError,
)
from wt_common.errors import error_from_wire, error_to_wire
from wt_common.session import Message, Ready
from wt_trainer.threads import run_in_thread

if TYPE_CHECKING:
    from wt_trainer.session import Peer
    from wt_trainer.stream import LentMemory

__all__ = ["Call", "Cause", "Round", "as_wired"]

M = TypeVar("M", bound=Message)

_POST_S = 2.0  # a call that has returned may be this much ahead of its workers' posts, which take another way
_FIRST_HAND_S = (
    0.2  # a failure that may be another's consequence waits this long for a better cause, on another way here
)


class Cause(IntEnum):
    """How near to the root of a fault an error is. One fault shows in many places; of those, the lowest cause counts.

    A rank that dies in a collective makes its neighbours' sources raise, a gloo broadcast break, a call answer 500, and others
    wait until the deadline. All of that arrives within moments, in any order.
    """

    DEATH = 0
    """A process is gone: its connection ended."""
    FINDING = 1
    """A rank has found something wrong, and says what. Nobody's death explains that."""
    EXCEPTION = 2
    """Something raised on a rank, in a source or an engine: perhaps since another rank died in its collective."""
    REFUSAL = 3
    """A call to the servers failed: perhaps because of what a worker says itself."""
    SILENCE = 4
    """Somebody was waited for in vain."""
    SECOND_HAND = 5
    """A collective of ours broke, of which somebody else's failure must be the reason."""

    @classmethod
    def of(cls, error: WeightTransferError) -> Cause:
        """What the class of `error` tells, where nothing more is known."""
        if isinstance(error, PeerLostError):
            return cls.DEATH
        if isinstance(error, RoundTimeoutError):
            return cls.SILENCE
        if isinstance(error, TransportError) or type(error) is WeightTransferError:
            return cls.EXCEPTION
        return cls.FINDING


def as_wired(error: WeightTransferError) -> WeightTransferError:
    """`error`, or a copy of the class as which it crosses the wire, if that is a base of its own."""
    wired = error_from_wire(error_to_wire(error))
    if type(wired) is type(error):
        return error
    wired.__cause__ = error
    return wired


class Round:
    """Everything that may end a wait meets here: a post, a failure, the end of a call, the deadline.

    Which failure counts: that with the lowest `Cause` of those that are known when the first one's grace is over, and the
    earliest of these. The grace is 0.2 s; a death, a finding, or the deadline ends it at once. The sender alone decides so for
    all ranks. On another rank the first failure ends the waits, and the sender is told of it; the error is the sender's word.

    Args:
        number: the round's number in its session.
        timeout_s: seconds from now to the deadline.
        changed: the session's condition, which guards all fields.
        decides: whether this is the sender's.
    """

    def __init__(self, number: int, timeout_s: float, changed: threading.Condition, *, decides: bool = True) -> None:
        self.number = number
        self.timeout_s = timeout_s
        self.started = time.monotonic()
        self.deadline = self.started + timeout_s
        self.changed = changed
        self.failure: WeightTransferError | None = None  # the one that counts
        self.cause: Cause | None = None  # of that
        self.told = False  # whether it is the sender's word, or its loss
        self._decides = decides
        self._suspected: tuple[Cause, WeightTransferError] | None = None  # what will count if nothing better comes
        self._on_failure: Callable[[], None] = lambda: None
        self.posts: dict[type[Message], dict[tuple[str, str, int], Message]] = {}
        self.credits: dict[tuple[str, str, int], int] = {}
        self.phase = "init"
        self.seconds: dict[str, float] = {}
        self.outcome: Outcome | None = None
        self.num_entered = 0  # groups whose collective has begun, so that a worker may have their bytes
        self.digests: dict[int, int] = {}  # of the parameters that this rank is the root of, by place, as they go out
        self.lent: dict[int, LentMemory] = {}  # of those, by place, where they were sent from the source's own memory
        self.buffer_bytes = 0  # most memory that this rank took for what it sends, beside the source's own
        self.begun = -1  # place in the metadata of the last parameter that this rank began to take from its source
        self.stopped = False  # whether this rank's source raised or ended at that one, so that it cannot be run further
        self.is_called = False  # whether an update call may have reached a worker
        self.run_to = -1  # see `RoundOutcome`; known once the round is settled
        self.is_settling = self.is_settled = False  # a failed round: how it ended is being found out, and told to all

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Within it the round is in `phase`; its seconds are added up under that name."""
        self.phase = phase
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - started

    @property
    def elapsed_s(self) -> float:
        """Seconds since the round began."""
        return time.monotonic() - self.started

    @property
    def remaining_s(self) -> float:
        """Seconds left to the deadline; not below 0."""
        return max(0.0, self.deadline - time.monotonic())

    def fail(self, error: WeightTransferError, cause: Cause | None = None, *, told: bool = False) -> None:
        """End every wait of this round with `error`, or with a better one if such is known in time.

        Returns when that is decided; a thread that may not block for 0.2 s says `suspect`.

        Args:
            error: what happened.
            cause: None is what its class tells.
            told: (ranks other than the sender) it is the sender's word, or its loss.
        """
        cause = Cause.of(error) if cause is None else cause
        with self.changed:
            if self.failure is None and (self._suspected is None or cause < self._suspected[0]):
                self._suspected = cause, error
            is_clear = cause <= Cause.FINDING or (cause is Cause.SILENCE and self.remaining_s == 0)
            if self._decides and not is_clear:
                self.changed.wait_for(lambda: self.failure is not None, _FIRST_HAND_S)
            is_first = self.failure is None
            if is_first:
                assert self._suspected is not None  # set above
                self.cause, self.failure = self._suspected
                self.failure.fill(round=self.number, elapsed_s=self.elapsed_s)
                self.told = told
            self.changed.notify_all()
        if is_first:
            self._on_failure()

    def suspect(self, error: WeightTransferError, cause: Cause | None = None) -> None:
        """As `fail`, for a thread that reads from a connection, and must go on: what it reads next may say better."""
        if (Cause.of(error) if cause is None else cause) <= Cause.FINDING:
            self.fail(error, cause)
        else:
            run_in_thread("wt-suspect", lambda: self.fail(error, cause))

    def watch(self, on_failure: Callable[[], None]) -> Self:
        """`on_failure` is called once the round has failed, on the thread that failed it; it must not block. Returns itself."""
        with self.changed:
            self._on_failure = on_failure
            has_failed = self.failure is not None
        if has_failed:
            on_failure()
        return self

    def check(self, missing: Callable[[], str] = lambda: "the next step") -> None:
        """Raise if the round has failed or its deadline has passed; `missing()` says what took the time."""
        self.wait(lambda: self.remaining_s > 0, missing)

    def wait(self, ready: Callable[[], bool], missing: Callable[[], str]) -> None:
        """Return once `ready()` holds; `missing()` says, at the deadline, what was being waited for.

        Raises:
            WeightTransferError: the round's first failure, whoever's it is.
            RoundTimeoutError: the deadline passed.
        """
        with self.changed:
            while True:
                if self.failure is not None:
                    raise self.failure
                if ready():
                    return
                if self.remaining_s == 0:
                    if self._suspected is not None and self._suspected[0] < Cause.SILENCE:
                        raise self._suspected[1]
                    raise self.timeout_error(missing)
                self.changed.wait(self.remaining_s)

    def begin_parameter(self, index: int) -> None:
        """Parameter `index` is being taken from the source, unless the round has failed: then none is, by itself."""
        with self.changed:
            if self.failure is not None:
                raise self.failure
            self.begun = index

    def digest_now(self, place: int) -> int | None:
        """The digest of a parameter of `digests` in the memory that it was sent from; None if it was a copy, or is freed."""
        memory = self.lent.get(place)
        return None if memory is None else memory.digest()

    def take_first_credits(self, workers: Iterable[Peer], casts: dict[str, str]) -> None:
        """The credit that `Ready` has in it counts, of those workers that expected `casts`; see there."""
        with self.changed:
            for peer in workers:
                ready = self.posts[Ready][peer.key]
                if isinstance(ready, Ready) and ready.casts == casts:
                    self.credits[peer.key] = max(ready.limit, self.credits.get(peer.key, 0))

    def enter(self, num_groups: int) -> None:
        """The first `num_groups` groups may be entered."""
        with self.changed:
            self.num_entered = num_groups
            self.changed.notify_all()

    def collect(
        self, kind: type[M], peers: Iterable[Peer], within: Call | None = None
    ) -> dict[tuple[str, str, int], M]:
        """The `kind` post of each of `peers`, once all are there. Raises as `wait` does.

        Args:
            kind: the message.
            peers: whose.
            within: the call in which they post it.

        Raises:
            AgreementError: `within` has returned, and a peer has not posted: the call did not reach it.
        """
        peers = list(peers)
        posts = self.posts.setdefault(kind, {})

        def lacking() -> str:
            return ", ".join(str(peer) for peer in peers if peer.key not in posts)

        def missing() -> str:
            return f"{kind.type!r} from {lacking()}"

        if within is not None:
            self.wait(lambda: within.done or not lacking(), missing)
            with self.changed:
                self.changed.wait_for(lambda: self.failure is not None or not lacking(), min(_POST_S, self.remaining_s))
                if self.failure is None and lacking() and self.remaining_s > 0:
                    raise AgreementError(
                        f"{within.name} has returned, but it did not reach {lacking()}; the client must call every replica, and "
                        "return when all are done",
                        side=Side.TRAINER,
                    )
        self.wait(lambda: not lacking(), missing)
        return {peer.key: posts[peer.key] for peer in peers}  # type: ignore[misc]  # filed under its own type

    def run(self, name: str, call: Callable[[], Any], *, may_fail: bool = False, then: Call | None = None) -> Call:
        """Start a `Call` of these, unless the round has failed already."""
        self.check(lambda: f"the call {name}")
        return Call(name, call, self, may_fail=may_fail, then=then).start()

    def timeout_error(self, missing: Callable[[], str]) -> RoundTimeoutError:
        """The error that the deadline has passed; `missing()` says what was being waited for."""
        return RoundTimeoutError(
            f"{'the round' if self.number else 'trainer_init'} did not end within {self.timeout_s:g} s; still waiting for "
            f"{missing()}",
            side=Side.TRAINER,
            round=self.number,
            elapsed_s=self.elapsed_s,
        )


class Call:
    """A control call on a daemon thread of its own, so that no server can block the sender.

    The thread is never joined; one that outlives its round is named in the round's error.

    Args:
        name: what the errors call it.
        call: takes nothing.
        round_: which its failure fails at once.
        may_fail: its failure does not matter.
        then: a call that is not started: it follows on the same thread, unless the round has failed by then, so that nobody need
            wake up in between.
    """

    def __init__(
        self, name: str, call: Callable[[], Any], round_: Round, *, may_fail: bool = False, then: Call | None = None
    ) -> None:
        self.name = name
        self.done = False
        self._call = call
        self._may_fail = may_fail
        self._then = then
        self._round = round_

    def start(self) -> Call:
        """It runs from now on; returns itself."""
        run_in_thread(f"wt-call {self.name}", self._run)
        return self

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as exc:
            if not self._may_fail:
                error = self._as_ours(exc).fill(side=Side.TRAINER)
                self._round.fail(error, max(Cause.REFUSAL, Cause.of(error)))
        finally:
            with self._round.changed:
                self.done = True
                goes_on = self._then is not None and self._round.failure is None
                self._round.changed.notify_all()
        if self._then is not None and goes_on:
            self._then._run()  # noqa: SLF001  # of the same class

    def _as_ours(self, exc: BaseException) -> WeightTransferError:
        if isinstance(exc, WeightTransferError):
            return as_wired(exc)
        error = TransportError(f"{self.name} failed ({type(exc).__name__}: {exc})")
        error.__cause__ = exc
        return error

    def join(self, unless: Callable[[], WeightTransferError | None] = lambda: None) -> None:
        """Return once the call has returned. Raises what `unless()` gives as soon as it does, else as `Round.wait` does."""
        self._round.wait(lambda: self.done or unless() is not None, lambda: f"the reply to {self.name}")
        error = unless()
        if error is not None:
            raise error
