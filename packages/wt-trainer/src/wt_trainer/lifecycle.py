"""The life of every built-in trainer engine: connect, run rounds, and give each an outcome. Backends only move bytes."""

from __future__ import annotations

import inspect
import logging
import math
import os
import socket
import threading
import weakref
from abc import abstractmethod
from contextlib import suppress
from typing import Any, ClassVar, Self, TypeVar

import torch

from wt_common import (
    SCHEMA,
    ConfigurationError,
    Outcome,
    Phase,
    PlanError,
    Side,
    SourceModeError,
    StaleSessionError,
    TransportError,
    WeightTransferError,
)
from wt_common.errors import error_from_wire, error_to_wire
from wt_common.session import (
    Abort,
    Committed,
    Ended,
    Failed,
    Finishing,
    Go,
    Hello,
    Installed,
    Joined,
    Position,
    Ready,
    RoundOutcome,
)
from wt_trainer.client.protocol import VLLMWeightSyncClient
from wt_trainer.connection import connect
from wt_trainer.engine import TrainerInitInfo, TrainerWeightTransferEngine
from wt_trainer.follower import FollowerSession
from wt_trainer.init_infos import SessionFields
from wt_trainer.metadata import RoundMetadata
from wt_trainer.ranks import TrainerRanks
from wt_trainer.repair import close_left_open
from wt_trainer.report import TransferReport, WorkerReport
from wt_trainer.round import Call, Round
from wt_trainer.serving import Serving
from wt_trainer.session import Peer, Session, local_address_towards
from wt_trainer.source import WeightSource

__all__ = ["SessionTrainerEngine"]

logger = logging.getLogger(__name__)

# A failed round raises within 1 s of its deadline, whoever is frozen. Of that, at most:
_ENDED_GRACE_S = 0.8  # for workers to say how it left them (less where the deadline has passed)
_LATE_GRACE_S = 0.3

TInfo = TypeVar("TInfo", bound=TrainerInitInfo)


