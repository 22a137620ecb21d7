"""The sender's half of a built-in engine: it makes the calls, watches everybody, and decides how a round ends.

How the trainer ranks end a failed round. A source runs on the thread that called `send_weights`. That thread may be in a
collective of the source's, which nobody can interrupt. So other threads do all that follows:

1. A rank that fails tells the sender at once (`Failed`), from the thread that noticed it.
2. On the sender all failures meet in `Round.fail`, which decides which one counts. A side thread (`_settle`) sends `Abort`
   to all workers and trainer ranks.
3. A rank whose round has failed begins no further parameter by itself. Its reader thread answers the abort with the last one
   that it has begun (`Position`), while its own thread may be in the source. The sender knows its own.
4. `_settle` hears from the workers how the round left them, and sends `RoundOutcome` to all trainer ranks: the error with its
   outcome, and `run_to`, the furthest parameter that any rank has begun. It ends every wait of theirs.
5. Each rank takes its own source's parameters up to `run_to`, without a limit in time, and raises the error. So all ranks enter
   the same collectives, whoever failed and why: a rank whose own parameter was refused (`PlanError`) runs on as well.

Where a rank cannot run on, the others cannot be helped: they are in a collective with one that never comes, and only that
collective's own error or timeout ends it. `run_to` then stops short of it. A source that raised or ended early at a parameter
runs no further: all run to the one before. A rank that is dead, or does not answer (it is frozen), may be anywhere: none runs
on. If the sender is dead nobody decides: each rank stops where it is.

Before the first update call nobody has begun a parameter. Then 3 is left out, and all ranks hear of the failure at once. After
the verdict no rank is stopped: all run their source to its end.
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from wt_common import (
    SCHEMA,
    AgreementError,
    ConfigurationError,
    IntegrityError,
    Outcome,
    Phase,
    Side,
    WeightTransferError,
)
from wt_common.errors import error_to_wire
from wt_common.session import (
    Abort,
    Committed,
    DigestAgain,
    DigestedAgain,
    Ended,
    Finishing,
    Installed,
    Joined,
    Message,
    Position,
    Ready,
    RoundOutcome,
    Sent,
)
from wt_trainer.blame import blamed
from wt_trainer.client.protocol import VLLMWeightSyncClient
from wt_trainer.metadata import RoundMetadata
from wt_trainer.repair import close_left_open
from wt_trainer.report import TransferReport, WorkerReport
from wt_trainer.round import Call, Round
from wt_trainer.serving import POISONED_SUFFIX, may_be_touched
from wt_trainer.session import Peer, Session, local_address_towards
from wt_trainer.session_engine import SessionEngine, TInfo, as_ours
from wt_trainer.source import WeightSource
from wt_trainer.takes import Takes, check_takes, check_tied
from wt_trainer.threads import run_in_thread
from wt_trainer.verify import PlacedRank, Placement, sent_digests

__all__ = ["LeadingEngine"]

logger = logging.getLogger(__name__)

# A failed round raises within 1 s of its deadline, whoever is frozen. Of that, at most:
_ENDED_GRACE_S = 0.8  # for workers to say how it left them (less where the deadline has passed)
_LATE_GRACE_S = 0.3
_DIGEST_AGAIN_S = 5.0  # for another trainer rank to digest one parameter: 2 GB/s on one core
_BEFORE_START = ("init", "pause")  # phases in which nobody has been called
_LEAVE_S = 2.0  # more than a channel takes to close; see there


class LeadingEngine(SessionEngine[TInfo]):
    """What trainer rank 0 does: `_connect` in the init, `_lead` in a round."""

    def __init__(self, init_info: TInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None) -> None:
        super().__init__(init_info, client=client, source=source)
        self._session: Session | None = None
        self._placed: tuple[Placement, Takes] | None = None  # of the last round
        self._check_open = True  # whether a worker may have an update open: until a round has ended well
        self._takes_version = (
            True  # whether the client takes a version with its finish call; looked up once, which costs 0.1 ms
        )

    # --- init ----------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """On the sender: the session is open, sealed, and known to all."""
        try:
            self._prepare_metadata()
            publishes = getattr(self.client, "publishes_version", True)  # our Ray client says whether an actor does
            self._takes_version = bool(publishes) and _takes_argument(self.client.finish_weight_update)
            with self._serving.bounded(self._timeout_s):
                expected = self._expected_workers()
                hosts = self._serving.control.hosts() if self._serving.control else ()
                address = self._fields.master_address or local_address_towards(hosts)
                session = Session(
                    address,
                    self._fields.master_port,
                    secret=self._fields.session_secret,
                    num_trainer_ranks=self._ranks.count,
                )
        except BaseException as exc:
            self._ranks.share({"error": error_to_wire(exc)})
            raise
        self._session = session
        weakref.finalize(
            self, session.close
        )  # an engine that is dropped without shutdown() leaves no socket and no thread
        with self._serving.bounded(self._timeout_s), session.running(0, self._timeout_s) as round_:
            where = {"address": session.address, "port": session.port, "secret": session.secret, "session": session.id}
            self._ranks.share(where)
            try:
                payload = self._init_payload(session)
                call = round_.run(
                    "init_weight_transfer_engine", lambda: self.client.init_weight_transfer_engine(payload)
                )
                call.join(unless=lambda: session.refusal)
                session.wait_followers(round_, self._ranks.count - 1)
                session.seal(expected)
                self._compare_settings(session)
            except BaseException as exc:
                session.notify(session.followers, RoundOutcome(round=0, error=error_to_wire(as_ours(exc))))
                self._serving.take_over(session)  # its workers have left the trainer before for this one
                raise
            session.send(session.followers, RoundOutcome(round=0, report={}))
            self._serving.take_over(session)
        logger.debug("%s: %r, workers %s", self.backend, session, [str(peer) for peer in session.workers])

    def _compare_settings(self, session: Session) -> None:
        """All members of a communicator have what it needs alike; what should be is logged where it is not.

        Raises:
            AgreementError: they have not.
        """
        own, own_versions = self._settings(), self._versions()
        for peer in (*session.workers, *session.followers):
            theirs = peer.hello.settings
            for name in sorted(own.keys() | theirs.keys()):
                if own.get(name) != theirs.get(name):
                    raise AgreementError(
                        f"{peer}: expected {name} {own.get(name, 'unset')}, as on the sender, got {theirs.get(name, 'unset')}; "
                        "make it the same on all ranks",
                        side=Side.WORKER if peer.hello.engine else Side.TRAINER,
                        engine=peer.hello.engine or None,
                        rank=peer.hello.rank,
                    )
            for name in sorted(own_versions.keys() & peer.hello.versions.keys() - {"torch"}):
                if own_versions[name] != peer.hello.versions[name]:
                    logger.warning(
                        "%s has %s %s, the sender %s", peer, name, peer.hello.versions[name], own_versions[name]
                    )

    def _init_payload(self, session: Session) -> dict[str, Any]:
        return {
            "session_address": session.address,
            "session_port": session.port,
            "session_secret": session.secret,
            "session": session.id,
            "schema": list(SCHEMA),
            "timeout_s": self._timeout_s,
            "check_cover": self._fields.check_cover,
            "verify": self._fields.verify,
            "server": None,
            **self._init_fields(),
        }

    def _expected_workers(self) -> int | None:
        told = self._serving.control.world_size() if self._serving.control else None
        given = None if self._fields.world_size is None else self._fields.world_size - 1
        if told is not None and given is not None and told != given:
            raise ConfigurationError(
                f"world_size: expected 1 (the sender) + {told} worker ranks that the servers have, got {given + 1}"
            )
        return told if given is None else given

    # --- a round -------------------------------------------------------------------------------------------

    def _lead(self, session: Session, weight_version: str | None, check: Callable[[], None]) -> TransferReport:
        """The round, on the sender; `check` raises where an argument is wrong."""
        number = self._round_number
        with self._serving.bounded(self._timeout_s), session.running(number, self._timeout_s) as round_:
            round_.watch(lambda: self._settle_soon(session, round_, unless=Outcome.COMMITTED))
            if session.followers:  # else nobody waits for this thread but workers, which end by themselves
                run_in_thread("wt-deadline", lambda: session.end_at_deadline(round_))
            try:
                check()
                version = None if self._is_draft else str(number) if weight_version is None else weight_version
                published = version if self._takes_version else None
                with self._serving.held(session, round_, published) as hold:
                    report = self._run(session, round_, version)
            except BaseException as exc:
                error = self._failure(session, round_, exc)
                self._round_number = session.in_step()
                self._run_source_to(round_, round_.run_to)
                if error is exc or not isinstance(exc, Exception):
                    raise
                raise error from exc
            report = replace(
                report, notes=(*report.notes, *hold.notes), version=report.version if hold.publishes else None
            )
            report.seconds.update(round_.seconds, total=round_.elapsed_s)
            if session.followers:
                session.send(session.followers, RoundOutcome(round=round_.number, report=report.to_dict()))
        return report

    def _run(self, session: Session, round_: Round, version: str | None) -> TransferReport:
        """The round between pause and resume. Whatever ends it early, the peers hear so, and `round_.outcome` is set."""
        try:
            return self._drive(session, round_, version)
        except BaseException as exc:
            error = self._failure(session, round_, exc)
            if error is exc or not isinstance(exc, Exception):
                raise
            raise error from exc

    def _drive(self, session: Session, round_: Round, version: str | None) -> TransferReport:
        workers = session.workers
        with round_.timed("start"):
            if self._check_open:
                close_left_open(session, round_, self.client)
            self._check_open = True
            metadata = self._round_metadata()
            self._compare_sources(session, round_, metadata)
            session.expect_placed(round_.number, metadata.digest, is_draft=self._is_draft)
            info = {"session": session.id, "round": round_.number, "metadata_digest": metadata.digest}

            def update() -> None:
                with round_.changed:
                    round_.check()
                    round_.is_called = True
                self.client.update_weights(info)

            call = Call("update_weights", update, round_)
            round_.run("start_weight_update", self.client.start_weight_update, then=call).join()
        with round_.timed("update"):
            self._get_ahead(session, round_, metadata)
            casts, cast_there = self._agree_on_metadata(session, round_, workers, metadata, call)
            placement, takes = self._place(workers, metadata, cast_there)
            received = placement.received if self._verifies else []
            num_bytes = self._transmit(session, round_, metadata, casts, received)
            installed = round_.collect(Installed, workers, call)
            call.join()
        with round_.timed("finish"):
            left = [peer for peer in workers if installed[peer.key].poisoned]
            published = version
            if left and version is not None:
                published = version + POISONED_SUFFIX
                # A client that can set labels does it for each server, before that runs: some may be whole.
                version = version if self._serving.control else published
            arguments = (version,) if self._takes_version and version is not None else ()
            with round_.changed:
                if round_.posts.get(Finishing):
                    raise AgreementError(
                        "finish_weight_update was called by somebody else in this round; drive these servers by one trainer, "
                        "then send again",
                        side=Side.TRAINER,
                    )
            call = round_.run("finish_weight_update", lambda: self.client.finish_weight_update(*arguments))
            if not self._verifies:  # then nobody has anything more to say
                self._commit(session, round_, metadata)
            finishing = round_.collect(Finishing, workers, call)
            if self._verifies:
                self._check_digests(session, round_, metadata, casts, placement, finishing)
                self._commit(session, round_, metadata)
            reset_notes = self._serving.resetting_caches(round_)
            report = self._report(round_, published, metadata, placement, takes, installed, len(casts), num_bytes)
            call.join()
        self._check_open = False
        self._end_transfer(failed=False)
        notes = [_left_text(left)] if left else []
        if not self._takes_version:
            notes.append("the client takes no version, or its engines publish none: none was published")
        return replace(report, notes=(*notes, *reset_notes()))

    @staticmethod
    def _commit(session: Session, round_: Round, metadata: RoundMetadata) -> None:
        """The verdict, when all workers have installed what all trainer ranks have sent. From now on nothing fails the round."""
        round_.collect(Sent, _other_roots(session, metadata))
        with round_.changed:
            round_.check()
            round_.outcome = Outcome.COMMITTED
        session.send(session.workers, Committed(round=round_.number))

    def _report(
        self,
        round_: Round,
        version: str | None,
        metadata: RoundMetadata,
        placement: Placement,
        takes: Takes,
        installed: dict[tuple[str, str, int], Installed],
        num_cast: int,
        num_bytes: int,
    ) -> TransferReport:
        """All of it but the seconds and the notes."""
        return TransferReport(
            round=round_.number,
            version=version if self._takes_version else None,
            outcome=Outcome.COMMITTED,
            backend=self.backend,
            num_parameters=len(metadata.names),
            num_cast=num_cast,
            num_bytes=num_bytes,
            seconds={},
            workers=tuple(
                _worker_report(rank, post) for rank, post in zip(placement.ranks, installed.values(), strict=True)
            ),
            verify=self._fields.verify,
            buffer_bytes=round_.buffer_bytes,
            ignored=tuple(metadata.names[place] for place in takes.ignored),
            unknown=tuple(metadata.names[place] for place in takes.unknown),
            aliases=metadata.aliases,
        )

    def _compare_sources(self, session: Session, round_: Round, metadata: RoundMetadata) -> None:
        """Every other trainer rank is in the round, with the same metadata; else one that differs says where."""
        joined = round_.collect(Joined, session.followers)
        differing = [peer for peer in session.followers if joined[peer.key].metadata_digest != metadata.digest]
        if differing:
            session.send(differing, metadata.message(round_.number))
            round_.wait(lambda: False, lambda: f"{differing[0]} to say where its source differs")

    def _agree_on_metadata(
        self, session: Session, round_: Round, workers: list[Peer], metadata: RoundMetadata, call: Call
    ) -> tuple[dict[str, str], list[int]]:
        """Every worker is in its update call and has checked the metadata against its model.

        Returns:
            The dtype on the wire of each parameter that all workers hold in one dtype, other than the declared; and the places in
            the metadata of the parameters that some worker casts, so that its model has other bytes than the wire.
        """
        ready = round_.collect(Ready, workers, call)
        unknowing = [peer for peer in workers if not ready[peer.key].knows_metadata]
        if unknowing:
            with round_.changed:
                for peer in unknowing:
                    del round_.posts[Ready][peer.key]
            session.send(unknowing, metadata.message(round_.number))
            ready = round_.collect(Ready, workers, call)
        first, *others = (post.casts for post in ready.values())
        casts = {name: dtype for name, dtype in first.items() if all(other.get(name) == dtype for other in others)}
        differing = {name for post in ready.values() for name in post.casts.keys() - casts.keys()}
        return casts, [place for place, name in enumerate(metadata.names) if name in differing] if differing else []

    def _place(self, workers: list[Peer], metadata: RoundMetadata, cast_there: list[int]) -> tuple[Placement, Takes]:
        """Where the workers' digests belong, and what they take, as each has said before its `Ready` or in an earlier round.

        Raises:
            PlanError: they do not take what is announced; see `check_takes`. No byte has moved.
        """
        key = metadata.digest, self._is_draft
        for peer in workers:
            if key not in peer.placed:
                raise AgreementError(
                    f"{peer}: expected 'placed' before its first 'ready' for these metadata, got none",
                    side=Side.WORKER,
                    engine=peer.hello.engine,
                    rank=peer.hello.rank,
                )
        ranks = [
            PlacedRank(
                name=str(peer),
                engine=peer.hello.engine,
                rank=peer.hello.rank,
                placed=peer.placed[key],
                shares_model=peer.hello.shares_model,
            )
            for peer in workers
        ]
        if self._placed is not None:
            placement, takes = self._placed
            if (placement.names, placement.ranks, placement.given) == (metadata.names, ranks, cast_there):
                return self._placed
        placement = Placement(ranks, names=metadata.names, num_elements=metadata.num_elements, given=cast_there)
        takes = check_takes(ranks, metadata, check_cover=self._fields.check_cover)
        self._placed = placement, takes
        return self._placed

    def _check_digests(
        self,
        session: Session,
        round_: Round,
        metadata: RoundMetadata,
        casts: dict[str, str],
        placement: Placement,
        finishing: dict[tuple[str, str, int], Finishing],
    ) -> None:
        """Every worker has what the trainer ranks have sent, as far as `verify` says; else the error says whose fault it is."""
        roots = _other_roots(session, metadata)
        sent = round_.collect(Sent, roots)
        others = {peer.hello.rank: (str(peer), sent[peer.key].digests) for peer in roots}
        digests = sent_digests(metadata.roots, round_.digests, others)
        check_tied(placement.ranks, metadata, casts, digests)
        try:
            placement.check(digests, {(engine, rank): post.digests for (_, engine, rank), post in finishing.items()})
        except IntegrityError as exc:
            place = metadata.names.index(exc.param or "")
            root = metadata.roots[place]
            now = _digest_now(session, round_, root, place)
            raise blamed(exc, root=root, sent=digests[place], now=now) from None

    def _failure(self, session: Session, round_: Round, exc: BaseException) -> WeightTransferError:
        """The error with which the round ends, now that `exc` has been raised on the sender's own thread; all ranks know it."""
        error = as_ours(exc).fill(side=Side.TRAINER)

        def fail() -> None:
            round_.fail(error)
            self._settle_soon(session, round_)

        try:
            # Not here: a second interrupt must not leave the other ranks waiting until the deadline.
            run_in_thread(f"wt-fail round {round_.number}", fail)
            with round_.changed:
                round_.changed.wait_for(lambda: round_.is_settled)
                assert round_.failure is not None  # it has just failed
                return round_.failure
        finally:  # also where a second interrupt ends the wait: who has not answered may be touched
            _decide_outcome(session, round_)

    def _settle_soon(self, session: Session, round_: Round, *, unless: Outcome | None = None) -> None:
        """Have the failed round settled on a side thread. After the verdict, only the sender's own thread knows that it fails."""
        with round_.changed:
            if round_.is_settling or (unless is not None and round_.outcome is unless):
                return
            round_.is_settling = True
        run_in_thread(f"wt-settle round {round_.number}", lambda: self._settle(session, round_))

    def _settle(self, session: Session, round_: Round) -> None:
        """Tell every peer that the round is over, find out how that left the workers, and tell the other trainer ranks."""
        try:
            self._end_everywhere(session, round_)
        except Exception:  # a bug
            logger.exception("the failed round could not be ended in good order")
        finally:  # nobody may wait for this thread for ever
            with round_.changed:
                round_.is_settled = True
                round_.changed.notify_all()

    def _end_everywhere(self, session: Session, round_: Round) -> None:
        error, workers, followers = round_.failure, session.workers, session.followers
        assert error is not None  # that is why
        error.fill(side=Side.TRAINER, phase=_error_phase(round_.phase), backend=self.backend)
        is_final, has_begun = round_.outcome is Outcome.COMMITTED, round_.phase not in _BEFORE_START
        if is_final:
            round_.run_to = sys.maxsize
            # The verdict is final: a worker must not find an abort behind it. An interrupt may have come before it was sent.
            session.notify(workers, Committed(round=round_.number))
        elif has_begun:
            session.notify([*workers, *followers], Abort(round=round_.number, error=error_to_wire(error)))
        left = threading.Event()

        def leave() -> None:
            self._end_transfer(failed=True)
            left.set()

        if followers or has_begun:  # the other ranks leave theirs in any case, and all must be new together
            run_in_thread("wt-leave", leave)  # a communicator takes half a second, which the workers need as well
        else:
            left.set()
        if round_.is_called and not is_final:
            self._hear_how_it_ended(round_, workers, followers)
        error.fill(outcome=_decide_outcome(session, round_))
        outcome = RoundOutcome(
            round=round_.number, error=error_to_wire(error), run_to=round_.run_to, number=session.in_step()
        )
        session.tell_outcome(outcome)
        left.wait(_LEAVE_S)  # from then on no tensor of the source's is read

    def _hear_how_it_ended(self, round_: Round, workers: list[Peer], followers: list[Peer]) -> None:
        """All have said how the round left them, as far as they do, and `round_.run_to` is known."""
        ended = round_.posts.setdefault(Ended, {})
        positions = round_.posts.setdefault(Position, {})
        with round_.changed:
            round_.changed.wait_for(
                lambda: (
                    all(peer.key in ended or peer.lost for peer in workers)
                    and all(peer.key in positions or peer.lost for peer in followers)
                ),
                min(_ENDED_GRACE_S, round_.remaining_s + _LATE_GRACE_S),
            )
            round_.run_to = _run_to(round_, [None if peer.lost else positions.get(peer.key) for peer in followers])


