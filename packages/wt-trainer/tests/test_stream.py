"""Taking parameters from a source: what it may yield, and what is done about the rest."""

import threading
import time
import weakref
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
from wt_trainer.stream import CheckedStream, LentMemory

METAS = [
    ParamMeta("a", torch.float32, (2,)),
    ParamMeta("b", torch.int8, (3,), owners=(1,)),
    ParamMeta("c", torch.float32, (2,)),
]
TENSORS = {"a": torch.tensor([1.0, 2.0]), "c": torch.tensor([3.0, 4.0])}


class Source(WeightSource):
    """`TENSORS`, or what a test puts in their place."""

    def __init__(self, items=None, owned=None, metas=METAS, *, is_stable=False):
        self.yields_stable = is_stable
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
    stream = stream_of(Source(items=[("a", tensor), ("c", torch.stack([TENSORS["c"]] * 2, -1)[:, 0])], is_stable=True))
    stream.piece(whole(0))
    assert (stream.is_lent, stream.must_be_copied) == (True, False)
    loan = stream.loan()
    loan.check()
    tensor.view(2, 1).add_(1)
    with pytest.raises(PlanError, match="'a' was written to while it was being sent"):
        loan.check()
    stream.piece(whole(2))
    assert (stream.is_lent, stream.must_be_copied) == (False, False)


class Other(torch.Tensor):
    """A tensor of a class of its own, as those that gather or unpack lazily."""


@pytest.mark.parametrize(
    ("change", "must_be_copied"),
    [
        (lambda tensor: tensor, True),
        (torch.nn.Parameter, True),
        (lambda tensor: tensor.view(2, 1)[:, 0], True),
        (lambda tensor: torch.stack([tensor] * 2, -1)[:, 0], False),
        (torch._neg_view, False),
        (lambda tensor: tensor.as_subclass(Other), True),
    ],
    ids=["plain", "parameter", "view", "strided", "lazy", "subclass"],
)
@pytest.mark.parametrize("casts", [{}, {"a": "bfloat16"}], ids=["as it is", "cast"])
def test_what_the_source_may_write_to_must_be_copied(change, must_be_copied, casts):
    """Without the source's word its own memory is copied; what was made of it on the way, of a plain tensor, is ours already."""
    tensor = change(TENSORS["a"].clone())
    must_be_copied = must_be_copied and (not casts or type(tensor) is Other)
    for is_stable in (False, True):
        stream = stream_of(Source(items=[("a", tensor)], is_stable=is_stable), casts=casts)
        stream.piece(Piece(0, 0, 4, 0))
        assert stream.must_be_copied == (must_be_copied and not is_stable)


def test_source_says_of_each_tensor_whether_it_is_stable():
    """`yields_stable` is looked up when a tensor has come, and holds for it alone."""

    class Alternating(Source):
        def iter_full(self):
            for is_stable, item in zip((True, False), self.items, strict=True):
                self.yields_stable = is_stable
                yield item

    stream = stream_of(Alternating())
    found = []
    for index in (0, 2):
        stream.piece(whole(index))
        found.append(stream.must_be_copied)
    assert found == [False, True]


def test_close_runs_what_the_source_does_in_the_end():
    """A source that was left in the middle restores what it had changed; what it raises there is only logged."""
    left = []

    class Restoring(Source):
        def iter_full(self):
            try:
                yield from self.items
            finally:
                left.append(len(left))
                if len(left) > 1:
                    raise OSError("broken on purpose")

    for count in (1, 2):
        stream = stream_of(Restoring())
        stream.piece(whole(0))
        stream.close()
        stream.close()
        assert len(left) == count
    stream_of(Source(items=iter(TENSORS.items()))).close()


# --- lent memory -----------------------------------------------------------------------------------------------


def test_lent_memory_is_digested_as_it_is_now():
    """Writes that torch does not count are found, also to a view into the middle of a larger tensor."""
    whole_ = torch.arange(100.0)
    memory = LentMemory(whole_[10:30].view(torch.uint8))
    before = digest_bytes(bytes_of(whole_[10:30]))
    assert memory.digest() == before
    whole_.data[9] = whole_.data[30] = -1
    assert memory.digest() == before
    whole_.data[29] = -1
    assert memory.digest() == digest_bytes(bytes_of(whole_[10:30])) != before


