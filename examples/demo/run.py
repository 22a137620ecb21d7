"""On-policy RL: a small language model learns to count, from what a server wrote with its latest weights.

Each round the server gets the weights and writes completions with them; the trainer grades these and takes one step of GRPO.
This process has no vLLM, the server's environment no wt-trainer. `nox -s demo` makes both environments and runs this script;
by hand, set WT_WORKER_PYTHON to the interpreter of the one that has wt-worker and vLLM, or wt-worker[serve] alone.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import requests
import torch
from model import NUM_SAMPLES, NUM_TOKENS, PROMPTS, Policy
from plot import plot
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from server import ENVIRONMENT, EmbeddedServer, Server, Visitor, VLLMServer

from wt_trainer import (
    GlooTrainerInitInfo,
    HTTPVLLMWeightSyncClient,
    ModuleSource,
    WeightTransferError,
    WeightTransferTrainerFactory,
)

ENGINES: dict[str, type[Server]] = {"vllm": VLLMServer, "embedded": EmbeddedServer}
NUM_COMPARED = 5  # versions at either end, over which the reward is averaged
MIN_RISE = 0.4  # of the reward; the mean over so many completions is uncertain by 0.02
MAX_DIFFERENCE = 1e-4  # between log-probabilities in float32; vLLM's and Hugging Face's kernels differ by 5e-6

on_terminal = sys.stdout.isatty()  # elsewhere: no progress bar, and lines of a fixed width
console = Console(highlight=False, markup=False, width=None if on_terminal else 120)
columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
progress = Progress(*columns, console=console, transient=True, disable=not on_terminal)


def demo(server: Server, policy: Policy, num_rounds: int, picture: Path) -> bool:
    """Train with a sync after every step; whether everything came out as it should."""
    bar = progress.add_task("warm-up", total=num_rounds)
    policy.warm_up()
    progress.update(bar, description="waiting for the server")
    start_s = server.wait_ready()
    console.print(f"server ready after {start_s:.0f} s, with untrained weights\n")
    print_row("version", "reward", "sync", "MB", "MB/s", "diff", "missed", "visits", "prompt and completion")
    visitor = Visitor(server, policy.prompts[0])
    visitor.start()

    # The library: connect once ...
    client = HTTPVLLMWeightSyncClient(server.url, timeout=60)
    info = GlooTrainerInitInfo(rank=0, timeout_s=60)
    source = ModuleSource(policy.model)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)

    syncs, sync_ms, rewards, differences, missed = [], [], [], [], []
    for step in range(num_rounds + 1):
        began = time.monotonic()

        # ... and call this whenever the server is to have the new weights. It pauses the server meanwhile.
        report = trainer.send_weights(weight_version=f"step-{step}")

        syncs.append((began, time.monotonic()))
        sync_ms.append(1e3 * report.seconds["total"])
        rollouts = policy.grade(server.complete(policy.prompts, NUM_TOKENS, NUM_SAMPLES))
        rewards.append(rollouts.rewards.mean().item())
        logprobs = policy.logprobs(rollouts)
        differences.append((logprobs - rollouts.logprobs).abs().max().item())
        off = ""
        if step < num_rounds:  # the last version is only looked at
            policy.learn(rollouts, logprobs)
            # The server has not got this step yet: so far off would it be without the next sync.
            with torch.no_grad():
                missed.append((policy.logprobs(rollouts) - rollouts.logprobs).abs().max().item())
            off = f"{missed[-1]:.0e}"
        shown = step % len(PROMPTS)
        print_row(
            *(str(report.version), f"{rewards[-1]:.2f}", f"{sync_ms[-1]:.0f} ms", f"{report.num_bytes / 1e6:.2f}"),
            *(f"{1e3 * report.gb_per_s:.0f}", f"{differences[-1]:.0e}", off, str(len(visitor.answered))),
            f"{PROMPTS[shown]} {rollouts.texts[shown * NUM_SAMPLES]!r}",
        )
        progress.update(bar, completed=step, description=f"learning, reward {rewards[-1]:.2f}")
    trainer.shutdown()
    visitor.leave.set()
    visitor.join(timeout=60)
    plot(picture, f"On-policy RL with {server.title}, {report.num_bytes / 1e6:.1f} MB in each sync", rewards, sync_ms)

    first, last = (sum(part) / NUM_COMPARED for part in (rewards[:NUM_COMPARED], rewards[-NUM_COMPARED:]))
    difference, mean_missed = torch.tensor(differences).max().item(), sum(missed) / len(missed)
    version = client.weight_version()
    not_synced = [name for worker in report.workers for name in worker.not_synced]
    frozen = [(a, b) for a, b in visitor.answered if any(a < began and ended < b for began, ended in syncs)]
    checks = [
        (
            f"reward, mean of {NUM_COMPARED} versions, from first to last",
            f"{first:.2f} to {last:.2f}",
            f"{MIN_RISE} more",
            last - first >= MIN_RISE,
        ),
        ("version that the server publishes", version, f"step-{num_rounds}", version == f"step-{num_rounds}"),
        ("parameters of the server's left out", not_synced, "[]", not not_synced),
        (
            "log-probabilities, server - trainer, at most",
            f"{difference:.0e}",
            f"< {MAX_DIFFERENCE}",
            difference < MAX_DIFFERENCE,
        ),
        ("the same on average, had the sync been missed", f"{mean_missed:.0e}", "> 0.01", mean_missed > 0.01),
        ("visitor's requests in hand during a sync", len(frozen), "at least 1", len(frozen) >= 1),
        ("visitor's failed or shortened requests", visitor.failure, "None", visitor.failure is None),
    ]
    console.print()
    for what, got, expected, holds in checks:
        console.print(f"{'ok' if holds else 'WRONG':5} {what}: {got} (expected: {expected})", soft_wrap=True)
    console.print(
        f"\nserver start {start_s:.0f} s; {num_rounds} steps; syncs {sum(sync_ms) / len(sync_ms):.0f} ms on average; "
        f"{len(visitor.answered)} visits; picture: {picture}"
    )
    return all(holds for *_, holds in checks)


def print_row(*cells: str) -> None:
    formats = ("{:>8}", "{:>7}", "{:>7}", "{:>5}", "{:>5}", "{:>6}", "{:>6}", "{:>6}", " {}")
    console.print(*map(str.format, formats, cells), no_wrap=True, overflow="ellipsis")


def choose_engine(python: str, wanted: str) -> type[Server]:
    """`wanted`, or the embedded server where `python` has no vLLM. Exits unless each side lacks the other's half."""
    names = sorted({"wt_trainer", "wt_worker"}.union(*(engine.needs for engine in ENGINES.values())))
    code = f"import importlib.util as u; print(*(n for n in {names} if u.find_spec(n)))"
    there = set(subprocess.check_output([python, "-c", code], env=ENVIRONMENT, cwd="/", text=True).split())
    if wanted == "vllm" and "vllm" not in there:
        console.print(f"no vLLM in {python}: falling back to --engine embedded")
        wanted = "embedded"
    engine = ENGINES[wanted]
    needed = engine.needs | {"wt_worker"}
    if "wt_trainer" in there or not needed <= there:
        sys.exit(f"{python}: expected {sorted(needed)} and no wt_trainer, got {sorted(there)}; see --help")
    if find_spec("vllm"):
        sys.exit(f"{sys.executable}: expected an environment without vLLM, as a trainer's is")
    console.print(f"trainer: this process, without vLLM; server: {engine.title}, without wt-trainer")
    return engine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, default="vllm", help="what serves the model (%(default)s)")
    parser.add_argument("--rounds", type=int, default=40, help="optimizer steps, each with a sync (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the model and of its warm-up (%(default)s)")
    parser.add_argument("--plot", type=Path, default=Path("demo.png"), metavar="PATH", help="picture (%(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoint and the server's output")
    args = parser.parse_args()
    python = os.environ.get("WT_WORKER_PYTHON")
    if python is None:
        parser.error("WT_WORKER_PYTHON is not set; see --help")
    if args.rounds < 2 * NUM_COMPARED:
        parser.error(f"--rounds: expected at least {2 * NUM_COMPARED}, to compare the ends; got {args.rounds}")
    if not args.plot.parent.is_dir():
        parser.error(f"--plot: expected a file in a folder that exists; got {args.plot}")
    engine = choose_engine(python, args.engine)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends this, and the server, as Ctrl-C does
    torch.set_num_threads(1)  # the other core is the server's

    began = time.monotonic()
    directory = Path(tempfile.mkdtemp(prefix="wt-demo-"))
    status = 1
    try:
        policy = Policy(args.seed)
        policy.save(directory / "checkpoint")
        with engine(python, directory / "checkpoint", directory / "server.log") as server, progress:
            status = 0 if demo(server, policy, args.rounds, args.plot) else 1
        console.print(f"{time.monotonic() - began:.0f} s in all: {'FAILED' if status else 'as it should be'}")
    except KeyboardInterrupt:
        status = 130
        console.print("stopped")
    except (WeightTransferError, RuntimeError, requests.RequestException) as exc:
        console.print(f"FAILED, {type(exc).__name__}: {exc}", soft_wrap=True)
    finally:
        if args.keep or status == 1:
            console.print(f"kept: {directory}, with the server's output in server.log")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
