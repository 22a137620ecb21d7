"""The matrix, as data: which model, trainer layout and engine are tested together.

`DEFAULT` is what a plain `nox` runs: few engines, each started once and used by its cells one after the other. `ALL` is every
cell (`nox -s integration -- --all`). Together they contain every value of every axis.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "ALL",
    "DEFAULT",
    "ENGINES",
    "LAYOUTS",
    "MODELS",
    "PLACEMENT_ALL",
    "PLACEMENT_DEFAULT",
    "Case",
    "PlacementCase",
    "count_reasons",
]

MODELS = ("llama", "llama-tied", "qwen2", "qwen3-moe")
"""Kinds of `models.py` that are crossed with layouts and engines; `PLACEMENT_ALL` has all kinds."""

LAYOUTS = {
    "whole": 1,  # one rank with the whole model, under its checkpoint names
    "renamed": 1,  # one rank, under the module's own names, which examples/renamed.py turns into the checkpoint's
    "fsdp2": 2,  # every layer sharded over two ranks
    "fsdp2-offload": 2,  # the same, the shards kept in host memory by FSDP
    "tp": 2,  # projections as tensor-parallel DTensors
    "tp-submesh": 4,  # the same on the inner axis of a 2 x 2 mesh
    "pipeline": 2,  # two stages, each a data sender
    "master-fp32": 1,  # float32 weights for an engine in bfloat16
}
"""Trainer layouts, and how many ranks each has."""

ENGINES = ("inprocess", "inprocess-tp2", "torchrun-tp2", "inprocess-bf16", "http", "http-tp2", "two-servers", "ray")
"""Where vLLM runs: `LLM` in a process, one in each of two that torchrun starts, one or two OpenAI servers, two Ray actors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One cell."""

    model: str
    layout: str
    engine: str

    def __str__(self) -> str:
        return f"{self.model}-{self.layout}-{self.engine}"


def _cells(engine: str, *cells: tuple[str, str]) -> tuple[Case, ...]:
    return tuple(Case(model=model, layout=layout, engine=engine) for model, layout in cells)


DEFAULT = (
    *_cells("inprocess", ("llama", "whole"), ("qwen3-moe", "whole"), ("qwen3-moe", "renamed")),
    *_cells("inprocess-tp2", ("qwen2", "fsdp2"), ("qwen2", "tp"), ("qwen2", "whole")),
    *_cells("http", ("llama-tied", "whole"), ("llama-tied", "pipeline"), ("llama-tied", "fsdp2")),
)
ALL = (
    *DEFAULT,
    *_cells(
        "inprocess", ("llama-tied", "whole"), ("qwen2", "whole"), ("llama", "fsdp2-offload"), ("llama", "tp-submesh")
    ),
    *_cells("torchrun-tp2", ("qwen2", "whole")),
    *_cells("inprocess-bf16", ("llama", "master-fp32")),
    *_cells("http", ("llama", "whole"), ("qwen2", "whole"), ("qwen3-moe", "whole")),
    *_cells("http-tp2", ("llama", "pipeline"), ("qwen3-moe", "whole")),
    *_cells("two-servers", ("llama", "fsdp2"), ("llama", "whole")),
    *_cells(
        "ray",
        ("llama", "whole"),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementCase:
    """One model, and how each of its layers must be installed once it is proved.

    Attributes:
        model: kind of `models.py`.
        packed: whether layers multiply with packed copies of their weights, as is usual on a CPU, or with these, as on CUDA.
        num_ranks: of tensor parallelism.
        dtype: of the engine; the trainer's weights are float32.
        not_in_place: words of each reason for which a layer goes through the loader, and how many layers have it.
        with_packed_convolutions: further ones on a CPU for which vLLM packs convolutions: one with avx512_bf16, for bfloat16.
        kinds: how many parameters the plan writes in each way, by rank.
    """

    model: str
    packed: bool
    num_ranks: int = 1
    dtype: str = "float32"
    not_in_place: dict[str, int]
    with_packed_convolutions: dict[str, int] = field(default_factory=dict)
    kinds: tuple[dict[str, int], ...]

    def __str__(self) -> str:
        name = f"{self.model}-{'packed' if self.packed else 'unpacked'}-tp{self.num_ranks}"
        return name if self.dtype == "float32" else f"{name}-{self.dtype}"


def _placed(
    model: str, variant: str, not_in_place: dict[str, int], *kinds: dict[str, int], **options: Any
) -> PlacementCase:
    words, _, ranks = variant.partition("-tp")
    return PlacementCase(
        model=model,
        packed=words == "packed",
        num_ranks=int(ranks or 1),
        not_in_place=not_in_place,
        kinds=kinds,
        **options,
    )


PLACEMENT_ALL = (
    _placed("llama", "unpacked", {}, {"contiguous": 4, "contiguous+filled": 2, "whole": 9}),
    _placed(
        "llama",
        "unpacked-tp2",
        {},
        {"contiguous": 6, "strided": 4, "whole": 5},
        {"contiguous": 4, "contiguous+filled": 2, "strided": 4, "whole": 5},
    ),
    _placed("llama", "packed", {"packed copy": 10}, {"contiguous": 4, "contiguous+filled": 2, "whole": 9}),
    _placed(
        "llama",
        "packed-tp2",
        {"packed copy": 10},
        {"contiguous": 6, "strided": 4, "whole": 5},
        {"contiguous": 4, "contiguous+filled": 2, "strided": 4, "whole": 5},
    ),
    _placed("llama-tied", "unpacked", {}, {"contiguous": 4, "contiguous+filled": 1, "whole": 9}),
    _placed(
        "llama-tied",
        "unpacked-tp2",
        {},
        {"contiguous": 5, "strided": 4, "whole": 5},
        {"contiguous": 4, "contiguous+filled": 1, "strided": 4, "whole": 5},
    ),
    _placed("llama-tied", "packed", {"packed copy": 9}, {"contiguous": 4, "contiguous+filled": 1, "whole": 9}),
    _placed(
        "llama-tied",
        "packed-tp2",
        {"packed copy": 9},
        {"contiguous": 5, "strided": 4, "whole": 5},
        {"contiguous": 4, "contiguous+filled": 1, "strided": 4, "whole": 5},
    ),
    _placed("llama-oddvocab", "unpacked", {}, {"contiguous": 4, "contiguous+filled": 2, "whole": 9}),
    _placed(
        "llama-oddvocab",
        "unpacked-tp2",
        {},
        {"contiguous": 6, "strided": 4, "whole": 5},
        {"contiguous": 4, "contiguous+filled": 2, "strided": 4, "whole": 5},
    ),
    _placed("llama-oddvocab", "packed", {"packed copy": 10}, {"contiguous": 4, "contiguous+filled": 2, "whole": 9}),
    _placed(
        "llama-oddvocab",
        "packed-tp2",
        {"packed copy": 10},
        {"contiguous": 6, "strided": 4, "whole": 5},
        {"contiguous": 4, "contiguous+filled": 2, "strided": 4, "whole": 5},
    ),
    _placed("qwen2", "unpacked", {}, {"contiguous": 6, "contiguous+filled": 2, "whole": 9}),
    _placed(
        "qwen2",
        "unpacked-tp2",
        {},
        {"contiguous": 8, "strided": 4, "whole": 5},
        {"contiguous": 6, "contiguous+filled": 2, "strided": 4, "whole": 5},
    ),
    _placed("qwen2", "packed", {"packed copy": 10}, {"contiguous": 6, "contiguous+filled": 2, "whole": 9}),
    _placed(
        "qwen2",
        "packed-tp2",
        {"packed copy": 10},
        {"contiguous": 8, "strided": 4, "whole": 5},
        {"contiguous": 6, "contiguous+filled": 2, "strided": 4, "whole": 5},
    ),
    _placed("qwen3", "unpacked", {}, {"contiguous": 4, "contiguous+filled": 1, "whole": 13}),
    _placed(
        "qwen3",
        "unpacked-tp2",
        {},
        {"contiguous": 5, "strided": 4, "whole": 9},
        {"contiguous": 4, "contiguous+filled": 1, "strided": 4, "whole": 9},
    ),
    _placed("qwen3", "packed", {"packed copy": 9}, {"contiguous": 4, "contiguous+filled": 1, "whole": 13}),
    _placed(
        "qwen3",
        "packed-tp2",
        {"packed copy": 9},
        {"contiguous": 5, "strided": 4, "whole": 9},
        {"contiguous": 4, "contiguous+filled": 1, "strided": 4, "whole": 9},
    ),
    _placed(
        "qwen3-moe", "unpacked", {"repacked for the kernel": 2}, {"contiguous": 6, "contiguous+filled": 2, "whole": 13}
    ),
    _placed(
        "qwen3-moe",
        "unpacked-tp2",
        {"repacked for the kernel": 2},
        {"contiguous": 6, "strided": 4, "whole": 11},
        {"contiguous": 4, "contiguous+filled": 2, "strided": 4, "whole": 11},
    ),
    _placed(
        "qwen3-moe",
        "packed",
        {"repacked for the kernel": 2, "packed copy": 8},
        {"contiguous": 6, "contiguous+filled": 2, "whole": 13},
    ),
    _placed(
        "qwen3-moe",
        "packed-tp2",
        {"repacked for the kernel": 2, "packed copy": 8},
        {"contiguous": 6, "strided": 4, "whole": 11},
        {"contiguous": 4, "contiguous+filled": 2, "strided": 4, "whole": 11},
    ),
    _placed(
        "mixtral", "unpacked", {"repacked for the kernel": 2}, {"contiguous": 6, "contiguous+filled": 2, "whole": 9}
    ),
    _placed(
        "mixtral",
        "unpacked-tp2",
        {"repacked for the kernel": 2},
        {"contiguous": 6, "strided": 4, "whole": 7},
        {"contiguous": 4, "contiguous+filled": 2, "strided": 4, "whole": 7},
    ),
    _placed(
        "mixtral",
        "packed",
        {"repacked for the kernel": 2, "packed copy": 8},
        {"contiguous": 6, "contiguous+filled": 2, "whole": 9},
    ),
    _placed(
        "mixtral",
        "packed-tp2",
        {"repacked for the kernel": 2, "packed copy": 8},
        {"contiguous": 6, "strided": 4, "whole": 7},
        {"contiguous": 4, "contiguous+filled": 2, "strided": 4, "whole": 7},
    ),
    _placed("gemma3", "unpacked", {}, {"contiguous": 4, "contiguous+filled": 1, "whole": 17}),
    _placed(
        "gemma3",
        "unpacked-tp2",
        {},
        {"contiguous": 5, "strided": 4, "whole": 13},
        {"contiguous": 4, "contiguous+filled": 1, "strided": 4, "whole": 13},
    ),
    _placed("gemma3", "packed", {"packed copy": 9}, {"contiguous": 4, "contiguous+filled": 1, "whole": 17}),
    _placed(
        "gemma3",
        "packed-tp2",
        {"packed copy": 9},
        {"contiguous": 5, "strided": 4, "whole": 13},
        {"contiguous": 4, "contiguous+filled": 1, "strided": 4, "whole": 13},
    ),
    _placed("phi3", "unpacked", {}, {"contiguous": 4, "contiguous+filled": 2, "whole": 9}),
    _placed(
        "phi3",
        "unpacked-tp2",
        {},
        {"contiguous": 6, "strided": 4, "whole": 5},
        {"contiguous": 4, "contiguous+filled": 2, "strided": 4, "whole": 5},
    ),
    _placed("phi3", "packed", {"packed copy": 10}, {"contiguous": 4, "contiguous+filled": 2, "whole": 9}),
    _placed(
        "phi3",
        "packed-tp2",
        {"packed copy": 10},
        {"contiguous": 6, "strided": 4, "whole": 5},
        {"contiguous": 4, "contiguous+filled": 2, "strided": 4, "whole": 5},
    ),
    _placed("gpt2", "unpacked", {}, {"contiguous": 2, "contiguous+filled": 1, "strided": 8, "whole": 17}),
    _placed(
        "gpt2",
        "unpacked-tp2",
        {},
        {"contiguous": 5, "strided": 8, "whole": 15},
        {"contiguous": 4, "contiguous+filled": 1, "strided": 8, "whole": 15},
    ),
    _placed("gpt2", "packed", {"packed copy": 9}, {"contiguous": 2, "contiguous+filled": 1, "strided": 8, "whole": 17}),
    _placed(
        "gpt2",
        "packed-tp2",
        {"packed copy": 9},
        {"contiguous": 5, "strided": 8, "whole": 15},
        {"contiguous": 4, "contiguous+filled": 1, "strided": 8, "whole": 15},
    ),
    _placed("falcon", "unpacked", {}, {"contiguous": 2, "contiguous+filled": 2, "whole": 16}),
    _placed(
        "falcon",
        "unpacked-tp2",
        {},
        {"contiguous": 6, "strided": 4, "whole": 10},
        {"contiguous": 4, "contiguous+filled": 2, "strided": 4, "whole": 10},
    ),
    _placed("falcon", "packed", {"packed copy": 10}, {"contiguous": 2, "contiguous+filled": 2, "whole": 16}),
    _placed(
        "falcon",
        "packed-tp2",
        {"packed copy": 10},
        {"contiguous": 6, "strided": 4, "whole": 10},
        {"contiguous": 4, "contiguous+filled": 2, "strided": 4, "whole": 10},
    ),
    _placed(
        "gpt-oss",
        "unpacked",
        {"repacked for the kernel": 2},
        {"contiguous": 4, "contiguous+filled": 2, "strided": 4, "whole": 19},
    ),
    _placed(
        "gpt-oss",
        "unpacked-tp2",
        {"repacked for the kernel": 2},
        {"contiguous": 8, "strided": 8, "whole": 13},
        {"contiguous": 6, "contiguous+filled": 4, "strided": 8, "whole": 11},
    ),
    _placed(
        "gpt-oss",
        "packed",
        {"repacked for the kernel": 2, "packed copy": 8},
        {"contiguous": 4, "contiguous+filled": 2, "strided": 4, "whole": 19},
    ),
    _placed(
        "gpt-oss",
        "packed-tp2",
        {"repacked for the kernel": 2, "packed copy": 8},
        {"contiguous": 8, "strided": 8, "whole": 13},
        {"contiguous": 6, "contiguous+filled": 4, "strided": 8, "whole": 11},
    ),
    _placed(
        "deepseek-v2",
        "unpacked",
        {"repacked for the kernel": 1},
        {"contiguous": 4, "contiguous+filled": 2, "whole": 18},
    ),
    _placed(
        "deepseek-v2",
        "unpacked-tp2",
        {"repacked for the kernel": 1},
        {"contiguous": 9, "strided": 5, "whole": 10},
        {"contiguous": 7, "contiguous+filled": 2, "strided": 5, "whole": 10},
    ),
    _placed(
        "deepseek-v2",
        "packed",
        {"packed copy": 13, "repacked for the kernel": 1},
        {"contiguous": 4, "contiguous+filled": 2, "whole": 18},
    ),
    _placed(
        "deepseek-v2",
        "packed-tp2",
        {"packed copy": 13, "repacked for the kernel": 1},
        {"contiguous": 9, "strided": 5, "whole": 10},
        {"contiguous": 7, "contiguous+filled": 2, "strided": 5, "whole": 10},
    ),
    _placed(
        "glm4-moe", "unpacked", {"repacked for the kernel": 1}, {"contiguous": 6, "contiguous+filled": 2, "whole": 11}
    ),
    _placed(
        "glm4-moe",
        "unpacked-tp2",
        {"repacked for the kernel": 1},
        {"contiguous": 7, "strided": 5, "whole": 7},
        {"contiguous": 5, "contiguous+filled": 2, "strided": 5, "whole": 7},
    ),
    _placed(
        "glm4-moe",
        "packed",
        {"packed copy": 11, "repacked for the kernel": 1},
        {"contiguous": 6, "contiguous+filled": 2, "whole": 11},
    ),
    _placed(
        "glm4-moe",
        "packed-tp2",
        {"packed copy": 11, "repacked for the kernel": 1},
        {"contiguous": 7, "strided": 5, "whole": 7},
        {"contiguous": 5, "contiguous+filled": 2, "strided": 5, "whole": 7},
    ),
    _placed(
        "mamba2",
        "unpacked",
        {"weight_utils.py": 2},
        {"contiguous": 6, "contiguous+filled": 2, "loader": 2, "whole": 11},
    ),
    _placed(
        "mamba2",
        "unpacked-tp2",
        {"weight_utils.py": 2},
        {"contiguous": 14, "loader": 2, "strided": 2, "whole": 3},
        {"contiguous": 12, "contiguous+filled": 2, "loader": 2, "strided": 2, "whole": 3},
    ),
    _placed(
        "mamba2",
        "packed",
        {"packed copy": 6, "weight_utils.py": 2},
        {"contiguous": 6, "contiguous+filled": 2, "loader": 2, "whole": 11},
    ),
    _placed(
        "mamba2",
        "packed",
        {"packed copy": 6, "weight_utils.py": 2},
        {"contiguous+cast": 6, "contiguous+filled+cast": 2, "loader": 2, "whole+cast": 11},
        dtype="bfloat16",
        with_packed_convolutions={"conv1d.weight is served with shape": 2},
    ),
    _placed(
        "mamba2",
        "packed-tp2",
        {"packed copy": 6, "weight_utils.py": 2},
        {"contiguous": 14, "loader": 2, "strided": 2, "whole": 3},
        {"contiguous": 12, "contiguous+filled": 2, "loader": 2, "strided": 2, "whole": 3},
    ),
)
PLACEMENT_DEFAULT = tuple(
    case
    for case in PLACEMENT_ALL
    if str(case)
    in {
        "llama-oddvocab-unpacked-tp2",  # padding, shards, parts of a parameter on each rank
        "gpt2-unpacked-tp1",  # transposed
        "gpt-oss-unpacked-tp1",  # replayed experts beside layers in place
        "deepseek-v2-unpacked-tp1",  # latent attention
        "glm4-moe-packed-tp1",  # a router's bias, which two modules of vLLM have
        "mamba2-packed-tp1",  # a value transform; packed copies
        "mamba2-packed-tp1-bfloat16",  # convolutions whose packing leaves a view behind, on some CPUs
    }
)
"""Of the kinds that `DEFAULT` does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUCase:
    """One cell of `nox -s gpu_integration`.

    Attributes:
        id: its session's name.
        backend: the trainer's name of it.
        model: kind of `models.py`.
        layout: of the trainer.
        trainer_gpus: the GPU that each trainer rank has for itself as device 0; None is a rank on the CPU.
        worker_gpus: those of the engine, one for each tensor-parallel rank.
        trainer_dtype: of the trainer's weights; the engine's are bfloat16.
        cuda_graphs: whether the engine captures them.
        not_in_place: words of the reasons for which layers are not written in place, and how many.
        quantization: what the engine quantizes to as it loads; None is not at all.
        engine: `inprocess`, or `http`, an unmodified server.
        laws: instead of all this, run the tests of test_fake_nccl.py that this expression selects, on the first trainer's GPU and
            the first worker's, with NCCL itself.
        tolerance: of a log-probability, against transformers in float32; a missing parameter shows by 0.25 or more. None
            compares nothing, where the two compute differently.
        trainer_needs: modules that the trainer's environment must have.
        worker_needs: modules that the worker's environment must have.
    """

    id: str
    backend: str
    model: str
    layout: str
    trainer_gpus: tuple[int | None, ...]
    worker_gpus: tuple[int, ...]
    trainer_dtype: str = "bfloat16"
    cuda_graphs: bool = False
    not_in_place: dict[str, int] = field(default_factory=dict)
    quantization: str | None = None
    engine: str = "inprocess"
    laws: str | None = None
    tolerance: float | None = 0.15
    trainer_needs: tuple[str, ...] = ("torch", "transformers")
    worker_needs: tuple[str, ...] = ("torch", "vllm", "wt_worker")

    @property
    def num_gpus(self) -> int:
        """How many GPUs it takes."""
        return len({gpu for gpu in (*self.trainer_gpus, *self.worker_gpus) if gpu is not None})


