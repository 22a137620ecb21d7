"""The fast digest equals its definition, for every dtype, size, layout, offset and cut."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wt_common.digest import BLOCK_WORDS, digest_bytes
from wt_trainer.digest import SmallDigests, block_factors, tensor_digest, tensor_digests, unsigned

DTYPES = [
    torch.bool,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int64,
    torch.complex64,
    torch.complex128,
]
GOLDEN = {
    b"\x01": "d1ec9726674e7af7",
    bytes(range(16)): "f7dd98a403c305d8",
    b"\xff" * 9: "72464aea67c810f9",
    bytes(range(256)) * 1025: "5ba2c68c60799208",  # more than one block
}
BLOCK_BYTES = 4 * BLOCK_WORDS
OFFSETS = st.one_of(
    st.integers(0, 40), st.integers(BLOCK_BYTES - 40, BLOCK_BYTES + 40), st.integers(0, 9 * BLOCK_BYTES)
)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def bytes_of(tensor):
    copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return bytes(copy.flatten().view(torch.uint8).tolist())


def random_tensor(shape, dtype, seed=0):
    """Random bytes, whatever they stand for; a bool has two values."""
    numel = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    data = torch.randint(0, high, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 1023, BLOCK_WORDS + 3])
def test_equals_the_definition(dtype, size):
    """Whatever the dtype and the number of elements, also where the last word is not whole."""
    tensor = random_tensor((size,), dtype, size)
    expected = digest_bytes(bytes_of(tensor))
    assert tensor_digest(tensor) == expected
    assert tensor_digests([tensor]) == [expected]


@pytest.mark.parametrize(("data", "digest"), GOLDEN.items(), ids=len)
def test_golden(data, digest):
    """The wire's digest never changes."""
    assert f"{tensor_digest(torch.tensor(list(data), dtype=torch.uint8)):016x}" == digest


@given(
    shape=st.lists(st.integers(0, 7), max_size=4),
    dtype=st.sampled_from(DTYPES),
    offset=OFFSETS,
    data=st.data(),
)
@settings(deadline=None)
def test_every_layout_at_every_offset(shape, dtype, offset, data):
    """A permuted, strided or shifted view has the digest of its values in row-major order, wherever they begin."""
    tensor = random_tensor([2 * size + 1 for size in shape], dtype)
    tensor = tensor[
        tuple(slice(data.draw(st.integers(0, 1)), 2 * size, data.draw(st.integers(1, 2))) for size in shape)
    ]
    tensor = tensor.permute(data.draw(st.permutations(range(len(shape)))))
    values = bytes_of(tensor)
    assert tensor_digest(tensor, offset) == digest_bytes(values, offset)
    assert tensor_digests([tensor, tensor]) == [digest_bytes(values)] * 2


@given(
    dtype=st.sampled_from(DTYPES),
    size=st.integers(0, 60),
    start=OFFSETS,
    cuts=st.lists(st.integers(0, 60), max_size=4),
)
@settings(deadline=None)
def test_pieces_add_up(dtype, size, start, cuts):
    """Cut anywhere, also within a word or a block, the digests of the pieces add up to that of the whole."""
    tensor = random_tensor((size,), dtype)
    bounds = [0, *sorted(min(cut, size) for cut in cuts), size]
    pieces = [(tensor[a:b], start + a * dtype.itemsize) for a, b in pairwise(bounds)]
    assert sum(tensor_digest(piece, offset) for piece, offset in pieces) % 2**64 == tensor_digest(tensor, start)


@pytest.mark.parametrize("offset", [0, 4, 2, 1, BLOCK_BYTES - 4, BLOCK_BYTES + 3])
def test_several_blocks_at_an_offset(offset):
    """Blocks are those of the parameter, not those of the piece."""
    tensor = random_tensor((2 * BLOCK_BYTES + 11,), torch.uint8)
    assert tensor_digest(tensor, offset) == digest_bytes(bytes_of(tensor), offset)


def test_layout_does_not_matter():
    """Strided, transposed, at an odd address, a scalar, conjugated or in another memory format: the values count."""
    matrix = random_tensor((700, 512), torch.float32)
    assert tensor_digest(matrix.t()) == tensor_digest(matrix.t().contiguous())
    assert tensor_digest(matrix[:, ::2]) == tensor_digest(matrix[:, ::2].contiguous())
    odd = torch.arange(41, dtype=torch.uint8)[1:]
    assert tensor_digest(odd) == digest_bytes(bytes(range(1, 41)))
    assert tensor_digest(torch.tensor(1.5)) == digest_bytes(bytes_of(torch.tensor([1.5])))
    turned = torch.randn(5, dtype=torch.complex64).conj()
    assert tensor_digest(turned) == tensor_digest(turned.resolve_conj())
    assert tensor_digest(turned.imag) == tensor_digest(turned.imag.resolve_neg().contiguous())
    image = random_tensor((2, 3, 4, 5), torch.float32)
    last = image.to(memory_format=torch.channels_last)
    assert tensor_digests([last, last]) == [digest_bytes(bytes_of(image))] * 2
    stepped = random_tensor((5, 3), torch.float64)[:1, :1].as_strided((1, 1), (3, 3))
    assert tensor_digest(stepped) == digest_bytes(bytes_of(random_tensor((5, 3), torch.float64)[:1, :1]))


