"""Closes the updates that a failed round left open in vLLM's own bookkeeping.

vLLM 0.26 to 0.33 keeps one flag per worker rank: set by a `start` that returned, cleared by an `update` that raised and
by a `finish` that returned. A rank whose `finish` raised stays open for good, and the next `start` is refused. With several
ranks, only the last one of an engine raises (see the worker's lifecycle), so after a failed round its flag differs from the
others':

* failed in update: the last rank is closed, the others open. `finish` closes them; the last rank's refusal is expected.
* failed in finish: the last rank is open, the others closed. `start` opens those (the last rank's refusal is expected), then
  `finish` closes all.

* failed between the two: all are open, and the last rank fails one more `finish`, which leaves the second case.

In all, the last rank alone raises, so that the executor's replies stay in step. A call that the other ranks refuse would shift
them for good; it is never made.

A worker fails a finish without a round, since it may be the late call of a trainer that was replaced. So one that repairs is
announced on the session.
"""

from __future__ import annotations

from wt_common import AgreementError, Side
from wt_common.session import AskState, State
from wt_trainer.client.protocol import VLLMWeightSyncClient
from wt_trainer.round import Round
from wt_trainer.session import Session

__all__ = ["close_left_open"]

_MAX_REPAIRS = 2  # a rank that was between update and finish when the round failed fails one more finish


def close_left_open(session: Session, round_: Round, client: VLLMWeightSyncClient) -> None:
    """No worker rank has an update open.

    Raises:
        AgreementError: an engine of several ranks cannot be repaired together with the other engines behind the client, or did
            not follow; the text names it. It must be restarted.
    """
    for _ in range(_MAX_REPAIRS):
        flags = _open_flags(session, round_)
        calls = _repair_calls(flags)
        if not calls:
            return
        for name in calls:
            if name == "finish_weight_update":
                _ask(session, round_, repairs=True)
            round_.run(name, getattr(client, name), may_fail=True).join()
    still_open = [engine for engine, ranks in _open_flags(session, round_).items() if any(ranks)]
    if still_open:
        raise _restart_error(still_open, "an update of an earlier round could not be closed")


def _open_flags(session: Session, round_: Round) -> dict[str, list[bool]]:
    """Per engine, whether each rank has an update open, as the ranks themselves know."""
    states = _ask(session, round_)
    flags: dict[str, list[bool]] = {}
    for peer in session.workers:
        flags.setdefault(peer.hello.engine, []).append(states[peer.key].open)
    return flags


def _ask(session: Session, round_: Round, *, repairs: bool = False) -> dict[tuple[str, str, int], State]:
    """Every worker's state; with `repairs`, all of them know that the next finish call without a round is ours."""
    workers = session.workers
    with round_.changed:
        round_.posts.pop(State, None)
    session.send(workers, AskState(round=round_.number, repairs=repairs))
    return round_.collect(State, workers)


def _repair_calls(flags: dict[str, list[bool]]) -> list[str]:
    """The calls that close every engine's update. All engines behind a client get the same calls."""
    needed = {engine: _calls_for(ranks) for engine, ranks in flags.items()}
    different = {tuple(calls) for calls in needed.values()}
    if len(different) == 1:
        return list(different.pop())
    # An engine of one rank may be given a call that it refuses; one of several may not.
    several = [engine for engine, ranks in flags.items() if len(ranks) > 1]
    if several:
        raise _restart_error(several, "the engines behind this client need different repairs after a failed round")
    return ["finish_weight_update"]


def _calls_for(ranks: list[bool]) -> list[str]:
    if not any(ranks):
        return []
    if ranks[0]:
        return ["finish_weight_update"]
    return ["start_weight_update", "finish_weight_update"]


def _restart_error(engines: list[str], what: str) -> AgreementError:
    return AgreementError(
        f"engine {', '.join(engines)}: {what}; restart it, then call trainer_init again",
        side=Side.TRAINER,
        phase="start",
        engine=engines[0],
    )
