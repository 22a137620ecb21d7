"""What must hold after a round of `chaos.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from chaos_faults import Fault
from chaos_servers import Connected, Seat, Seen, Weights, digest_of, weights_of

SUFFIX = "+poisoned"
GRACE_S = 1.5  # past its deadline, within which a call must have returned
GROUP_S = 2.0  # past the deadline of a round, that the trainer's own collectives take to give up


@dataclass
class Trial:
    """One round: what was sent to whom, what befell it, and what each rank got."""

    number: int
    trainer: Connected
    version: str
    sent: Weights
    fault: Fault
    results: list[dict[str, Any] | None] = field(default_factory=list)  # None: the rank is gone
    before: dict[str, Seen] = field(default_factory=dict)
    ran_as: dict[str, list[str]] = field(default_factory=dict)

    @property
    def outcomes(self) -> set[str | None]:
        """What the ranks that came back say of the round; None is an interrupt."""
        return {_outcome(result) for result in self.results if result is not None}

    @property
    def notes(self) -> list[str]:
        """All notes of reports and errors."""
        return [
            note
            for result in self.results
            if result is not None
            for note in (*result.get("notes", ()), *result.get("report", {}).get("notes", ()))
        ]


def _outcome(result: dict[str, Any]) -> str | None:
    part = result.get("report") or result.get("error") or {}
    return part.get("outcome")


def _told(result: dict[str, Any]) -> Any:
    """What must be the same on every rank."""
    if "report" in result:
        return result["report"]
    if "error" in result:
        error = result["error"]
        keys = ("message", "outcome", "side", "rank", "engine", "param", "round")
        kind = next(name for name in error["kinds"] if not name.startswith("_"))
        return {"type": kind, **{key: error.get(key) for key in keys}}
    return None


class Oracle:
    """What must hold. `wrong` collects what did not, as (round, law, text)."""

    def __init__(self) -> None:
        self.truths: dict[str, Weights] = {"default": weights_of(0)}
        self.wrong: list[tuple[int, str, str]] = []
        self.ranks_differ: list[tuple[int, str]] = []

    def known(self) -> list[Weights]:
        """All weights that were sent under a version, the latest last."""
        return list(self.truths.values())

    def fail(self, number: int, law: str, text: str) -> None:
        """A law did not hold."""
        self.wrong.append((number, law, text))
        print(f"    WRONG [{law}] {text}", flush=True)

    def is_true(self, seen: Seen) -> bool:
        """Whether its label is: a clean one is of exactly what it serves."""
        if seen.label.endswith(SUFFIX) or seen.content is None:
            return True
        weights = self.truths.get(seen.label)
        return weights is not None and digest_of(weights) == seen.content

    def calls(self, trial: Trial) -> None:
        """Every call came back in time, and all ranks say the same."""
        came_back = [(rank, result) for rank, result in enumerate(trial.results) if result is not None]
        for rank, result in came_back:
            if "late" in result:
                self.fail(trial.number, "time", f"rank {rank} did not return within {result['late']:.1f} s")
                continue
            took = result["ended"] - result["started"]
            limit = trial.trainer.timeout_s + GRACE_S + trial.fault.extra_s + trial.fault.froze_s(rank)
            if trial.fault.breaks_collectives and trial.trainer.layout == "fsdp2":
                limit += trial.trainer.timeout_s + GROUP_S
            if took > limit:
                self.fail(trial.number, "time", f"rank {rank}: {took:.2f} s, expected at most {limit:.2f} s")
        told = [_told(result) for _, result in came_back if "interrupted" not in result and "late" not in result]
        if any(each != told[0] for each in told) and not trial.fault.own_error:
            text = "; ".join(str({k: v for k, v in each.items() if k != "workers"})[:400] for each in told)
            self.ranks_differ.append((trial.number, text))
            print(f"    ranks differ: {text}", flush=True)

    def server(self, trial: Trial, seat: Seat, seen: Seen) -> None:
        """One server, some time after the round."""
        number, before = trial.number, trial.before[seat.name]
        name = f"{seat.name} {before} -> {seen}, {sorted(map(str, trial.outcomes))}, notes {trial.notes}"
        is_lost = seat.name in trial.fault.killed_seats
        if seen.is_paused != seat.user_paused and not (seen.is_paused and self._may_stay_paused(trial)):
            self.fail(number, "pause", f"expected paused {seat.user_paused}: {name}")
        is_excused = any("label not set" in note or "may still be paused, or have" in note for note in trial.notes)
        if not self.is_true(seen) and not seen.is_paused and not is_excused:
            self.fail(number, "label", f"it runs under a label that is not true: {name}")
        if (
            not self.is_true(seen)
            and seen.is_paused
            and seat.user_paused
            and not trial.fault.killed_ranks
            and not is_excused
        ):
            self.fail(number, "label", f"not labelled while the user's pause lasts: {name}")
        for label in () if trial.fault.sends_more else trial.ran_as.get(seat.name, ()):
            if not self.is_true(Seen(label, False, seen.content)) and not is_excused and not is_lost:
                self.fail(number, "label", f"it ran as {label!r} in the meantime: {name}")
        if is_lost or trial.fault.sends_more:
            return
        if seat not in trial.trainer.seats:
            if str(seen) != str(before):
                self.fail(number, "others", f"the round is none of its business: {name}")
            return
        outcomes = trial.outcomes - {None}
        if outcomes == {"unchanged"} and None not in trial.outcomes:
            if seen.content is not None and before.content is not None and seen.content != before.content:
                self.fail(number, "unchanged", f"other weights: {name}")
            if seen.label != before.label:
                self.fail(number, "unchanged", f"another label: {name}")
        if "committed" in outcomes:
            if seen.content not in (None, digest_of(trial.sent)) and not before.label.endswith(SUFFIX):
                self.fail(number, "committed", f"expected {digest_of(trial.sent)[:6]}: {name}")
            if seen.label.removesuffix(SUFFIX) != trial.version and not (seen.is_paused or is_excused):
                self.fail(number, "committed", f"expected label {trial.version}: {name}")
        # Where the sender died or was silent, the others cannot know that it had committed.
        is_known = None not in trial.outcomes and not trial.fault.killed_ranks and not trial.fault.own_error
        has_failed = outcomes and "committed" not in outcomes and is_known
        if has_failed and seen.label.removesuffix(SUFFIX) == trial.version:
            self.fail(number, "version", f"a failed round has advanced it: {name}")

    @staticmethod
    def _may_stay_paused(trial: Trial) -> bool:
        """Whether somebody who lives holds the server, or nobody is there who could resume it."""
        if trial.fault.killed_ranks or trial.fault.may_stay_paused:
            return True
        return any("paused" in note for note in trial.notes) or any(
            "paused" in result["error"]["message"] for result in trial.results if result and "error" in result
        )


def short(result: dict[str, Any] | None) -> str:
    if result is None:
        return "gone"
    for key in ("late", "interrupted"):
        if key in result:
            return key
    took = f" {result['ended'] - result['started']:.1f} s" if "ended" in result else ""
    return f"{result.get('error', {}).get('type', '')} {_outcome(result)}{took}".strip()
