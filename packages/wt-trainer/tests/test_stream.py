"""Taking parameters from a source: what it may yield, and what is done about the rest."""

import threading
from functools import cached_property

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

from wt_common import PlanError
from wt_common.digest import digest_bytes
from wt_common.packing import Piece
from wt_trainer import ParamMeta, WeightSource
from wt_trainer.metadata import RoundMetadata
from wt_trainer.round import Round
from wt_trainer.stream import CheckedStream

METAS = [
    ParamMeta("a", torch.float32, (2,)),
    ParamMeta("b", torch.int8, (3,), owners=(1,)),
    ParamMeta("c", torch.float32, (2,)),
]
TENSORS = {"a": torch.tensor([1.0, 2.0]), "c": torch.tensor([3.0, 4.0])}


class Source(WeightSource):
    """`TENSORS`, or what a test puts in their place."""

    def __init__(self, items=None, owned=None, metas=METAS):
        self.items = list(TENSORS.items()) if items is None else items
        self.owned = owned
        self.metas = metas

    @cached_property
    def metadata(self):
        return self.metas

    def owned_names(self, rank):
        return super().owned_names(rank) if self.owned is None else self.owned

    def iter_full(self):
        yield from self.items


def stream_of(source, rank=0, *, casts=None, round_=None, digest=True):
    metadata = RoundMetadata.of(source, 2)
    round_ = round_ or Round(1, 10, threading.Condition())
    return CheckedStream(source, metadata, metadata.cast(casts or {}), rank, round_, digest=digest)


def whole(index):
    return Piece(index, 0, 8, 0)


def test_pieces_are_the_bytes_of_the_parameters():
    """Each piece is of its own parameter; those that another rank sends are passed over."""
    stream = stream_of(Source())
    assert torch.equal(stream.piece(whole(0)).view(torch.float32), TENSORS["a"])
    assert torch.equal(stream.piece(whole(2)).view(torch.float32), TENSORS["c"])
    stream.finish()


