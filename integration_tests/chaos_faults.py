"""What `chaos.py` does to a round. Each kind chooses its own details from the driver's seed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import requests
from chaos_proxy import ACTIONS, CALLS, Rule
from chaos_servers import Connected, all_of
from harness import HostError, unreachable_init_info

if TYPE_CHECKING:
    from chaos import Driver

NUM_PARAMETERS = 21  # of the model
PART = ("model.norm.weight",)


def _nothing(*_: Any) -> None:
    """It takes care of itself."""


@dataclass
class Fault:
    """One fault, and what it excuses."""

    kind: str
    text: str = ""
    pause_s: float = 0.0  # of the source, before each parameter
    at_s: float = 0.0  # into the round
    strike: Callable[[list[threading.Event]], None] = _nothing  # is given an event for each rank that has returned
    after: Callable[[], None] = _nothing  # when all ranks have returned, before anything is looked at
    clean: Callable[[], None] = _nothing  # when all was looked at, before the next round
    source: tuple[str, int, float] | None = None
    source_ranks: tuple[int, ...] = ()
    part: tuple[str, ...] = ()
    extra_s: float = 0.0  # that a call may take longer: nobody can interrupt a source
    killed_ranks: set[int] = field(default_factory=set)
    killed_seats: set[str] = field(default_factory=set)
    dead_seats: set[str] = field(default_factory=set)
    sends_more: bool = False  # `after` sends a round of its own
    must_connect: bool = False
    may_stay_paused: bool = False
    breaks_collectives: bool = False  # of the source: a rank does not come, or leaves
    own_error: bool = False  # a rank may have an error of its own: after the commit, or since the sender says nothing
    struck: float = 0.0
    frozen: dict[int, float] = field(default_factory=dict)

    def __str__(self) -> str:
        pace = f" pace {self.pause_s:g}" if self.pause_s else ""
        moment = f" at {self.at_s:.2f}" if self.at_s else ""
        return f"{self.kind} {self.text}{moment}{pace}".strip()

    def run(self, returned: list[threading.Event]) -> None:
        """Let it happen at its moment."""
        time.sleep(self.at_s)
        self.struck = time.monotonic()
        self.strike(returned)

    def froze_s(self, rank: int) -> float:
        """How long this rank was stopped."""
        return self.frozen.get(rank, 0.0)


@dataclass(frozen=True)
class Kind:
    """A kind of fault, and how often it is chosen."""

    name: str
    weight: float
    make: Callable[[Driver, Connected], Fault]


def _timed(kind: str, driver: Driver, text: str = "") -> Fault:
    """A fault at a random moment of a round of a random pace."""
    choose = driver.choose
    pause_s = choose.choice((0.0, 0.005, 0.02, 0.05, 0.05))
    return Fault(kind, text, pause_s, choose.uniform(0, 1.05 * (NUM_PARAMETERS * pause_s + 0.06)))


def _plain(driver: Driver, trainer: Connected) -> Fault:
    return Fault("none", pause_s=driver.choose.choice((0.0, 0.005)))


def _part(driver: Driver, trainer: Connected) -> Fault:
    labels = {seat.see().label for seat in trainer.seats}
    if trainer.layout != "whole" or len(labels) > 1:
        return _plain(driver, trainer)
    return Fault("part", part=PART)


def _poison_part(driver: Driver, trainer: Connected) -> Fault:
    """A part after a round that failed half-way: it commits, and clears nothing."""
    if trainer.layout != "whole":
        return _source(driver, trainer)
    at = driver.choose.randrange(3, NUM_PARAMETERS)
    labels = {seat.see().label for seat in trainer.seats}
    if len(labels) > 1:
        return _source(driver, trainer)
    before = driver.oracle.truths[labels.pop()]
    fault = Fault("poison, part", f"at {at}", source=("end", at, 0), source_ranks=tuple(range(len(trainer.ranks))))
    fault.sends_more = True

    def after() -> None:
        version = f"part{driver.number}"
        driver.oracle.truths[version] = tuple((name, driver.number if name in PART else seed) for name, seed in before)
        for rank in trainer.ranks:
            rank.call("disturb", pause_s=0, fault=None)
        results = all_of(
            *(lambda r=r: r.call("try_send", weight_version=version, names=list(PART)) for r in trainer.ranks)
        )
        told = results[0].get("report", {}).get("version")
        touched = any(seat.see().label.endswith("+poisoned") for seat in trainer.seats)
        if "report" in results[0] and told != version + "+poisoned" * touched:
            driver.oracle.fail(driver.number, "part", f"the report's version is {told}, poisoned is {touched}")

    fault.after = after
    return fault


def _source(driver: Driver, trainer: Connected) -> Fault:
    choose = driver.choose
    what = choose.choice(("raise", "end", "stall", "stall long"))
    at = choose.randrange(NUM_PARAMETERS)
    ranks = tuple(range(len(trainer.ranks)))
    if choose.random() < 0.6:
        ranks = (choose.choice(ranks),)
    seconds = {"stall": choose.uniform(0.1, 1.0), "stall long": trainer.timeout_s + choose.uniform(0.2, 1.5)}.get(
        what, 0
    )
    fault = Fault("source", f"{what} at {at} on {ranks}", choose.choice((0.0, 0.005)), own_error=True)
    fault.source, fault.source_ranks = (what.partition(" ")[0], at, seconds), ranks
    fault.kind = f"source {what}"
    fault.breaks_collectives = len(ranks) < len(trainer.ranks)
    if what == "stall long":
        fault.extra_s = seconds - trainer.timeout_s + NUM_PARAMETERS * 0.01 + 0.5
    return fault


def _interrupt(driver: Driver, trainer: Connected) -> Fault:
    choose = driver.choose
    rank, times = choose.randrange(len(trainer.ranks)), choose.choice((1, 1, 2, 3))
    gaps = [choose.choice((0.0, 0.01, 0.1, 0.3)) for _ in range(times)]
    fault = _timed("interrupt", driver, f"rank {rank}, {times} times {gaps}")

    def strike(_: list[threading.Event]) -> None:
        for gap in gaps:
            trainer.ranks[rank].signal(signal.SIGINT)
            time.sleep(gap)

    fault.strike = strike
    fault.breaks_collectives = True
    return fault


def _kill_trainer(driver: Driver, trainer: Connected) -> Fault:
    rank = driver.choose.randrange(len(trainer.ranks))
    fault = _timed(f"kill trainer {'sender' if rank == 0 else 'other'}", driver, f"rank {rank}")
    fault.strike = lambda _: trainer.ranks[rank].kill()
    fault.killed_ranks = {rank} if rank == 0 else set()
    fault.must_connect = fault.breaks_collectives = True
    return fault


def _stop_trainer(driver: Driver, trainer: Connected) -> Fault:
    choose = driver.choose
    rank, is_long = choose.randrange(len(trainer.ranks)), choose.random() < 0.6
    fault = _timed(
        f"stop trainer {'sender' if rank == 0 else 'other'}{' long' if is_long else ''}", driver, f"rank {rank}"
    )
    seconds = trainer.timeout_s + 1 if is_long else choose.uniform(0.05, 1.0)

    def strike(returned: list[threading.Event]) -> None:
        stopped = time.monotonic()
        trainer.ranks[rank].signal(signal.SIGSTOP)
        others = [event for number, event in enumerate(returned) if number != rank]
        if is_long and others:
            for event in others:
                event.wait(trainer.timeout_s + 5)
        else:
            time.sleep(seconds)
        fault.frozen[rank] = time.monotonic() - stopped
        trainer.ranks[rank].signal(signal.SIGCONT)

    fault.strike = strike
    fault.must_connect = fault.breaks_collectives = is_long
    fault.own_error = is_long and rank == 0  # the others cannot know how it ended
    return fault


def _kill_server(driver: Driver, trainer: Connected) -> Fault:
    seat = driver.choose.choice(trainer.seats)
    victim = (
        driver.choose.choice(("server", "VLLM::EngineCore", "VLLM::Worker")) if driver.server == "vllm" else "server"
    )
    fault = _timed(f"kill {victim}", driver, seat.name)

    def strike(_: list[threading.Event]) -> None:
        found = seat.server.processes(victim) if victim != "server" else []
        if not found:
            seat.server.signal(signal.SIGKILL)
        else:
            os.kill(found[-1], signal.SIGKILL)

    fault.strike = strike
    fault.clean = seat.restart
    fault.killed_seats = fault.dead_seats = {seat.name}
    fault.must_connect = True
    return fault


def _stop_server(driver: Driver, trainer: Connected) -> Fault:
    choose = driver.choose
    seat, is_long = choose.choice(trainer.seats), choose.random() < 0.5
    fault = _timed(f"stop server{' long' if is_long else ''}", driver, seat.name)
    seconds = choose.uniform(0.05, 1.0)

    def strike(returned: list[threading.Event]) -> None:
        seat.server.signal(signal.SIGSTOP)
        if not is_long:
            time.sleep(seconds)
        else:
            for event in returned:
                event.wait(trainer.timeout_s + 5)
        seat.server.signal(signal.SIGCONT)

    fault.strike = strike
    return fault


def _replace(driver: Driver, trainer: Connected) -> Fault:
    """A second trainer inits in mid-round; the first one's next round fails and touches nothing."""
    choose = driver.choose
    fault = _timed("replace", driver)
    then_kill, seconds = choose.random() < 0.4, []

    def strike(_: list[threading.Event]) -> None:
        try:
            seconds.append(driver.connect(1, trainer.seats, "whole"))
        except HostError as exc:
            driver.oracle.fail(driver.number, "init", f"a second trainer could not connect in mid-round: {exc}")

    def after() -> None:
        if not seconds:
            fault.must_connect = True
            return
        if len(trainer.ranks) == 1 and not then_kill:
            before = {seat.name: seat.see() for seat in trainer.seats}
            result = trainer.ranks[0].call("try_send", weight_version="stale")
            kind = result.get("error", {}).get("type")
            if kind != "StaleSessionError":
                driver.oracle.fail(driver.number, "stale", f"a replaced trainer's round: {result}")
            after = {seat.name: seat.see() for seat in trainer.seats}
            if {n: s.label for n, s in before.items()} != {n: s.label for n, s in after.items()}:
                driver.oracle.fail(driver.number, "stale", f"it has changed labels: {before} -> {after}")
        driver.dismiss(trainer)
        driver.trainer = seconds[0]

    fault.strike, fault.after = strike, after
    return fault