def test_lent_memory_keeps_nothing_alive():
    """Memory that its owner has let go, or shrunk, is not there any more, and so not digested."""
    tensor = torch.arange(100.0)
    alive = weakref.ref(tensor)
    memory = LentMemory(tensor.view(torch.uint8))
    del tensor
    assert alive() is None
    assert memory.digest() is None
    shrunk = torch.arange(100.0)
    memory = LentMemory(shrunk.view(torch.uint8))
    shrunk.untyped_storage().resize_(0)
    assert memory.digest() is None


@pytest.mark.parametrize(("digest", "expected"), [(True, [0]), (False, [])])
def test_memory_is_remembered_where_digests_are_compared(digest, expected):
    """What was sent in place can be digested again, by its place; without digests nobody will ask."""
    round_ = Round(1, 10, threading.Condition())
    stream = stream_of(Source(is_stable=True), round_=round_, digest=digest)
    for start in (0, 4):
        stream.piece(Piece(0, start, 4, 0))
        stream.sent_in_place()
    assert list(round_.lent) == expected
    assert round_.digest_now(0) == (digest_bytes(bytes_of(TENSORS["a"])) if digest else None)
    assert round_.digest_now(2) is None


# --- after a failure -------------------------------------------------------------------------------------------


class Counting(Source):
    """Notes which parameters were asked for; `slow_s` is what each takes."""

    def __init__(self, slow_s=0.0, **options):
        super().__init__(
            items=[("a", TENSORS["a"]), ("b", torch.zeros(3, dtype=torch.int8)), ("c", TENSORS["c"])], **options
        )
        self.slow_s = slow_s
        self.asked = []

    def iter_full(self):
        for name, tensor in self.items:
            time.sleep(self.slow_s)
            self.asked.append(name)
            yield name, tensor


@pytest.mark.parametrize(("index", "asked"), [(-1, "a"), (0, "a"), (1, "ab"), (2, "abc"), (1 << 40, "abc")])
def test_failed_source_is_run_to_where_others_are(index, asked):
    """However far others have begun, parameters are taken up to there and no further, also where each takes its time."""
    source = Counting(slow_s=0.3 if index == 2 else 0.0, owned=["a", "b", "c"])
    stream = stream_of(source)
    stream.piece(whole(0))
    stream.round.fail(PlanError("elsewhere"))
    stream.run_to(index)
    assert source.asked == list(asked)
    assert not stream.round.stopped


def test_source_is_run_on_after_its_own_parameter_was_refused():
    """What this rank refuses leaves the iterator alive: it runs on for the others."""
    source = Counting(owned=["a", "b", "c"])
    source.items[0] = ("a", torch.zeros(7))
    stream = stream_of(source)
    with pytest.raises(PlanError):
        stream.piece(whole(0))
    assert not stream.round.stopped
    stream.run_to(2)
    assert source.asked == ["a", "b", "c"]


@pytest.mark.parametrize("how", ["raises", "ends"])
def test_source_that_stopped_says_so(how):
    """An iterator that raised or ended early cannot be run further, which the other ranks must know; running it does nothing."""

    class Stopping(Source):
        def iter_full(self):
            yield "a", TENSORS["a"]
            if how == "raises":
                raise KeyError("c")

    stream = stream_of(Stopping(owned=["a", "c"]))
    stream.piece(whole(0))
    assert not stream.round.stopped
    with pytest.raises(KeyError if how == "raises" else PlanError):
        stream.piece(whole(2))
    assert (stream.round.stopped, stream.round.begun) == (True, 2)
    stream.run_to(2)


# --- digests ---------------------------------------------------------------------------------------------------


@pytest.fixture
def round_():
    return Round(1, 10, threading.Condition())


def bytes_of(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def test_digests_of_pieces_add_up(round_):
    """A parameter's digest is the sum of its pieces', modulo 2^64; one without elements has 0, and no other rank's is there."""
    stream = stream_of(
        Source(
            [("a", TENSORS["a"]), ("none", torch.empty(0, 4)), ("c", TENSORS["c"])],
            metas=[METAS[0], ParamMeta("none", torch.float32, (0, 4)), METAS[1], METAS[2]],
        ),
        round_=round_,
    )
    stream.add_digest(0, (1 << 64) - 1)
    stream.add_digest(0, 3)
    stream.take_digests([3], [7])
    stream.finish()
    assert round_.digests == {0: 2, 1: 0, 3: 7}


def test_nothing_is_digested_unless_it_is_verified(round_):
    """A session that verifies nothing costs nothing."""
    stream_of(Source(), round_=round_, digest=False).finish()
    assert round_.digests == {}
