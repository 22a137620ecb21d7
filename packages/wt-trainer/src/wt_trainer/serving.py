"""What the sender does to the servers around a round: hold them, mark them, drop their caches, where its client can."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from wt_common import StaleSessionError, WeightTransferError
from wt_common.session import Held
from wt_trainer.client.protocol import ServingControl, VLLMWeightSyncClient
from wt_trainer.round import Round
from wt_trainer.session import Session
from wt_trainer.threads import run_into

__all__ = ["POISONED_SUFFIX", "Serving"]

POISONED_SUFFIX = "+poisoned"
"""Behind the old version in the label of an engine whose model a failed round left half-written."""

_LABEL_S = 0.2  # for the servers to take the label of a poisoned model, of the second in which a failed round raises

logger = logging.getLogger(__name__)


class Serving:
    """The servers behind a client. One with `ServingControl` can be asked and told; of another one we only say so, once."""

    def __init__(self, client: VLLMWeightSyncClient) -> None:
        self.control = client if isinstance(client, ServingControl) else None
        self._client = client
        self._was_warned = False
        self._left_held = False  # by an earlier sender, which is gone
        self._may_sleep = True
        self._is_told = False

    def bounded(self, seconds: float) -> AbstractContextManager[None]:
        """Within it, no call lasts longer than what is then left of `seconds`."""
        return self.control.bounded(seconds) if self.control else nullcontext()

    def take_over(self, session: Session) -> None:
        """The state in which earlier senders left the servers is known, and those with a half-written model say so."""
        self._left_held = self._is_told = any(peer.hello.held for peer in session.workers)
        self._may_sleep = any(peer.hello.can_sleep for peer in session.workers)
        if any(peer.hello.poisoned for peer in session.workers):
            self.mark_poisoned()  # the trainer that should have done it may be dead

    @contextmanager
    def held(self, session: Session, round_: Round) -> Iterator[None]:
        """Within it, no server generates.

        The workers know that it is held, and tell the next sender if this one dies. After a round that succeeds, servers that an
        earlier sender has left paused are resumed as well.
        """
        if self.control is None:
            if not self._was_warned:
                logger.warning(
                    "%r cannot be asked whether its servers generate: pause them around send_weights()", self._client
                )
                self._was_warned = True
            yield
            return
        hold = ExitStack()
        to_resume: list[str] = []
        try:
            with hold:
                with round_.timed("pause"):
                    pausing = self.control.paused(
                        before=lambda: self._tell(session, round_, held=True), may_sleep=self._may_sleep
                    )
                    to_resume = hold.enter_context(pausing)
                try:
                    yield
                except BaseException:
                    if _all_taken_over(session):
                        to_resume.clear()  # the servers are another trainer's now, which may be in the middle of a round
                    raise
                round_.phase = "resume"
                started = time.monotonic()
            if self._left_held:
                self.control.resume()
                self._left_held = False
            round_.seconds["resume"] = time.monotonic() - started
        finally:
            if self._is_told and not to_resume and not self._left_held:
                self._tell(session, round_, held=False)

    def _tell(self, session: Session, round_: Round, *, held: bool) -> None:
        """The workers know whether the sender holds their server."""
        self._is_told = held
        session.notify(session.workers, Held(round=round_.number, held=held))

    def mark_poisoned(self, session: Session | None = None) -> str:
        """The servers publish `<old>+poisoned`, where they can; returns why not, empty if they do."""
        if session is not None and _all_taken_over(session):
            return "another trainer has taken the servers over"
        if self.control is None:
            return "the client cannot set it"
        try:
            with self.control.bounded(_LABEL_S):
                self.control.mark(POISONED_SUFFIX)
        except Exception as exc:
            logger.error("the models are poisoned, and the label could not be set: %s", exc)  # noqa: TRY400
            return exc.message if isinstance(exc, WeightTransferError) else str(exc)
        return ""

    def resetting_caches(self, round_: Round) -> Callable[[], list[str]]:
        """Begin to drop what the servers have computed with older weights, which must be installed by now.

        Returns:
            What waits for it: notes say what could not be dropped. Raises what the client does; the round itself does not fail.
        """
        if self.control is None:
            return list
        reset, notes = self.control.reset_caches, Future[list[str]]()
        call = round_.run("reset_caches", lambda: run_into(notes, reset))

        def wait() -> list[str]:
            call.join()
            return notes.result()

        return wait


def _all_taken_over(session: Session) -> bool:
    """Whether every worker has left for a later sender."""
    workers = session.workers
    return bool(workers) and all(isinstance(peer.lost, StaleSessionError) for peer in workers)
