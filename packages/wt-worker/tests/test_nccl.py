"""What backend `nccl` says where it cannot run; rounds over it are in integration_tests/test_fake_nccl.py."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from wt_common import BackendUnavailableError
from wt_worker import WeightTransferConfig, WeightTransferEngineFactory
from wt_worker.channels.nccl import SETTINGS, NcclChannel

without_bindings = pytest.mark.skipif(importlib.util.find_spec("nccl") is not None, reason="nccl4py is here")


@without_bindings
def test_missing_bindings_are_named():
    """The text says what to install; nothing was imported or opened before."""
    with pytest.raises(BackendUnavailableError, match=r"nccl4py cannot be imported .*extra \[nccl\]"):
        NcclChannel.settings()


@without_bindings
def test_worker_without_bindings_refuses_the_init():
    """An engine can be made, so that vLLM starts; its init says why it cannot take part."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(rank=0, world_size=1, data_parallel_index=0), model_config=None, instance_id="e"
    )
    engine = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend="nccl"), config, torch.device("cpu"), torch.nn.Linear(1, 1)
    )
    info = {
        "session_address": "127.0.0.1",
        "session_port": 1,
        "session_secret": "ab" * 32,
        "session": "s",
        "schema": [1, 0],
        "timeout_s": 5,
        "max_group_bytes": 1 << 20,
        "max_group_pieces": 8,
        "num_buffers": 2,
    }
    with pytest.raises(BackendUnavailableError, match="nccl4py"):
        engine.init_transfer_engine(engine.parse_init_info(info))


def test_settings_are_those_that_choose_how_ranks_talk():
    """What names a host's own interfaces and files is not compared, nor what logs."""
    assert list(SETTINGS) == sorted(set(SETTINGS))
    assert not {"NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_DEBUG", "NCCL_TOPO_FILE"} & set(SETTINGS)