def test_parameters_and_modes():
    """A parameter's gradient is not of interest, and factors that were made in inference mode serve outside of it."""
    parameter = torch.nn.Parameter(torch.randn(4, 6))
    expected = digest_bytes(bytes_of(parameter.detach()))
    with torch.inference_mode():
        assert tensor_digest(parameter) == expected
    assert tensor_digest(parameter) == expected
    assert tensor_digest(parameter, 2) == digest_bytes(bytes_of(parameter.detach()), 2)
    assert tensor_digests([parameter, parameter]) == [expected, expected]


def test_many_tensors_keep_their_order(monkeypatch):
    """Small ones, which are computed together, and large ones, each in its place; what is held is bounded."""
    monkeypatch.setattr("wt_trainer.digest.HELD_BYTES", 1000)
    tensors = [
        random_tensor((size, 3), dtype, size)
        for size in (0, 1, 2, 100, 3, 2, 7000, 1)
        for dtype in (torch.float32, torch.bfloat16, torch.int8)
    ]
    assert tensor_digests(iter(tensors)) == [tensor_digest(tensor) for tensor in tensors]
    assert tensor_digests([]) == []


def of_small(small, count):
    totals = torch.zeros(count, dtype=torch.int64)
    small.add_to(totals)
    return unsigned(totals)


@pytest.mark.parametrize("at_once", [64, 1000, BLOCK_BYTES])
def test_small_tensors_again_and_again(monkeypatch, at_once):
    """Rows at equal distances, others, several shapes and layouts, in any order: each has its digest, also when bytes are new."""
    monkeypatch.setattr("wt_trainer.digest.BLOCK_BYTES", at_once)
    store = random_tensor((40, 6), torch.float32)
    halves = torch.zeros(9, 4, dtype=torch.bfloat16)
    tensors = [
        *store[3:20],
        *reversed(store[:2]),
        store[30],
        store[30],
        *store.t()[:3],
        *halves[:5].flatten()[1:17].split(4),
        *halves.split(3),
        halves[:8].view(4, 8).t(),
        random_tensor((6,), torch.int32, 5),
        random_tensor((24,), torch.bool, 6),
    ]
    small = SmallDigests(torch.device("cpu"))
    for place, tensor in enumerate(tensors):
        assert SmallDigests.takes(tensor)
        small.add(place, tensor)
    for seed in range(3):
        assert of_small(small, len(tensors)) == [digest_bytes(bytes_of(tensor)) for tensor in tensors]
        store.copy_(random_tensor(store.shape, store.dtype, seed))
        halves.copy_(random_tensor(halves.shape, halves.dtype, seed))


def test_small_parts_add_up():
    """Digests of one place are added, with the factors of their places in the parameter; none at all is nothing."""
    tensor = random_tensor((50,), torch.float32)
    small = SmallDigests(torch.device("cpu"))
    assert of_small(small, 1) == [0]
    small = SmallDigests(torch.device("cpu"))
    one = torch.ones(1, dtype=torch.int32)
    factors = torch.tensor([tensor_digest(one, 4 * index) for index in range(50)], dtype=torch.uint64).view(torch.int64)
    for part, its_factors in zip(tensor.split(20), factors.split(20), strict=True):
        small.add(0, part, its_factors)
    assert of_small(small, 1) == [digest_bytes(bytes_of(tensor))]


@pytest.mark.parametrize(
    ("count", "dtype"), [(0, torch.float32), (3, torch.int8), (5000, torch.float32), (2, torch.complex64)], ids=str
)
def test_what_is_not_small(count, dtype):
    """Nothing, a word that is not whole, much, and what cannot be read as words."""
    assert not SmallDigests.takes(torch.zeros(count, dtype=dtype))


def test_block_factors_grow():
    """A longer table begins as the shorter one did."""
    few = block_factors(torch.device("cpu"), 2)[:2].clone()
    many = block_factors(torch.device("cpu"), 2000)
    assert len(many) >= 2000
    assert torch.equal(many[:2], few)


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_equals_the_cpu(dtype):
    """A device computes the same number, of a few bytes and of several chunks."""
    for size, offset in ((1, 0), (7, 3), (3 * BLOCK_WORDS + 5, 4), (40 << 20, 0)):
        tensor = random_tensor((size,), dtype)
        assert tensor_digest(tensor.cuda(), offset) == tensor_digest(tensor, offset), (size, offset)
    small = [random_tensor((5, 4), dtype, seed) for seed in range(9)]
    assert tensor_digests([tensor.cuda() for tensor in small]) == tensor_digests(small)
    assert tensor_digest(small[0].cuda().t(), 6) == tensor_digest(small[0].t(), 6)
