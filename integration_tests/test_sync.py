"""A trainer without vLLM updates a running, unmodified vLLM; what it then computes is compared with Hugging Face."""

from __future__ import annotations

import sys
from functools import cached_property

import models
import pytest
import torch
from harness import VLLMServer, WorkerHost

from wt_trainer import (
    GlooTrainerInitInfo,
    HTTPVLLMWeightSyncClient,
    ParamMeta,
    TrainerWeightTransferEngine,
    WeightSource,
    WeightTransferTrainerFactory,
)

PROMPT = [72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100, 33, 10, 65, 66]
NUM_TOKENS = 16
TOLERANCE = (
    1e-4  # of a log-probability in float32; vLLM's and transformers' kernels differ by about 1e-5 on these models
)


class CheckpointSource(WeightSource):
    """A model under its checkpoint names, with some left out on request."""

    def __init__(self, model: torch.nn.Module, withhold: str | None = None) -> None:
        self.model = model
        self.withhold = withhold

    def _items(self) -> list[tuple[str, torch.Tensor]]:
        return [item for item in models.checkpoint_items(self.model) if item[0] != self.withhold]

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._items()]

    def iter_full(self):
        yield from self._items()


def connect(engine: WorkerHost | VLLMServer, source: WeightSource, **options: object) -> TrainerWeightTransferEngine:
    """A trainer engine connected to `engine`, through its own client or ours."""
    client = engine if isinstance(engine, WorkerHost) else HTTPVLLMWeightSyncClient(engine.base_url, timeout=60)
    info = GlooTrainerInitInfo(rank=0, timeout_s=60, **options)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


def version_of(engine: WorkerHost | VLLMServer) -> str:
    return engine.weight_version() if isinstance(engine, VLLMServer) else engine.call("weight_version")


def logprobs(engine: WorkerHost | VLLMServer) -> list[float]:
    if isinstance(engine, VLLMServer):
        return engine.prompt_logprobs(PROMPT)
    return engine.call("prompt_logprobs", token_ids=PROMPT)


def greedy(engine: WorkerHost | VLLMServer) -> list[int]:
    if isinstance(engine, VLLMServer):
        return engine.greedy(PROMPT, NUM_TOKENS)
    return engine.call("greedy", token_ids=PROMPT, num_tokens=NUM_TOKENS)


def largest_difference(engine: WorkerHost | VLLMServer, model: torch.nn.Module) -> float:
    """The largest difference between the engine's and Hugging Face's prompt log-probabilities; inf where one is NaN."""
    pairs = zip(logprobs(engine), models.prompt_logprobs(model, PROMPT), strict=True)
    differences = [abs(ours - theirs) for ours, theirs in pairs]
    return max(difference if difference == difference else float("inf") for difference in differences)


def test_two_rounds_equal_hugging_face(case, engine) -> None:
    """After each round vLLM computes what Hugging Face does on the weights sent, and publishes the version."""
    before = greedy(engine)
    source = CheckpointSource(models.build_model(case.model, 1))
    trainer = connect(engine, source)
    for seed in (1, 2):
        source.model = models.build_model(case.model, seed)
        report = trainer.send_weights(weight_version=f"step-{seed}")
        assert largest_difference(engine, source.model) < TOLERANCE
        tokens = greedy(engine)
        assert tokens == models.greedy(source.model, PROMPT, NUM_TOKENS)
        assert tokens != before
        before = tokens
        assert version_of(engine) == f"step-{seed}" == report.version
        assert report.outcome == "committed"
        assert [worker.not_synced for worker in report.workers] == [[]]
    trainer.shutdown()


def test_withholding_any_parameter_shows(case, engine) -> None:
    """No parameter is without effect: leaving out any single one, cover check off, gives other log-probabilities."""
    if case.engine != "inprocess":
        pytest.skip("the same loader runs in-process")
    seeds = (1, 2)
    references = {seed: models.build_model(case.model, seed) for seed in seeds}
    names = [name for name, _ in models.checkpoint_items(references[1])]
    assert names
    unseen = []
    for index, name in enumerate(names):
        complete, partial = references[seeds[index % 2]], references[seeds[1 - index % 2]]
        trainer = connect(engine, CheckpointSource(complete))
        trainer.send_weights()
        assert largest_difference(engine, complete) < TOLERANCE
        trainer.shutdown()
        trainer = connect(engine, CheckpointSource(partial, withhold=name), check_cover=False)
        trainer.send_weights()
        if largest_difference(engine, partial) < 10 * TOLERANCE:
            unseen.append(name)
        trainer.shutdown()
    assert not unseen


def test_trainer_process_has_no_vllm(case, engine) -> None:
    """This process, which drove the rounds, never imported vLLM, nor could it."""
    assert "vllm" not in sys.modules
    with pytest.raises(ImportError):
        __import__("vllm")
