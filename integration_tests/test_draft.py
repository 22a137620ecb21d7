"""A real vLLM that drafts with a second model: rounds within `client.draft()` reach that one, and leave the served one alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import models
import pytest
import requests
from harness import Cast, VLLMServer
from test_sync import PROMPT

NUM_TOKENS = 24
COUNTERS = re.compile(r"^vllm:spec_decode_num_(draft|accepted)_tokens_total\{.*\} ([\d.]+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def drafting(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VLLMServer]:
    """A server whose draft model has other weights than the model that it serves."""
    if not request.config.getoption("--all"):
        pytest.skip("a server of its own, with --all")
    draft = tmp_path_factory.mktemp("draft")
    models.save_checkpoint("llama", 7, draft)
    speculative = {"model": str(draft), "method": "draft_model", "num_speculative_tokens": 2}
    arguments = ("--speculative-config", json.dumps(speculative))
    with VLLMServer(checkpoint("llama"), tmp_path_factory.mktemp("drafting"), arguments=arguments) as server:
        server.wait_ready()
        yield server


def accepted(server: VLLMServer) -> float:
    """How many of the draft model's tokens the served model agrees with, of those for one greedy completion."""

    def counters() -> dict[str, float]:
        text = requests.get(f"{server.base_url}/metrics", timeout=30).text
        return {kind: float(value) for kind, value in COUNTERS.findall(text)}

    before = counters()
    server.greedy(PROMPT, NUM_TOKENS)
    after = counters()
    drafted = after["draft"] - before["draft"]
    assert drafted > 0
    return (after["accepted"] - before["accepted"]) / drafted


def test_draft_round_reaches_the_draft_model_only(drafting: VLLMServer, cast: Cast) -> None:
    """Given the served model's weights, the draft model guesses every token; what is served, and its label, do not change."""
    trainer = cast.trainer([], layout="whole", model="llama", base_urls=[drafting.base_url])
    trainer.call("init")
    trainer.call("set_weights", seed=3)
    trainer.call("send", weight_version="served")
    served = drafting.prompt_logprobs(PROMPT)
    assert accepted(drafting) < 0.5
    report = trainer.call("send_draft_model", seed=3)
    assert (report["outcome"], report["version"]) == ("committed", None)
    assert accepted(drafting) > 0.95
    assert drafting.prompt_logprobs(PROMPT) == served
    assert drafting.weight_version() == "served"
    trainer.call("set_weights", seed=4)
    trainer.call("send", weight_version="next")
    assert drafting.weight_version() == "next"
    assert accepted(drafting) < 0.5
