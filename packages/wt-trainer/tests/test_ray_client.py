"""The Ray client, over a stand-in for Ray with actors in this process."""

import sys
import traceback
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from wt_common import ConfigurationError, RoundTimeoutError, TransportError
from wt_trainer import RayVLLMWeightSyncClient, VLLMWeightSyncClient

FOUR = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
SECRET = "5ec2e7" * 10


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause):
        super().__init__(f"task failed: {cause!r}")
        self.cause = cause


class GetTimeoutError(RayError):
    pass


def get(futures, timeout):
    try:
        return [future.result(timeout) for future in futures]
    except TimeoutError:
        raise GetTimeoutError from None


@pytest.fixture(autouse=True)
def _ray(monkeypatch):
    """Ray is an extra; what the client needs of it is few lines."""
    names = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError, GetTimeoutError=GetTimeoutError)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=get, exceptions=names))


class Actor:
    """An actor handle with `methods`; `calls` has (name, arguments) of each call."""

    def __init__(self, *methods, fails=()):
        self.calls = []
        self._fails = fails
        for name in methods:
            setattr(self, name, SimpleNamespace(remote=lambda *args, name=name: self._call(name, args)))

    def _call(self, name, args):
        self.calls.append((name, args))
        future = Future()
        if name in self._fails:
            future.set_exception(RayTaskError(RuntimeError(f"{name} does not take {args}")))
        else:
            future.set_result(None)
        return future


def names_of(actor):
    return [name for name, _ in actor.calls]


def test_calls_reach_every_actor_with_vllms_requests():
    """Each call is one of every actor's methods, with vLLM's field names."""
    actors = [Actor(*FOUR, "update_weight_version") for _ in range(2)]
    client = RayVLLMWeightSyncClient(actors)
    assert isinstance(client, VLLMWeightSyncClient)
    client.init_weight_transfer_engine({"a": 1})
    client.start_weight_update()
    client.update_weights({"b": 2})
    client.finish_weight_update("v7")
    for actor in actors:
        assert names_of(actor) == [*FOUR, "update_weight_version"]
        assert actor.calls[0][1][0].init_info == {"a": 1}
        assert actor.calls[2][1][0].update_info == {"b": 2}
        assert actor.calls[4][1] == ("v7",)
    assert client.publishes_version


def test_actor_that_publishes_no_version_is_not_asked_to():
    """`update_weight_version` is optional: the others get the version, and where no actor has it nobody does."""
    without, with_it = Actor(*FOUR), Actor(*FOUR, "update_weight_version")
    client = RayVLLMWeightSyncClient([without, with_it])
    client.finish_weight_update("v7")
    assert names_of(without) == ["finish_weight_update"]
    assert with_it.calls == [("finish_weight_update", ()), ("update_weight_version", ("v7",))]
    assert client.publishes_version
    alone = RayVLLMWeightSyncClient(without)
    alone.finish_weight_update("v8")
    assert names_of(without) == ["finish_weight_update"] * 2
    assert not alone.publishes_version


def test_missing_method_is_named():
    """An actor without one of the four calls is a ConfigurationError, before any actor is called."""
    actors = [Actor(*FOUR), Actor("start_weight_update")]
    with pytest.raises(ConfigurationError, match="has no method update_weights"):
        RayVLLMWeightSyncClient(actors).update_weights({})
    assert actors[0].calls == []


def test_errors_are_ours():
    """An actor's exception and a late reply are our errors, which name the call."""
    with pytest.raises(TransportError, match=r"start_weight_update failed in an actor: RuntimeError"):
        RayVLLMWeightSyncClient(Actor(*FOUR, fails=["start_weight_update"])).start_weight_update()
    late = Actor(*FOUR)
    late.start_weight_update = SimpleNamespace(remote=Future)
    with pytest.raises(RoundTimeoutError, match=r"start_weight_update: no reply from every actor within 0\.01 s"):
        RayVLLMWeightSyncClient(late, timeout=0.01).start_weight_update()


def test_actor_that_repeats_its_request_gives_no_secret_away():
    """An actor's exception may have the init info in it, and ours does not have its secret, nor do its causes."""
    client = RayVLLMWeightSyncClient(Actor(*FOUR, fails=["init_weight_transfer_engine"]))
    with pytest.raises(TransportError, match=r"does not take .*session_secret") as caught:
        client.init_weight_transfer_engine({"session_secret": SECRET})
    assert SECRET not in "".join(traceback.format_exception(caught.value))
