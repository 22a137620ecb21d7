"""What a GPU cell tests: four rounds into a real vLLM on GPUs. Run by gpu_runner.py, which has checked that all is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import models
import pytest
from cases import GPU_CASES, LAYOUTS, GPUCase, count_reasons
from harness import TrainerHost, WorkerHost, free_port, together

PROMPT = [72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100, 33, 10, 65, 66]


@pytest.fixture
def cell(request: pytest.FixtureRequest) -> GPUCase:
    """The cell that `--gpu-case` names."""
    (case,) = (case for case in GPU_CASES if case.id == request.config.getoption("--gpu-case"))
    return case


def test_rounds(cell: GPUCase, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """New weights twice, those of the checkpoint, new ones again.

    The third round is written in place, as far as the cell says; after it vLLM computes bit for bit as at its start.
    """
    num_ranks = LAYOUTS[cell.layout]
    worker = WorkerHost(
        "vllm",
        tmp_path,
        environment={"CUDA_VISIBLE_DEVICES": ",".join(map(str, cell.worker_gpus))},
        model=str(checkpoint(cell.model)),
        dtype="bfloat16",
        backend=f"wt_{cell.backend}",
        tensor_parallel_size=len(cell.worker_gpus),
        enforce_eager=not cell.cuda_graphs,
        fill_memory=not cell.cuda_graphs,  # it forbids what torch.compile measures
        quantization=cell.quantization,
    )
    trainers = [
        TrainerHost(tmp_path, environment={"CUDA_VISIBLE_DEVICES": "" if gpu is None else str(gpu)})
        for gpu in cell.trainer_gpus
    ]
    try:
        config = {"layout": cell.layout, "model": cell.model, "workers": [worker.port], "num_ranks": num_ranks}
        config |= {"group_port": free_port()} if num_ranks > 1 else {}
        config |= {"dtype": cell.trainer_dtype, "info": {"timeout_s": 60}}

        def on_all(name: str, **args: object) -> list[object]:
            results = together(*(lambda t=trainer: t.call(name, **args) for trainer in trainers))
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            return results

        together(
            *(
                lambda r=rank, t=trainer: t.call("configure", config={**config, "rank": r})
                for rank, trainer in enumerate(trainers)
            )
        )
        on_all("init")
        fresh = worker.call("prompt_logprobs", token_ids=PROMPT)
        computed = {}
        for seed in (3, 5, 0, 4):
            on_all("set_weights", seed=seed)
            report = on_all("send")[0]
            computed[seed] = worker.call("prompt_logprobs", token_ids=PROMPT)
            expected = models.prompt_logprobs(models.build_model(cell.model, seed), PROMPT)
            difference = max(abs(a - b) for a, b in zip(computed[seed], expected, strict=True))
            print(
                f"seed {seed}: {report['num_bytes']} bytes in {1e3 * report['seconds']['total']:.0f} ms, off by {difference:.3f}"
            )
            print(f"seed {seed}: {report['seconds']}; not in place: {report['workers'][0]['not_in_place']}")
            assert report["outcome"] == "committed"
            assert all(each["not_synced"] == [] for each in report["workers"])
            assert cell.tolerance is None or difference < cell.tolerance
        for worker_report in report["workers"]:
            assert count_reasons(worker_report["not_in_place"], cell.not_in_place) == cell.not_in_place
        assert computed[0] == fresh
        assert computed[3] != fresh != computed[4]
        on_all("shutdown")
    except BaseException:
        for host in (worker, *trainers):
            print(f"----- {host.log.name}\n{host.tail(60)}")
        raise
    finally:
        together(worker.close, *(trainer.close for trainer in trainers))
