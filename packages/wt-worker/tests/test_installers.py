"""Which installer a model gets."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from wt_worker.installers import choose_installer
from wt_worker.installers.module import ModuleInstaller

CPU = torch.device("cpu")


def config_of(module):
    """A configuration whose class is defined in `module`."""
    return type("VllmConfig", (), {"__module__": module})()


@pytest.fixture
def layerwise(monkeypatch):
    """A stand-in for the module that imports vLLM; what its installer is made with is kept."""

    class LayerwiseInstaller:
        check_cover = None

        def __init__(self, *args):
            self.args = args

    module = ModuleType("wt_worker.vllm.reload")
    module.LayerwiseInstaller = LayerwiseInstaller
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return LayerwiseInstaller


@pytest.mark.parametrize("check_cover", [True, False])
def test_model_of_vllm_is_loaded_by_vllm(layerwise, check_cover):
    """Where the configuration is vLLM's own, the model's layers are reloaded by vLLM, checked as was asked for."""
    model, config, model_config = torch.nn.Linear(1, 1), config_of("vllm.config.vllm"), object()
    installer = choose_installer(model, config, model_config, CPU, check_cover=check_cover)
    assert type(installer) is layerwise
    assert installer.args == (model, config, model_config, CPU)
    assert installer.check_cover is check_cover


@pytest.mark.parametrize(
    "config",
    [None, SimpleNamespace(), config_of("vllm_fork.config"), config_of("mine.vllm")],
    ids=["none", "namespace", "similar name", "inner name"],
)
@pytest.mark.parametrize("check_cover", [True, False])
def test_any_other_model_is_copied_into(monkeypatch, config, check_cover):
    """Elsewhere parameters are copied by name, and neither vLLM nor what imports it is loaded."""
    for name in ("vllm", "wt_worker.vllm.reload"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it is an ImportError
    installer = choose_installer(torch.nn.Linear(1, 1), config, None, CPU, check_cover=check_cover)
    assert type(installer) is ModuleInstaller
    assert installer.check_cover is check_cover
