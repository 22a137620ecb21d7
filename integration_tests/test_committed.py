"""A round that commits leaves a server that computes what the trainer does; what cannot be so is refused before a byte moves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import models
import pytest
from engines import InProcess, Servers
from harness import Cast, EmbeddedServer, HostError, TrainerHost
from test_sync import PROMPT, TOLERANCE

O_BIAS = "model.layers.0.self_attn.o_proj.bias"
DOWN = "model.layers.0.mlp.down_proj.weight"
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., InProcess]]:
    """A function that starts an engine on a checkpoint; the one before, if it is another, is ended."""
    running: dict[str, InProcess] = {}

    def start(checkpoint: Path, **config: Any) -> InProcess:
        key = f"{checkpoint} {json.dumps(config)}"
        if key not in running:
            for engine in running.values():
                engine.close()
            running.clear()
            running[key] = InProcess(checkpoint, tmp_path_factory.mktemp("committed"), **config)
        return running[key]

    yield start
    for engine in running.values():
        engine.close()


def trainer_of(cast: Cast, engine: Any, model: str, layout: str = "whole", **config: Any) -> TrainerHost:
    return cast.trainer([], layout=layout, model=model, **engine.reach(), **config)


def sync(trainer: TrainerHost, seed: int) -> dict[str, Any]:
    trainer.call("set_weights", seed=seed)
    return dict(trainer.call("send"))


def difference(engine: Any, model: str, seed: int) -> float:
    """The largest difference of a log-probability from Hugging Face's."""
    expected = models.prompt_logprobs(models.build_model(model, seed), PROMPT)
    return max(abs(a - b) for a, b in zip(engine.prompt_logprobs(PROMPT)[0], expected, strict=True))


@contextmanager
def refused(kind: str, text: str, param: str) -> Iterator[None]:
    """Inside, a round is refused before a byte moves."""
    with pytest.raises(HostError, match=text) as caught:
        yield
    error = caught.value.error
    assert (error["type"], error["outcome"], error["param"]) == (kind, "unchanged", param)


# --- what nobody takes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["full", "off"])
def test_trained_parameter_that_the_server_has_no_place_for(
    checkpoint: Callable[[str], Path], started: Callable[..., InProcess], cast: Cast, verify: str
) -> None:
    """A bias that vLLM's loader drops in silence refuses the round, alone or among others, whatever is verified."""
    engine = started(checkpoint("llama"))
    for only in (False, True):
        trainer = trainer_of(cast, engine, "llama", extra={O_BIAS: ["float32", [64]]}, only_extra=only)
        trainer.call("init", verify=verify)
        with refused("PlanError", r"takes nothing of 1 parameter\(s\).*ignore=", O_BIAS):
            sync(trainer, 3)
        cast.release()


def test_what_is_ignored_on_purpose_is_reported(
    checkpoint: Callable[[str], Path], started: Callable[..., InProcess], cast: Cast
) -> None:
    """Names that `ignore` allows are left, those that vLLM's loader raises at among them; all else is as sent."""
    engine = started(checkpoint("llama"))
    extra = {"visual.blocks.0.weight": ["float32", [4, 4]], O_BIAS: ["float32", [64]]}
    trainer = trainer_of(cast, engine, "llama", extra=extra)
    trainer.call("init")
    with refused("PlanError", r"There is no module or parameter named 'visual'", "visual.blocks.0.weight"):
        sync(trainer, 3)
    trainer.call("init", ignore=["visual.*", "*.o_proj.bias"])
    report = sync(trainer, 3)
    assert (report["outcome"], report["ignored"]) == ("committed", list(extra))
    assert difference(engine, "llama", 3) < TOLERANCE


# --- extents ---------------------------------------------------------------------------------------------------


def test_wrong_vocabulary_says_what_is_wrong(
    checkpoint: Callable[[str], Path], started: Callable[..., InProcess], cast: Cast
) -> None:
    """An assertion of the loader's that says nothing is told with its line, and with the shape that was announced."""
    engine = started(checkpoint("llama"))
    trainer = trainer_of(cast, engine, "llama", extra={EMBED: ["float32", [299, 64]]})
    trainer.call("init")
    with refused("PlanError", r"announced with shape \[299, 64\].*AssertionError at \w+\.py:\d+: assert", EMBED):
        sync(trainer, 3)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_wider_layer_is_not_cut(
    checkpoint: Callable[[str], Path], started: Callable[..., InProcess], cast: Cast, num_ranks: int
) -> None:
    """A trained layer of twice the server's width is refused, on one rank and on two, of which each takes its part."""
    engine = started(checkpoint("llama"), tensor_parallel_size=num_ranks)
    trainer = trainer_of(cast, engine, "llama", extra={DOWN: ["float32", [64, 192]]})
    trainer.call("init", verify="off")
    with refused("PlanError", DOWN.replace(".", r"\."), DOWN):
        sync(trainer, 3)
    cast.release()
    trainer = trainer_of(cast, engine, "llama")
    trainer.call("init")
    assert sync(trainer, 4)["ignored"] == []
    assert difference(engine, "llama", 4) < TOLERANCE


