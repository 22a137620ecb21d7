"""What vLLM calls in each of its processes. vLLM is not there; its factory is a stand-in that keeps what it is given."""

import logging
import sys
from importlib.metadata import PackageNotFoundError, distribution
from types import ModuleType

import pytest

from wt_worker.factory import BUILTIN_BACKENDS
from wt_worker.vllm import plugin

BUILT_IN = {f"wt_{name}": target for name, target in BUILTIN_BACKENDS.items()}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """Each test is a process in which nothing was registered yet."""
    monkeypatch.setattr(plugin, "_registered", set())
    monkeypatch.delenv(plugin.ALLOW_ANY_VLLM, raising=False)


class Factory:
    """vLLM's factory, as far as it is used: a name can be taken once."""

    def __init__(self):
        self.registry = {}
        self.calls = []

    def register_engine(self, name, module_path_or_cls, class_name=None):
        self.calls.append(name)
        if name in self.registry:
            raise ValueError(f"Weight transfer engine '{name}' is already registered.")
        self.registry[name] = (module_path_or_cls, class_name)


@pytest.fixture
def factory():
    return Factory()


@pytest.fixture
def vllm(monkeypatch, factory):
    """A package tree that looks like a supported vLLM; returned is its top."""
    modules = {}
    path = ""
    for part in ("vllm", "distributed", "weight_transfer", "factory"):
        path = f"{path}.{part}".lstrip(".")
        modules[path] = ModuleType(path)
        modules[path].__path__ = []
        monkeypatch.setitem(sys.modules, path, modules[path])
    modules[path].WeightTransferEngineFactory = factory
    modules["vllm"].__version__ = "0.32.0"
    return modules["vllm"]


@pytest.fixture
def publish(tmp_path, monkeypatch):
    """Lays out what an installed package with one entry point in `wt_worker.backends` looks like."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(name, target):
        info = tmp_path / f"wt_test_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: wt-test-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[wt_worker.backends]\n{name} = {target}\n")

    return make


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_vllm_finds_the_plugin():
    """The installed package publishes `register` where vLLM looks for plugins."""
    try:
        entry_points = distribution("wt-worker").entry_points
    except PackageNotFoundError:
        pytest.skip("wt-worker is on the path and not installed")
    (entry,) = entry_points.select(group="vllm.general_plugins")
    assert entry.load() is plugin.register


@pytest.mark.usefixtures("vllm")
def test_built_in_backends_are_registered_with_a_prefix(factory, caplog):
    """Each built-in backend is `wt_<name>` in vLLM, by module path, so that no engine is imported; nothing is logged."""
    loaded = {module for module, _ in BUILTIN_BACKENDS.values()} & set(sys.modules)
    plugin.register()
    assert factory.registry == BUILT_IN
    assert factory.registry["wt_gloo"] == ("wt_worker.backends.broadcast", "GlooWeightTransferEngine")
    assert {module for module, _ in BUILTIN_BACKENDS.values()} & set(sys.modules) == loaded
    assert caplog.records == []


@pytest.mark.usefixtures("vllm")
def test_published_backends_are_registered_under_their_own_names(factory, publish):
    """A user's entry point becomes a name in every vLLM process, and its module is not imported by that."""
    publish("mine", "wt_test_mine.engines:MineEngine")
    plugin.register()
    assert factory.registry == {**BUILT_IN, "mine": ("wt_test_mine.engines", "MineEngine")}
    assert not any(name.startswith("wt_test_mine") for name in sys.modules)


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("target", ["wt_test_mine", "wt_test_mine:Outer.Inner"], ids=["module", "nested"])
def test_entry_point_that_names_no_class_is_left_out(factory, publish, caplog, target):
    """Anything but one attribute of a module, which is what vLLM looks up, is logged by name; the others are registered."""
    publish("mine", target)
    publish("yours", "wt_test_yours:Engine")
    plugin.register()
    assert factory.registry == {**BUILT_IN, "yours": ("wt_test_yours", "Engine")}
    (text,) = warnings_of(caplog)
    assert "backend mine is not registered" in text
    assert "module:Class" in text


