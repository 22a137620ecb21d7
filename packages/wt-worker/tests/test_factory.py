"""Which engine a backend's name stands for."""

import sys
from types import SimpleNamespace

import pytest
import torch

from wt_common import ConfigurationError
from wt_worker import WeightTransferConfig, WeightTransferEngine, WeightTransferEngineFactory
from wt_worker.factory import BUILTIN_BACKENDS

MODULE = """
from wt_worker import WeightTransferEngine

class Engine(WeightTransferEngine):
    def init_transfer_engine(self, init_info): ...
    def start_weight_update(self): ...
    def receive_weights(self, update_info): ...
    def finish_weight_update(self): ...
    def shutdown(self): ...
"""


class MineEngine(WeightTransferEngine):
    def init_transfer_engine(self, init_info): ...

    def start_weight_update(self): ...

    def receive_weights(self, update_info): ...

    def finish_weight_update(self): ...

    def shutdown(self): ...


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    """What a test registers ends with it."""
    monkeypatch.setattr(WeightTransferEngineFactory, "_registry", dict(WeightTransferEngineFactory._registry))


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """A directory that can be imported from; what was imported ends with the test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("wt_test_"):
            del sys.modules[name]


def publish(directory, name, target):
    """Lay out what an installed package with one entry point looks like."""
    info = directory / f"wt_test_{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: wt-test-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[wt_worker.backends]\n{name} = {target}\n")


def create(backend):
    """An engine of `backend`; returned are it and what it was made with."""
    vllm_config = SimpleNamespace(parallel_config=None, model_config=None)
    parts = WeightTransferConfig(backend=backend), vllm_config, torch.device("cpu"), torch.nn.Linear(1, 1)
    return WeightTransferEngineFactory.create_engine(*parts), parts


def test_registered_class_is_used():
    """A user's engine, registered as a class, gets the four arguments as they are."""
    WeightTransferEngineFactory.register_engine("mine", MineEngine)
    engine, parts = create("mine")
    assert type(engine) is MineEngine
    assert (engine.config, engine.vllm_config, engine.device, engine.model) == parts


def test_any_configuration_with_a_backend_will_do():
    """The configuration may be of vLLM's own class, not ours: only its `backend` counts."""
    WeightTransferEngineFactory.register_engine("mine", MineEngine)
    config = SimpleNamespace(backend="mine", other=1)
    vllm_config = SimpleNamespace(parallel_config=None, model_config=None)
    engine = WeightTransferEngineFactory.create_engine(config, vllm_config, torch.device("cpu"), torch.nn.Linear(1, 1))
    assert engine.config is config


def test_registered_module_is_imported_when_it_is_asked_for(directory):
    """A module path is imported at the first use of its backend and not before, and once."""
    (directory / "wt_test_lazy.py").write_text(MODULE)
    WeightTransferEngineFactory.register_engine("mine", "wt_test_lazy", "Engine")
    assert "wt_test_lazy" not in sys.modules
    engine, _ = create("mine")
    assert type(engine) is sys.modules["wt_test_lazy"].Engine
    assert type(create("mine")[0]) is type(engine)


def test_broken_module_is_its_own_error(directory):
    """A backend whose module cannot be imported raises what its import raised, each time it is asked for."""
    (directory / "wt_test_broken.py").write_text("import wt_test_missing\n")
    WeightTransferEngineFactory.register_engine("mine", "wt_test_broken", "Engine")
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="wt_test_missing"):
            create("mine")


def test_name_can_be_taken_once():
    """A second registration of a name is refused, a built-in's included, and changes nothing."""
    WeightTransferEngineFactory.register_engine("mine", MineEngine)
    before = dict(WeightTransferEngineFactory._registry)
    for name in ("mine", "gloo"):
        with pytest.raises(ConfigurationError, match=f"worker backend '{name}' is already registered") as caught:
            WeightTransferEngineFactory.register_engine(name, "some.module", "Other")
        assert isinstance(caught.value, ValueError)
        assert (caught.value.side, caught.value.backend) == ("worker", name)
    assert before == WeightTransferEngineFactory._registry


def test_module_path_needs_a_class_name():
    """A module path alone is refused, and the name stays free."""
    with pytest.raises(ConfigurationError, match=r"a module path .'some\.module'. needs class_name"):
        WeightTransferEngineFactory.register_engine("mine", "some.module")
    WeightTransferEngineFactory.register_engine("mine", MineEngine)


def test_unknown_backend_names_those_there_are():
    """An unknown name is a ConfigurationError, a ValueError, that lists what there is."""
    WeightTransferEngineFactory.register_engine("yours", MineEngine)
    with pytest.raises(
        ConfigurationError, match=r"unknown worker backend 'mine'; available: \[.*'gloo'.*'yours'"
    ) as caught:
        create("mine")
    assert isinstance(caught.value, ValueError)
    assert (caught.value.side, caught.value.backend) == ("worker", "mine")


def test_every_built_in_name_has_an_engine():
    """Each built-in name can be loaded, and its engine says which infos it takes."""
    assert "gloo" in BUILTIN_BACKENDS
    for name in BUILTIN_BACKENDS:
        engine = WeightTransferEngineFactory.engine_class(name)
        assert issubclass(engine, WeightTransferEngine)
        assert engine.init_info_cls is not engine.update_info_cls


def test_entry_point_is_a_backend(directory):
    """A package's entry point in the group `wt_worker.backends` is a backend without a call, imported when needed."""
    (directory / "wt_test_published.py").write_text(MODULE)
    publish(directory, "mine", "wt_test_published:Engine")
    assert "wt_test_published" not in sys.modules
    engine, _ = create("mine")
    assert type(engine) is sys.modules["wt_test_published"].Engine
    assert type(create("mine")[0]) is type(engine)


def test_registered_name_comes_before_an_entry_point(directory):
    """What the program registers itself is what it gets; the published module is not even imported."""
    (directory / "wt_test_shadowed.py").write_text("raise AssertionError('imported')")
    publish(directory, "mine", "wt_test_shadowed:Engine")
    WeightTransferEngineFactory.register_engine("mine", MineEngine)
    assert WeightTransferEngineFactory.engine_class("mine") is MineEngine


def test_unknown_backend_lists_entry_points_too(directory):
    """Published names are among those that an unknown name's error lists; listing imports nothing."""
    publish(directory, "published", "wt_test_none:Engine")
    with pytest.raises(ConfigurationError, match=r"available: \[.*'published'"):
        create("mine")