# --- what the source does not list -----------------------------------------------------------------------------


def test_persistent_buffers_are_sent(
    checkpoint: Callable[[str], Path], started: Callable[..., InProcess], cast: Cast
) -> None:
    """A router's bias, a buffer of the trainer's module, decides which experts compute: it arrives like a parameter."""
    engine = started(checkpoint("glm4-moe"))
    trainer = trainer_of(cast, engine, "glm4-moe", layout="renamed")
    trainer.call("init")
    for seed in (3, 4, 5):
        report = sync(trainer, seed)
        assert report["ignored"] == report["workers"][0]["not_synced"] == []
        assert difference(engine, "glm4-moe", seed) < TOLERANCE


def test_persistent_buffers_are_sent_to_the_embedded_server(
    checkpoint: Callable[[str], Path], tmp_path: Path, cast: Cast
) -> None:
    """The same there; a source without them commits, and the report, its text and the log say what the server has from before."""
    with EmbeddedServer(checkpoint("glm4-moe"), tmp_path) as server:
        server.wait_ready()
        expected = models.prompt_logprobs(models.build_model("glm4-moe", 3), PROMPT)
        for buffers in (True, False):
            reach = {"base_urls": [server.base_url]}
            trainer = cast.trainer([], layout="module", model="glm4-moe", buffers=buffers, **reach)
            trainer.call("init")
            report = sync(trainer, 3 if buffers else 4)
            not_synced = report["workers"][0]["not_synced"]
            assert (not_synced != []) is not buffers
            assert all(name.endswith("e_score_correction_bias") for name in not_synced)
            if buffers:
                assert server.prompt_logprobs(PROMPT) == pytest.approx(expected, abs=TOLERANCE)
            cast.release()