def test_tensor_that_was_not_gathered_is_refused(tmp_path):
    """A DTensor has the whole shape and a part of the data: its error names the parameter and says to gather it."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        sharded = distribute_tensor(TENSORS["a"], mesh, [Shard(0)])
        stream = stream_of(Source([("a", sharded)]))
        with pytest.raises(PlanError, match=r"yields a DTensor.*materialize_full_tensor") as caught:
            stream.piece(whole(0))
        assert caught.value.param == "a"
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("owned", "param", "text"),
    [
        (["a"], "c", r"owned_names\(0\) leaves out 'c', which rank 0 must send"),
        ([], "a", "leaves out 'a'"),
        (["c", "a"], "a", "each once and in their order, got 'a'"),
        (["a", "a", "c"], "a", "each once and in their order"),
        (["a", "x", "c"], "x", "expected names of the metadata"),
    ],
)
def test_owned_names_that_do_not_fit_are_refused_before_a_byte_moves(owned, param, text):
    """A rank that would leave out what it must send, or says anything else than the metadata, sends nothing."""
    with pytest.raises(PlanError, match=text) as caught:
        stream_of(Source(owned=owned))
    assert (caught.value.param, caught.value.side) == (param, "trainer")


@pytest.mark.parametrize(
    "item",
    [
        None,
        "a",
        ("a",),
        ("a", [1.0, 2.0]),
        (1, torch.zeros(2)),
        ("a", torch.zeros(2, device="meta")),
        ("a", torch.zeros(2).to_sparse()),
    ],
    ids=["None", "name", "short", "list", "number", "meta", "sparse"],
)
def test_what_is_no_tensor_is_refused_by_name(item):
    """Anything but a name and a dense tensor that holds data is a PlanError that names the parameter that was due."""
    stream = stream_of(Source(items=[item]))
    with pytest.raises(PlanError, match=r"where parameter 'a' is next; expected \(name, tensor\)") as caught:
        stream.piece(whole(0))
    assert caught.value.param == "a"


def test_lazy_negation_is_resolved():
    """A tensor whose sign or conjugate torch has only noted is sent as what it is."""
    lazy = torch._neg_view(TENSORS["a"])
    stream = stream_of(Source(items=[("a", lazy)]))
    assert torch.equal(stream.piece(whole(0)).view(torch.float32), -TENSORS["a"])


def test_write_to_a_lent_tensor_is_found():
    """A tensor that is sent from where it lies is watched; a copy need not be."""
    tensor = TENSORS["a"].clone()
    stream = stream_of(Source(items=[("a", tensor), ("c", torch.stack([TENSORS["c"]] * 2, -1)[:, 0])]))
    stream.piece(whole(0))
    (loan,) = stream.lent()
    loan.check()
    tensor.view(2, 1).add_(1)
    with pytest.raises(PlanError, match="'a' was written to while it was being sent"):
        loan.check()
    stream.piece(whole(2))
    assert stream.lent() == []


# --- digests ---------------------------------------------------------------------------------------------------


@pytest.fixture
def round_():
    return Round(1, 10, threading.Condition())


def bytes_of(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def test_digest_is_over_the_bytes_of_the_wire(round_):
    """What this rank is the root of is digested as it goes out, after the cast; what another rank sends is not."""
    tensors = {
        "a": torch.tensor([1.5, -2.0]),
        "b": torch.tensor([1, 2, 3], dtype=torch.int8),
        "c": torch.tensor([3.0, 4.0]),
    }
    stream = stream_of(Source(tensors.items(), owned=["a", "b", "c"]), casts={"a": "bfloat16"}, round_=round_)
    stream.finish()
    assert round_.digests == {
        0: digest_bytes(bytes_of(tensors["a"].to(torch.bfloat16))),
        2: digest_bytes(bytes_of(tensors["c"])),
    }


def test_each_rank_digests_what_it_is_the_root_of(round_):
    """Another rank has the digests of its own parameters, by their places in the metadata."""
    tensors = {
        "a": torch.tensor([1.0, 2.0]),
        "b": torch.tensor([1, 2, 3], dtype=torch.int8),
        "c": torch.tensor([3.0, 4.0]),
    }
    stream_of(Source(tensors.items(), owned=["a", "b", "c"]), rank=1, round_=round_).finish()
    assert round_.digests == {1: digest_bytes(bytes([1, 2, 3]))}


def test_digest_is_there_before_the_bytes_are(round_):
    """When a piece can be had, its parameter's digest is there: nothing is sent that is not digested."""
    stream = stream_of(Source(), round_=round_)
    stream.piece(Piece(0, 4, 4, 0))
    assert list(round_.digests) == [0]


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(12.0).reshape(3, 4).T, torch.arange(13.0)[1:].reshape(4, 3), torch.arange(24.0)[::2].reshape(4, 3)],
    ids=["transposed", "offset", "strided"],
)
def test_digest_does_not_depend_on_the_layout(round_, tensor):
    """A tensor that is not contiguous, or begins anywhere, has the digest of its bytes in row-major order."""
    source = Source([("a", tensor)], metas=[ParamMeta("a", torch.float32, (4, 3))])
    stream_of(source, round_=round_).finish()
    assert round_.digests == {0: digest_bytes(bytes_of(tensor))}


def test_parameter_without_elements_has_digest_0(round_):
    """Nothing is 0, as in the definition."""
    source = Source([("a", torch.zeros(0, 4))], metas=[ParamMeta("a", torch.float32, (0, 4))])
    stream_of(source, round_=round_).finish()
    assert round_.digests == {0: 0}


def test_nothing_is_digested_unless_it_is_verified(round_):
    """A session that verifies nothing costs nothing."""
    stream_of(Source(), round_=round_, digest=False).finish()
    assert round_.digests == {}
