"""A worker process for tests: hosts a worker engine, or a whole vLLM, behind one-line JSON calls on a local port.

Runs in the worker environment, where wt-trainer is not installed:

    python worker_host.py bare  '{"port_file": ..., ...}'
    python worker_host.py vllm  '{"port_file": ..., "model": DIR, "backend": "wt_gloo", ...}'

The calls are the methods of the host class; see `hosting.py`.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hosting import checksums, device_bytes, process_stats, serve


class BareHost:
    """One engine rank around a small module, without vLLM. It keeps vLLM's own books about open updates."""

    def __init__(self, config: dict[str, Any]) -> None:
        import torch

        torch.set_num_threads(1)
        self.engine: Any = None

    def configure(self, config: dict[str, Any]) -> None:
        """Host a new engine, with `parameters` (name: [dtype, shape]) as its model; the one before is shut down."""
        import torch

        from wt_worker import WeightTransferConfig, WeightTransferEngineFactory

        if self.engine is not None:
            self.engine.shutdown()
        device = torch.device(config.get("device", "cpu"))
        if config.get("backend") == "nccl" and device.type == "cpu":
            import fake_nccl

            fake_nccl.install("wt_worker")
        self.model = _module(config["parameters"]).to(device)
        self.draft = _module(config.get("draft", {})).to(device)
        parallel = SimpleNamespace(rank=config.get("rank", 0), world_size=config.get("size", 1), data_parallel_index=0)
        vllm_config = SimpleNamespace(parallel_config=parallel, model_config=None, instance_id=config["engine"])
        self.engine = WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(backend=config.get("backend", "gloo")), vllm_config, device, self.model
        )
        self.active = False
        self.version = "default"

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(self.engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        if self.active:
            raise RuntimeError("start_weight_update: an update is already open")
        self.engine.start_weight_update()
        self.active = True

    def start_draft_weight_update(self) -> None:
        self.engine.set_weight_update_target(self.draft, None)
        self.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if not self.active:
            raise RuntimeError("update_weights: no update is open")
        try:
            self.engine.update_weights(update_info)
        except BaseException:
            self.active = False
            self.engine.reset_weight_update_target()
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        if not self.active:
            raise RuntimeError("finish_weight_update: no update is open")
        self.engine.finish_weight_update()
        self.engine.reset_weight_update_target()
        self.active = False
        if weight_version is not None:
            self.version = weight_version

    def weight_version(self) -> str:
        return self.version

    def break_next(self, moment: str) -> None:
        """The engine's next step of this kind raises, once: on the update's arrival, in the installer, or in finish."""
        target, name = {
            "update": (self.engine, "_agree_on_metadata"),
            "installing": (self.engine, "_receive"),
            "finish": (self.engine, "_await_verdict"),
        }[moment]
        original = getattr(target, name)

        def broken(*args: Any) -> Any:
            delattr(target, name)
            if moment == "installing":
                original(*args)
            raise OSError("broken on purpose")

        setattr(target, name, broken)

    def shutdown_weight_transfer_engine(self) -> None:
        self.engine.shutdown()

    def sums(self, *, draft: bool = False) -> dict[str, int]:
        """A checksum per parameter of the model, or of the draft model."""
        return checksums(dict((self.draft if draft else self.model).named_parameters(remove_duplicate=False)))

    def stats(self) -> dict[str, Any]:
        """Threads, descriptors and memory of this process."""
        return process_stats()

    def echo(self, value: Any) -> Any:
        return value


def _module(parameters: dict[str, Any]) -> Any:
    """A module with these parameters (name: [dtype, shape]), all zero."""
    import torch

    module = torch.nn.Module()
    for name, (dtype, shape) in parameters.items():
        value = torch.zeros(shape, dtype=getattr(torch, dtype))
        _register(module, name, torch.nn.Parameter(value, requires_grad=False))
    return module


def _register(model: Any, name: str, param: Any) -> None:
    *path, leaf = name.split(".")
    module = model
    for part in path:
        if part not in module._modules:
            module.add_module(part, type(model)())
        module = module._modules[part]
    module.register_parameter(leaf, param)


def _attention_options(dtype: str) -> dict[str, Any]:
    """What makes every CPU compute latent attention in float32 as well.

    Where there is AMX, vLLM takes a kernel for it that refuses float32, unless its reference is asked for. For other kinds of
    attention a CPU ignores the option. Before vLLM 0.28 there is no such kernel, and no name for the reference.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if dtype == "float32" and current_platform.is_cpu() and "CPU_MLA" in AttentionBackendEnum.__members__:
        return {"attention_config": {"backend": "CPU_MLA"}}
    return {}


class VLLMHost:
    """A whole vLLM in this process (`LLM`), its engine core and worker included."""

    def __init__(self, config: dict[str, Any]) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        if config.get("unpacked"):
            os.environ["WT_TEST_UNPACKED"] = "1"  # see extension.py
        import torch

        if config.get("pretends_amx"):
            torch.cpu._is_amx_tile_supported = lambda: True  # what vLLM asks; in this process, so for one rank
        from vllm import LLM

        if config.get("fill_memory", True):
            # Memory that nobody wrote is NaN: what was left out cannot look right by luck.
            torch.use_deterministic_algorithms(True, warn_only=True)
        self.llm = LLM(
            model=config["model"],
            enforce_eager=config.get("enforce_eager", True),
            dtype=config.get("dtype", "float32"),
            max_model_len=128,
            max_num_seqs=8,
            kv_cache_memory_bytes=64 << 20,
            gpu_memory_utilization=config.get("gpu_memory_utilization", 0.9),
            weight_transfer_config={"backend": config.get("backend", "wt_gloo")},
            tensor_parallel_size=config.get("tensor_parallel_size", 1),
            pipeline_parallel_size=config.get("pipeline_parallel_size", 1),
            enable_expert_parallel=config.get("enable_expert_parallel", False),
            distributed_executor_backend=config.get("distributed_executor_backend"),
            disable_custom_all_reduce=config.get("disable_custom_all_reduce", False),
            quantization=config.get("quantization"),
            load_format=config.get("load_format", "auto"),
            skip_tokenizer_init=config.get("load_format") == "dummy",
            worker_extension_cls="extension.TestExtension",
            **_attention_options(config.get("dtype", "float32")),
        )
        if config.get("pipeline_parallel_size", 1) > 1:
            self.llm.collective_rpc("make_stage_buffers")
        self.takes_version = "weight_version" in inspect.signature(self.llm.finish_weight_update).parameters

    def each_rank(self, method: str, arguments: list[Any]) -> list[Any]:
        """The answer of every worker rank to a call of `extension.py`."""
        return self.llm.collective_rpc(method, args=tuple(arguments))

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        from wt_worker import WeightTransferInitRequest

        self.llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        from wt_worker import WeightTransferUpdateRequest

        self.llm.update_weights(WeightTransferUpdateRequest(update_info=update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        if self.takes_version:
            self.llm.finish_weight_update(weight_version)
        else:
            self.llm.finish_weight_update()  # vLLM before 0.28

    def weight_version(self) -> str:
        return self.llm.get_weight_version()

    def device_bytes(self) -> int:
        return device_bytes()

    def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        """Log-probability of each prompt token after the first."""
        from vllm import SamplingParams

        self.llm.reset_prefix_cache()
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        output = self.llm.generate([{"prompt_token_ids": token_ids}], params, use_tqdm=False)[0]
        pairs = zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
        return [position[token].logprob for token, position in pairs]

    def greedy(self, token_ids: list[int], num_tokens: int) -> list[int]:
        """The next `num_tokens` tokens, most probable ones."""
        from vllm import SamplingParams

        self.llm.reset_prefix_cache()
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        output = self.llm.generate([{"prompt_token_ids": token_ids}], params, use_tqdm=False)[0]
        return list(output.outputs[0].token_ids)

    def unknown_backend(self, backend: str) -> list[str]:
        """What vLLM's factory and ours say to a name that nobody has registered."""
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as OfVLLM

        from wt_worker import WeightTransferEngineFactory

        texts = []
        for factory in (OfVLLM, WeightTransferEngineFactory):
            try:
                factory.create_engine(SimpleNamespace(backend=backend), None, None, None)
            except ValueError as error:
                texts.append(str(error))
        return texts

    def importable(self, module: str) -> bool:
        return importlib.util.find_spec(module) is not None

    def echo(self, value: Any) -> Any:
        return value


class RayHost:
    """Ray actors, each around a `VLLMHost`, named so that a trainer process can find them."""

    def __init__(self, config: dict[str, Any]) -> None:
        import ray

        os.environ["RAY_AUTH_MODE"] = "disabled"
        self.ray = ray
        environment = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).parent),
        }
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=100 << 20,
            _node_ip_address="127.0.0.1",
            namespace="wt",
            runtime_env={"env_vars": environment},
        )
        actor = ray.remote(num_cpus=1)(VLLMActor)
        self.actors = {
            f"engine-{index}": actor.options(name=f"engine-{index}").remote(config)
            for index in range(config["num_actors"])
        }
        ray.get([handle.weight_version.remote() for handle in self.actors.values()])  # up when the first call returns

    def names(self) -> list[str]:
        return list(self.actors)

    def address(self) -> str:
        return self.ray.get_runtime_context().gcs_address

    def each(self, method: str, arguments: list[Any]) -> list[Any]:
        return self.ray.get([getattr(handle, method).remote(*arguments) for handle in self.actors.values()])

    def importable(self, module: str) -> bool:
        return importlib.util.find_spec(module) is not None

    def stop(self) -> None:
        self.ray.shutdown()


class VLLMActor:
    """What a user's actor around `LLM` looks like: vLLM's own method names, requests passed through."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.host = VLLMHost(config)

    def init_weight_transfer_engine(self, request: Any) -> None:
        self.host.llm.init_weight_transfer_engine(request)

    def start_weight_update(self) -> None:
        self.host.llm.start_weight_update()

    def update_weights(self, request: Any) -> None:
        self.host.llm.update_weights(request)

    def finish_weight_update(self) -> None:
        self.host.llm.finish_weight_update()

    def update_weight_version(self, version: str) -> None:
        self.host.llm.update_weight_version(version)

    def weight_version(self) -> str:
        return self.host.weight_version()

    def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        return self.host.prompt_logprobs(token_ids)

    def greedy(self, token_ids: list[int], num_tokens: int) -> list[int]:
        return self.host.greedy(token_ids, num_tokens)


def main() -> None:
    kind, config = sys.argv[1], json.loads(sys.argv[2])
    serve({"bare": BareHost, "vllm": VLLMHost, "ray": RayHost}[kind](config), config["port_file"])


if __name__ == "__main__":
    main()
