"""The other side: a server in an environment of its own, vLLM's or the embedded one, and who uses it."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Self

import requests

START_TIMEOUT_S = 180
REQUEST_TIMEOUT_S = 60
VISIT_TOKENS, VISIT_REST_S = 100, 1.0  # a server that never rests takes the training's time, on two cores
ENVIRONMENT = os.environ | {
    "VLLM_SERVER_DEV_MODE": "1",  # enables the routes that change weights
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # this and one thread: the other core is the trainer's
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": os.environ.get("WT_WORKER_PYTHONPATH", ""),  # not the trainer's
}


class Server(ABC):
    """A server, which starts in the background at once. Leaving the `with` block ends all of its processes.

    Attributes:
        title: what to call it.
        needs: what its environment must hold beside wt_worker.
    """

    title: ClassVar[str]
    needs: ClassVar[set[str]]

    def __init__(self, python: str, checkpoint: Path, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._started = time.monotonic()
        command = [python, *self._arguments(str(checkpoint)), "--host", "127.0.0.1", "--port", str(port)]
        with log.open("wb") as stream:
            # A session of its own: Ctrl-C does not reach it, and `__exit__` ends the process group as a whole.
            self._process = subprocess.Popen(
                command, stdout=stream, stderr=stream, env=ENVIRONMENT, cwd=log.parent, start_new_session=True
            )

    @abstractmethod
    def _arguments(self, checkpoint: str) -> list[str]:
        """What follows the interpreter in the command, without address and port."""

    def wait_ready(self) -> float:
        """Returns when the server answers: the seconds since its start."""
        while True:
            seconds = time.monotonic() - self._started
            if self._process.poll() is not None or seconds > START_TIMEOUT_S:
                tail = self._log.read_text(errors="replace").splitlines()[-20:]
                raise RuntimeError("\n".join([*tail, f"the server did not start; it ran for {seconds:.0f} s"]))
            with suppress(requests.RequestException):
                if requests.get(f"{self.url}/health", timeout=5).ok:
                    return seconds
            time.sleep(0.2)

    def complete(self, prompts: list[list[int]], num_tokens: int, num_samples: int = 1) -> list[dict[str, Any]]:
        """The choices for the first prompt, then those for the next; drawn at temperature 1, each with its log-probabilities."""
        sampling = {"max_tokens": num_tokens, "n": num_samples, "temperature": 1.0, "ignore_eos": True}
        body = {"model": "demo", "prompt": prompts, "return_token_ids": True, "logprobs": 0, **sampling}
        reply = requests.post(f"{self.url}/v1/completions", json=body, timeout=REQUEST_TIMEOUT_S)
        reply.raise_for_status()
        choices: list[dict[str, Any]] = reply.json()["choices"]
        return sorted(choices, key=lambda choice: choice["index"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # whoever of its processes is left


class VLLMServer(Server):
    """A stock vLLM, with the wt-worker plugin."""

    title = "vLLM"
    needs: ClassVar = {"vllm"}

    def _arguments(self, checkpoint: str) -> list[str]:
        return [
            *("-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint, "--served-model-name", "demo"),
            *("--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "8"),
            *("--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)),
            *("--weight-transfer-config", json.dumps({"backend": "wt_gloo"})),
        ]


class EmbeddedServer(Server):
    """The one that wt-worker brings, for machines without vLLM."""

    title = "wt-worker's embedded server"
    needs: ClassVar = {"starlette", "transformers", "uvicorn"}

    def _arguments(self, checkpoint: str) -> list[str]:
        return ["-m", "wt_worker.serve", "--model", checkpoint, "--backend", "gloo"]


class Visitor(threading.Thread):
    """Sends the server one request after the other, and knows nothing of the trainer."""

    def __init__(self, server: Server, prompt: list[int]) -> None:
        super().__init__(daemon=True)
        self.leave = threading.Event()
        self.answered: list[tuple[float, float]] = []  # from when to when
        self.failure: Exception | None = None
        self._server, self._prompt = server, prompt

    def run(self) -> None:
        while not self.leave.is_set():
            asked = time.monotonic()
            try:
                [choice] = self._server.complete([self._prompt], VISIT_TOKENS)
                if choice["finish_reason"] != "length":
                    raise RuntimeError(f"expected {VISIT_TOKENS} tokens; ended by {choice['finish_reason']!r}")
            except (requests.RequestException, RuntimeError) as exc:
                self.failure = exc
                return
            self.answered.append((asked, time.monotonic()))
            self.leave.wait(VISIT_REST_S)
