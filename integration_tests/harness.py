"""The trainer's end of the tests: starts worker processes and calls them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import requests

P = TypeVar("P", bound="_HostProcess")

HERE = Path(__file__).parent

WORKER_ENVIRONMENT = {
    # The facts behind these: without them vLLM pins threads to cores and takes 8 GiB of key-value cache on a small machine.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class HostError(RuntimeError):
    """A process of the test failed, or answered a call with an error: `error` has its type, message and attributes."""

    def __init__(self, message: str, error: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.error = error or {}


def worker_python() -> str:
    """The interpreter of the worker environment: vLLM and wt-worker, no wt-trainer."""
    if "WT_WORKER_PYTHON" not in os.environ:
        raise HostError("set WT_WORKER_PYTHON to an interpreter with vLLM and wt-worker, or run `nox -s integration`")
    return os.environ["WT_WORKER_PYTHON"]


def worker_environment(packages: Path | None = None, **extra: str) -> dict[str, str]:
    """The environment of a worker process: ours, with the worker's own PYTHONPATH, and what is installed in `packages`."""
    environment = {**os.environ, **WORKER_ENVIRONMENT, **extra}
    environment.pop("PYTHONPATH", None)
    paths = [str(packages)] if packages else []
    if "WT_WORKER_PYTHONPATH" in os.environ:
        paths.append(os.environ["WT_WORKER_PYTHONPATH"])
    if paths:
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


class HostClient:
    """Calls to a process that serves `hosting.py`; a weight-sync client of exactly the four documented calls, and more."""

    def __init__(self, port: int) -> None:
        self._port: int | None = port

    @property
    def port(self) -> int:
        """The port it answers on."""
        assert self._port is not None
        return self._port

    def call(self, name: str, reply_within_s: float = 120, **args: Any) -> Any:
        """The result of one call; raises HostError with what was raised there."""
        with (
            socket.create_connection(("127.0.0.1", self.port), timeout=reply_within_s) as connection,
            connection.makefile("rwb") as stream,
        ):
            stream.write(json.dumps({"call": name, "args": args}).encode() + b"\n")
            stream.flush()
            line = stream.readline()
        if not line:
            raise HostError(f"the process closed the connection in {name}")
        reply = json.loads(line)
        if "error" in reply:
            raise HostError(f"{reply['error']['type']}: {reply['error']['message']}", reply["error"])
        return reply["result"]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.call("init_weight_transfer_engine", init_info=init_info)

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def start_draft_weight_update(self) -> None:
        self.call("start_draft_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self.call("update_weights", update_info=update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish_weight_update", weight_version=weight_version)


class _HostProcess(HostClient):
    """A process that serves `hosting.py`. `log` holds what it printed."""

    def __init__(
        self, command: list[str], config: dict[str, Any], environment: dict[str, str], directory: Path
    ) -> None:
        name = f"{Path(command[1]).stem}-{time.monotonic_ns()}"
        self.log = directory / f"{name}.log"
        self._port = None
        self._port_file = directory / f"{name}.port"
        self._deadline = time.monotonic() + 240
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, json.dumps({**config, "port_file": str(self._port_file)})],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=directory,
                start_new_session=True,
            )

    @property
    def port(self) -> int:
        """The port it answers on, once it is ready."""
        while self._port is None:
            if self._port_file.exists():
                self._port = int(self._port_file.read_text())
            elif self.process.poll() is not None:
                raise HostError(f"the process ended with {self.process.returncode}\n{self.tail()}")
            elif time.monotonic() > self._deadline:
                raise HostError(f"the process is not ready in time\n{self.tail()}")
            else:
                time.sleep(0.02)
        return self._port

    def tail(self, num_lines: int = 40) -> str:
        """The end of its output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])

    def kill(self) -> None:
        """SIGKILL to the whole process group."""
        self.signal(signal.SIGKILL)
        self.process.wait(timeout=10)

    def signal(self, number: int) -> None:
        """Send a signal to the whole process group."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """End the process."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class WorkerHost(_HostProcess):
    """A worker process under `worker_host.py`: `bare` (an engine around a small module) or `vllm` (a whole vLLM).

    `script` is one that is run in its place, with the same arguments.
    """

    def __init__(
        self,
        kind: str,
        directory: Path,
        *,
        packages: Path | None = None,
        environment: dict[str, str] | None = None,
        script: Path = HERE / "worker_host.py",
        **config: Any,
    ) -> None:
        command = [worker_python(), str(script), kind]
        super().__init__(command, config, worker_environment(packages, **(environment or {})), directory)


class TrainerHost(_HostProcess):
    """A trainer rank in a process of its own, under `trainer_host.py`."""

    def __init__(self, directory: Path, environment: dict[str, str] | None = None, **config: Any) -> None:
        command = [sys.executable, str(HERE / "trainer_host.py")]
        super().__init__(command, config, {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}, directory)


