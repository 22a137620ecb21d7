"""The other trainer ranks' half of a built-in engine: they run their source in step, send their part, and hear how it ended."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from wt_common import SCHEMA, Outcome, Side, WeightTransferError
from wt_common.errors import error_from_wire, error_to_wire
from wt_common.session import Hello, Joined, RoundOutcome, Sent
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
        failure: Exception | None = None
        try:
            self._prepare_metadata()
        except Exception as exc:
            failure = exc
        where = self._ranks.share(None)  # in any case: the sender would wait for it
        if "error" in where:
            raise error_from_wire(where["error"])
        try:
            outcome = self._take_part_in_init(where, self._hello(failure))
        finally:
            if failure is not None:
                raise failure  # all others raise what the hello says of it
        if outcome.error is not None:
            raise error_from_wire(outcome.error)

    def _take_part_in_init(self, where: dict[str, Any], hello: Hello) -> RoundOutcome:
        """This rank is connected to the sender, and has heard how the init ended."""
        connection = connect(
            str(where.get("address", self._fields.master_address)),
            int(where.get("port", self._fields.master_port or 0)),
            secret=str(where.get("secret", self._fields.session_secret)),
            session=where.get("session"),
            hello=hello,
            timeout_s=self._timeout_s,
        )
        self._following = FollowerSession(connection)
        weakref.finalize(self, self._following.close)
        with self._following.running(0, self._timeout_s) as round_:
            return self._following.outcome(round_)

    def _hello(self, failure: Exception | None) -> Hello:
        """Who this rank is, and why it cannot take part, if so."""
        error = None if failure is None else error_to_wire(as_ours(failure).fill(side=Side.TRAINER, rank=self.rank))
        return Hello(
            role=Side.TRAINER.value,
            engine="",
            rank=self.rank,
            size=self._ranks.count,
            schema=list(SCHEMA),
            device="",
            hostname=socket.gethostname(),
            pid=os.getpid(),
            versions=self._versions() if failure is None else {},
            settings=self._settings() if failure is None else {},
            failure=error,
        )

    def _take_part(self, check: Callable[[], None]) -> TransferReport:
        """The round, on every other rank; `check` raises where an argument is wrong."""
        session = self._following
        assert session is not None  # send_weights has checked
        caught: BaseException | None = None
        with session.running(self._round_number, self._timeout_s) as round_:
            round_.watch(lambda: session.report(round_))
            try:
                check()
                metadata = self._round_metadata()
                round_.check()  # the sender may be further, and have failed
                session.send(Joined(round=round_.number, metadata_digest=metadata.digest))
                self._assist(session, round_, metadata, session.go(round_, metadata))
                if self.rank in metadata.roots:
                    digests = [round_.digests[place] for place in sorted(round_.digests)]
                    session.send(Sent(round=round_.number, digests=digests))
                self._end_transfer(failed=False)
            except BaseException as exc:
                caught = exc
                round_.fail(as_ours(exc).fill(side=Side.TRAINER, rank=self.rank))
                self._end_transfer(failed=True)
            try:
                outcome = session.outcome(round_)
            except WeightTransferError as error:
                self._raise(error, caught)
            self._round_number = max(self._round_number, outcome.number)
            if outcome.error is not None:
                self._end_transfer(failed=True)
                self._run_source_to(round_, outcome.run_to)
                self._raise(error_from_wire(outcome.error), caught)
        if caught is not None:
            # The others did not need what this rank had still to yield, and may have returned: they cannot raise it.
            own = as_ours(caught).fill(side=Side.TRAINER, rank=self.rank)
            own.outcome = Outcome.COMMITTED
            self._raise(own, caught)
        return TransferReport.from_dict(outcome.report or {})

    @staticmethod
    def _raise(error: WeightTransferError, caught: BaseException | None) -> NoReturn:
        """Raise `error`, as all ranks do, or the interrupt that this rank has caught."""
        if caught is None or caught is error:
            raise error
        if not isinstance(caught, Exception):
            raise caught
        raise error from caught
