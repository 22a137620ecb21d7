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
def for_vllm(monkeypatch):
    """A stand-in for the module that imports vLLM; what its installer is made with is kept."""

    class VLLMInstaller:
        def __init__(self, *args):
            self.args = args

    module = ModuleType("wt_worker.vllm.installer")
    module.VLLMInstaller = VLLMInstaller
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return VLLMInstaller


def test_model_of_vllm_is_installed_by_vllm(for_vllm):
    """Where the configuration is vLLM's own, the installer is the one that knows vLLM's layers."""
    model, config, model_config = torch.nn.Linear(1, 1), config_of("vllm.config.vllm"), object()
    installer = choose_installer(model, config, model_config, CPU)
    assert type(installer) is for_vllm
    assert installer.args == (model, config, model_config, CPU)


@pytest.mark.parametrize(
    "config",
    [None, SimpleNamespace(), config_of("vllm_fork.config"), config_of("mine.vllm")],
    ids=["none", "namespace", "similar name", "inner name"],
)
def test_any_other_model_is_a_plain_module(monkeypatch, config):
    """Elsewhere parameters are written by name, gaps are refused, and neither vLLM nor what imports it is loaded."""
    for name in ("vllm", "wt_worker.vllm.installer"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it is an ImportError
    installer = choose_installer(torch.nn.Linear(1, 1), config, None, CPU)
    assert type(installer) is ModuleInstaller
    assert installer.check_cover is True