@pytest.fixture(scope="module")
def untied(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose configuration ties the head to the embedding, and which has a head that differs in one element."""
    import safetensors.torch

    directory = tmp_path_factory.mktemp("untied")
    models.save_checkpoint("llama-tied", 0, directory)
    file = directory / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    head = tensors[EMBED].clone()
    head[7, 9] += 1
    safetensors.torch.save_file({**tensors, HEAD: head}, file, metadata={"format": "pt"})
    return directory


def test_tied_trainer_updates_a_server_that_has_untied_the_head(
    untied: Path, started: Callable[..., InProcess], cast: Cast
) -> None:
    """A name that the trainer ties is an alias: the server's own tensor gets the same bytes, in every round."""
    engine = started(untied)
    trainer = trainer_of(cast, engine, "llama-tied", layout="renamed")
    trainer.call("init")
    for seed in (3, 4, 5):
        report = sync(trainer, seed)
        assert report["aliases"] == {HEAD: EMBED}
        assert report["workers"][0]["not_synced"] == report["ignored"] == []
        assert difference(engine, "llama-tied", seed) < TOLERANCE


def test_both_tied_names_may_be_sent(
    checkpoint: Callable[[str], Path], started: Callable[..., InProcess], cast: Cast
) -> None:
    """A server that ties them computes with these values; a second one with other values is an error."""
    engine = started(checkpoint("llama-tied"))
    trainer = trainer_of(cast, engine, "llama-tied")
    trainer.call("tie", param=HEAD, to=EMBED)
    trainer.call("init")
    for seed in (3, 4, 5):
        assert sync(trainer, seed)["ignored"] in ([], [HEAD])
        assert difference(engine, "llama-tied", seed) < TOLERANCE
    cast.release()
    trainer = trainer_of(cast, engine, "llama-tied", extra={HEAD: ["float32", [300, 64]]})
    trainer.call("init")
    with pytest.raises(HostError, match="send equal ones, or") as caught:
        sync(trainer, 3)
    assert (caught.value.error["type"], caught.value.error["param"]) == ("PlanError", HEAD)


def test_server_with_random_weights_needs_all_of_the_model(
    checkpoint: Callable[[str], Path], started: Callable[..., InProcess], cast: Cast
) -> None:
    """A source that would leave random values is refused. Once all has been sent, a part may come."""
    engine = started(checkpoint("qwen2"), load_format="dummy")
    bias = "model.layers.1.self_attn.q_proj.bias"
    norm = "model.layers.1.input_layernorm.weight"
    trainer = trainer_of(cast, engine, "qwen2")
    trainer.call("configure_withheld", param=norm)
    trainer.call("init")
    with refused("PlanError", r"started with random weights \(load_format dummy\)", norm):
        sync(trainer, 3)
    cast.release()
    trainer = trainer_of(cast, engine, "qwen2", extra={norm: ["float32", [128]], bias: ["float32", [128]]})
    trainer.call("init")
    sync(trainer, 3)
    cast.release()
    trainer = trainer_of(cast, engine, "qwen2")
    trainer.call("init")
    for seed in (3, 4):
        assert sync(trainer, seed)["workers"][0]["not_synced"] == []
        assert difference(engine, "qwen2", seed) < TOLERANCE
    trainer.call("configure_withheld", param=norm)
    trainer.call("init")
    assert sync(trainer, 4)["workers"][0]["not_synced"] == [norm]


# --- set-ups that are healthy ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "layout"), [("llama", "whole"), ("llama-tied", "renamed")], ids=["plain", "tied"])
def test_pipeline_stages_commit(
    request: pytest.FixtureRequest,
    checkpoint: Callable[[str], Path],
    started: Callable[..., InProcess],
    cast: Cast,
    model: str,
    layout: str,
) -> None:
    """Ranks that have some layers each make up the model together; a tied head has a tensor of its own on the last."""
    if model == "llama" and not request.config.getoption("--all"):
        pytest.skip("the tied one shows it; this one with --all")
    engine = started(checkpoint(model), pipeline_parallel_size=2)
    trainer = trainer_of(cast, engine, model, layout=layout)
    trainer.call("init")
    for seed in (3, 4, 5):
        report = sync(trainer, seed)
        assert report["ignored"] == report["unknown"] == []
        assert all(worker["not_synced"] == [] for worker in report["workers"])
        assert difference(engine, model, seed) < TOLERANCE


def test_expert_parallel_ranks_commit(
    request: pytest.FixtureRequest,
    checkpoint: Callable[[str], Path],
    started: Callable[..., InProcess],
    cast: Cast,
) -> None:
    """Ranks that each have some of the experts make up the model together.

    vLLM's CPU build cannot generate so. All that serves is other after a round of other weights, and as at the start after
    one with the checkpoint's.
    """
    if not request.config.getoption("--all"):
        pytest.skip("an engine of two ranks that cannot generate, with --all")
    engine = started(checkpoint("qwen3-moe"), tensor_parallel_size=2, enable_expert_parallel=True)
    fresh = engine.host.call("each_rank", method="live_digests", arguments=[])
    trainer = trainer_of(cast, engine, "qwen3-moe")
    trainer.call("init")
    for seed, same in ((3, False), (4, False), (0, True)):
        report = sync(trainer, seed)
        assert report["ignored"] == report["unknown"] == []
        assert all(worker["not_synced"] == [] for worker in report["workers"])
        live = engine.host.call("each_rank", method="live_digests", arguments=[])
        for now, then in zip(live, fresh, strict=True):
            weights = [name for name in then if name.endswith(("weight", "bias")) and then[name]]
            assert len(weights) > 10
            assert [name for name in weights if (now[name] == then[name]) is not same] == []


def test_data_parallel_engines_commit(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], tmp_path: Path, cast: Cast
) -> None:
    """Two engines behind one server each take the whole model."""
    if not request.config.getoption("--all"):
        pytest.skip("a server of two engines, with --all")
    server = Servers(checkpoint("llama"), tmp_path, arguments=("--data-parallel-size", "2"))
    try:
        trainer = trainer_of(cast, server, "llama")
        trainer.call("init")
        for seed in (3, 4):
            report = sync(trainer, seed)
            assert len({worker["engine"] for worker in report["workers"]}) == 2
            assert all(worker["not_synced"] == [] for worker in report["workers"])
            for _ in range(4):  # whichever engine answers
                assert difference(server, "llama", seed) < TOLERANCE
    finally:
        server.close()
