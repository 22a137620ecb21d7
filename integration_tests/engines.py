"""The engines of the matrix: how each is started, reached by a trainer, and asked what it computes."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest
from harness import VLLMServer, WorkerHost, together

__all__ = ["Engine", "FreshLoad", "InProcess", "Running"]


class Engine(Protocol):
    """One or several vLLM engines that get the same weights."""

    def reach(self) -> dict[str, Any]:
        """What a trainer's configuration says to reach it (`workers`, `base_urls` or `actors`)."""

    def prompt_logprobs(self, token_ids: list[int]) -> list[list[float]]:
        """Log-probability of each prompt token after the first, from every engine."""

    def greedy(self, token_ids: list[int], num_tokens: int) -> list[list[int]]:
        """The next tokens, from every engine."""

    def weight_versions(self) -> list[str]:
        """The label of every engine."""

    def close(self) -> None:
        """End it."""


class InProcess:
    """vLLM's `LLM` in a process of its own."""

    def __init__(self, model: Path, directory: Path, **config: Any) -> None:
        self.host = WorkerHost("vllm", directory, model=str(model), **config)
        assert self.host.port

    def reach(self) -> dict[str, Any]:
        return {"workers": [self.host.port]}

    def prompt_logprobs(self, token_ids: list[int]) -> list[list[float]]:
        return [self.host.call("prompt_logprobs", token_ids=token_ids)]

    def greedy(self, token_ids: list[int], num_tokens: int) -> list[list[int]]:
        return [self.host.call("greedy", token_ids=token_ids, num_tokens=num_tokens)]

    def weight_versions(self) -> list[str]:
        return [self.host.call("weight_version")]

    def device_bytes(self) -> list[int]:
        """What torch has allocated on the GPU of each rank that is in the engine's own process."""
        return [self.host.call("device_bytes")]

    def tail(self, num_lines: int) -> str:
        """The end of what it printed."""
        return self.host.tail(num_lines)

    def close(self) -> None:
        self.host.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshLoad:
    """What a vLLM serves that has loaded a checkpoint, and was never sent a byte.

    Attributes:
        digests: by rank, the digest of each parameter and buffer.
        logprobs: log-probability of each token of the prompt after the first.
    """

    digests: list[dict[str, int]]
    logprobs: list[float]

    @classmethod
    def of(cls, model: Path, directory: Path, prompt: list[int], **config: Any) -> FreshLoad:
        """Of the checkpoint in `model`, by an engine with the options `config`, which is started for it and ended."""
        engine = InProcess(model, directory, **config)
        try:
            return cls.now(engine, prompt)
        finally:
            engine.close()

    @classmethod
    def now(cls, engine: InProcess, prompt: list[int]) -> FreshLoad:
        """Of an engine that runs."""
        digests = engine.host.call("each_rank", method="live_digests", arguments=[])
        return cls(digests=digests, logprobs=engine.prompt_logprobs(prompt)[0])


