"""Groups are filled with the bytes that the source yields, in the dtypes of the wire, and small parameters are digested there."""

import threading
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
    def __init__(self):
        self.tensors = tensors_of(0)

    @cached_property
    def metadata(self):
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def iter_full(self):
        yield from self.tensors.items()


class Sender:
    """Rounds of one source, without a wire: what would be sent is kept."""

    def __init__(self, max_bytes, max_pieces=4096, num_buffers=2, *, digest=True):
        self.source = Source()
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
        for number, group in enumerate(self.groups):
            filled = self.staging.fill(self.groups, number, number, stream, self.wire)
            buffers, self.lent = filled.buffers, filled.lent
            data = b"".join(bytes(buffer.tolist()) for buffer in buffers)
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
            bytes(tensor.detach().to(dtype).resolve_neg().contiguous().reshape(-1).view(torch.uint8).tolist())
            for tensor, dtype in zip(self.source.tensors.values(), self.wire.dtypes, strict=True)
        ]


@pytest.mark.parametrize(
    ("max_bytes", "max_pieces"), [(1 << 22, 4096), (1 << 22, 2), (1 << 22, 1), (1 << 12, 4096), (202, 4096)]
)
def test_every_round_sends_what_the_source_has_now(max_bytes, max_pieces):
    """Bytes are those of the source, cast, in row-major order, and so are digests, however they are grouped and cut."""
    sender = Sender(max_bytes, max_pieces)
    for seed in (0, 100, 200):
        sender.source.tensors = tensors_of(seed)
        sent, round_ = sender.round()
        assert sent == sender.expected()
        assert round_.digests == {place: digest_bytes(data) for place, data in enumerate(sent)}


def test_nothing_is_digested_unless_it_is_verified():
    """A session that verifies nothing costs nothing."""
    sender = Sender(1 << 22, digest=False)
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
