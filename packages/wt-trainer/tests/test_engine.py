"""The bases that a user's own backend derives from."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from wt_trainer import TrainerInitInfo, TrainerWeightTransferEngine


@dataclass
class MineInitInfo(TrainerInitInfo):
    backend: ClassVar[str] = "mine"

    url: str
    retries: int = 3


class MineEngine(TrainerWeightTransferEngine[MineInitInfo]):
    init_info_cls = MineInitInfo

    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
        return cls(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)

    def send_weights(self):
        return "sent"


def test_init_info_without_backend_is_refused_at_class_creation():
    """A subclass that names no backend is a TypeError when the class is made, which says what to set."""
    with pytest.raises(TypeError, match="NamelessInfo must set the class attribute `backend`"):

        @dataclass
        class NamelessInfo(TrainerInitInfo):
            url: str


@pytest.mark.parametrize("backend", ["", None])
def test_init_info_with_an_empty_backend_is_refused(backend):
    """An empty name is none."""
    with pytest.raises(TypeError, match="must set the class attribute `backend`"):
        type("EmptyInfo", (TrainerInitInfo,), {"backend": backend})


def test_init_info_of_an_init_info_keeps_the_backend():
    """A subclass of a user's init info need not name the backend again."""

    @dataclass
    class MoreInitInfo(MineInitInfo):
        more: int = 1

    assert MoreInitInfo("here", rank=0).backend == "mine"


def test_init_info_takes_its_own_fields_positionally_and_the_rank_by_name():
    """A user's fields come as in any dataclass; `rank` is keyword-only and required."""
    assert MineInitInfo("here", 4, rank=2) == MineInitInfo(url="here", retries=4, rank=2)
    with pytest.raises(TypeError, match="rank"):
        MineInitInfo("here")
    with pytest.raises(TypeError):
        MineInitInfo("here", 4, 2)


@pytest.mark.parametrize(("rank", "is_sender"), [(0, True), (1, False), (7, False)])
def test_rank_0_is_the_sender(rank, is_sender):
    """The rank alone says who drives the control plane."""
    assert MineInitInfo("here", rank=rank).is_sender is is_sender


def test_rank_is_never_read_from_a_process_group(monkeypatch):
    """The rank is what the user says; no process group is asked for it."""

    def ask():
        raise AssertionError("the process group was asked")

    monkeypatch.setattr("torch.distributed.get_rank", ask)
    assert MineInitInfo("here", rank=3).rank == 3


def test_engine_keeps_what_it_is_given():
    """The base's constructor stores client, source, sender and rank, with the documented defaults."""
    client, source = object(), object()
    engine = MineEngine(client=client, source=source, is_sender=False, rank=3)
    assert (engine.client, engine.source, engine.is_sender, engine.rank) == (client, source, False, 3)
    engine = MineEngine(client=client)
    assert (engine.source, engine.is_sender, engine.rank) == (None, True, 0)
    with pytest.raises(TypeError):
        MineEngine(client)


def test_engine_that_lacks_a_method_cannot_be_made():
    """A backend implements `trainer_init` and `send_weights`; `shutdown` does nothing unless it is overridden."""
    with pytest.raises(TypeError, match="send_weights"):
        type("Half", (TrainerWeightTransferEngine,), {"trainer_init": MineEngine.trainer_init})(client=None)
    with pytest.raises(TypeError, match="trainer_init"):
        type("Half", (TrainerWeightTransferEngine,), {"send_weights": lambda self: None})(client=None)
    assert MineEngine(client=None).shutdown() is None
