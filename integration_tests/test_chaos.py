"""A short part of what `chaos.py` does for long: rounds with faults that a seed chooses, after which all must agree."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import models
import pytest
import requests
from chaos import Driver
from chaos_oracle import Oracle
from chaos_proxy import ACTIONS, Proxy, Rule
from chaos_servers import Seen, digest_of, weights_of
from harness import EmbeddedServer

NUM_ROUNDS = 12
BUDGET_S = 40.0  # where a machine is slow, no further round begins then
MIN_ROUNDS = 4


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(tmp_path, seed=4, timeout_s=4.0)
    try:
        yield driver
    finally:
        driver.close()


def test_seeded_rounds(driver: Driver) -> None:
    """After every round, label, pause and digest of each server agree with what each trainer rank was told; the next works."""
    started = time.monotonic()
    while driver.number < NUM_ROUNDS and (driver.number < MIN_ROUNDS or time.monotonic() - started < BUDGET_S):
        driver.round()
    print(driver.summary())
    assert driver.oracle.wrong == []
    assert driver.oracle.ranks_differ == []
    assert len(driver.kinds) >= 3


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    checkpoint = tmp_path_factory.mktemp("checkpoint")
    models.save_checkpoint("llama", 0, checkpoint)
    with EmbeddedServer(checkpoint, tmp_path_factory.mktemp("server")) as server:
        server.wait_ready()
        yield server


def test_the_oracle_knows_a_label_that_is_not_true(embedded: EmbeddedServer) -> None:
    """A clean label is true only of the weights that were committed under it; one that nobody committed never is."""
    oracle = Oracle()
    content = str(embedded.get("/weight_digest")["digest"])
    assert content == digest_of(weights_of(0))
    oracle.truths["v1"] = weights_of(1)
    for label, is_true in {"default": True, "v1": False, "v1+poisoned": True, "never": False}.items():
        assert oracle.is_true(Seen(label, is_paused=False, content=content)) is is_true


@pytest.mark.parametrize("action", ACTIONS)
def test_the_proxy_does_what_its_rule_says(embedded: EmbeddedServer, action: str) -> None:
    """One call is lost, refused, late or repeated, and the next one passes."""
    proxy = Proxy(embedded.port)
    url, before = f"{proxy.base_url}/update_weight_version", embedded.weight_version()
    try:
        proxy.set(Rule("label", action, seconds=0.2))
        started = time.monotonic()
        status, timeout_s = 0, 0.5 if action == "hang" else 10.0
        try:
            status = requests.post(url, json={"new_version": action}, timeout=timeout_s).status_code
        except requests.RequestException:
            assert action in {"refuse", "lose_reply", "hang"}
        assert (status == 500) is (action in {"fail", "fail_after"})
        assert (embedded.weight_version() == before) is (action in {"refuse", "fail", "hang"})
        if action.startswith("delay"):
            assert time.monotonic() - started >= 0.2
        assert requests.post(url, json={"new_version": "next"}, timeout=10).ok
        assert embedded.weight_version() == "next"
    finally:
        proxy.close()