def _over_nccl(
    name: str,
    model: str,
    *,
    layout: str = "whole",
    trainer_gpus: tuple[int, ...] = (0,),
    worker_gpus: tuple[int, ...] = (1,),
    **options: Any,
) -> GPUCase:
    return GPUCase(
        id=name,
        backend="nccl",
        model=model,
        layout=layout,
        trainer_gpus=trainer_gpus,
        worker_gpus=worker_gpus,
        trainer_needs=("torch", "transformers", "nccl"),
        worker_needs=("torch", "vllm", "wt_worker", "nccl"),
        **options,
    )


GPU_CASES = (
    # gloo into a GPU engine: the trainer has none, and vLLM's loaders move what arrives.
    GPUCase(id="gloo-tp1-plain", backend="gloo", model="llama", layout="whole", trainer_gpus=(None,), worker_gpus=(0,)),
    GPUCase(
        id="gloo-tp1-graphs-moe",
        backend="gloo",
        model="qwen3-moe",
        layout="renamed",
        trainer_gpus=(None,),
        worker_gpus=(0,),
        cuda_graphs=True,
    ),
    GPUCase(
        id="gloo-tp2-fp32-pipeline",
        backend="gloo",
        model="llama-tied",
        layout="pipeline",
        trainer_gpus=(None, None),
        worker_gpus=(0, 1),
        trainer_dtype="float32",
    ),
    # Views of one weight in another; a loader that writes behind its parameters' own; everything through the loader.
    GPUCase(
        id="gloo-tp1-mla",
        backend="gloo",
        model="deepseek-v2",
        layout="whole",
        trainer_gpus=(None,),
        worker_gpus=(0,),
        tolerance=None,
    ),
    GPUCase(
        id="gloo-tp1-gpt-oss",
        backend="gloo",
        model="gpt-oss",
        layout="whole",
        trainer_gpus=(None,),
        worker_gpus=(0,),
        tolerance=None,
    ),
    GPUCase(
        id="gloo-tp1-online-fp8",
        backend="gloo",
        model="llama",
        layout="whole",
        trainer_gpus=(None,),
        worker_gpus=(0,),
        quantization="fp8",
        tolerance=None,
        not_in_place={"quantization method": 8},
    ),
    _over_nccl("nccl-tp1-plain", "llama"),
    # The second trainer rank and the worker have a GPU in common.
    _over_nccl("nccl-tp1-fsdp2", "qwen2", layout="fsdp2", trainer_gpus=(0, 1)),
    _over_nccl("nccl-tp1-fp32-tied", "llama-tied", trainer_dtype="float32"),
    _over_nccl("nccl-tp1-graphs", "llama", cuda_graphs=True),
    _over_nccl("nccl-tp1-graphs-moe", "qwen3-moe", layout="renamed", cuda_graphs=True),
    _over_nccl(
        "nccl-tp1-online-fp8", "llama", quantization="fp8", tolerance=None, not_in_place={"quantization method": 8}
    ),
    _over_nccl("nccl-http-plain", "llama", engine="http"),
    # mid_broadcast: 400 MB are there before anybody could be killed. written_during: a GPU digests what it sends, so that nobody
    # can see what was written before.
    _over_nccl("nccl-laws", "llama", laws="not settings and not mid_broadcast and not missing and not written_during"),
    _over_nccl("nccl-pp2-tp1", "llama-tied", layout="pipeline", trainer_gpus=(0, 1), worker_gpus=(2,)),
    _over_nccl("nccl-tp2-plain", "qwen2", worker_gpus=(1, 2)),
    _over_nccl("nccl-pp2-tp2", "llama", layout="pipeline", trainer_gpus=(0, 1), worker_gpus=(2, 3)),
)
"""Cells for GPUs, one session each; a new backend adds its own."""


def count_reasons(not_in_place: dict[str, list[str]], words: dict[str, int]) -> dict[str, int]:
    """How many layers of a report have a reason with each of `words`; reasons without any are counted as they are."""
    found: dict[str, int] = {}
    for reason, layers in not_in_place.items():
        key = next((each for each in words if each in reason), reason)
        found[key] = found.get(key, 0) + len(layers)
    return found