class SessionTrainerEngine(TrainerWeightTransferEngine[TInfo]):
    """What all built-in engines share.

    `trainer_init`: the sender opens a session, tells the other trainer ranks where, hands the address to the workers through the
    client, and seals the list of who came. The other ranks connect, and all return or raise together.

    `send_weights`, on the sender: 1. pause the servers; 2. `start_weight_update`; 3. `update_weights` on a side thread, while the
    workers get metadata they do not know, then `Go`, then the backend's bytes, install them and post that;
    4. `finish_weight_update` on a side thread, in which the workers wait for 5. the verdict; 6. reset caches, resume; 7. tell the
    other ranks the outcome. The calling thread watches posts, lost connections, the calls and the deadline all at once: whichever
    fails first ends the round. The other ranks run their source meanwhile, send what they are the root of, and wait for 7.

    A backend sets `needs` and implements `_init_fields`, `_transmit` and `_assist`.
    """

    needs: ClassVar[str | None] = "iter_full"
    """The source's iterator that this engine runs; None for a delta engine, which takes no source."""

    supports_draft_weight_update: ClassVar[bool] = True
    """Whether the backend can update a speculative draft model, within `client.draft()`."""

    def __init__(self, init_info: TInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)
        self.init_info = init_info
        self.backend = init_info.backend
        self._fields = _session_fields(init_info)
        self._ranks = TrainerRanks(self._fields, self.rank)
        self._session: Session | None = None  # on the sender
        self._following: FollowerSession | None = None  # on every other rank
        self._round_number = 0
        self._epoch = 0
        self._known_metadata: list[tuple[weakref.ref[WeightSource], RoundMetadata]] = []
        self._round_source = source
        self._serving = Serving(client)
        self._in_send = threading.Lock()
        self._check_open = True  # whether a worker may have an update open: until a round has ended well

    # --- init ----------------------------------------------------------------------------------------------

    @classmethod
    def trainer_init(
        cls, init_info: TInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        """A connected engine. Called on every trainer rank; see `WeightTransferTrainerFactory.trainer_init` for errors."""
        engine = cls(init_info, client=client, source=source)
        try:
            if engine.is_sender:
                engine._connect()
            else:
                engine._follow()
        except BaseException as exc:
            engine.shutdown()
            if isinstance(exc, WeightTransferError):
                exc.fill(side=Side.TRAINER, rank=engine.rank, phase=Phase.INIT, backend=engine.backend)
            raise
        return engine

    @classmethod
    def _check_source(cls, source: WeightSource | None) -> None:
        if cls.needs is None:
            if source is not None:
                raise ConfigurationError(f"{cls.__name__} sends what send_weights() is given; expected source=None")
            return
        if source is None:
            raise ConfigurationError(f"{cls.__name__} sends the whole model: pass a WeightSource as source=")
        if not getattr(source, f"implements_{cls.needs}")():
            raise SourceModeError(f"{cls.__name__} needs a source that implements {cls.needs}(), {source!r} does not")

    def _connect(self) -> None:
        """On the sender: the session is open, sealed, and known to all."""
        try:
            self._prepare_metadata()
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
            except BaseException as exc:
                session.notify(session.followers, RoundOutcome(round=0, error=error_to_wire(_as_ours(exc))))
                raise
            session.send(session.followers, RoundOutcome(round=0, report={}))
            self._serving.take_over(session)
        logger.debug("%s: %r, workers %s", self.backend, session, [str(peer) for peer in session.workers])

    def _follow(self) -> None:
        """On every other rank: connected to the sender, which has connected the workers."""
        fields = self._fields
        self._prepare_metadata()
        where = self._ranks.share(None)
        if "error" in where:
            raise error_from_wire(where["error"])
        connection = connect(
            str(where.get("address", fields.master_address)),
            int(where.get("port", fields.master_port or 0)),
            secret=str(where.get("secret", fields.session_secret)),
            session=where.get("session"),
            hello=self._hello(),
            timeout_s=self._timeout_s,
        )
        self._following = FollowerSession(connection)
        weakref.finalize(self, self._following.close)
        with self._following.running(0, self._timeout_s) as round_:
            outcome = self._following.outcome(round_)
        if outcome.error is not None:
            raise error_from_wire(outcome.error)

    def _prepare_metadata(self) -> None:
        """The source fits the backend; its metadata are known, computed on all ranks here, since it may cost a collective."""
        self._check_source(self.source)
        if self.source is not None:
            self._round_metadata()

    def _hello(self) -> Hello:
        return Hello(
            role=Side.TRAINER.value,
            engine="",
            rank=self.rank,
            size=self._ranks.count,
            schema=list(SCHEMA),
            device="",
            hostname=socket.gethostname(),
            pid=os.getpid(),
            versions={"torch": str(torch.__version__)},
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

    @property
    def _timeout_s(self) -> float:
        return min(self._fields.timeout_s, self._serving.control.timeout if self._serving.control else math.inf)

    # --- a round -------------------------------------------------------------------------------------------

    def send_weights(self, *, weight_version: str | None = None, source: WeightSource | None = None) -> TransferReport:
        """Every worker has the source's current weights, and publishes them as `weight_version` (None is the round's number).

        Called on every trainer rank; returns or raises the same on all. Tensors are read after the caller's current stream has
        reached this call, and not after it returns. Inside `client.draft()` the weights go to the speculative draft model, and no
        version is published.

        Args:
            weight_version: the label that the engines publish.
            source: what to send in this round instead of the engine's own source, such as the draft model's weights.

        Raises:
            ConfigurationError: this backend cannot update draft models; nothing was called.
            WeightTransferError: the round failed. `outcome` says how it left the models: `unchanged` (send again),
                `poisoned` (only a full round repairs them), `committed` (installed, but a later call failed).
        """
        if self._session is None and self._following is None:
            raise StaleSessionError("shut down; call trainer_init again", side=Side.TRAINER, backend=self.backend)
        is_draft = bool(getattr(self.client, "is_draft", False))
        if is_draft and not self.supports_draft_weight_update:
            raise ConfigurationError(
                f"backend {self.backend!r} cannot update draft models; use a broadcast backend for them",
                side=Side.TRAINER,
                backend=self.backend,
            )
        if weight_version is not None and not isinstance(weight_version, str):
            raise ConfigurationError(
                f"weight_version: expected a str or None, got {weight_version!r}",
                side=Side.TRAINER,
                backend=self.backend,
            )
        if source is not None:
            self._check_source(source)
        if not self._in_send.acquire(blocking=False):
            raise ConfigurationError(
                "send_weights: a round is in progress on another thread; one at a time",
                side=Side.TRAINER,
                backend=self.backend,
            )
        try:
            self._round_source = self.source if source is None else source
            self._round_number += 1
            number = str(self._round_number)
            version = None if is_draft else number if weight_version is None else weight_version
            report = self._lead(self._session, version) if self._session else self._take_part()
        finally:
            self._round_source = self.source
            self._in_send.release()
        logger.info("%s: %s", self.backend, report)
        return report

    def _lead(self, session: Session, version: str | None) -> TransferReport:
        """The round, on the sender."""
        with self._serving.bounded(self._timeout_s), session.running(self._round_number, self._timeout_s) as round_:
            try:
                with self._serving.held(session, round_):
                    report = self._run(session, round_, version)
            except BaseException as exc:
                error = _as_ours(exc).fill(
                    side=Side.TRAINER,
                    phase=_error_phase(round_.phase),
                    backend=self.backend,
                    round=round_.number,
                    elapsed_s=round_.elapsed_s,
                    outcome=round_.outcome or Outcome.UNCHANGED,  # no outcome yet: it failed before the first call
                )
                if round_.outcome is Outcome.POISONED:
                    problem = self._serving.mark_poisoned(session)
                    if problem:
                        error.add_note(f"label not set: the engines publish the version from before ({problem})")
                run_to = _last_begun(session, round_)
                outcome = RoundOutcome(round=round_.number, error=error_to_wire(error), run_to=run_to)
                session.notify(session.followers, outcome)
                self._run_source_to(run_to)
                if error is exc or not isinstance(exc, Exception):
                    raise
                raise error from exc
            report.seconds.update(round_.seconds, total=round_.elapsed_s)
            session.send(session.followers, RoundOutcome(round=round_.number, report=report.to_dict()))
        return report

    def _take_part(self) -> TransferReport:
        """The round, on every other rank."""
        session = self._following
        assert session is not None  # send_weights has checked
        with session.running(self._round_number, self._timeout_s) as round_:
            try:
                metadata = self._round_metadata()
                session.send(Joined(round=round_.number, metadata_digest=metadata.digest))
                self._assist(session, round_, metadata, session.go(round_, metadata))
                self._end_transfer(failed=False)
            except BaseException as exc:
                error = _as_ours(exc).fill(side=Side.TRAINER, rank=self.rank)
                ours = round_.failure is None or round_.failure is not error  # else the sender knows, or is gone
                stopped = round_.failure is None and (isinstance(error, PlanError) or error is not exc)
                round_.fail(error)
                self._end_transfer(failed=True)
                if ours:
                    with suppress(WeightTransferError):  # the sender is gone, which its outcome, below, says better
                        session.send(Failed(round=round_.number, error=error_to_wire(error), stopped=stopped))
                if not isinstance(exc, Exception):
                    raise
            outcome = session.outcome(round_)
        if outcome.error is not None:
            self._end_transfer(failed=True)
            self._run_source_to(outcome.run_to)
            raise error_from_wire(outcome.error)
        return TransferReport.from_dict(outcome.report or {})

    def _run(self, session: Session, round_: Round, version: str | None) -> TransferReport:
        """The round between pause and resume. Whatever ends it early, the peers hear so, and `round_.outcome` is set."""
        try:
            return self._drive(session, round_, version)
        except BaseException as exc:
            error = _as_ours(exc)
            if round_.failure is None and (isinstance(error, PlanError) or error is not exc):
                round_.stopped = True  # our own source: the other ranks' collectives would wait for it in vain
            self._settle(session, round_, error)
            if error is exc or not isinstance(exc, Exception):
                raise
            raise error from exc

    def _drive(self, session: Session, round_: Round, version: str | None) -> TransferReport:
        workers = session.workers
        with round_.timed("start"):
            if self._check_open:
                close_left_open(session, round_, self.client)
            self._check_open = True
            round_.run("start_weight_update", self.client.start_weight_update).join()
        with round_.timed("update"):
            metadata = self._round_metadata()
            self._compare_sources(session, round_, metadata)
            info = {"session": session.id, "round": round_.number, "metadata_digest": metadata.digest}
            call = round_.run("update_weights", lambda: self.client.update_weights(info))
            casts = self._agree_on_metadata(session, round_, workers, metadata, call)
            num_bytes = self._transmit(session, round_, metadata, casts)
            installed = round_.collect(Installed, workers, call)
            call.join()
        with round_.timed("finish"):
            takes_version = _takes_argument(self.client.finish_weight_update)
            arguments = (version,) if takes_version and version is not None else ()
            call = round_.run("finish_weight_update", lambda: self.client.finish_weight_update(*arguments))
            round_.collect(Finishing, workers, call)
            with round_.changed:
                round_.check()
                round_.outcome = Outcome.COMMITTED
            session.send(workers, Committed(round=round_.number))
            call.join()
        self._check_open = False
        self._end_transfer(failed=False)
        notes = [] if takes_version else ["the client's finish_weight_update takes no version: none was published"]
        notes += self._serving.reset_caches()
        return TransferReport(
            round=round_.number,
            version=version if takes_version else None,
            outcome=Outcome.COMMITTED,
            backend=self.backend,
            num_parameters=len(metadata.names),
            num_cast=len(casts),
            num_bytes=num_bytes,
            seconds={},
            workers=tuple(_worker_report(peer, installed[peer.key]) for peer in workers),
            covered=metadata.covered,
            notes=tuple(notes),
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
    ) -> dict[str, str]:
        """Every worker is in its update call and has checked the metadata against its model.

        Returns:
            The dtype on the wire of each parameter that all workers hold in one dtype, other than the declared.
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
        return {name: dtype for name, dtype in first.items() if all(other.get(name) == dtype for other in others)}

    def _settle(self, session: Session, round_: Round, error: WeightTransferError) -> None:
        """Tell every peer that the round is over, and find out how that left the workers."""
        round_.fail(error)
        self._end_transfer(failed=True)
        workers = session.workers
        if round_.outcome is Outcome.COMMITTED:
            # The verdict is final: a worker must not find an abort behind it. An interrupt may have come before it was sent.
            session.notify(workers, Committed(round=round_.number))
            return
        session.notify([*workers, *session.followers], Abort(round=round_.number, error=error_to_wire(error)))
        ended = round_.posts.setdefault(Ended, {})
        positions = round_.posts.setdefault(Position, {})
        with round_.changed:
            round_.changed.wait_for(
                lambda: (
                    all(peer.key in ended or peer.lost for peer in workers)
                    and all(peer.key in positions or peer.lost for peer in session.followers)
                ),
                min(_ENDED_GRACE_S, round_.remaining_s + _LATE_GRACE_S),
            )
            if round_.outcome is None:
                touched = any(self._may_be_touched(round_, ended.get(peer.key)) for peer in workers)
                round_.outcome = Outcome.POISONED if touched else Outcome.UNCHANGED

    @staticmethod
    def _may_be_touched(round_: Round, ended: Any) -> bool:
        """Whether a byte of the worker's model may have changed; one that cannot be asked may have from its first group on."""
        return ended.touched if isinstance(ended, Ended) else round_.num_entered > 0

    def _round_metadata(self) -> RoundMetadata:
        """The metadata of the round's source; computed once for each source, and forgotten with it."""
        source = self._round_source
        if source is None:
            raise ConfigurationError(f"{type(self).__name__} sends the whole model: pass a WeightSource as source=")
        for known, metadata in self._known_metadata:
            if known() is source:
                return metadata
        metadata = RoundMetadata.of(source, self._ranks.count)
        alive = [entry for entry in self._known_metadata if entry[0]() is not None]
        self._known_metadata = [*alive, (weakref.ref(source), metadata)]
        return metadata

    def shutdown(self) -> None:
        """Leave the session: workers see the end and go on serving; no group, socket or thread of ours is left."""
        for link in (self._session, self._following):
            if link is not None:
                link.close()
        self._session = self._following = None
        self._end_transfer(failed=True)

    # --- what a backend implements -------------------------------------------------------------------------

    @abstractmethod
    def _init_fields(self) -> dict[str, Any]:
        """The backend's own fields of the init info."""

    @abstractmethod
    def _transmit(self, session: Session, round_: Round, metadata: RoundMetadata, casts: dict[str, str]) -> int:
        """On the sender: send the round's bytes, cast as `casts` says; our tensors are no longer read when it returns.

        Returns:
            How many bytes all data senders send together.
        """

    @abstractmethod
    def _assist(self, session: FollowerSession, round_: Round, metadata: RoundMetadata, go: Go) -> None:
        """On every other rank: run the source in step with the sender, and send what this rank is the root of."""

    def _run_source_to(self, index: int) -> None:
        """Take the source's parameters up to place `index` of the metadata, unsent; see `RoundOutcome.run_to`."""

    def _end_transfer(self, *, failed: bool) -> None:
        """Called after every round, and at shutdown; `failed` says that nothing half-used may be used again."""


def _session_fields(init_info: TrainerInitInfo) -> SessionFields:
    if not isinstance(init_info, SessionFields):
        raise ConfigurationError(f"{type(init_info).__name__}: a built-in engine takes its own init info class")
    return init_info


def _as_ours(exc: BaseException) -> WeightTransferError:
    """`exc` if it is ours, else ours for it: what a user's source or client raised is reported, and chained."""
    if isinstance(exc, WeightTransferError):
        return exc
    return TransportError(f"the trainer failed in the round ({type(exc).__name__}: {exc})", side=Side.TRAINER)


def _last_begun(session: Session, round_: Round) -> int:
    """How far all trainer ranks run their source after a failed round, so that no collective lacks a rank; -1: not at all."""
    followers = session.followers
    positions = [round_.posts.get(Position, {}).get(peer.key) for peer in followers]
    if not followers or round_.stopped or None in positions:
        return -1
    return max(round_.begun, *(position.index for position in positions if isinstance(position, Position)))


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


def _worker_report(peer: Peer, installed: Installed) -> WorkerReport:
    return WorkerReport(
        engine=peer.hello.engine,
        rank=peer.hello.rank,
        num_bytes=installed.num_bytes,
        seconds=installed.seconds,
        not_synced=installed.not_synced,
    )