def _foreign(driver: Driver, trainer: Connected) -> Fault:
    """Calls that are not the trainer's."""
    choose = driver.choose
    seat = choose.choice(trainer.seats)
    call = choose.choice(
        ("finish", "start", "shutdown", "unreachable init") if driver.tp == 1 else ("shutdown", "unreachable init")
    )
    fault = _timed(f"foreign {call}", driver, seat.name)
    path, body = {
        "finish": (CALLS["finish"], {"weight_version": f"foreign{driver.number}"}),
        "start": (CALLS["start"], None),
        "shutdown": ("/shutdown_weight_transfer_engine", None),
        "unreachable init": (CALLS["init"], {"init_info": unreachable_init_info()}),
    }[call]

    def strike(_: list[threading.Event]) -> None:
        with suppress(requests.RequestException):
            requests.post(seat.server.base_url + path, json=body, timeout=30)

    fault.strike = strike
    return fault


def _lost_call(driver: Driver, trainer: Connected, action: str = "", call: str = "") -> Fault:
    """A call to one server is lost, late, refused or repeated."""
    choose = driver.choose
    seat = choose.choice(trainer.seats)
    call = call or choose.choice([each for each in CALLS if each != "init"])
    rule = _rule(driver, trainer, call, action)
    fault = Fault(f"{rule.action} {call}", f"{seat.name} x{rule.count} {rule.seconds:.2f} s")
    fault.pause_s = choose.choice((0.0, 0.01))
    if choose.random() < 0.75 and call in ("resume", "label", "weight_info"):
        # What happens to a server after a failed round.
        fault.source, fault.source_ranks = (
            ("end", choose.randrange(4, NUM_PARAMETERS), 0),
            tuple(range(len(trainer.ranks))),
        )
        fault.text += f", source ends at {fault.source[1]}"
    seat.proxy.set(rule)
    fault.struck = time.monotonic()
    fault.after = seat.proxy.lift
    return fault


