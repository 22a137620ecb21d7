"""The base that a user's own backend derives from."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from wt_common import ConfigurationError
from wt_worker import (
    WeightTransferConfig,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferInitRequest,
    WeightTransferUpdateInfo,
    WeightTransferUpdateRequest,
)


@dataclass
class MineInitInfo(WeightTransferInitInfo):
    url: str
    retries: int = 3


@dataclass
class MineUpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    shapes: list[list[int]] = field(default_factory=list)

    def __post_init__(self):
        if len(self.shapes) != len(self.names):
            raise ValueError(f"expected {len(self.names)} shapes, got {len(self.shapes)}")


class MineEngine(WeightTransferEngine[MineInitInfo, MineUpdateInfo]):
    init_info_cls = MineInitInfo
    update_info_cls = MineUpdateInfo

    def __init__(self, *args):
        super().__init__(*args)
        self.calls = []

    def init_transfer_engine(self, init_info):
        self.calls.append(("init", init_info))

    def start_weight_update(self):
        self.calls.append("start")

    def receive_weights(self, update_info):
        self.calls.append(("receive", update_info))

    def finish_weight_update(self):
        self.calls.append("finish")

    def shutdown(self):
        self.calls.append("shutdown")

    def synchronize(self):
        self.calls.append("synchronize")
        super().synchronize()


@pytest.fixture
def vllm_config():
    return SimpleNamespace(parallel_config=object(), model_config=object())


@pytest.fixture
def model():
    return torch.nn.Linear(2, 2)


@pytest.fixture
def engine(vllm_config, model):
    return MineEngine(WeightTransferConfig(backend="mine"), vllm_config, torch.device("cpu"), model)


UPDATE = {"names": ["a"], "shapes": [[2]]}


def test_init_sets_the_documented_attributes(vllm_config, model):
    """An engine has its four arguments, and what vLLM's configuration says of parallelism and model, as attributes."""
    config, device = WeightTransferConfig(backend="mine"), torch.device("cpu")
    engine = MineEngine(config, vllm_config, device, model)
    assert engine.config is config
    assert engine.vllm_config is vllm_config
    assert engine.device is device
    assert engine.model is model
    assert engine.parallel_config is vllm_config.parallel_config
    assert engine.model_config is vllm_config.model_config


def test_documented_defaults():
    """An engine can update draft models and leaves nothing to do later, unless its class says otherwise; backend is nccl."""
    assert MineEngine.supports_draft_weight_update is True
    assert MineEngine.defers_processing is False
    assert WeightTransferConfig().backend == "nccl"
    assert WeightTransferConfig("mine").backend == "mine"


def test_requests_carry_plain_dicts():
    """The request classes hold what the API takes: dicts, or one per rank, each request its own."""
    assert WeightTransferInitRequest().init_info == {} == WeightTransferUpdateRequest().update_info
    assert WeightTransferInitRequest().init_info is not WeightTransferInitRequest().init_info
    assert WeightTransferInitRequest(init_info={"url": "x"}).init_info == {"url": "x"}
    assert WeightTransferUpdateRequest(update_info=[{}, {"a": 1}]).update_info[1] == {"a": 1}


@pytest.mark.parametrize("missing", sorted(WeightTransferEngine.__abstractmethods__))
def test_engine_that_lacks_a_method_cannot_be_made(missing, vllm_config, model):
    """Each abstract method must be there, and the error names the one that is not."""
    methods = {name: value for name, value in vars(MineEngine).items() if callable(value) and name != missing}
    incomplete = type("Incomplete", (WeightTransferEngine,), methods)
    with pytest.raises(TypeError, match=missing):
        incomplete(WeightTransferConfig(), vllm_config, torch.device("cpu"), model)


def test_methods_to_implement_are_the_documented_ones():
    """A backend written by vLLM's documentation implements these five and no other."""
    assert WeightTransferEngine.__abstractmethods__ == {
        "init_transfer_engine",
        "start_weight_update",
        "receive_weights",
        "finish_weight_update",
        "shutdown",
    }


# --- parsing ---------------------------------------------------------------------------------------------------


def test_parse_gives_the_users_dataclasses(engine):
    """A good payload becomes the class that the engine names, defaults filled in."""
    assert engine.parse_init_info({"url": "here"}) == MineInitInfo("here", 3)
    assert engine.parse_update_info(UPDATE) == MineUpdateInfo(["a"], [[2]])