def _left_text(left: list[Peer]) -> str:
    others = f" and {len(left) - 1} more" if len(left) > 1 else ""
    return (
        f"still half-written: {left[0]}{others}. An earlier round failed, and this one has not written all that it had touched. "
        f"The label keeps {POISONED_SUFFIX!r} until the rest is sent, or a full round"
    )


def _other_roots(session: Session, metadata: RoundMetadata) -> list[Peer]:
    """The other trainer ranks that send."""
    return [peer for peer in session.followers if peer.hello.rank in metadata.roots]


def _digest_now(session: Session, round_: Round, root: int, place: int) -> int | None:
    """The digest of a parameter in the memory that trainer rank `root` sent it from; None if nobody can say."""
    asked = [peer for peer in session.followers if peer.hello.rank == root]
    if not asked:
        return round_.digest_now(place)
    session.send(asked, DigestAgain(round=round_.number, place=place))
    answers = round_.posts.setdefault(DigestedAgain, {})
    with round_.changed:  # not `collect`: no answer must not hide what has been found
        round_.changed.wait_for(
            lambda: bool(answers) or round_.failure is not None, min(_DIGEST_AGAIN_S, round_.remaining_s)
        )
    return next(
        (digest for answer in answers.values() if isinstance(answer, DigestedAgain) for digest in answer.digests), None
    )


