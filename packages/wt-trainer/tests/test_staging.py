"""Groups are filled with the bytes that the source yields, in the dtypes of the wire, and small parameters are digested there."""

import ctypes
import threading
from dataclasses import replace
from functools import cached_property

import pytest
import torch

from wt_common import PlanError
from wt_common.digest import digest_bytes
from wt_common.packing import DIRECT_BYTES, plan_groups
from wt_trainer import ParamMeta, WeightSource
from wt_trainer.metadata import RoundMetadata
from wt_trainer.round import Round
from wt_trainer.staging import Staging
from wt_trainer.stream import CheckedStream


def some_tensor(dtype, shape, seed):
    """Random numbers."""
    return torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bytes_of(tensor):
    """What a tensor is, in row-major order; a million numbers as a list would take longer than all else."""
    data = tensor.resolve_neg().contiguous()
    return ctypes.string_at(data.data_ptr(), data.nbytes)


def tensors_of(seed):
    """Small ones, of which some are odd, strided or of no elements; larger ones; one that is sent from where it lies."""
    return {
        "norm": some_tensor(torch.float32, (6,), seed),
        "cast": some_tensor(torch.float32, (5, 2), seed + 1),
        "odd": some_tensor(torch.int8, (3,), seed + 2),
        "none": torch.empty(0, 4),
        "turned": some_tensor(torch.bfloat16, (4, 6), seed + 3).t(),
        "lazy": torch._neg_view(some_tensor(torch.float32, (6,), seed + 4)),
        "middle": some_tensor(torch.float32, (9000,), seed + 5),
        "learned": torch.nn.Parameter(some_tensor(torch.bfloat16, (6, 2), seed + 6)),
        "wide": some_tensor(torch.complex64, (3,), seed + 7),
        "scalar": some_tensor(torch.float32, (), seed + 8),
        "large": some_tensor(torch.float32, (DIRECT_BYTES // 4 + 100,), seed + 9),
        "last": some_tensor(torch.float32, (6,), seed + 10),
    }


class Source(WeightSource):
    """One that keeps its tensors as they are, if `yields_stable`; else one that changes each for as long as it is yielded."""

    def __init__(self, *, is_stable=True):
        self.tensors = tensors_of(0)
        self.yields_stable = is_stable
        self.yielded = {}

    @cached_property
    def metadata(self):
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def iter_full(self):
        for name, tensor in self.tensors.items():
            if self.yields_stable:
                yield name, tensor
                continue
            tensor.data.neg_()  # in place of adding an adapter
            self.yielded[name] = tensor.detach().clone()
            yield name, tensor
            tensor.data.neg_()


class Sender:
    """Rounds of one source, without a wire: what would be sent is kept."""

    def __init__(self, max_bytes, max_pieces=4096, num_buffers=2, *, digest=True, is_stable=True):
        self.source = Source(is_stable=is_stable)
        self.metadata = RoundMetadata.of(self.source, 1)
        self.wire = self.metadata.cast({"cast": "bfloat16"})
        self.groups = plan_groups(
            self.wire.sizes_bytes, max_bytes=max_bytes, max_pieces=max_pieces, roots=self.wire.roots
        )
        self.staging = Staging(num_buffers, torch.device("cpu"))
        self.digest = digest

    def round(self):
        """The bytes of each parameter, and the round."""
        round_ = Round(1, 10, threading.Condition())
        stream = CheckedStream(self.source, self.metadata, self.wire, 0, round_, digest=self.digest)
        sent = [b""] * len(self.metadata.names)
        self.held_bytes = 0
        for number, group in enumerate(self.groups):
            filled = self.staging.fill(self.groups, number, number, stream, self.wire)
            buffers, self.lent = filled.buffers, filled.lent
            self.held_bytes = max(filled.held_bytes, self.held_bytes)
            data = b"".join(map(bytes_of, buffers))
            for piece in group.pieces:
                gap = 0 if len(buffers) == 1 else self._gaps_before(piece, group, buffers)
                sent[piece.index] += data[piece.offset - gap : piece.offset - gap + piece.num_bytes]
        stream.finish()
        return sent, round_

    @staticmethod
    def _gaps_before(piece, group, buffers):
        """How much of the group's padding, up to `piece`, is between two buffers and so in none of them."""
        from wt_common.packing import operations

        gap = end = 0
        for pieces in operations(group):
            gap += pieces[0].offset - end
            end = pieces[-1].offset + pieces[-1].num_bytes
            if piece.offset < end:
                break
        return gap

    def expected(self):
        """By the definition of the wire."""
        return [
            bytes_of(tensor.detach().to(dtype))
            for tensor, dtype in zip(
                (self.source.tensors | self.source.yielded).values(), self.wire.dtypes, strict=True
            )
        ]


@pytest.mark.parametrize(
    ("max_bytes", "max_pieces"), [(1 << 22, 4096), (1 << 22, 2), (1 << 22, 1), (1 << 12, 4096), (202, 4096)]
)
@pytest.mark.parametrize("is_stable", [True, False], ids=["stable", "restoring"])
def test_every_round_sends_what_the_source_has_now(max_bytes, max_pieces, is_stable):
    """Bytes are those of the source, cast, in row-major order, and so are digests, however they are grouped and cut.

    It is the same for a source whose tensors are what is sent only until it is asked for the next one.
    """
    sender = Sender(max_bytes, max_pieces, is_stable=is_stable)
    for seed in (0, 100, 200):
        sender.source.tensors = tensors_of(seed)
        sent, round_ = sender.round()
        assert sent == sender.expected()
        assert round_.digests == {place: digest_bytes(data) for place, data in enumerate(sent)}


@pytest.mark.parametrize("is_stable", [True, False], ids=["stable", "restoring"])
def test_nothing_is_digested_unless_it_is_verified(is_stable):
    """A session that verifies nothing costs nothing, and the bytes are right all the same."""
    sender = Sender(1 << 22, digest=False, is_stable=is_stable)
    sent, round_ = sender.round()
    assert (sent, round_.digests) == (sender.expected(), {})


def test_large_parameters_are_lent():
    """Only what goes out from where it lies is watched."""
    sender = Sender(1 << 23)
    sender.round()
    (loan,) = sender.lent
    loan.check()
    sender.source.tensors["last"].add_(1)
    loan.check()
    sender.source.tensors["large"].add_(1)
    with pytest.raises(PlanError, match="'large' was written to"):
        loan.check()


def test_what_must_be_copied_shares_the_bounded_buffers():
    """Copies of large parameters and small ones beside them take no more than a group for each buffer, and nothing is lent."""
    sender = Sender(1 << 22, is_stable=False)
    for _ in range(2):
        sent, _ = sender.round()
        assert sent == sender.expected()
        assert sender.lent == []
        assert sender.staging.num_bytes <= 2 * (1 << 22)
        assert sender.held_bytes == 0
    sender.source.yields_stable = True
    sender.source.yielded = {}
    sent, _ = sender.round()
    assert sent == sender.expected()
    assert len(sender.lent) == 1


def test_buffers_are_no_larger_than_needed_for_what_is_lent():
    """Where large parameters are sent from where they lie, there is no buffer for them."""
    sender = Sender(1 << 22)
    sender.round()
    assert sender.staging.num_bytes < 2 * DIRECT_BYTES


def test_each_buffer_is_made_larger_once():
    """A round whose first group needs no copy, and the second one does: what was worked out before is worked out again."""
    sender = Sender((1 << 20) + 400, num_buffers=1, is_stable=False)
    for _ in range(3):
        sent, round_ = sender.round()
        assert sent == sender.expected()
        assert round_.digests == {place: digest_bytes(data) for place, data in enumerate(sent)}
    buffers = list(sender.staging._buffers)
    sender.round()
    assert sender.staging._buffers[0] is buffers[0]


@pytest.mark.parametrize("is_stable", [True, False], ids=["stable", "restoring"])
def test_device_copies_are_put_off_only_where_the_source_allows(is_stable):
    """A GPU's small tensors are copied together, in few launches, unless the source may have changed them by then."""
    sender = Sender(1 << 22, is_stable=is_stable)
    sender.staging._pack = sender.staging._pack_at_once  # as on another device
    sender.digest = False
    sent, _ = sender.round()
    assert sent == sender.expected()


def test_digest_and_bytes_cannot_differ_where_they_are_copied():
    """Another thread's write while a copied parameter is made ready gives other bytes, and the digest of those."""
    sender = Sender(1 << 22, is_stable=False)
    usual = sender.staging._copied

    def copied(data, *where):
        result = usual(data, *where)
        sender.source.tensors["large"].data.zero_()
        return result

    sender.staging._copied = copied
    sent, round_ = sender.round()
    place = list(sender.source.tensors).index("large")
    assert sent == sender.expected()
    assert round_.digests[place] == digest_bytes(sent[place])


@pytest.mark.parametrize("max_bytes", [1 << 22, 202])
def test_digest_is_there_before_the_bytes_are(max_bytes):
    """When a group is ready its pieces are digested: nothing is sent that is not."""
    sender = Sender(max_bytes)
    round_ = Round(1, 10, threading.Condition())
    stream = CheckedStream(sender.source, sender.metadata, sender.wire, 0, round_, digest=True)
    data = [b""] * len(sender.metadata.names)
    expected = sender.expected()
    for number, group in enumerate(sender.groups[:10]):
        sender.staging.fill(sender.groups, number, number, stream, sender.wire)
        for piece in group.pieces:
            data[piece.index] += expected[piece.index][piece.start : piece.start + piece.num_bytes]
            assert digest_bytes(data[piece.index]) == round_.digests[piece.index]


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_digests_what_it_is_the_root_of(rank):
    """Another rank has the digests of its own parameters, by their places in the metadata."""
    source = Source()
    source.metadata = [replace(meta, owners=(place % 2,)) for place, meta in enumerate(source.metadata)]
    source.owned_names = lambda rank: list(source.tensors)
    metadata = RoundMetadata.of(source, 2)
    groups = plan_groups(metadata.sizes_bytes, max_bytes=1 << 22, max_pieces=4096, roots=metadata.roots)
    round_ = Round(1, 10, threading.Condition())
    stream = CheckedStream(source, metadata, metadata, rank, round_, digest=True)
    staging = Staging(2, torch.device("cpu"))
    own = [number for number, group in enumerate(groups) if group.root == rank]
    for count, number in enumerate(own):
        staging.fill(groups, number, count, stream, metadata)
    stream.finish()
    assert sorted(round_.digests) == [place for place, root in enumerate(metadata.roots) if root == rank]


@pytest.mark.parametrize("is_stable", [True, False])
@pytest.mark.parametrize(
    "tensor_of",
    [
        lambda rows: torch.arange(3.0 * rows).reshape(3, rows).T,
        lambda rows: torch.arange(3.0 * rows + 1)[1:].reshape(rows, 3),
        lambda rows: torch.arange(6.0 * rows)[::2].reshape(rows, 3),
    ],
    ids=["transposed", "offset", "strided"],
)
@pytest.mark.parametrize("rows", [4, 1 << 17], ids=["small", "large"])
def test_digest_does_not_depend_on_the_layout(tensor_of, rows, is_stable):
    """A tensor that is not contiguous, or begins anywhere, has the digest of its bytes in row-major order."""
    tensor = tensor_of(rows)
    source = Source(is_stable=is_stable)
    source.tensors = {"a": tensor}
    metadata = RoundMetadata.of(source, 1)
    groups = plan_groups(metadata.sizes_bytes, max_bytes=1 << 23, max_pieces=4096)
    round_ = Round(1, 10, threading.Condition())
    stream = CheckedStream(source, metadata, metadata, 0, round_, digest=True)
    (group,) = groups
    filled = Staging(1, torch.device("cpu")).fill(groups, 0, 0, stream, metadata)
    stream.finish()
    (buffer,) = filled.buffers
    expected = bytes_of(tensor if is_stable else -tensor)
    assert bytes_of(buffer[: group.num_bytes]) == expected
    assert round_.digests == {0: digest_bytes(expected)}


def test_small_parameters_are_checked():
    """What is copied without looking at its bytes is compared with the metadata all the same."""
    sender = Sender(1 << 22)
    sender.source.tensors["scalar"] = torch.zeros(1)
    with pytest.raises(PlanError, match=r"'scalar': the metadata declares float32 \[\]") as error:
        sender.round()
    assert error.value.param == "scalar"


def test_buffers_are_used_again_until_they_are_let_go():
    """Rounds share buffers and what was worked out for them; after a failure both are new."""
    sender = Sender(1 << 12)
    sender.round()
    buffers, known = list(sender.staging._buffers), dict(sender.staging._operations)
    sender.round()
    assert sender.staging._buffers == buffers
    assert all(sender.staging._operations[key] is value for key, value in known.items())
    sender.staging.clear()
    sent, _ = sender.round()
    assert sent == sender.expected()
    assert not {buffer.data_ptr() for buffer in buffers} & {buffer.data_ptr() for buffer in sender.staging._buffers}


def test_other_groups_are_worked_out_anew():
    """Another wire has other groups, and nothing of the old ones is used."""
    sender = Sender(1 << 22)
    sender.round()
    sender.wire = sender.metadata
    sender.groups = plan_groups(sender.wire.sizes_bytes, max_bytes=1 << 22, max_pieces=4096, roots=sender.wire.roots)
    sent, round_ = sender.round()
    assert sent == sender.expected()
    assert round_.digests[1] == digest_bytes(sent[1])


def test_rounds_within_and_without_inference_mode():
    """A caller may be in inference mode in one round and not in the next."""
    sender = Sender(1 << 22)
    with torch.inference_mode():
        sender.round()
    sent, _ = sender.round()
    assert sent == sender.expected()
