"""Which engine a rank says that it is of."""

import logging
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from wt_worker import identity as module
from wt_worker.identity import Identity


def config_of(rank=0, size=2, instance="i0", index=0, **fields):
    parallel = SimpleNamespace(rank=rank, world_size=size, data_parallel_index=index, **fields)
    return SimpleNamespace(parallel_config=parallel, instance_id=instance)


@pytest.fixture
def store(monkeypatch):
    """The store of a default process group, as all ranks of a test's engines see it; each is the first of its process."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(module, "_default_store", lambda: store)
    monkeypatch.setattr(module, "_made", FirstOfEach())
    return store


class FirstOfEach:
    """Stands for the counters of several processes: each engine is numbered by its turn among those of its rank."""

    turn = 0

    def __next__(self):
        return self.turn


def test_one_rank_says_what_vllm_does(store):
    """An engine of one rank has vLLM's own id and data-parallel index, and shares nothing."""
    assert Identity(config_of(size=1, instance="i7", index=3)).engine_id == "i7/3"
    assert store.num_keys() <= 1  # a HashStore counts one of its own


def test_ranks_with_configurations_of_their_own_are_one_engine(store):
    """Every rank has the id of rank 0, whichever is made first; it is read when it is asked for."""
    ranks = [Identity(config_of(rank, 3, f"i{rank}")) for rank in (2, 0, 1)]
    assert {rank.engine_id for rank in ranks} == {"i0/0"}
    assert [(rank.rank, rank.size) for rank in ranks] == [(2, 3), (0, 3), (1, 3)]


def test_replicas_in_one_group_stay_apart(store):
    """Data-parallel engines share a default group, and each has its own id."""
    ranks = [Identity(config_of(rank, 2, f"i{rank}{index}", index)) for index in range(2) for rank in range(2)]
    assert [rank.engine_id for rank in ranks] == ["i00/0", "i00/0", "i01/1", "i01/1"]


def test_replicas_that_were_started_together_have_a_word_in_common(store):
    """It is that of the first rank of the first replica, also where every replica has a configuration of its own."""
    ranks = [
        Identity(config_of(rank, 2, f"i{rank}{index}", index, data_parallel_size=2))
        for index in (1, 0)
        for rank in (1, 0)
    ]
    assert {rank.replicas_id for rank in ranks} == {"i00"}
    assert [rank.engine_id for rank in ranks] == ["i01/1", "i01/1", "i00/0", "i00/0"]
    single = [Identity(config_of(0, 1, f"j{index}", index, data_parallel_size=2)) for index in (0, 1)]
    assert [rank.engine_id for rank in single] == ["j0/0", "j1/1"]


def test_torchrun_ranks_are_one_engine_with_data_parallelism(store):
    """With torchrun vLLM numbers and counts the ranks of all replicas together: so they are one engine here."""
    external = {"distributed_executor_backend": "external_launcher"}
    ranks = [Identity(config_of(rank, 4, f"i{rank}", rank // 2, **external)) for rank in range(4)]
    assert {rank.engine_id for rank in ranks} == {"i0/0"}


def test_later_engine_of_the_same_processes_has_its_own_id(store):
    """A second engine does not read what the first has written."""
    first = [Identity(config_of(rank, 2, f"first{rank}")) for rank in range(2)]
    FirstOfEach.turn = 1
    second = [Identity(config_of(rank, 2, f"second{rank}")) for rank in range(2)]
    FirstOfEach.turn = 0
    assert [rank.engine_id for rank in second] == ["second0/0"] * 2
    assert [rank.engine_id for rank in first] == ["first0/0"] * 2


def test_making_an_engine_waits_for_nobody(store, monkeypatch):
    """A rank whose engine is half-started holds up no other; one that is asked too early says so once, and goes on alone."""
    monkeypatch.setattr(module, "_READ_S", 0.05)
    alone = Identity(config_of(1, 2, "mine"))
    assert alone.engine_id == "mine/0"
    Identity(config_of(0, 2, "late"))
    assert alone.engine_id == "mine/0", "an engine that a trainer knows has another id now"


def test_missing_rank_0_is_logged(store, monkeypatch, caplog):
    """What a trainer will say of such an engine is in the worker's log, with its cause."""
    monkeypatch.setattr(module, "_READ_S", 0.05)
    with caplog.at_level(logging.WARNING):
        assert Identity(config_of(1, 2)).engine_id == "i0/0"
    assert "the first rank has written no id" in caplog.text
    assert "a trainer will miss ranks of this engine" in caplog.text


def test_without_a_default_group_nothing_is_shared():
    """Outside vLLM, and where there is no default group, the configuration's own id holds; without one, a new one."""
    assert not torch.distributed.is_initialized()
    assert [Identity(config_of(rank, 2)).engine_id for rank in range(2)] == ["i0/0"] * 2
    names = {Identity(SimpleNamespace()).engine_id for _ in range(2)}
    assert len(names) == 2


def test_ids_travel_through_the_store_of_a_real_group(tmp_path):
    """The default group's own store is found; it is where rank 0's id is."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        first = Identity(config_of(0, 2, "real"))
        store = torch.distributed.distributed_c10d._get_default_store()
        store.wait([first._of_engine.key], timedelta(seconds=10))
        assert store.get(first._of_engine.key) == b"real"
    finally:
        torch.distributed.destroy_process_group()
