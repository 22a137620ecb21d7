"""What a GPU cell tests: four rounds into a real vLLM on GPUs. Run by gpu_runner.py, which has checked that all is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import models
import pytest
from cases import GPU_CASES, LAYOUTS, GPUCase, count_reasons
from engines import InProcess, Servers
from harness import TrainerHost, free_port, gpus_are_shared, together

PROMPT = [72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100, 33, 10, 65, 66]

KEPT_BYTES = 4 << 20
SHARED_MEMORY = 0.2  # of a GPU, for each rank of vLLM where several have one GPU


@pytest.fixture
def cell(request: pytest.FixtureRequest) -> GPUCase:
    """The cell that `--gpu-case` names."""
    (case,) = (case for case in GPU_CASES if case.id == request.config.getoption("--gpu-case"))
    return case


def test_rounds(cell: GPUCase, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """New weights twice, those of the checkpoint, new ones again.

    The third round is written in place, as far as the cell says; after it vLLM computes bit for bit as at its start. When the
    trainer has left, neither side has more memory than before it came.
    """
    num_ranks = LAYOUTS[cell.layout]
    worker = _engine(cell, checkpoint(cell.model), tmp_path)
    trainers = [
        TrainerHost(tmp_path, environment={"CUDA_VISIBLE_DEVICES": "" if gpu is None else _visible([gpu])})
        for gpu in cell.trainer_gpus
    ]
    try:
        config = {"layout": cell.layout, "model": cell.model, "num_ranks": num_ranks, "backend": cell.backend}
        config |= worker.reach()
        config |= {"group_port": free_port()} if num_ranks > 1 else {}
        config |= {"dtype": cell.trainer_dtype, "info": {"timeout_s": 60}}

        def on_all(name: str, **args: object) -> list[object]:
            results = together(*(lambda t=trainer: t.call(name, **args) for trainer in trainers))
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            return results

        def configure(rank: int) -> None:
            device = "cpu" if cell.trainer_gpus[rank] is None else "cuda"
            trainers[rank].call("configure", config={**config, "rank": rank, "device": device})

        for result in together(*(lambda r=rank: configure(r) for rank in range(num_ranks))):
            assert result is None, result
        (fresh,) = worker.prompt_logprobs(PROMPT)
        before = [*on_all("device_bytes"), *worker.device_bytes()]
        on_all("init")
        computed = {}
        for seed in (3, 5, 0, 4):
            on_all("set_weights", seed=seed)
            report = on_all("send")[0]
            (computed[seed],) = worker.prompt_logprobs(PROMPT)
            expected = models.prompt_logprobs(models.build_model(cell.model, seed), PROMPT)
            difference = max(abs(a - b) for a, b in zip(computed[seed], expected, strict=True))
            total_ms = 1e3 * report["seconds"]["total"]
            print(f"seed {seed}: {report['num_bytes']} bytes in {total_ms:.0f} ms, off by {difference:.3f}")
            print(f"seed {seed}: {report['seconds']}; not in place: {report['workers'][0]['not_in_place']}")
            print(f"seed {seed}: buffers {report['buffer_bytes']}, {[w['buffer_bytes'] for w in report['workers']]}")
            assert report["outcome"] == "committed"
            assert report["verify"] == "full"
            assert all(each["not_synced"] == [] for each in report["workers"])
            assert cell.tolerance is None or difference < cell.tolerance
        for worker_report in report["workers"]:
            assert count_reasons(worker_report["not_in_place"], cell.not_in_place) == cell.not_in_place
        assert computed[0] == fresh
        assert computed[3] != fresh != computed[4]
        on_all("shutdown")
        _assert_released(before, lambda: [*on_all("device_bytes"), *worker.device_bytes()])
    except BaseException:
        for trainer in trainers:
            print(f"----- {trainer.log.name}\n{trainer.tail(60)}")
        print(f"----- the worker\n{worker.tail(60)}")
        raise
    finally:
        together(worker.close, *(trainer.close for trainer in trainers))


def _visible(gpus: Iterable[int]) -> str:
    """What a process of these GPUs is given."""
    return "0" if gpus_are_shared() else ",".join(map(str, gpus))


def _engine(cell: GPUCase, model: Path, directory: Path) -> InProcess | Servers:
    environment = {"CUDA_VISIBLE_DEVICES": _visible(cell.worker_gpus)}
    ranks = {"backend": f"wt_{cell.backend}", "tensor_parallel_size": len(cell.worker_gpus)}
    if cell.engine == "http":
        return Servers(model, directory, environment=environment, dtype="bfloat16", **ranks)
    if gpus_are_shared():
        ranks |= {"gpu_memory_utilization": SHARED_MEMORY, "disable_custom_all_reduce": True}
    return InProcess(
        model,
        directory,
        environment=environment,
        dtype="bfloat16",
        enforce_eager=not cell.cuda_graphs,
        fill_memory=not cell.cuda_graphs,  # it forbids what torch.compile measures
        quantization=cell.quantization,
        **ranks,
    )


def _assert_released(before: list[int], now: Callable[[], list[int]]) -> None:
    """What a round took is given back; the digest's tables and the sizes of small kernels' workspaces stay."""
    deadline = time.monotonic() + 5
    while True:
        after = now()
        grown = [there - then for there, then in zip(after, before, strict=True)]
        if all(each <= KEPT_BYTES for each in grown):
            print(f"memory grown by {grown} bytes")
            return
        assert time.monotonic() < deadline, f"memory grown by {grown} bytes"
        time.sleep(0.2)