SHARE_GPUS = "WT_SHARE_GPUS"
"""Environment variable; with 1 all processes of a GPU cell have this host's first GPU. NCCL 2.30 and newer allows it."""


def gpus_are_shared() -> bool:
    """Whether all processes have one GPU."""
    return os.environ.get(SHARE_GPUS) == "1"


TEST_GPUS = "WT_TEST_GPUS"
"""Environment variable: the GPUs of all trainer and of all worker processes of a `Cast`, such as `0,1`; unset is the CPU."""


class Cast:
    """Processes for the tests: warm ones are given out again, each test gets them newly configured.

    Starting one imports torch, which takes seconds on a small machine; and a process that has lived through other tests' failures
    is the better test of what a failure leaves behind.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.backend = "gloo"
        trainer_gpu, _, worker_gpu = os.environ.get(TEST_GPUS, "").partition(",")
        self._on_gpu = bool(trainer_gpu)
        self._gpus = {
            TrainerHost: {"CUDA_VISIBLE_DEVICES": trainer_gpu} if trainer_gpu else {},
            WorkerHost: {"CUDA_VISIBLE_DEVICES": worker_gpu} if worker_gpu else {},
        }
        self._idle: dict[type[_HostProcess], list[_HostProcess]] = {WorkerHost: [], TrainerHost: []}
        self._used: list[_HostProcess] = []

    def worker(self, parameters: dict[str, Any], **config: Any) -> WorkerHost:
        """A bare worker rank with these parameters."""
        others = [used for used in self._used if isinstance(used, WorkerHost) and used.process.poll() is None]
        if self._on_gpu and others and not gpus_are_shared():
            import pytest  # which the processes that import this module for its clients do without

            pytest.skip("two ranks of a communicator cannot share a GPU")
        worker = self._take(WorkerHost, lambda: WorkerHost("bare", self.directory, environment=self._gpus[WorkerHost]))
        name = f"engine-{worker.process.pid}"
        worker.call("configure", config={"engine": name, "parameters": parameters, **self._transport(), **config})
        return worker

    def engine(self, parameters: dict[str, Any], size: int, name: str = "e", **config: Any) -> list[WorkerHost]:
        """All ranks of one engine."""
        return [self.worker(parameters, engine=name, rank=rank, size=size, **config) for rank in range(size)]

    def trainer(self, workers: list[WorkerHost], /, rank: int = 0, num_ranks: int = 1, **config: Any) -> TrainerHost:
        """One trainer rank, for these workers."""
        return self._trainer(workers, rank, num_ranks, config)

    def trainers(self, workers: list[WorkerHost], num_ranks: int, /, **config: Any) -> list[TrainerHost]:
        """All ranks of one trainer, with a default group."""
        config = {"group_port": free_port(), **self._transport(), **config}
        hosts = [self._take(TrainerHost, self._new_trainer) for _ in range(num_ranks)]
        results = together(
            *(
                lambda rank=rank: self._configure(hosts[rank], workers, rank, num_ranks, config)
                for rank in range(num_ranks)
            )
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return hosts

    def release(self) -> None:
        """The test is over: its processes are idle, those that it killed are gone."""
        self.backend = "gloo"
        for process in self._used:
            process.signal(signal.SIGCONT)
            if process.process.poll() is None:
                self._idle[type(process)].append(process)
        self._used.clear()

    def close(self) -> None:
        """End all processes."""
        together(*(process.close for processes in self._idle.values() for process in processes))

    def _take(self, kind: type[P], make: Callable[[], P]) -> P:
        process = self._idle[kind].pop() if self._idle[kind] else make()
        self._used.append(process)
        return process  # type: ignore[return-value]  # filed under its own type

    def _transport(self) -> dict[str, str]:
        return {"backend": self.backend, "device": "cuda" if self._on_gpu else "cpu"}

    def _new_trainer(self) -> TrainerHost:
        return TrainerHost(self.directory, environment=self._gpus[TrainerHost])

    def _trainer(self, workers: list[WorkerHost], rank: int, num_ranks: int, config: dict[str, Any]) -> TrainerHost:
        host = self._take(TrainerHost, self._new_trainer)
        self._configure(host, workers, rank, num_ranks, {**self._transport(), **config})
        return host

    @staticmethod
    def _configure(
        host: TrainerHost, workers: list[WorkerHost], rank: int, num_ranks: int, config: dict[str, Any]
    ) -> None:
        ports = [worker.port for worker in workers]
        base = {"layout": "plain", "rank": rank, "num_ranks": num_ranks, "workers": ports}
        host.call("configure", config={**base, **config})


def together(*calls: Callable[[], Any], timeout_s: float = 120) -> list[Any]:
    """The result of each call, run at the same time; an exception takes its place."""
    futures: list[Future[Any]] = [Future() for _ in calls]

    def run(call: Callable[[], Any], future: Future[Any]) -> None:
        try:
            future.set_result(call())
        except BaseException as exc:
            future.set_result(exc)

    for call, future in zip(calls, futures, strict=True):
        threading.Thread(target=run, args=(call, future), daemon=True).start()
    return [future.result(timeout=timeout_s) for future in futures]


class _Server:
    """An inference server in the worker environment, and the few questions that tests ask it."""

    def __init__(
        self,
        module: str,
        arguments: list[str],
        directory: Path,
        packages: Path | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.log = directory / f"server-{self.port}.log"
        command = [worker_python(), "-m", module, "--host", "127.0.0.1", "--port", str(self.port), *arguments]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=worker_environment(packages, VLLM_SERVER_DEV_MODE="1", **(environment or {})),
                cwd=directory,
                start_new_session=True,
            )
        self._deadline = time.monotonic() + 240

    def wait_ready(self) -> None:
        """Return once it answers /health."""
        while True:
            if self.process.poll() is not None:
                raise HostError(f"the server ended with {self.process.returncode}\n{self.tail()}")
            if time.monotonic() > self._deadline:
                raise HostError(f"the server is not ready in time\n{self.tail()}")
            try:
                if requests.get(f"{self.base_url}/health", timeout=5).ok:
                    return
            except requests.RequestException:
                time.sleep(0.2)

    def tail(self, num_lines: int = 60) -> str:
        """The end of its output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])

    def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        """Log-probability of each prompt token after the first."""
        choice = self._complete(token_ids, max_tokens=1, prompt_logprobs=0)
        pairs = zip(token_ids[1:], choice["prompt_logprobs"][1:], strict=True)
        return [position[str(token)]["logprob"] for token, position in pairs]

    def greedy(self, token_ids: list[int], num_tokens: int) -> list[int]:
        """The next `num_tokens` tokens, most probable ones."""
        choice = self._complete(token_ids, max_tokens=num_tokens, ignore_eos=True, return_token_ids=True)
        return list(choice["token_ids"])

    def weight_version(self) -> str:
        """The label that it publishes."""
        return str(self.get("/weight_info")["weight_version"])

    def _complete(self, token_ids: list[int], **params: Any) -> dict[str, Any]:
        body = {"model": "m", "prompt": token_ids, "temperature": 0, **params}
        reply = requests.post(f"{self.base_url}/v1/completions", json=body, timeout=60)
        if not reply.ok:
            raise HostError(f"{reply.status_code}: {reply.text}\n{self.tail()}")
        return dict(reply.json()["choices"][0])

    def get(self, path: str) -> dict[str, Any]:
        """The JSON reply to GET `path`."""
        return dict(requests.get(self.base_url + path, timeout=30).json())

    def post(self, path: str, **body: Any) -> requests.Response:
        """The reply to POST `path` with this JSON body."""
        return requests.post(self.base_url + path, json=body, timeout=60)

    def processes(self, title: str) -> list[int]:
        """Ids of the server's processes whose title has this in it."""
        command = ["ps", "-o", "pid=,args=", "-g", str(self.process.pid)]
        lines = subprocess.check_output(command, text=True).splitlines()
        return sorted(int(line.split()[0]) for line in lines if title in line)

    def signal(self, number: int) -> None:
        """Send a signal to the whole process group."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """End the server and all its processes."""
        self.signal(signal.SIGCONT)
        if self.process.poll() is None:
            self.process.terminate()  # the leader alone: it waits for requests in flight if its children are told too
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)
        self._kill_group()
        self.process.wait(timeout=10)

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def unreachable_init_info() -> dict[str, Any]:
    """An init info, complete, of a session whose sender does not listen."""
    return {
        "session_address": "127.0.0.1",
        "session_port": free_port(),
        "session_secret": "00" * 32,
        "session": "none",
        "schema": [1, 0],
        "timeout_s": 0.5,
        "max_group_bytes": 1 << 20,
        "max_group_pieces": 1,
        "num_buffers": 1,
    }


class VLLMServer(_Server):
    """An unmodified vLLM OpenAI server with the wt-worker plugin."""

    def __init__(
        self,
        model: Path,
        directory: Path,
        *,
        backend: str = "wt_gloo",
        tensor_parallel_size: int = 1,
        dtype: str = "float32",
        arguments: tuple[str, ...] = (),
        packages: Path | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        options = [
            *("--model", str(model), "--served-model-name", "m"),
            *("--enforce-eager", "--dtype", dtype, "--max-model-len", "128", "--max-num-seqs", "8"),
            *("--kv-cache-memory-bytes", str(64 << 20), "--tensor-parallel-size", str(tensor_parallel_size)),
            *("--weight-transfer-config", json.dumps({"backend": backend}), *arguments),
        ]
        super().__init__("vllm.entrypoints.openai.api_server", options, directory, packages, environment)


class EmbeddedServer(_Server):
    """The embedded server."""

    def __init__(self, model: Path, directory: Path, *, backend: str = "gloo", packages: Path | None = None) -> None:
        super().__init__("wt_worker.serve", ["--model", str(model), "--backend", backend], directory, packages)
