"""The processes that `chaos.py` drives: servers, each behind a proxy, and trainer ranks; and what weights they may have."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import models
import requests
import torch
from chaos_proxy import Proxy
from harness import HERE, EmbeddedServer, HostError, TrainerHost, VLLMServer, _HostProcess, together

from wt_common.digest import digest_bytes

MODEL = "llama"
PROMPT = [72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100, 33, 10, 65, 66]
TOLERANCE = 1e-4  # of a log-probability on vLLM, see test_sync.py

Weights = tuple[tuple[str, int], ...]
"""Of each parameter, by name, the seed that it is from."""


@cache
def _tensors(seed: int) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in models.build_model(MODEL, seed).named_parameters()}


@cache
def _digests(seed: int) -> dict[str, int]:
    return {
        name: digest_bytes(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, tensor in _tensors(seed).items()
    }


@cache
def weights_of(seed: int) -> Weights:
    """All parameters of one seed."""
    return tuple((name, seed) for name in _tensors(seed))


@cache
def digest_of(weights: Weights) -> str:
    """What `/weight_digest` must say of them."""
    lines = sorted(f"{name} {_digests(seed)[name]:016x}\n" for name, seed in weights)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@cache
def logprobs_of(weights: Weights) -> tuple[float, ...]:
    """What a server that computes with them must answer."""
    model = models.build_model(MODEL, 0)
    model.load_state_dict({name: _tensors(seed)[name] for name, seed in weights})
    return tuple(models.prompt_logprobs(model, PROMPT))


@dataclass
class Seen:
    """What a server says of itself."""

    label: str
    is_paused: bool
    content: str | None  # the digest of its weights; None where it cannot be asked now
    outcome: str | None = None

    def __str__(self) -> str:
        return f"{self.label}{' (paused)' if self.is_paused else ''} {(self.content or '?')[:6]}"


class Seat:
    """A place for a server: the process that is there, and the proxy through which trainers reach it."""

    def __init__(self, name: str, start: Callable[[], EmbeddedServer | VLLMServer], known: Callable[[], list[Weights]]):
        self.name = name
        self._start = start
        self._known = known  # all weights that it may have
        self.server = start()
        self.proxy = Proxy(self.server.port)
        self.user_paused = False

    @property
    def base_url(self) -> str:
        """Where trainers find it."""
        return self.proxy.base_url

    def restart(self) -> None:
        """Another process takes the place of the one that was killed."""
        self.server.close()
        self.server = self._start()
        self.server.wait_ready()
        self.proxy.target_port = self.server.port
        self.user_paused = False

    def see(self, timeout_s: float = 20.0) -> Seen:
        """Its label, whether it is paused, and what it has, as soon as it answers."""
        is_paused = bool(self._get("/is_paused", timeout_s)["is_paused"])
        info = self._get("/weight_info", timeout_s)
        return Seen(str(info["weight_version"]), is_paused, self._content(is_paused, timeout_s), info.get("outcome"))

    def glance(self) -> tuple[bool, str]:
        """Whether it runs, and then its label: if that is an earlier one, the server has run under it."""
        runs = not self._get("/is_paused", 5)["is_paused"]
        return runs, str(self._get("/weight_info", 5)["weight_version"])

    def _get(self, path: str, timeout_s: float) -> dict[str, Any]:
        return dict(requests.get(self.server.base_url + path, timeout=timeout_s).json())

    def _content(self, is_paused: bool, timeout_s: float) -> str | None:
        if isinstance(self.server, EmbeddedServer):
            return str(self._get("/weight_digest", timeout_s)["digest"])
        if is_paused:
            return None
        found = self.server.prompt_logprobs(PROMPT)
        for weights in reversed(self._known()):
            if max(abs(a - b) for a, b in zip(found, logprobs_of(weights), strict=True)) < TOLERANCE:
                return digest_of(weights)
        return "mix of " + hashlib.sha256(repr([round(each, 3) for each in found]).encode()).hexdigest()

    def close(self) -> None:
        """End the process."""
        self.proxy.close()
        self.server.close()


class ChaosTrainerHost(TrainerHost):
    """A trainer rank under `chaos_trainer.py`."""

    def __init__(self, directory: Path) -> None:
        command = [sys.executable, str(HERE / "chaos_trainer.py")]
        _HostProcess.__init__(self, command, {}, {**os.environ, "OMP_NUM_THREADS": "1"}, directory)

    def has_ended(self) -> bool:
        """Whether it is gone, or is going: its connections close before it can be waited for."""
        deadline = time.monotonic() + 2
        while self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.process.poll() is not None


@dataclass
class Connected:
    """A trainer of one rank or two, and the servers that it drives."""

    ranks: list[ChaosTrainerHost]
    seats: list[Seat]
    layout: str
    timeout_s: float

    def __str__(self) -> str:
        return f"{'+'.join(seat.name for seat in self.seats)} {len(self.ranks)}x{self.layout}"

    @property
    def is_alive(self) -> bool:
        return all(rank.process.poll() is None for rank in self.ranks)


class Watch:
    """Looks at servers, and keeps under which labels each has run since it was first seen paused."""

    def __init__(self, seats: list[Seat]) -> None:
        self.ran_as: dict[str, list[str]] = {seat.name: [] for seat in seats}
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._look, args=(seat,), daemon=True) for seat in seats]

    def _look(self, seat: Seat) -> None:
        was_paused = False
        while not self._ends.wait(0.02):
            with suppress(requests.RequestException, KeyError):
                runs, label = seat.glance()
                was_paused = was_paused or not runs
                if was_paused and runs and label not in self.ran_as[seat.name]:
                    self.ran_as[seat.name].append(label)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(15)


def all_of(*calls: Callable[[], Any]) -> list[Any]:
    """The result of each call, at the same time; raises the first error."""
    results = together(*calls)
    for result in results:
        if isinstance(result, OSError):
            raise HostError(str(result)) from result
        if isinstance(result, BaseException):
            raise result
    return results
