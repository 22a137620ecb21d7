"""The other side: a stock vLLM server with the wt-worker plugin, in an environment of its own, and who uses it."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import requests
import torch

START_TIMEOUT_S = 180
REQUEST_TIMEOUT_S = 60
ENVIRONMENT = os.environ | {
    "VLLM_SERVER_DEV_MODE": "1",  # enables the routes that change weights
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # this and one thread: the other core is the trainer's
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": os.environ.get("WT_WORKER_PYTHONPATH", ""),  # not the trainer's
}


class VLLMServer:
    """A vLLM server, which starts in the background at once. Leaving the `with` block ends all of its processes."""

    def __init__(self, python: str, checkpoint: Path, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [
            *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)),
            *("--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "8"),
            *("--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)),
            *("--weight-transfer-config", json.dumps({"backend": "wt_gloo"})),
        ]
        self._log = log
        self._started = time.monotonic()
        with log.open("wb") as stream:
            # A session of its own: Ctrl-C does not reach it, and `__exit__` ends the process group as a whole.
            self._process = subprocess.Popen(
                command, stdout=stream, stderr=stream, env=ENVIRONMENT, cwd=log.parent, start_new_session=True
            )

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

    def complete(self, prompt: str | list[int], num_tokens: int, **params: Any) -> dict[str, Any]:
        body = {"model": "demo", "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, **params}
        reply = requests.post(f"{self.url}/v1/completions", json=body, timeout=REQUEST_TIMEOUT_S)
        reply.raise_for_status()
        return dict(reply.json()["choices"][0])

    def sample(self, prompt: str, seed: int) -> str:
        """What comes after `prompt`, with dots for what is not printable ASCII."""
        text = self.complete(prompt, 60, temperature=0.6, seed=seed)["text"]
        return "".join(character if " " <= character <= "~" else "." for character in text)

    def judge(self, prompt: list[int], num_tokens: int) -> tuple[torch.Tensor, list[int]]:
        """The log-probability of each token of `prompt` but the first, and the likeliest tokens after it."""
        choice = self.complete(prompt, num_tokens, temperature=0, prompt_logprobs=0, return_token_ids=True)
        pairs = zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)
        return torch.tensor([position[str(token)]["logprob"] for token, position in pairs]), choice["token_ids"]

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


class Visitor(threading.Thread):
    """Sends the server one request after the other, and knows nothing of the trainer."""

    def __init__(self, server: VLLMServer, prompt: str) -> None:
        super().__init__(daemon=True)
        self.leave = threading.Event()
        self.answered: list[tuple[float, float]] = []  # from when to when
        self.failure: Exception | None = None
        self._server, self._prompt = server, prompt

    def run(self) -> None:
        while not self.leave.is_set():
            asked = time.monotonic()
            try:
                self._server.complete(self._prompt, 200)
            except requests.RequestException as exc:
                self.failure = exc
                return
            self.answered.append((asked, time.monotonic()))
            self.leave.wait(1.0)  # on two cores, a server that never rests takes the training's time
