"""Which engine a backend's name stands for."""

import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest

from wt_common import ConfigurationError
from wt_trainer import TrainerInitInfo, TrainerWeightTransferEngine, WeightTransferTrainerFactory

MODULE = """
from wt_trainer import TrainerWeightTransferEngine

class Engine(TrainerWeightTransferEngine):
    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
        return cls(client=client, source=source, rank=init_info.rank)

    def send_weights(self):
        return "sent"
"""


@dataclass
class MineInitInfo(TrainerInitInfo):
    backend: ClassVar[str] = "mine"


class MineEngine(TrainerWeightTransferEngine[MineInitInfo]):
    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
        engine = cls(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)
        engine.init_info = init_info
        return engine

    def send_weights(self):
        return "sent"


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    """What a test registers ends with it."""
    monkeypatch.setattr(WeightTransferTrainerFactory, "_registry", dict(WeightTransferTrainerFactory._registry))


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """A directory that can be imported from; what was imported ends with the test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("wt_test_"):
            del sys.modules[name]


def test_registered_class_is_used():
    """A user's engine, registered as a class, gets the init info, client and source as they are."""
    WeightTransferTrainerFactory.register_engine("mine", MineEngine)
    info, client, source = MineInitInfo(rank=2), object(), object()
    engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
    assert type(engine) is MineEngine
    assert (engine.init_info, engine.client, engine.source) == (info, client, source)
    assert (engine.rank, engine.is_sender) == (2, False)
    assert engine.send_weights() == "sent"


def test_source_may_be_left_out():
    """A delta engine is made without a source."""
    WeightTransferTrainerFactory.register_engine("mine", MineEngine)
    assert WeightTransferTrainerFactory.trainer_init(MineInitInfo(rank=0), client=None).source is None


def test_registered_module_is_imported_when_it_is_asked_for(directory):
    """A module path is imported at the first use of its backend and not before."""
    (directory / "wt_test_lazy.py").write_text(MODULE)
    WeightTransferTrainerFactory.register_engine("mine", "wt_test_lazy", "Engine")
    assert "wt_test_lazy" not in sys.modules
    engine = WeightTransferTrainerFactory.trainer_init(MineInitInfo(rank=0), client=None)
    assert type(engine) is sys.modules["wt_test_lazy"].Engine
    assert type(WeightTransferTrainerFactory.trainer_init(MineInitInfo(rank=0), client=None)) is type(engine)


def test_name_can_be_taken_once():
    """A second registration of a name is refused, a built-in's included, and changes nothing."""
    WeightTransferTrainerFactory.register_engine("mine", MineEngine)
    before = dict(WeightTransferTrainerFactory._registry)
    for name in ("mine", "gloo"):
        with pytest.raises(ConfigurationError, match=f"trainer backend '{name}' is already registered") as caught:
            WeightTransferTrainerFactory.register_engine(name, "some.module", "Other")
        assert isinstance(caught.value, ValueError)
        assert caught.value.backend == name
    assert before == WeightTransferTrainerFactory._registry


def test_module_path_needs_a_class_name():
    """A module path alone is refused, and the name stays free."""
    with pytest.raises(ConfigurationError, match=r"a module path .'some\.module'. needs class_name"):
        WeightTransferTrainerFactory.register_engine("mine", "some.module")
    WeightTransferTrainerFactory.register_engine("mine", MineEngine)


def test_unknown_backend_names_those_there_are():
    """An unknown name is a ConfigurationError, a ValueError, that lists what there is."""
    WeightTransferTrainerFactory.register_engine("yours", MineEngine)
    with pytest.raises(
        ConfigurationError, match=r"unknown trainer backend 'mine'; available: \[.*'gloo'.*'yours'"
    ) as caught:
        WeightTransferTrainerFactory.trainer_init(MineInitInfo(rank=0), client=None)
    assert isinstance(caught.value, ValueError)
    assert caught.value.backend == "mine"


def test_every_built_in_name_has_an_engine():
    """Each name of the registry can be loaded, and its engine takes the init info that names it."""
    names = list(WeightTransferTrainerFactory._registry)
    assert "gloo" in names
    for name in names:
        engine = WeightTransferTrainerFactory.engine_class(name)
        assert issubclass(engine, TrainerWeightTransferEngine)
        assert engine.init_info_cls.backend == name


def publish(directory, name, target):
    """Lay out what an installed package with one entry point looks like."""
    info = directory / f"wt_test_{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: wt-test-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[wt_trainer.backends]\n{name} = {target}\n")


def test_entry_point_is_a_backend(directory):
    """A package's entry point in the group `wt_trainer.backends` is a backend without a call, imported when needed."""
    (directory / "wt_test_published.py").write_text(MODULE)
    publish(directory, "mine", "wt_test_published:Engine")
    assert "wt_test_published" not in sys.modules
    engine = WeightTransferTrainerFactory.trainer_init(MineInitInfo(rank=1), client=None)
    assert type(engine) is sys.modules["wt_test_published"].Engine
    assert engine.rank == 1


def test_registered_name_comes_before_an_entry_point(directory):
    """What the program registers itself is what it gets; the published module is not even imported."""
    (directory / "wt_test_shadowed.py").write_text("raise AssertionError('imported')")
    publish(directory, "mine", "wt_test_shadowed:Engine")
    WeightTransferTrainerFactory.register_engine("mine", MineEngine)
    assert WeightTransferTrainerFactory.engine_class("mine") is MineEngine


def test_unknown_backend_lists_entry_points_too(directory):
    """Published names are among those that an unknown name's error lists."""
    publish(directory, "published", "wt_test_none:Engine")
    with pytest.raises(ConfigurationError, match=r"available: \[.*'published'"):
        WeightTransferTrainerFactory.engine_class("mine")