@pytest.mark.parametrize(
    ("parse", "payload", "text"),
    [
        ("parse_init_info", {"url": "here", "colour": "red"}, "init_info for MineEngine is invalid.*colour"),
        ("parse_init_info", {}, "init_info for MineEngine is invalid.*url"),
        ("parse_init_info", {1: 2}, "init_info for MineEngine is invalid.*keywords must be strings"),
        ("parse_init_info", ["url"], "init_info for MineEngine is invalid.*mapping"),
        ("parse_update_info", {**UPDATE, "rows": 1}, "update_info for MineEngine is invalid.*rows"),
        ("parse_update_info", {}, "update_info for MineEngine is invalid.*names"),
        ("parse_update_info", {"names": 7}, "update_info for MineEngine is invalid.*has no len"),
        ("parse_update_info", {"names": ["a"]}, "update_info for MineEngine is invalid.*expected 1 shapes, got 0"),
    ],
    ids=["unknown", "missing", "key", "no dict", "unknown update", "missing update", "wrong type", "wrong value"],
)
def test_bad_payload_is_a_value_error(engine, parse, payload, text):
    """What does not fit the dataclass is a ValueError that names engine and field, and says what must agree."""
    with pytest.raises(ValueError, match=text) as caught:
        getattr(engine, parse)(payload)
    assert isinstance(caught.value, ConfigurationError)
    assert "Trainer and worker must use the same backend" in str(caught.value)
    assert caught.value.side == "worker"
    assert isinstance(caught.value.__cause__, (TypeError, ValueError))


# --- updating --------------------------------------------------------------------------------------------------


def test_update_parses_receives_and_synchronizes(engine):
    """An update hands the parsed info to the backend, and returns when the device has everything."""
    engine.update_weights(UPDATE)
    assert engine.calls == [("receive", MineUpdateInfo(**UPDATE)), "synchronize"]


def test_update_of_a_deferring_engine_does_not_synchronize(engine):
    """An engine that completes its work in finish is not made to wait in update."""
    engine.defers_processing = True
    engine.update_weights(UPDATE)
    assert engine.calls == [("receive", MineUpdateInfo(**UPDATE))]


def test_update_that_cannot_be_parsed_receives_nothing(engine):
    """A bad payload is refused before the backend sees it."""
    with pytest.raises(ValueError, match="rows"):
        engine.update_weights({"rows": 1})
    assert engine.calls == []


def test_failed_receive_is_raised_as_it_is(engine):
    """What the backend raises is what the caller gets, and nothing is waited for."""
    error = OSError("broken")

    def fail(update_info):
        raise error

    engine.receive_weights = fail
    with pytest.raises(OSError, match="broken") as caught:
        engine.update_weights(UPDATE)
    assert caught.value is error
    assert engine.calls == []


def test_drain_pending_may_be_called_at_any_time(engine):
    """Draining an engine that defers nothing does nothing, as often as one likes."""
    engine.drain_pending()
    engine.drain_pending()
    assert engine.calls == []


def test_synchronize_on_a_cpu_touches_no_accelerator(engine, monkeypatch):
    """There is nothing to wait for on a CPU, whatever accelerators the machine has."""
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: pytest.fail("synchronized an accelerator"))
    engine.synchronize()


def test_synchronize_waits_for_the_engines_own_device(vllm_config, model, monkeypatch):
    """An accelerator is waited for by its own index, not whichever is current."""
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    device = torch.device("cuda", 3)
    MineEngine(WeightTransferConfig(), vllm_config, device, model).synchronize()
    assert waited == [device]


# --- the target ------------------------------------------------------------------------------------------------


def test_target_is_set_and_reset(engine, model, vllm_config):
    """An update may go to another model with its own configuration; reset goes back to the engine's own, at any time."""
    draft, draft_config = torch.nn.Linear(1, 1), object()
    engine.reset_weight_update_target()
    assert (engine.model, engine.model_config) == (model, vllm_config.model_config)
    engine.set_weight_update_target(draft, draft_config)
    assert (engine.model, engine.model_config) == (draft, draft_config)
    engine.set_weight_update_target(draft, None)
    engine.reset_weight_update_target()
    assert (engine.model, engine.model_config) == (model, vllm_config.model_config)
