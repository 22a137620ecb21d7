"""A seeded driver that kills, stops, interrupts and replaces, loses calls, and says after every round whether all agrees.

    python integration_tests/chaos.py --rounds 300 --seed 1 --server embedded
    python integration_tests/chaos.py --rounds 30 --seed 1 --server vllm --tp 2

Trainer ranks and servers are processes. Faults come from outside: signals, proxies in front of the servers, calls by others; and
from the trainer's own source. What must hold after each round is `Oracle`. One line is printed for each round, and a summary; the
exit status is 1 where something did not hold.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import chaos_faults
import models
import requests
import torch
from chaos_oracle import GRACE_S, GROUP_S, Oracle, Trial, short
from chaos_servers import (
    MODEL,
    ChaosTrainerHost,
    Connected,
    Seat,
    Seen,
    Watch,
    Weights,
    all_of,
    digest_of,
    weights_of,
)
from harness import EmbeddedServer, HostError, VLLMServer, free_port, together

SETTLE_S = 5.0  # within which a server must be labelled and run, once it answers
NUM_SPARES = 3  # trainer processes that have imported everything and wait for their part
MAX_ATTEMPTS = 3  # of the round that must work after a fault: one to hear of it, one to connect again, one to spare


class Driver:
    """Runs rounds on its servers, each with a fault that its seed chooses."""

    def __init__(
        self,
        directory: Path,
        seed: int,
        *,
        server: str = "embedded",
        tp: int = 1,
        num_seats: int = 2,
        timeout_s: float = 5.0,
        kinds: tuple[str, ...] = (),
    ) -> None:
        self.directory = directory
        self.choose = random.Random(seed)
        self.server, self.tp, self.timeout_s = server, tp, timeout_s
        self.oracle = Oracle()
        self.faults = chaos_faults.chosen(kinds)
        self.number = 0
        self.is_broken = False  # the trainer's own process group, by a fault: only new processes have another
        self.trainer: Connected | None = None
        self.kinds: set[str] = set()
        self.measured: dict[tuple[str, str], list[float]] = {}
        self._started: list[ChaosTrainerHost] = []
        self._spares = [self._start_trainer() for _ in range(NUM_SPARES)]
        checkpoint = directory / "checkpoint"
        models.save_checkpoint(MODEL, 0, checkpoint)
        self._checkpoint = checkpoint
        self.seats = [Seat("AB"[index], self._start_server, self.oracle.known) for index in range(num_seats)]
        for seat in self.seats:
            seat.server.wait_ready()

    def _start_trainer(self) -> ChaosTrainerHost:
        self._started.append(ChaosTrainerHost(self.directory))
        return self._started[-1]

    def _start_server(self) -> EmbeddedServer | VLLMServer:
        if self.server == "embedded":
            return EmbeddedServer(self._checkpoint, self.directory)
        return VLLMServer(self._checkpoint, self.directory, tensor_parallel_size=self.tp)

    # --- trainers ------------------------------------------------------------------------------------------

    def connect(
        self,
        num_ranks: int,
        seats: list[Seat],
        layout: str,
        ranks: list[ChaosTrainerHost] | None = None,
        info: dict[str, Any] | None = None,
    ) -> Connected:
        """A trainer that is connected, of new processes unless `ranks` are given. Raises HostError where it cannot connect."""
        hosts = ranks or [self._take() for _ in range(num_ranks)]
        is_packed = self.choose.random() < 0.3
        options = {"packed": is_packed, "check_cover": False, **(info or {})}
        trainer = Connected(hosts, seats, layout, self.timeout_s)
        if ranks is None:
            config = {
                "layout": layout,
                "model": MODEL,
                "num_ranks": num_ranks,
                "workers": [],
                "base_urls": [seat.base_url for seat in seats],
                "client_timeout_s": self.timeout_s + 3,
                "info": {"timeout_s": self.timeout_s, **options},
                **({"group_port": free_port(), "group_timeout_s": self.timeout_s + GROUP_S} if num_ranks > 1 else {}),
            }
            all_of(*(lambda r=r, h=h: h.call("configure", config={**config, "rank": r}) for r, h in enumerate(hosts)))
        results = all_of(*(lambda h=h: h.call("try_init", **options) for h in hosts))
        for result in results:
            took = result["ended"] - result["started"]
            if took > self.timeout_s + GRACE_S:
                self.oracle.fail(self.number, "time", f"an init took {took:.1f} s: {short(result)}")
            if "report" not in result:
                raise HostError(f"init: {result}", result.get("error"))
        return trainer

    def dismiss(self, trainer: Connected) -> None:
        """It is not used any more: it dies, or is a trainer of nothing until it becomes a part of another one."""
        for rank in trainer.ranks:
            if self.choose.random() < 0.15 or rank.process.poll() is not None:
                rank.kill()
            else:
                self._spares.append(rank)

    def _take(self) -> ChaosTrainerHost:
        self._spares = [spare for spare in self._spares if spare.process.poll() is None]
        while len(self._spares) < NUM_SPARES:
            self._spares.append(self._start_trainer())
        return self._spares.pop(0)

    def connect_anew(self) -> None:
        """Another trainer, of a kind that the seed chooses, takes over from the one that there is."""
        old, self.trainer = self.trainer, None
        if old is not None:
            self.dismiss(old)
        seats = list(self.seats) if self.choose.random() < 0.5 else [self.choose.choice(self.seats)]
        num_ranks = self.choose.choice((1, 2, 2))
        layout = self.choose.choice(("whole", "pipeline", "fsdp2")) if num_ranks > 1 else "whole"
        self.trainer = self.connect(num_ranks, seats, layout)

    # --- a round -------------------------------------------------------------------------------------------

    def round(self) -> Trial:
        """One round with a fault, what must hold after it, and then one that must work."""
        self.number += 1
        if self.trainer is None or self.choose.random() < 0.2:
            self.connect_anew()
            self.repair(None)
        trainer = self.trainer
        assert trainer is not None
        for seat in trainer.seats:
            if self.choose.random() < 0.06:
                assert requests.post(f"{seat.server.base_url}/pause?mode=keep", timeout=20).ok
                seat.user_paused = True
        fault = self.choose.choices(self.faults, [each.weight for each in self.faults])[0].make(self, trainer)
        sent, version = weights_of(self.number), f"r{self.number}"
        if fault.part:
            (served,) = {self._truth(seat) for seat in trainer.seats}
            sent = tuple((name, self.number if name in fault.part else old) for name, old in served)
        trial = Trial(self.number, trainer, version, sent, fault)
        trial.before = {seat.name: seat.see() for seat in self.seats}
        self.oracle.truths[version] = sent
        print(f"{self.number:4} {trainer} | {fault}", end="", flush=True)
        all_of(*(lambda rank=rank: rank.call("set_weights", seed=self.number) for rank in trainer.ranks))
        for number, rank in enumerate(trainer.ranks):
            rank.call("disturb", pause_s=fault.pause_s, fault=fault.source if number in fault.source_ranks else None)
        with Watch(trainer.seats) as watch:
            trial.results = self._send(trial)
            fault.after()
            seen = self._settled(trial)
        trial.ran_as = watch.ran_as
        self._measure(trial)
        said = "/".join(sorted({short(result) for result in trial.results}))
        print(f" | {said} | {', '.join(f'{k} {v}' for k, v in seen.items())}", end="", flush=True)
        print(flush=True)
        started = time.monotonic()
        self.oracle.calls(trial)
        for seat in self.seats:
            if seat.name in seen:
                self.oracle.server(trial, seat, seen[seat.name])
        fault.clean()
        attempts = self.repair(trial)
        print(f"     repaired in {attempts} attempt(s), {time.monotonic() - started:.1f} s", flush=True)
        return trial

    def _truth(self, seat: Seat) -> Weights:
        return self.oracle.truths[seat.see().label]

    def _send(self, trial: Trial) -> list[dict[str, Any] | None]:
        """What each rank's call ended with, while the fault happens."""
        fault, limit = trial.fault, 2 * trial.trainer.timeout_s + trial.fault.extra_s + 10
        arguments = {"weight_version": trial.version, **({"names": list(fault.part)} if fault.part else {})}
        results: list[dict[str, Any] | None] = [{"late": limit} for _ in trial.trainer.ranks]
        # A rank that is frozen returns only when it is let go, which waits for the others.
        others = [threading.Event() for _ in trial.trainer.ranks]

        def call(number: int, rank: ChaosTrainerHost) -> None:
            try:
                results[number] = rank.call("try_send", reply_within_s=limit, **arguments)
            except (HostError, OSError):
                results[number] = None if rank.has_ended() else {"late": limit}
            others[number].set()

        threads = [
            threading.Thread(target=call, args=(number, rank), daemon=True)
            for number, rank in enumerate(trial.trainer.ranks)
        ]
        striking = threading.Thread(target=fault.run, args=(others,), daemon=True)
        for thread in (*threads, striking):
            thread.start()
        for thread in (*threads, striking):
            thread.join(limit + 5)
        return results

    def _settled(self, trial: Trial) -> dict[str, Seen]:
        """What each server says when it is as it should be, or when the time for that is over."""
        result: dict[str, Seen] = {}
        deadline = time.monotonic() + SETTLE_S
        for seat in self.seats:
            if seat.name in trial.fault.dead_seats:
                continue
            while True:
                seen = seat.see()
                is_right = seen.is_paused == seat.user_paused and self.oracle.is_true(seen)
                if is_right or time.monotonic() > deadline or trial.fault.killed_ranks:
                    break
                time.sleep(0.05)
            result[seat.name] = seen
        return result

    def _measure(self, trial: Trial) -> None:
        struck = trial.fault.struck
        self.kinds.add(trial.fault.kind)
        for result in trial.results:
            if result and ("error" in result or "interrupted" in result) and struck:
                error = result.get("error", {"type": "interrupted"})
                key = trial.fault.kind, f"{error['type']} {error.get('outcome')}"
                self.measured.setdefault(key, []).append(result["ended"] - struck)

    # --- and the next one ----------------------------------------------------------------------------------

    def repair(self, trial: Trial | None) -> int:
        """A full round without a fault commits, after as many attempts as are returned; all is as it says."""
        number, attempts = self.number, 0
        for seat in self.seats:
            seat.proxy.lift()
        last: dict[str, Any] | None = None
        must_connect = self.trainer is None or not self.trainer.is_alive
        if trial is not None:
            must_connect = must_connect or any(map(_wants_init, trial.results)) or trial.fault.must_connect
            if self.trainer is trial.trainer and trial.fault.breaks_collectives and self.trainer.layout == "fsdp2":
                self.is_broken = must_connect = True
        version, seed = f"r{number}.ok", 10_000 + number
        while True:
            attempts += 1
            try:
                if must_connect:
                    self._connect_again()
                assert self.trainer is not None
                last = self._send_clean(self.trainer, f"{version}{attempts}", seed)
            except HostError as exc:
                last = {"error": exc.error or {"type": "HostError", "message": str(exc)}}
            if "report" in (last or {}):
                break
            print(f"     attempt {attempts} failed: {short(last)} {str(last)[:500]}", flush=True)
            if attempts >= MAX_ATTEMPTS:
                self.oracle.fail(number, "next round", f"{attempts} attempts failed, the last with {last}")
                self._start_over()
                return attempts
            must_connect = must_connect or _wants_init(last) or attempts == MAX_ATTEMPTS - 1
        assert self.trainer is not None
        for seat in self.trainer.seats:
            self._check_repaired(seat, f"{version}{attempts}", seed)
        for seat in self.seats:
            self._set_straight(seat)
        return attempts

    def _check_repaired(self, seat: Seat, version: str, seed: int) -> None:
        seen = seat.see()
        if seen.label != version or seen.is_paused != seat.user_paused:
            self.oracle.fail(self.number, "next round", f"{seat.name} is {seen}, expected {version}")
        if seen.content not in (None, digest_of(weights_of(seed))):
            self.oracle.fail(self.number, "next round", f"{seat.name} has {seen.content}, not what was sent")

    def _set_straight(self, seat: Seat) -> None:
        """The user's pause ends."""
        if seat.user_paused:
            if not seat.see().is_paused:
                self.oracle.fail(self.number, "pause", f"{seat.name}: the user's pause is over")
            assert requests.post(f"{seat.server.base_url}/resume", timeout=20).ok
            seat.user_paused = False
        if seat.see().is_paused and not (self.trainer and seat not in self.trainer.seats):
            self.oracle.fail(self.number, "pause", f"{seat.name} is paused, and nobody holds it")

    def _connect_again(self) -> None:
        """The same trainer inits again where it is whole, else another one does for the same servers."""
        old = self.trainer
        assert old is not None or self.seats
        if old is None:
            self.connect_anew()
        elif old.is_alive and not self.is_broken and self.choose.random() < 0.8:
            self.trainer = self.connect(len(old.ranks), old.seats, old.layout, old.ranks)
        else:
            for rank in old.ranks:
                rank.kill()
            self.is_broken = False
            # A server that only the old one had is taken over by this one, which is what sets it right.
            self.trainer = self.connect(len(old.ranks), old.seats, old.layout)

    def _send_clean(self, trainer: Connected, version: str, seed: int) -> dict[str, Any]:
        self.oracle.truths[version] = weights_of(seed)
        for rank in trainer.ranks:
            rank.call("disturb", pause_s=0.0, fault=None)
        all_of(*(lambda r=r: r.call("set_weights", seed=seed) for r in trainer.ranks))
        results = all_of(*(lambda r=r: r.call("try_send", weight_version=version) for r in trainer.ranks))
        for result in results:
            took = result["ended"] - result["started"]
            if took > self.timeout_s + GRACE_S:
                self.oracle.fail(self.number, "time", f"the next round took {took:.1f} s: {short(result)}")
        failed = [result for result in results if "report" not in result]
        return failed[0] if failed else results[0]

    def _start_over(self) -> None:
        """Nothing is left of what went wrong: the rounds after it are judged by themselves."""
        if self.trainer is not None:
            for rank in self.trainer.ranks:
                rank.kill()
        self.trainer = None
        for seat in self.seats:
            seat.server.signal(9)
            seat.restart()

    def summary(self) -> str:
        """What was measured, and what did not hold."""
        lines = [
            f"{self.number} rounds, {len(self.oracle.wrong)} laws broken, {len(self.oracle.ranks_differ)} times ranks differed"
        ]
        for (kind, error), times in sorted(self.measured.items()):
            spread = f"{min(times):6.2f} {statistics.median(times):6.2f} {max(times):6.2f}"
            lines.append(f"  {kind:34} {error:40} {len(times):3} times, after {spread} s")
        lines += [f"  WRONG in round {number}: [{law}] {text}" for number, law, text in self.oracle.wrong]
        return "\n".join(lines)

    def close(self) -> None:
        """End all processes."""
        together(*(host.kill for host in self._started if host.process.poll() is None))
        together(*(seat.close for seat in self.seats))


def _wants_init(result: dict[str, Any] | None) -> bool:
    """Whether the documentation says to init again after it."""
    kinds = (result or {}).get("error", {}).get("kinds", [])
    return (
        result is None or "late" in result or bool({"PeerLostError", "StaleSessionError", "TimeoutError"} & set(kinds))
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--server", choices=("embedded", "vllm"), default="embedded")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size of vLLM (%(default)s)")
    parser.add_argument("--servers", type=int, choices=(1, 2), default=2)
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds of a round (%(default)s)")
    parser.add_argument("--only", nargs="*", default=[], help="kinds of faults, by the beginning of their names")
    args = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))  # as Ctrl-C does: no process outlives this one
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        driver = Driver(
            Path(directory),
            args.seed,
            server=args.server,
            tp=args.tp,
            num_seats=args.servers,
            timeout_s=args.timeout,
            kinds=tuple(args.only),
        )
        started = time.monotonic()
        try:
            for _ in range(args.rounds):
                driver.round()
        finally:
            print(driver.summary(), flush=True)
            print(f"{time.monotonic() - started:.0f} s", flush=True)
            driver.close()
    return 1 if driver.oracle.wrong or driver.oracle.ranks_differ else 0


if __name__ == "__main__":
    sys.exit(main())
