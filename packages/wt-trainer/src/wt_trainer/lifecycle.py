"""The life of every built-in trainer engine: connect, run rounds, and give each an outcome. Backends only move bytes."""

from __future__ import annotations

import logging
from typing import Self

from wt_common import ConfigurationError, Phase, Side, StaleSessionError, WeightTransferError
from wt_trainer.client.protocol import VLLMWeightSyncClient
from wt_trainer.following import FollowingEngine
from wt_trainer.leading import LeadingEngine
from wt_trainer.report import TransferReport
from wt_trainer.session_engine import TInfo
from wt_trainer.source import WeightSource

__all__ = ["SessionTrainerEngine"]

logger = logging.getLogger(__name__)


class SessionTrainerEngine(LeadingEngine[TInfo], FollowingEngine[TInfo]):
    """What all built-in engines share.

    `trainer_init`: the sender opens a session, tells the other trainer ranks where, hands the address to the workers through the
    client, and seals the list of who came. The other ranks connect, and all return or raise together.

    `send_weights`, on the sender: 1. pause the servers; 2. `start_weight_update`; 3. `update_weights` on a side thread, while the
    workers get metadata they do not know, then `Go`, then the backend's bytes, install them and post that;
    4. `finish_weight_update` on a side thread, in which the workers post digests and wait for 5. the verdict, which is committed
    only where these are the digests of what was sent; 6. reset caches, resume; 7. tell the other ranks the outcome. The calling
    thread watches posts, lost connections, the calls and the deadline all at once: whichever fails first ends the round. The
    other ranks run their source meanwhile, send what they are the root of, and wait for 7.

    The sender's half is in `leading.py`, that of the other ranks in `following.py`, and what both have in `session_engine.py`.

    A backend sets `needs` and implements `_init_fields`, `_transmit` and `_assist`.
    """

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

    def send_weights(self, *, weight_version: str | None = None, source: WeightSource | None = None) -> TransferReport:
        """Every worker has the source's current weights, and publishes them as `weight_version` (None is the round's number).

        Called on every trainer rank; returns or raises the same on all, except that a source which fails when the round has
        committed without it raises on its own rank, as `committed`. Tensors are read after the caller's current stream has
        reached this call, and not after it returns. Inside `client.draft()` the weights go to the speculative draft model, and no
        version is published.

        Args:
            weight_version: the label that the engines publish.
            source: what to send in this round instead of the engine's own source, such as the draft model's weights.

        Raises:
            ConfigurationError: this backend cannot update draft models, or an argument is wrong; nothing was called.
            StaleSessionError: the engine was shut down, or is of the process from which this one was forked; nothing was called.
            WeightTransferError: the round failed. `outcome` says how it left the models: `unchanged` (send again),
                `poisoned` (only a full round repairs them), `committed` (installed, but a later call failed).
        """
        if self._is_inherited:
            raise StaleSessionError(
                f"this process was forked from process {self._pid}, to which the engine belongs; send there, or call "
                "trainer_init in this process",
                side=Side.TRAINER,
                backend=self.backend,
            )
        if self._session is None and self._following is None:
            raise StaleSessionError("shut down; call trainer_init again", side=Side.TRAINER, backend=self.backend)
        if not self._in_send.acquire(blocking=False):
            raise ConfigurationError(
                "send_weights: a round is in progress on another thread; one at a time",
                side=Side.TRAINER,
                backend=self.backend,
            )
        try:
            self._round_source = self.source if source is None else source
            self._round_number += 1  # in any case: the ranks number their rounds by counting calls

            def check() -> None:
                self._check_arguments(weight_version, source)

            report = self._lead(self._session, weight_version, check) if self._session else self._take_part(check)
        finally:
            self._round_source = self.source
            self._let_go()
            self._in_send.release()
        logger.info("%s: %s", self.backend, report)
        if report.not_synced and report.not_synced not in self._told_not_synced:
            self._told_not_synced.add(report.not_synced)
            logger.warning(
                "%s: the servers still have from before %d parameters or buffers that the trainer does not send: %s",
                self.backend,
                len(report.not_synced),
                ", ".join(report.not_synced),
            )
        return report

    def _check_arguments(self, weight_version: str | None, source: WeightSource | None) -> None:
        """What `send_weights` was given can be sent. Within the round, so that all ranks hear of it."""
        if self._is_draft and not self.supports_draft_weight_update:
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

    def shutdown(self) -> None:
        """Leave the session: workers see the end and go on serving; no group, socket or thread of ours is left.

        In a process that was forked from the engine's it does nothing.
        """
        if self._is_inherited:
            return
        self._serving.let_go()
        for link in (self._session, self._following):
            if link is not None:
                link.close()
        self._session = self._following = None
        self._end_transfer(failed=True)
