"""The other trainer ranks' half of a built-in engine: they run their source in step, send their part, and hear how it ended."""

from __future__ import annotations

import os
import socket
import weakref
from contextlib import suppress

from wt_common import SCHEMA, Outcome, PlanError, Side, WeightTransferError
from wt_common.errors import error_from_wire, error_to_wire
from wt_common.session import Failed, Hello, Joined, Sent
from wt_trainer.client.protocol import VLLMWeightSyncClient
from wt_trainer.connection import connect
from wt_trainer.follower import FollowerSession
from wt_trainer.report import TransferReport
from wt_trainer.session_engine import SessionEngine, TInfo, as_ours
from wt_trainer.source import WeightSource

__all__ = ["FollowingEngine"]


class FollowingEngine(SessionEngine[TInfo]):
    """What a trainer rank above 0 does: `_follow` in the init, `_take_part` in a round."""

    def __init__(self, init_info: TInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None) -> None:
        super().__init__(init_info, client=client, source=source)
        self._following: FollowerSession | None = None

    def _follow(self) -> None:
        """On every other rank: connected to the sender, which has connected the workers."""
        fields = self._fields
        failure: Exception | None = None
        try:
            self._prepare_metadata()
        except Exception as exc:
            failure = exc
        where = self._ranks.share(None)  # in any case: the sender would wait for it
        if "error" in where:
            raise error_from_wire(where["error"])
        if failure is not None:
            raise failure
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
            versions=self._versions(),
            settings=self._settings(),
        )

    def _take_part(self) -> TransferReport:
        """The round, on every other rank."""
        session = self._following
        assert session is not None  # send_weights has checked
        own: tuple[WeightTransferError, BaseException] | None = None  # what this rank's source raised
        with session.running(self._round_number, self._timeout_s) as round_:
            try:
                metadata = self._round_metadata()
                session.send(Joined(round=round_.number, metadata_digest=metadata.digest))
                self._assist(session, round_, metadata, session.go(round_, metadata))
                if self.rank in metadata.roots:
                    digests = [round_.digests[place] for place in sorted(round_.digests)]
                    session.send(Sent(round=round_.number, digests=digests))
                self._end_transfer(failed=False)
            except BaseException as exc:
                error = as_ours(exc).fill(side=Side.TRAINER, rank=self.rank)
                ours = round_.failure is None or round_.failure is not error  # else the sender knows, or is gone
                stopped = round_.failure is None and (isinstance(error, PlanError) or error is not exc)
                own = (error, exc) if stopped else None
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
        if own is not None:
            # The others did not need what this rank had still to yield, and may have returned: they cannot raise it.
            error, cause = own
            error.outcome = Outcome.COMMITTED
            raise error from (None if error is cause else cause)
        return TransferReport.from_dict(outcome.report or {})
