"""A Llama of 8B shapes to a real vLLM on another GPU: `send_weights()` whole, against one flat broadcast and stock vLLM.

Needs two GPUs, a worker's environment with vLLM, and nccl4py in both. In one run, in turn, medians: ncclBroadcast of one flat
buffer of as many bytes; ours with `verify="off"` and with the default; ours with `verify="off"` over HTTP, also to a server
that was paused before; vLLM's own backend `nccl`, packed; freshly gathered tensors, of a source that does not vouch for them, so
that they are copied, against one that does. All workers are on one GPU, all trainers on the other.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import models
import torch
from harness import VLLMServer, WorkerHost
from lines import LineClient
from measure import line

from wt_trainer import (
    HTTPVLLMWeightSyncClient,
    NCCLTrainerInitInfo,
    ParamMeta,
    WeightSource,
    WeightTransferTrainerFactory,
)

HERE = Path(__file__).parent
RUNS = 15
TRAINER_GPU, WORKER_GPU = "0", "1"
GPU_SHARE = 0.2  # of the worker's GPU for each of four vLLMs
HIDDEN, INTERMEDIATE, LAYERS, KV, VOCAB = 4096, 14336, 32, 1024, 128256
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": VOCAB,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def shapes() -> dict[str, list[int]]:
    """The checkpoint's 291 names."""
    result = {"model.embed_tokens.weight": [VOCAB, HIDDEN]}
    for index in range(LAYERS):
        prefix = f"model.layers.{index}."
        result |= {
            f"{prefix}self_attn.q_proj.weight": [HIDDEN, HIDDEN],
            f"{prefix}self_attn.k_proj.weight": [KV, HIDDEN],
            f"{prefix}self_attn.v_proj.weight": [KV, HIDDEN],
            f"{prefix}self_attn.o_proj.weight": [HIDDEN, HIDDEN],
            f"{prefix}mlp.gate_proj.weight": [INTERMEDIATE, HIDDEN],
            f"{prefix}mlp.up_proj.weight": [INTERMEDIATE, HIDDEN],
            f"{prefix}mlp.down_proj.weight": [HIDDEN, INTERMEDIATE],
            f"{prefix}input_layernorm.weight": [HIDDEN],
            f"{prefix}post_attention_layernorm.weight": [HIDDEN],
        }
    return {**result, "model.norm.weight": [HIDDEN], "lm_head.weight": [VOCAB, HIDDEN]}


class Tensors(WeightSource):
    """Tensors by name."""

    yields_stable = True

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors.items())


class Gathered(Tensors):
    """The same, each gathered when it is its turn, which a clone stands for; `is_stable`: nobody else has it."""

    def __init__(self, tensors: dict[str, torch.Tensor], *, is_stable: bool) -> None:
        super().__init__(tensors)
        self.yields_stable = is_stable

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors.items():
            yield name, tensor.clone()


class Raw:
    """One flat ncclBroadcast of as many bytes, beside everything else."""

    def __init__(self, client: LineClient, num_bytes: int) -> None:
        from nccl import core

        self._client = client
        self._beside = ThreadPoolExecutor(1)
        self._flat = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        unique_id = core.get_unique_id()
        joining = self._beside.submit(client.call, "raw_join", bytes(unique_id).hex(), num_bytes)
        self._communicator = core.Communicator.init(2, 0, unique_id)
        joining.result()

    def send(self) -> float:
        """Seconds from the root's entering to its end; the receiver had entered before."""
        receiving = self._beside.submit(self._client.call, "raw_receive")
        time.sleep(0.02)
        started = time.perf_counter()
        self._communicator.broadcast(self._flat, self._flat, 0, stream=torch.cuda.current_stream())
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        receiving.result()
        return seconds


def measure() -> Iterator[str]:
    os.environ["CUDA_VISIBLE_DEVICES"] = TRAINER_GPU
    directory = Path(os.environ.get("WT_BENCH_LOGS") or tempfile.mkdtemp())
    with ExitStack() as stack:
        yield from _measure(directory, stack)


