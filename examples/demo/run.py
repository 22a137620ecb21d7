"""Train a small language model while vLLM serves it, and give the server the new weights every few steps.

This process has no vLLM, the server's environment no wt-trainer. `nox -s demo` makes both environments and runs this
script; by hand, set WT_WORKER_PYTHON to the interpreter of the one that has vLLM and wt-worker.
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
from model import Training, read_corpus
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from server import ENVIRONMENT, Visitor, VLLMServer

from wt_trainer import (
    GlooTrainerInitInfo,
    HTTPVLLMWeightSyncClient,
    ModuleSource,
    WeightTransferError,
    WeightTransferTrainerFactory,
)

PROMPT = "Return the "
MIN_LOSS_DROP = 2.0  # nats per byte, of the 5.6 that the untrained model has
MAX_DIFFERENCE = 1e-4  # between log-probabilities in float32; vLLM's and Hugging Face's kernels differ by 5e-6

on_terminal = sys.stdout.isatty()  # elsewhere: no progress bar, and lines of a fixed width
console = Console(highlight=False, markup=False, width=None if on_terminal else 120)
columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
progress = Progress(*columns, console=console, transient=True, disable=not on_terminal)


def demo(server: VLLMServer, training: Training, num_steps: int, sync_every: int) -> bool:
    """Train with a sync every few steps; whether everything came out as it should."""
    bar = progress.add_task("reading docstrings", total=num_steps)
    training.read(read_corpus())

    def train_until(step: int) -> None:
        while len(training.losses) < step:
            training.step()
            progress.update(bar, advance=1, description=f"training, loss {training.loss:.2f}")

    train_until(sync_every)
    progress.update(bar, description="waiting for the server")
    start_s = server.wait_ready()
    console.print(f"server ready after {start_s:.0f} s, the first {sync_every} steps done\n")
    print_row("round", "version", "loss", "sync", "MB", "MB/s", "diff", "visits", f"the server adds to {PROMPT!r}")
    print_row("", "on disk", f"{training.losses[0]:.2f}", "", "", "", "", "", server.sample(PROMPT, 0))
    visitor = Visitor(server, PROMPT)
    visitor.start()

    # The library: connect once ...
    client = HTTPVLLMWeightSyncClient(server.url, timeout=60)
    info = GlooTrainerInitInfo(rank=0, timeout_s=60)
    source = ModuleSource(training.model)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)

    rounds, judgements, differences = [], [], []
    for step in [*range(sync_every, num_steps, sync_every), num_steps]:
        train_until(step)
        began = time.monotonic()

        # ... and call this whenever the server is to have the new weights. It pauses the server meanwhile.
        report = trainer.send_weights(weight_version=f"step-{step}")

        rounds.append((began, time.monotonic()))
        logprobs, tokens = server.judge(training.held_out, 16)
        expected_logprobs, expected_tokens = training.judge(training.held_out, tokens)
        judgements.append(logprobs)
        differences.append((logprobs - expected_logprobs).abs().max().item())
        ms, mb = 1e3 * report.seconds["total"], report.num_bytes / 1e6
        print_row(
            *(str(report.round), str(report.version), f"{training.loss:.2f}"),
            *(f"{ms:.0f} ms", f"{mb:.2f}", f"{1e3 * mb / ms:.0f}", f"{differences[-1]:.0e}"),
            *(str(len(visitor.answered)), server.sample(PROMPT, step)),
        )
    trainer.shutdown()
    visitor.leave.set()
    visitor.join(timeout=60)

    drop, version = training.losses[0] - training.loss, client.weight_version()
    difference = torch.tensor(differences).max().item()
    change = (judgements[-1] - judgements[0]).abs().max().item()
    texts = [repr(training.tokenizer.decode(ids)) for ids in (tokens, expected_tokens)]
    not_synced = [name for worker in report.workers for name in worker.not_synced]
    frozen = [(a, b) for a, b in visitor.answered if any(a < began and ended < b for began, ended in rounds)]
    checks = [
        ("fall of the loss, in nats per byte", f"{drop:.2f}", f"at least {MIN_LOSS_DROP}", drop >= MIN_LOSS_DROP),
        ("parameters of the server's left out", not_synced, "[]", not not_synced),
        ("version that the server publishes", version, f"step-{num_steps}", version == f"step-{num_steps}"),
        (
            "log-probabilities, server - trainer",
            f"{difference:.0e}",
            f"< {MAX_DIFFERENCE}",
            difference < MAX_DIFFERENCE,
        ),
        ("likeliest next bytes, server", texts[0], f"{texts[1]}, of the trainer", tokens == expected_tokens),
        ("log-probabilities, last - first round", f"{change:.1f}", "> 0.1", change > 0.1),
        ("visitor's requests in hand during a sync", len(frozen), "at least 1", len(frozen) >= 1),
        ("visitor's failed requests", visitor.failure, "None", visitor.failure is None),
    ]
    console.print()
    for what, got, expected, holds in checks:
        console.print(f"{'ok' if holds else 'WRONG':5} {what}: {got} (expected: {expected})", soft_wrap=True)
    sync_ms = 1e3 * sum(ended - began for began, ended in rounds) / len(rounds)
    console.print(
        f"\nserver start {start_s:.0f} s; training {training.seconds:.0f} s for {num_steps} steps; "
        f"syncs {sync_ms:.0f} ms on average; {len(visitor.answered)} visits"
    )
    return all(holds for *_, holds in checks)


def print_row(*cells: str) -> None:
    formats = ("{:>5}", "{:>9}", "{:>5}", "{:>7}", "{:>5}", "{:>5}", "{:>6}", "{:>6}", " {}")
    console.print(*map(str.format, formats, cells), no_wrap=True, overflow="ellipsis")


def check_environments(python: str) -> None:
    """Exits unless each side lacks the other's half."""
    code = "import importlib.util as u; print([n for n in ('vllm', 'wt_worker', 'wt_trainer') if u.find_spec(n)])"
    there = subprocess.check_output([python, "-c", code], env=ENVIRONMENT, cwd="/", text=True).strip()
    if find_spec("vllm") or there != "['vllm', 'wt_worker']":
        sys.exit(f"expected: no vllm here, ['vllm', 'wt_worker'] in {python}; got: {find_spec('vllm')}, {there}")
    console.print("trainer: this process, without vLLM; server: vLLM and wt-worker, without wt-trainer")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="training steps (%(default)s)")
    parser.add_argument("--sync-every", type=int, default=20, help="steps from one sync to the next (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the model and of the order of the text (%(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoint and the server's output")
    args = parser.parse_args()
    python = os.environ.get("WT_WORKER_PYTHON")
    if python is None:
        parser.error("WT_WORKER_PYTHON is not set; see --help")
    if not 0 < args.sync_every < args.steps:
        parser.error(f"--sync-every: expected 1 to {args.steps - 1}, for two rounds at least; got {args.sync_every}")
    check_environments(python)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends this, and the server, as Ctrl-C does
    torch.set_num_threads(1)  # the other core is the server's

    began = time.monotonic()
    directory = Path(tempfile.mkdtemp(prefix="wt-demo-"))
    status = 1
    try:
        training = Training(num_steps=args.steps, seed=args.seed)
        training.save(directory / "checkpoint")
        with VLLMServer(python, directory / "checkpoint", directory / "server.log") as server, progress:
            status = 0 if demo(server, training, args.steps, args.sync_every) else 1
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
