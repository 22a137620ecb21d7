"""Asks a vLLM how the weights of its layers are installed: one that runs, or one that is started for the question.

To ask a server, start it with

    --worker-extension-cls wt_worker.vllm.describe.PlanExtension
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from wt_common.session import Metadata
from wt_worker.vllm.installer import VLLMInstaller
from wt_worker.vllm.reload import plan_error

__all__ = ["PlanExtension", "describe_checkpoint"]

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # with one rank, all is in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # on a CPU, more ranks than NUMA nodes are refused otherwise
    "VLLM_LOGGING_LEVEL": "ERROR",  # below that, a line for each weight that is cast
}
_KV_CACHE_BYTES = 256 << 20  # nothing is generated; vLLM wants room for one request of `max_model_len` all the same


class PlanExtension:
    """Mixed into vLLM's worker class by `--worker-extension-cls`; `wt_plan` is then a method for `collective_rpc`."""

    def wt_plan(self, rows: Sequence[Sequence[Any]] | None = None) -> dict[str, Any]:
        """This rank's description of how weights are installed, in plain JSON values; the model is as before.

        Of the last round, as it is now; or, with `rows` (each a name, a dtype's name and a shape), of a round that announces
        those, which costs a trace if it is new. It has `rank`, `size` and `device` beside the fields of `PlanDescription`.

        An error is returned, as the text `error`: vLLM's executor loses step with its ranks where one raises.
        """
        worker: Any = self  # that this is mixed into
        parallel = worker.vllm_config.parallel_config
        answer = {"rank": worker.rank, "size": parallel.world_size, "device": str(worker.device)}
        try:
            metadata = None if rows is None else _metadata(rows)
            return {**answer, **_installer(worker, is_new=metadata is not None).describe(metadata).to_dict()}
        except Exception as error:
            return {**answer, "error": f"{type(error).__name__}: {error}"}


def describe_checkpoint(
    directory: str, rows: Sequence[Sequence[Any]], *, tensor_parallel_size: int = 1, dtype: str = "auto"
) -> list[dict[str, Any]]:
    """What each rank of a vLLM says of `rows`, started here on the checkpoint in `directory` with random weights.

    It takes as much memory as serving the model would, and ends with this process.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm import LLM

    llm = LLM(
        model=directory,
        load_format="dummy",
        dtype=dtype,
        tensor_parallel_size=tensor_parallel_size,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=1,
        kv_cache_memory_bytes=_KV_CACHE_BYTES,
        weight_transfer_config={"backend": "wt_gloo"},
        worker_extension_cls=f"{__name__}.{PlanExtension.__name__}",
    )
    answers: list[dict[str, Any]] = llm.collective_rpc("wt_plan", args=(rows,))
    return answers


def _installer(worker: Any, *, is_new: bool) -> VLLMInstaller:
    """The one that installs into the worker's model; one that nobody else has, where there was no round yet."""
    engine = worker.weight_transfer_engine
    if is_new and getattr(engine, "_open", False):
        raise plan_error("", "an update is open, and looking at new names would end it: ask again when it is over")
    model = worker.get_model()
    installers = getattr(engine, "_installers", {})  # vLLM's own engines have none
    found: VLLMInstaller | None = installers.get(id(model))
    return found or VLLMInstaller(model, worker.vllm_config, worker.model_config, worker.device)


def _metadata(rows: Sequence[Sequence[Any]]) -> Metadata:
    names, dtype_names, shapes = ([row[place] for row in rows] for place in range(3))
    return Metadata(round=1, names=names, dtype_names=dtype_names, shapes=[list(shape) for shape in shapes])
