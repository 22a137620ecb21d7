"""The Ray client against real actors, without vLLM: it needs the extra `[ray]`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from wt_common import RoundTimeoutError, TransportError
from wt_trainer import RayVLLMWeightSyncClient

ray = pytest.importorskip("ray")

SLOW_S = 20.0


class Actor:
    """One that fails its calls with a message, or takes its time."""

    def __init__(self, message: str, seconds: float) -> None:
        self.message = message
        self.seconds = seconds

    def up(self) -> None:
        """Return; the first call returns when the actor has started."""

    def start_weight_update(self) -> None:
        time.sleep(self.seconds)
        if self.message:
            raise ValueError(self.message)


@pytest.fixture(scope="module")
def actors() -> Iterator[Callable[..., Any]]:
    """Makes actors in a cluster of this process."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    kind = ray.remote(num_cpus=0)(Actor)
    yield lambda message="", seconds=0.0: kind.remote(message, seconds)
    ray.shutdown()


def test_first_actor_that_fails_fails_the_call(actors: Callable[..., Any], measured: Callable[[float], None]) -> None:
    """One actor's error is raised with its message as soon as it is there, while another takes its time."""
    handles = [actors(seconds=SLOW_S), actors("no room")]
    ray.get([handle.up.remote() for handle in handles])
    client = RayVLLMWeightSyncClient(handles)
    started = time.monotonic()
    with pytest.raises(TransportError, match=r"start_weight_update failed in an actor: ValueError\('no room'\)"):
        client.start_weight_update()
    took_s = time.monotonic() - started
    assert took_s < SLOW_S / 4
    measured(took_s)


def test_actors_have_one_time_together(actors: Callable[..., Any]) -> None:
    """Actors that do not reply cost the timeout once."""
    client = RayVLLMWeightSyncClient([actors(seconds=SLOW_S), actors(seconds=SLOW_S), actors()], timeout=3)
    started = time.monotonic()
    with pytest.raises(RoundTimeoutError, match="no reply from every actor within 3 s"):
        client.start_weight_update()
    assert time.monotonic() - started < 2 * 3