@pytest.mark.usefixtures("vllm")
def test_registering_again_changes_nothing(factory, publish, caplog):
    """Plugins may be loaded more than once in a process."""
    publish("mine", "wt_test_mine:Engine")
    plugin.register()
    before = dict(factory.registry)
    plugin.register()
    assert factory.registry == before
    assert len(factory.calls) == len(before)
    assert caplog.records == []


@pytest.mark.usefixtures("vllm")
def test_taken_name_stays_with_its_owner(factory, publish, caplog):
    """A name that somebody else has registered stays theirs, which is logged once; the other names are registered."""
    publish("nccl", "wt_test_mine:Engine")
    factory.registry.update({"nccl": "theirs", "wt_gloo": "theirs"})
    plugin.register()
    plugin.register()
    assert factory.registry == {**BUILT_IN, "nccl": "theirs", "wt_gloo": "theirs"}
    texts = warnings_of(caplog)
    assert len(texts) == 2
    assert any("backend nccl of wt_test_mine:Engine is not registered: the name is taken" in text for text in texts)


@pytest.mark.usefixtures("vllm")
def test_factory_that_fails_is_logged_and_tried_again(factory, caplog, monkeypatch):
    """Whatever vLLM's factory raises stops no vLLM: it is logged with its cause, and the next call tries again."""
    with monkeypatch.context() as context:
        context.setattr(factory, "register_engine", lambda *args: {}["broken on purpose"])
        plugin.register()
    assert "registered no weight transfer backend, or not all of them" in caplog.text
    assert "KeyError: 'broken on purpose'" in caplog.text
    assert factory.registry == {}
    plugin.register()
    assert factory.registry == BUILT_IN


def test_absent_vllm_is_logged(monkeypatch, caplog):
    """Without a vLLM there is nothing to register with, which raises nothing."""
    monkeypatch.setitem(sys.modules, "vllm", None)  # importing it is an ImportError
    plugin.register()
    assert "registered no weight transfer backend" in caplog.text


def test_vllm_without_a_factory_is_logged(vllm, monkeypatch, caplog):
    """A vLLM whose modules lie elsewhere raises nothing either."""
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.factory", None)
    plugin.register()
    assert "registered no weight transfer backend" in caplog.text


@pytest.mark.parametrize("version", ["0.26.0", "0.33.2", "0.27.1.dev5+g0a1b2c3", "0.32.0+cpu"])
def test_supported_versions(vllm, factory, version):
    """From 0.26 to 0.33, pre-releases and local builds included, the backends are registered."""
    vllm.__version__ = version
    plugin.register()
    assert factory.registry == BUILT_IN


@pytest.mark.parametrize("version", ["0.25.9", "0.34.0", "1.0.0", "0.3.2", "dev", ""])
def test_unsupported_versions(vllm, factory, caplog, monkeypatch, version):
    """With another vLLM no name is registered and the log says what to do; the switch it names is one."""
    vllm.__version__ = version
    plugin.register()
    assert factory.registry == {}
    (text,) = warnings_of(caplog)
    assert "supports vLLM 0.26 to 0.33" in text
    assert (version or "of no known version") in text
    assert "WT_ALLOW_ANY_VLLM=1" in text
    monkeypatch.setenv("WT_ALLOW_ANY_VLLM", "1")
    plugin.register()
    assert factory.registry == BUILT_IN


def test_vllm_that_says_no_version_is_not_supported(vllm, factory, monkeypatch):
    """No version is not a supported one; a switch that is set to anything but 1 is off."""
    del vllm.__version__
    monkeypatch.setenv("WT_ALLOW_ANY_VLLM", "yes")
    plugin.register()
    assert factory.registry == {}