def _rule(driver: Driver, trainer: Connected, call: str, action: str = "") -> Rule:
    choose = driver.choose
    shifts = driver.tp > 1 and call in ("start", "update", "finish")  # vLLM's replies, for good
    actions = [each for each in ACTIONS if not (shifts and each == "repeat")]
    action = action or choose.choice(actions)
    seconds = choose.choice((choose.uniform(0.05, 1.0), choose.uniform(1, trainer.timeout_s + 1)))
    return Rule(call, action, choose.choice((1, 1, 2, 1000)), seconds if action.startswith("delay") else 0.0)


def _lost_init(driver: Driver, trainer: Connected) -> Fault:
    """After a plain round, an init call that is lost, late, refused or repeated; the next one works."""
    seat = driver.choose.choice(trainer.seats)
    rule = _rule(driver, trainer, "init")
    fault = Fault(f"{rule.action} init", f"{seat.name} x{rule.count} {rule.seconds:.2f} s")

    def after() -> None:
        seat.proxy.set(rule)
        started = time.monotonic()
        with suppress(HostError):
            driver.connect(len(trainer.ranks), trainer.seats, trainer.layout, trainer.ranks)
        took = time.monotonic() - started
        if took > trainer.timeout_s + 2.5:  # two ranks agree, too
            driver.oracle.fail(driver.number, "time", f"an init took {took:.1f} s under {rule}")
        seat.proxy.lift()

    fault.after = after
    fault.must_connect = True
    return fault


KINDS = (
    Kind("none", 1.0, _plain),
    Kind("part", 0.5, _part),
    Kind("poison part", 0.7, _poison_part),
    Kind("source", 2.0, _source),
    Kind("interrupt", 2.5, _interrupt),
    Kind("kill trainer", 1.5, _kill_trainer),
    Kind("stop trainer", 1.5, _stop_trainer),
    Kind("kill server", 0.6, _kill_server),
    Kind("stop server", 1.5, _stop_server),
    Kind("replace", 1.2, _replace),
    Kind("foreign", 1.5, _foreign),
    Kind("lost call", 5.0, _lost_call),
    Kind("lost init", 0.8, _lost_init),
)


def chosen(names: tuple[str, ...]) -> list[Kind]:
    """The kinds whose names begin with one of `names`, and what `action call` names of proxies; all, if there are none."""
    found = [kind for kind in KINDS if not names or kind.name.startswith(names)]
    for name in names:
        action, _, call = name.partition(" ")
        if action in ACTIONS and call in CALLS:
            found.append(Kind(name, 1.0, partial(_lost_call, action=action, call=call)))
    if not found:
        raise ValueError(f"expected the beginning of one of {[kind.name for kind in KINDS]}, got {names}")
    return found