class Torchrun:
    """One engine of two ranks that torchrun would have started: each is an `LLM` of its own, with a configuration of its own."""

    def __init__(self, model: Path, directory: Path) -> None:
        self._remove_segments()  # of a run that was killed
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        config = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
        self.hosts = [
            WorkerHost(
                "vllm",
                directory,
                environment={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                model=str(model),
                **config,
            )
            for rank in range(2)
        ]

    def reach(self) -> dict[str, Any]:
        return {"workers": [host.port for host in self.hosts]}

    def prompt_logprobs(self, token_ids: list[int]) -> list[list[float]]:
        return self._each("prompt_logprobs", token_ids=token_ids)

    def greedy(self, token_ids: list[int], num_tokens: int) -> list[list[int]]:
        return self._each("greedy", token_ids=token_ids, num_tokens=num_tokens)

    def weight_versions(self) -> list[str]:
        return self._each("weight_version")

    def close(self) -> None:
        together(*(host.close for host in self.hosts))
        self._remove_segments()

    @staticmethod
    def _remove_segments() -> None:
        """Shared memory of vLLM between the ranks of a CPU engine has one name for every torchrun, and stays behind."""
        for segment in Path("/dev/shm").glob("-tp:0-*-cpushm_*"):
            segment.unlink(missing_ok=True)

    def _each(self, name: str, **args: Any) -> list[Any]:
        """Every rank computes its part, and has the whole answer."""
        answers = together(*(lambda host=host: host.call(name, **args) for host in self.hosts))
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers


class Servers:
    """Unmodified OpenAI servers."""

    def __init__(self, model: Path, directory: Path, count: int = 1, **config: Any) -> None:
        self.servers = [VLLMServer(model, directory, **config) for _ in range(count)]
        for server in self.servers:
            server.wait_ready()

    def reach(self) -> dict[str, Any]:
        return {"base_urls": [server.base_url for server in self.servers]}

    def prompt_logprobs(self, token_ids: list[int]) -> list[list[float]]:
        return [server.prompt_logprobs(token_ids) for server in self.servers]

    def greedy(self, token_ids: list[int], num_tokens: int) -> list[list[int]]:
        return [server.greedy(token_ids, num_tokens) for server in self.servers]

    def weight_versions(self) -> list[str]:
        return [server.weight_version() for server in self.servers]

    def device_bytes(self) -> list[int]:
        """Nothing: servers cannot be asked."""
        return []

    def tail(self, num_lines: int) -> str:
        """The end of what they printed."""
        return "\n".join(server.tail(num_lines) for server in self.servers)

    def close(self) -> None:
        together(*(server.close for server in self.servers))


class RayActors:
    """Two Ray actors, each around an `LLM`, held by a process that the trainer's Ray client joins."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.host = WorkerHost("ray", directory, model=str(model), num_actors=2)
        assert self.host.port

    def reach(self) -> dict[str, Any]:
        return {"actors": self.host.call("names"), "ray_address": self.host.call("address")}

    def prompt_logprobs(self, token_ids: list[int]) -> list[list[float]]:
        return self.host.call("each", method="prompt_logprobs", arguments=[token_ids])

    def greedy(self, token_ids: list[int], num_tokens: int) -> list[list[int]]:
        return self.host.call("each", method="greedy", arguments=[token_ids, num_tokens])

    def weight_versions(self) -> list[str]:
        return self.host.call("each", method="weight_version", arguments=[])

    def close(self) -> None:
        self.host.call("stop")
        self.host.close()


_MAKERS: dict[str, Callable[[Path, Path], Engine]] = {
    "inprocess": InProcess,
    "inprocess-tp2": lambda model, directory: InProcess(model, directory, tensor_parallel_size=2),
    "torchrun-tp2": Torchrun,
    "inprocess-bf16": lambda model, directory: InProcess(model, directory, dtype="bfloat16"),
    "http": Servers,
    "http-tp2": lambda model, directory: Servers(model, directory, tensor_parallel_size=2),
    "two-servers": lambda model, directory: Servers(model, directory, count=2),
    "ray": RayActors,
}


class Running:
    """The engine that runs now. Two real vLLMs do not fit beside each other on a small machine."""

    def __init__(self, directories: pytest.TempPathFactory, checkpoint: Callable[[str], Path]) -> None:
        self._directories = directories
        self._checkpoint = checkpoint
        self._key: tuple[str, str] | None = None
        self._engine: Engine | None = None

    def get(self, kind: str, model: str) -> Engine:
        """The engine of this kind, serving this model; started unless it is the one that runs."""
        if self._engine is None or self._key != (kind, model):
            self.stop()
            directory = self._directories.mktemp(f"{kind}-{model}")
            self._engine = _MAKERS[kind](self._checkpoint(model), directory)
            self._key = (kind, model)
        return self._engine

    def stop(self) -> None:
        """End the engine that runs, if one does."""
        if self._engine is not None:
            self._engine.close()
        self._engine = self._key = None