def _decide_outcome(session: Session, round_: Round) -> Outcome:
    """How the failed round left the workers, as far as they have said; once decided it stays."""
    with round_.changed:
        if round_.outcome is None:
            touched = round_.is_called and any(may_be_touched(round_, peer) for peer in session.workers)
            round_.outcome = Outcome.POISONED if touched else Outcome.UNCHANGED
        return round_.outcome


def _run_to(round_: Round, others: list[Message | None]) -> int:
    """How far all trainer ranks run their source after a failed round, by the positions of the others; -1: not at all."""
    positions = [
        Position(round=round_.number, index=round_.begun, stopped=round_.stopped),
        *(other for other in others if isinstance(other, Position)),
    ]
    if not others or len(positions) <= len(others):
        return -1
    furthest = max(position.index for position in positions)
    return max(-1, min([furthest, *(position.index - 1 for position in positions if position.stopped)]))


def _error_phase(phase: str) -> str | None:
    return phase if phase in list(Phase) else None


def _takes_argument(finish: Any) -> bool:
    """Whether `finish_weight_update` can be called with a version; a callable without a signature is taken to."""
    try:
        signature = inspect.signature(finish)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind("version")
    except TypeError:
        return False
    return True


def _worker_report(rank: PlacedRank, installed: Installed) -> WorkerReport:
    return WorkerReport(
        engine=rank.engine,
        rank=rank.rank,
        num_bytes=installed.num_bytes,
        seconds=installed.seconds,
        not_synced=installed.not_synced,
        not_in_place=rank.placed.not_in_place,
        buffer_bytes=installed.buffer_bytes,
    )
