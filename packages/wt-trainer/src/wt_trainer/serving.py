"""What the sender does to the servers around a round: pause, label and resume them, drop their caches, where its client can."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

from wt_common import Outcome, RoundTimeoutError, Side, StaleSessionError, TransportError, WeightTransferError
from wt_common.session import Ended, Held, Holding, Installed
from wt_trainer.client.protocol import ServingControl, VLLMWeightSyncClient
from wt_trainer.round import Round
from wt_trainer.session import Peer, Session
from wt_trainer.threads import run_in_thread, run_into

__all__ = ["POISONED_SUFFIX", "Hold", "Serving", "may_be_touched"]

POISONED_SUFFIX = "+poisoned"
"""Behind the version in the label of a server of which some model is half-written."""

_FAILED_S = 0.3  # that a failed round waits for its servers to be labelled and resumed; it must raise within a second
_LATE_S = (
    2.0  # that a round waits for what an earlier one has not got answered: a server that answers others has lost it
)
_RETRY_S = 0.1  # before a failed resume is tried again

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Hold:
    """What holding the servers for a round has shown: `notes` for its report, and whether a server publishes versions."""

    notes: list[str] = field(default_factory=list)
    publishes: bool = True


@dataclass(frozen=True, slots=True)
class _Label:
    """What a server's label must become: `wanted` of what it is.

    With `must` the server is not resumed before it is so. `published` is what it should be already, after a finish call that took
    a version.
    """

    wanted: Callable[[str], str]
    must: bool
    published: str | None = None


def _unmarked(label: str) -> str:
    return label.removesuffix(POISONED_SUFFIX)


def _marked(label: str) -> str:
    return _unmarked(label) + POISONED_SUFFIX


def _marked_after(owed: _Label, label: str) -> str:
    return _marked(owed.wanted(label))


class Serving:
    """The servers behind a client. One with `ServingControl` can be asked and told; of another one we only say so, once.

    A server that we pause is ours until it is seen running: what this or an earlier sender has left paused is set right by the
    next init, at the end of every round, and at shutdown. To set a server right is to set its label, and then to resume it: a
    server never runs under a label that is not true. Where its label cannot be set, it stays paused and ours. A side thread for
    each server does all this, in this order, so that no interrupt and no slow server can turn it around.

    A server that another trainer has taken over is not ours any more: that one has heard from the workers what was held.
    """

    def __init__(self, client: VLLMWeightSyncClient) -> None:
        self.control = client if isinstance(client, ServingControl) else None
        self._client = client
        self._names = self.control.servers() if self.control else []
        self._was_warned = False
        self._may_sleep = True
        self._session: Session | None = None
        # By the server's place in the client's list; guarded by `_lock`, as side threads change it.
        self._lock = threading.Lock()
        self._ours: set[int] = set()  # paused by us or an earlier sender, and not seen running since
        self._poisoned: set[int] = set()
        self._labels: dict[int, _Label] = {}  # that are still to be set
        self._publishes: dict[
            int, bool
        ] = {}  # whether its label was seen to be that of a finish call, since the last failure
        self._usual: set[int] = set()  # those that the last round had to pause
        self._pauses: dict[int, Future[None]] = {}
        self._settling: dict[int, Future[Hold]] = {}
        self._round: tuple[Session, Round, str | None] | None = None  # until it is known what it means for the servers
        self._is_holding = False

    def bounded(self, seconds: float) -> AbstractContextManager[None]:
        """Within it, no call lasts longer than what is then left of `seconds`."""
        return self.control.bounded(seconds) if self.control else nullcontext()

    def take_over(self, session: Session) -> None:
        """What earlier senders have left is set right, on the servers whose workers have said so in their hellos."""
        if self.control is None:
            return
        self._session = session
        self._may_sleep = any(peer.hello.can_sleep for peer in session.workers)
        for server in self._servers():
            hellos = [peer.hello for peer in self._peers(session, server)]
            with self._lock:
                if any(hello.held for hello in hellos):
                    self._ours.add(server)
                if any(hello.poisoned for hello in hellos):
                    self._poisoned.add(server)
                    self._labels[server] = _Label(_marked, must=True)
        self.let_go()

    def let_go(self) -> None:
        """Servers that are still ours are set right, as far as they answer at once."""
        if self.control is None or self._session is None or self._is_holding:
            return
        self._account(failed=True)
        for problem in self._settle(self._session, self.control.timeout, _FAILED_S)[1]:
            logger.error("%s", problem)

    @contextmanager
    def held(self, session: Session, round_: Round, version: str | None) -> Iterator[Hold]:
        """Within it, no server generates; afterwards each has its label, and those that we paused run.

        The workers know what is held before it is paused, and tell the next sender if this one dies.

        Args:
            session: the round's.
            round_: the round; its outcome and posts decide about the labels.
            version: what the finish call publishes if the round commits; None is nothing.

        Raises:
            WeightTransferError: before a server is paused: the round cannot run. After a round that went well: a server could not
                be labelled or resumed. After another one that is a note of its error.
        """
        hold = Hold()
        if self.control is None:
            self._warn()
            try:
                yield hold
            except BaseException as exc:
                if round_.outcome is Outcome.POISONED:
                    exc.add_note(
                        "label not set: the engines publish the version from before (the client cannot set it)"
                    )
                raise
            return
        self._is_holding = True
        try:
            with round_.timed("pause"):
                self._hold(session, round_, version)
            yield hold
            round_.phase = "resume"
            started = time.monotonic()
            self._account(failed=False)
            within = max(round_.remaining_s, _FAILED_S)
            settled, problems = self._settle(session, within, within)
            hold.notes += settled.notes
            hold.publishes = settled.publishes
            if problems:
                raise problems[0]
            round_.seconds["resume"] = time.monotonic() - started
        except BaseException as exc:
            self._account(failed=True)
            settled, problems = self._settle(session, self.control.timeout, _FAILED_S)
            for note in (*settled.notes, *map(str, problems)):
                exc.add_note(note)
            for problem in problems:
                logger.error("%s", problem)  # noqa: TRY400  # it is a note of `exc`
            if round_.outcome is Outcome.POISONED and len(self._names) > 1 and not self._is_known(session):
                exc.add_note("the client does not say which server has which engine: all of them are labelled")
            raise
        finally:
            self._is_holding = False

    def resetting_caches(self, round_: Round) -> Callable[[], list[str]]:
        """Begin to drop what the servers have computed with older weights, which must be installed by now.

        Returns:
            What waits for it: notes say what could not be dropped. Raises what the client does; the round itself does not fail.
        """
        if self.control is None:
            return list
        reset, notes = self.control.reset_caches, Future[list[str]]()
        call = round_.run("reset_caches", lambda: run_into(notes, reset))

        def wait_for() -> list[str]:
            call.join()
            return notes.result()

        return wait_for

    # --- before a round ------------------------------------------------------------------------------------

    def _warn(self) -> None:
        if not self._was_warned:
            logger.warning(
                "%r cannot be asked whether its servers generate: pause them around send_weights()", self._client
            )
            self._was_warned = True

    def _hold(self, session: Session, round_: Round, version: str | None) -> None:
        """No server generates. Nothing is paused for a round that cannot run, nor before all workers know of it."""
        assert self.control is not None  # the caller has looked
        self._account(failed=True)
        round_.check()  # a peer that is gone, or another trainer's
        self._wait_for_earlier(round_)
        self._round = session, round_, version
        # Those of the last round hear it while the servers are asked, so that the round need not wait for the answer.
        told = self._usual - self._ours if self._is_known(session) else set()
        try:
            self._tell(session, round_, told, held=True)
            running = self.control.running(may_sleep=self._may_sleep)
            self._tell(session, round_, set(running) - told, held=True)
            told.update(running)
            peers = self._peers_of(session, running)
            if not all(post.held for post in round_.collect(Holding, peers).values()):
                raise StaleSessionError(
                    "another trainer is connecting to these servers; send again if it fails, else call trainer_init again",
                    side=Side.TRAINER,
                )
        except BaseException:
            self._tell(session, round_, told - self._ours, held=False)
            raise
        self._tell(session, round_, told - self._ours - set(running), held=False)
        self._usual = set(running)
        with self._lock:
            self._ours.update(running)
        pauses = {server: Future[None]() for server in running}
        self._pauses.update(pauses)
        for server, future in pauses.items():
            run_in_thread("wt-pause", partial(run_into, future, partial(self.control.pause_server, server)))
        wait(pauses.values(), timeout=round_.remaining_s)
        for server, future in pauses.items():
            if not future.done():
                raise RoundTimeoutError(f"{self._names[server]}: no reply to the pause in time", side=Side.TRAINER)
            future.result()

    def _tell(self, session: Session, round_: Round, servers: Collection[int], *, held: bool) -> None:
        session.notify(self._peers_of(session, servers), Held(round=round_.number, held=held))

    def _wait_for_earlier(self, round_: Round) -> None:
        """Nothing that an earlier round has begun to do to a server happens from now on."""
        wait(self._settling.values(), timeout=min(_LATE_S, round_.remaining_s))
        with self._lock:
            self._settling.clear()

    # --- after a round -------------------------------------------------------------------------------------

    def _account(self, *, failed: bool) -> None:
        """It is known what the last round means for each server's label."""
        if self._round is None:
            return
        session, round_, version = self._round
        if failed:
            self._publishes.clear()  # look again
        for server in self._servers():
            peers = self._peers(session, server)
            if round_.outcome is Outcome.COMMITTED:
                installed = [round_.posts.get(Installed, {}).get(peer.key) for peer in peers]
                is_left = any(isinstance(post, Installed) and post.poisoned for post in installed)
                self._note_commit(server, version, is_left=is_left, failed=failed)
            elif any(may_be_touched(round_, peer) for peer in peers):
                with self._lock:
                    owed = self._labels.get(server)
                    self._labels[server] = _Label(_marked if owed is None else partial(_marked_after, owed), must=True)
                    self._poisoned.add(server)
        self._round = None

    def _note_commit(self, server: int, version: str | None, *, is_left: bool, failed: bool) -> None:
        with self._lock:
            was_poisoned = server in self._poisoned
            (self._poisoned.add if is_left else self._poisoned.discard)(server)
            if version is not None and not is_left and not failed and self._publishes.get(server):
                # A finish call that returned was ours: the server has its version. One of somebody else's would have failed it.
                self._labels.pop(server, None)
            elif version is not None:
                label = _marked(version) if is_left else version
                published = None if failed else version
                self._labels[server] = _Label(lambda _: label, must=is_left or failed, published=published)
            elif is_left:
                self._labels[server] = _Label(_marked, must=True)
            elif was_poisoned:
                self._labels[server] = _Label(_unmarked, must=False)

    def _settle(self, session: Session, within: float, wait_s: float) -> tuple[Hold, list[WeightTransferError]]:
        """Every server is set right that has to be; what is not known to be after `wait_s` goes on, for `within` seconds a call.

        Returns:
            What was to be seen on the way, and a problem for each server that is not right.
        """
        found = Hold()
        problems: list[WeightTransferError] = []
        with self._lock:
            servers = sorted(self._ours | self._labels.keys())
            for server in servers:
                if server not in self._settling or self._settling[server].done():
                    future = self._settling[server] = Future()
                    call = partial(self._set_right, server, session, within, future)
                    run_in_thread("wt-settle", partial(run_into, future, call))
            settling = {server: self._settling[server] for server in servers}
        wait(settling.values(), timeout=wait_s + _RETRY_S)
        publish = []
        for server, future in settling.items():
            if not future.done():
                text = f"{self._names[server]} may still be paused, or have its old label: no reply in time; it is waited for"
                problems.append(RoundTimeoutError(text, side=Side.TRAINER))
                continue
            try:
                each = future.result()
            except WeightTransferError as exc:
                problems.append(exc)
            else:
                found.notes += each.notes
                publish.append(each.publishes)
        found.publishes = not publish or any(publish)
        return found, problems

    def _set_right(self, server: int, session: Session, within: float, own: Future[Hold]) -> Hold:
        """On a side thread: label the server, then resume it, unless that is another trainer's task, or another thread's."""
        assert self.control is not None  # the caller has looked
        found = Hold()
        if server in self._pauses:  # it may still be on its way
            wait([self._pauses[server]], timeout=within)
        label = self._labels.get(server)
        if label is not None and self._goes_on(server, session, own):
            self._set_label(server, session, label, within, own, found)
        if server in self._ours and self._goes_on(server, session, own):
            self._resume(server, within, found)
            with self._lock:
                if self._settling.get(server) is not own:  # it took so long that another round has begun
                    return found
                self._ours.discard(server)
                is_free = not self._ours or self._is_known(session)
            if is_free:
                session.notify(self._peers(session, server), Held(round=0, held=False))
        return found

    def _goes_on(self, server: int, session: Session, own: Future[Hold]) -> bool:
        peers = self._peers(session, server)
        # A client that does not say which server has which engine: another trainer may have a part of them only.
        of_server = any if self._is_known(session) else all
        with self._lock:
            if peers and of_server(peer.replaced for peer in peers):
                self._ours.discard(server)
                self._labels.pop(server, None)
                return False
            return self._settling.get(server) is own

    def _set_label(
        self, server: int, session: Session, label: _Label, within: float, own: Future[Hold], found: Hold
    ) -> None:
        assert self.control is not None  # the caller has looked
        name = self._names[server]
        try:
            old = self.control.label(server, within=within)
            new = None if old is None else label.wanted(old)
            if new is not None and new != old and self._goes_on(server, session, own):
                self.control.set_label(server, new, within=within)
        except WeightTransferError as exc:
            if label.must:
                paused = "stays paused until it can be" if server in self._ours else "may not generate"
                raise TransportError(
                    f"label not set: {name} {paused}, in the next round or init ({exc.message})", side=Side.TRAINER
                ) from exc
            found.notes.append(f"{name}: its label could not be read or set ({exc.message})")
        else:
            found.publishes = old is not None
            self._publishes[server] = old is not None and old == label.published
            if old is None and label.must:
                found.notes.append(f"label not set: {name} publishes none; its weights are not those of a version")
            elif old is None:
                found.notes.append(f"{name} publishes no version")
            elif label.published not in (None, old):
                found.notes.append(
                    f"{name} had the label {old!r} after this round's finish, from somebody else's finish or update; it is "
                    f"{new!r} now"
                )
        with self._lock:
            if self._labels.get(server) is label:
                del self._labels[server]

    def _resume(self, server: int, within: float, found: Hold) -> None:
        assert self.control is not None  # the caller has looked
        try:
            try:
                self.control.resume_server(server, within=within)
            except RoundTimeoutError:
                raise
            except WeightTransferError as first:
                time.sleep(_RETRY_S)
                self.control.resume_server(server, within=within)
                found.notes.append(f"{self._names[server]} took the second resume, the first failed ({first.message})")
        except WeightTransferError as exc:
            raise self._not_resumed(server, exc) from exc

    def _not_resumed(self, server: int, exc: WeightTransferError) -> WeightTransferError:
        kind = RoundTimeoutError if isinstance(exc, RoundTimeoutError) else TransportError
        return kind(
            f"{self._names[server]} may still be paused; the next round or init resumes it ({exc.message})",
            side=Side.TRAINER,
        )

    # --- which worker is where -----------------------------------------------------------------------------

    def _servers(self) -> Iterable[int]:
        return range(len(self._names))

    @staticmethod
    def _is_known(session: Session) -> bool:
        """Whether the workers know which server they are behind, so that servers can be told apart."""
        return all(peer.hello.server is not None for peer in session.workers)

    def _peers(self, session: Session, server: int) -> list[Peer]:
        """The workers behind `server`; all, where that is not known."""
        return self._peers_of(session, (server,))

    def _peers_of(self, session: Session, servers: Collection[int]) -> list[Peer]:
        """The workers behind `servers`; all, where that is not known."""
        if not servers:
            return []
        known = self._is_known(session)
        return [peer for peer in session.workers if not known or peer.hello.server in servers]


def may_be_touched(round_: Round, peer: Peer) -> bool:
    """Whether a byte of the worker's model may have changed; one that does not say may have from its first group on."""
    ended = round_.posts.get(Ended, {}).get(peer.key)
    return ended.touched if isinstance(ended, Ended) else round_.num_entered > 0
