"""What every trainer rank of a built-in engine has, whichever its part in a round: source, deadline, the backend's hooks."""

from __future__ import annotations

import math
import os
import threading
import weakref
from abc import abstractmethod
from typing import Any, ClassVar, TypeVar

import torch

from wt_common import ConfigurationError, Side, SourceModeError, TransportError, WeightTransferError
from wt_common.session import Go
from wt_trainer.client.protocol import VLLMWeightSyncClient
from wt_trainer.engine import TrainerInitInfo, TrainerWeightTransferEngine
from wt_trainer.follower import FollowerSession
from wt_trainer.init_infos import SessionFields
from wt_trainer.metadata import RoundMetadata
from wt_trainer.ranks import TrainerRanks
from wt_trainer.round import Round, as_wired
from wt_trainer.serving import Serving
from wt_trainer.session import Session
from wt_trainer.source import WeightSource

__all__ = ["SessionEngine", "TInfo", "as_ours"]

_MAX_METADATA = 8  # sources that alternate: a model's own, an adapter's base, a draft's

TInfo = TypeVar("TInfo", bound=TrainerInitInfo)


class SessionEngine(TrainerWeightTransferEngine[TInfo]):
    """What `leading.py` and `following.py` share; see `SessionTrainerEngine`, which is both."""

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
        self._round_number = 0
        self._epoch = 0
        self._known_metadata: list[tuple[weakref.ref[WeightSource], RoundMetadata]] = []
        self._round_source = source
        self._serving = Serving(client)
        self._in_send = threading.Lock()
        self._told_not_synced: set[tuple[str, ...]] = set()  # of which the log has warned
        self._pid = os.getpid()

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

    def _prepare_metadata(self) -> None:
        """The source fits the backend; its metadata are known, computed on all ranks here, since it may cost a collective."""
        self._check_source(self.source)
        if self.source is not None:
            self._round_metadata()

    def _round_metadata(self) -> RoundMetadata:
        """The metadata of the round's source; computed once for each source, and forgotten with it, or when others came later."""
        source = self._round_source
        if source is None:
            raise ConfigurationError(f"{type(self).__name__} sends the whole model: pass a WeightSource as source=")
        alive = [entry for entry in self._known_metadata if entry[0]() is not None]
        others = [entry for entry in alive if entry[0]() is not source]
        metadata = next((known for ref, known in alive if ref() is source), None)
        metadata = RoundMetadata.of(source, self._ranks.count, self._fields.ignore) if metadata is None else metadata
        self._known_metadata = [*others[-_MAX_METADATA + 1 :], (weakref.ref(source), metadata)]
        return metadata

    @property
    def _is_inherited(self) -> bool:
        """Whether this process was forked from the one that made the engine: sockets, groups and threads are that one's."""
        return os.getpid() != self._pid

    @property
    def _timeout_s(self) -> float:
        return min(self._fields.timeout_s, self._serving.control.timeout if self._serving.control else math.inf)

    @property
    def _is_draft(self) -> bool:
        return bool(getattr(self.client, "is_draft", False))

    @property
    def _verifies(self) -> bool:
        return self._fields.verify != "off"

    # --- what a backend implements -------------------------------------------------------------------------

    def _settings(self) -> dict[str, str]:
        """What all members of the backend's communicators must have alike."""
        return {}

    def _versions(self) -> dict[str, str]:
        """What the sender should know of this rank."""
        return {"torch": str(torch.__version__)}

    @abstractmethod
    def _init_fields(self) -> dict[str, Any]:
        """The backend's own fields of the init info."""

    def _get_ahead(self, session: Session, round_: Round, metadata: RoundMetadata) -> None:
        """On the sender, while the workers get ready: do what `_transmit` would have to do, if it needs nobody else."""

    @abstractmethod
    def _transmit(
        self, session: Session, round_: Round, metadata: RoundMetadata, casts: dict[str, str], received: list[int]
    ) -> int:
        """On the sender: send the round's bytes, cast as `casts` says; our tensors are no longer read when it returns.

        `casts` and `received` are for `Go`. Of what this rank is the root of, `round_.digests` has the digests afterwards, unless
        `verify` is "off" (`CheckedStream` sees to that).

        Returns:
            How many bytes all data senders send together.
        """

    @abstractmethod
    def _assist(self, session: FollowerSession, round_: Round, metadata: RoundMetadata, go: Go) -> None:
        """On every other rank: run the source in step with the sender, and send what this rank is the root of.

        `round_.digests` as above.
        """

    def _run_source_to(self, round_: Round, index: int) -> None:
        """After the failed `round_`: take the source's parameters up to place `index` of the metadata, unsent.

        See `RoundOutcome.run_to`. The round may have failed before the source was begun.
        """

    def _let_go(self) -> None:
        """Called at the end of `send_weights`, however it ended: hold none of the source's tensors until the next round.

        The source's iterator is closed, also where it has not come to its end.
        """

    def _end_transfer(self, *, failed: bool) -> None:
        """Called after every round, and at shutdown; `failed` says that nothing half-used may be used again.

        After a failed round on a side thread, while this rank's own thread may still be in its source.
        """


def _session_fields(init_info: TrainerInitInfo) -> SessionFields:
    if not isinstance(init_info, SessionFields):
        raise ConfigurationError(f"{type(init_info).__name__}: a built-in engine takes its own init info class")
    return init_info


def as_ours(exc: BaseException) -> WeightTransferError:
    """`exc` if it is ours, else ours for it: what a user's source or client raised is reported, and chained.

    Of a subclass of ours it is the class that crosses the wire, so that all ranks raise the same.
    """
    if isinstance(exc, WeightTransferError):
        return as_wired(exc)
    return TransportError(f"the trainer failed in the round ({type(exc).__name__}: {exc})", side=Side.TRAINER)