def _measure(directory: Path, stack: ExitStack) -> Iterator[str]:
    def host(script: str, kind: str, gpu: str, **config: Any) -> WorkerHost:
        return WorkerHost(kind, directory, script=HERE / script, environment={"CUDA_VISIBLE_DEVICES": gpu}, **config)

    model = directory / "model"
    model.mkdir(exist_ok=True)
    models.build_tokenizer(VOCAB).save_pretrained(model)
    (model / "config.json").write_text(json.dumps(CONFIG))
    options = {"model": str(model), "dtype": "bfloat16", "load_format": "dummy", "fill_memory": False}
    options |= {"gpu_memory_utilization": GPU_SHARE}
    workers = {
        name: stack.enter_context(host("nccl_worker.py", "vllm", WORKER_GPU, backend=backend, **options))
        for name, backend in (("off", "wt_nccl"), ("full", "wt_nccl"), ("stock", "nccl"))
    }
    server = VLLMServer(
        model,
        directory,
        backend="wt_nccl",
        dtype="bfloat16",
        arguments=("--load-format", "dummy", "--gpu-memory-utilization", str(GPU_SHARE)),
        environment={"CUDA_VISIBLE_DEVICES": WORKER_GPU},
    )
    stack.enter_context(server)
    tensors = {name: torch.randn(shape, dtype=torch.bfloat16, device="cuda") for name, shape in shapes().items()}
    num_bytes = sum(2 * prod(shape) for shape in shapes().values())
    stock_trainer = host("nccl_stock.py", "trainer", TRAINER_GPU, worker_port=workers["stock"].port, shapes=shapes())
    stack.enter_context(stock_trainer)
    clients = {name: LineClient(workers[name].port) for name in ("off", "full")}
    raw = Raw(clients["full"], num_bytes)
    stock = LineClient(stock_trainer.port)
    stock.call("init")
    server.wait_ready()
    http = HTTPVLLMWeightSyncClient(server.base_url, timeout=60)
    engines = {}
    for name, client in (*clients.items(), ("http", http)):
        info = NCCLTrainerInitInfo(rank=0, timeout_s=60, verify="full" if name == "full" else "off")
        engines[name] = WeightTransferTrainerFactory.trainer_init(info, client=client, source=Tensors(tensors))
    reports: dict[str, Any] = {}

    def ours(name: str) -> Callable[[], float]:
        def send() -> float:
            torch.cuda.synchronize()
            started = time.perf_counter()
            reports[name] = engines[name].send_weights()
            return time.perf_counter() - started

        return send

    def paused() -> float:
        with http.paused():  # the server's own pause has a sleep of 20 ms in it
            return ours("http")()

    gathered = {name: Gathered(tensors, is_stable=name == "gathered") for name in ("gathered", "unvouched")}

    def from_source(name: str, engine: str) -> Callable[[], float]:
        def send() -> float:
            torch.cuda.synchronize()
            started = time.perf_counter()
            reports[f"{name}_{engine}"] = engines[engine].send_weights(source=gathered[name])
            return time.perf_counter() - started

        return send

    calls: dict[str, Callable[[], float]] = {
        "raw": raw.send,
        "off": ours("off"),
        "full": ours("full"),
        "http": ours("http"),
        "http_paused": paused,
        "stock": lambda: float(stock.call("send")),
        **{f"{name}_{engine}": from_source(name, engine) for engine in ("off", "full") for name in gathered},
    }
    for name in ("off", "full", "http") * 3:  # the first rounds prove the layers, and compile
        calls[name]()
    for name in ("off", "full"):  # before there are copies, whose buffers stay
        yield json.dumps({"name": f"nccl_dense_{name}_memory", **_memory(clients[name], calls[name], reports, name)})
    for name in (*calls, *calls):
        calls[name]()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(RUNS):
        for name, call in calls.items():
            seconds[name].append(call())
    ms = {name: 1e3 * statistics.median(each) for name, each in seconds.items()}
    for name in ("off", "full", "http"):
        report = reports[name]
        phases = {"phases": report.seconds, "worker": report.workers[0].seconds}
        reasons = {reason: len(layers) for reason, layers in report.workers[0].not_in_place.items()}
        yield json.dumps({"name": f"nccl_dense_{name}_detail", **phases, "not_in_place": reasons})
    fields = {"num_bytes": num_bytes, "runs": RUNS}
    yield line("nccl_dense", ours_ms=ms["off"], reference_ms=ms["raw"], **fields)
    yield line("nccl_dense_verified", ours_ms=ms["full"], reference_ms=ms["raw"], **fields)
    yield line("nccl_dense_http", ours_ms=ms["http"], reference_ms=ms["off"], **fields)
    yield line("nccl_dense_http_paused", ours_ms=ms["http_paused"], reference_ms=ms["off"], **fields)
    for suffix, engine in (("", "off"), ("_verified", "full")):
        both = {"ours_ms": ms[f"unvouched_{engine}"], "reference_ms": ms[f"gathered_{engine}"]}
        buffer_bytes = reports[f"unvouched_{engine}"].buffer_bytes
        yield line(f"nccl_dense_unvouched{suffix}", **both, **fields, buffer_bytes=buffer_bytes)
    yield line("nccl_dense_stock", ours_ms=ms["off"], reference_ms=ms["stock"], **fields)


def _memory(client: LineClient, send: Callable[[], float], reports: dict[str, Any], name: str) -> dict[str, int]:
    """What a round takes on the worker at most, beside what it has."""
    before = client.call("reset_peak")
    send()
    report = reports[name]
    return {
        "worker_extra_bytes": client.call("peak") - before,
        "worker_buffer_bytes": report.workers[0].buffer_bytes,
        "trainer_buffer_bytes": report.buffer_bytes,
    }
