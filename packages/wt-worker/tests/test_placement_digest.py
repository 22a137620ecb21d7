"""The digest of a box, wherever and however it lies, is that of its bytes among zeros."""

from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wt_common.digest import BLOCK_WORDS, digest_bytes
from wt_worker.digest import tensor_digest
from wt_worker.placement.digest import box_digest, box_factors
from wt_worker.placement.installed import InstalledDigests
from wt_worker.placement.plan import Box, row_major

DTYPES = [
    torch.bool,
    torch.int8,
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int64,
    torch.complex64,
    torch.complex128,
]
STEPS = st.sampled_from([1, 1, 1, 2, 3])

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def random_tensor(shape, dtype):
    """Random bytes, whatever they stand for; a bool has two values."""
    high = 2 if dtype == torch.bool else 256
    generator = torch.Generator().manual_seed(prod(shape))
    data = torch.randint(0, high, (prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape)


def cut(tensor, slices):
    """A view of `tensor`, contiguous and a whole parameter: its elements at `slices`, and their offset and strides."""
    steps = row_major(tensor.shape)
    offset = sum(each.start * step for each, step in zip(slices, steps, strict=True))
    strides = tuple(each.step * step for each, step in zip(slices, steps, strict=True))
    return tensor[tuple(slices)], offset, strides


def among_zeros(tensor, slices):
    """The parameter with zeros outside of the box."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = integers.get(tensor.itemsize, tensor.dtype)
    kept = torch.zeros(tensor.shape, dtype=kind)
    kept[tuple(slices)] = tensor.view(kind)[tuple(slices)]
    return kept.view(tensor.dtype)


def bytes_of(tensor):
    return bytes(tensor.flatten().view(torch.uint8).tolist())


@given(shape=st.lists(st.integers(1, 9), max_size=4), dtype=st.sampled_from(DTYPES), data=st.data())
@settings(deadline=None)
def test_equals_the_definition(shape, dtype, data):
    """Any slices, dimensions in any order, as they lie in the parameter or with other elements between them."""
    tensor = random_tensor(shape, dtype)
    slices = []
    for size in shape:
        start = data.draw(st.integers(0, size - 1))
        slices.append(slice(start, data.draw(st.integers(start, size)), data.draw(STEPS)))
    region, offset, strides = cut(tensor, slices)
    order = data.draw(st.permutations(range(len(shape))))
    region, strides = region.permute(order), tuple(strides[dim] for dim in order)
    if data.draw(st.booleans()):
        gaps = [data.draw(st.integers(0, 1)) for _ in shape]
        holder = torch.zeros([size + gap for size, gap in zip(region.shape, gaps, strict=True)], dtype=dtype)
        region = holder[tuple(slice(gap, None) for gap in gaps)].copy_(region)
    assert box_digest(region, offset, strides) == digest_bytes(bytes_of(among_zeros(tensor, slices)))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("shape", "slices"),
    [
        ((520, 1024), (slice(3, 515, 1), slice(0, 1024, 1))),  # rows, contiguous in the parameter
        ((520, 1024), (slice(0, 520, 1), slice(256, 512, 1))),  # rows that repeat after some blocks
        ((520, 1024), (slice(0, 520, 1), slice(255, 510, 1))),  # the same at odd places
        ((511, 1029), (slice(1, 511, 1), slice(300, 1000, 1))),  # rows that never repeat, some in two blocks
        ((300, 2000), (slice(0, 300, 3), slice(1, 2000, 2))),
        ((3, 200_000), (slice(0, 3, 1), slice(50_000, 150_001, 1))),  # rows of more than a block
        ((3, 200_000), (slice(0, 3, 1), slice(5, 200_000, 17))),
        ((400_003, 1), (slice(2, 400_003, 3), slice(0, 1, 1))),
        ((9, 70, 30, 31), (slice(1, 8, 1), slice(3, 66, 1), slice(2, 30, 2), slice(4, 31, 1))),
    ],
    ids=str,
)
def test_several_blocks(dtype, shape, slices):
    """What is done by blocks, periods and strips equals the whole parameter's digest, as it lies and transposed."""
    tensor = random_tensor(shape, dtype)
    region, offset, strides = cut(tensor, slices)
    expected = tensor_digest(among_zeros(tensor, slices))
    assert box_digest(region, offset, strides) == expected
    assert box_digest(region.contiguous(), offset, strides) == expected
    assert box_digest(region.permute(*reversed(range(region.ndim))).contiguous(), offset, strides[::-1]) == expected


@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.lists(st.integers(0, 12), max_size=2),
    columns=st.lists(st.integers(0, 14), max_size=2),
)
@settings(deadline=None)
def test_boxes_add_up(dtype, rows, columns):
    """Disjoint boxes that cover a parameter have its digest together."""
    tensor = random_tensor((12, 14), dtype)
    total = 0
    for top, bottom in pairwise([0, *sorted(rows), 12]):
        for left, right in pairwise([0, *sorted(columns), 14]):
            total += box_digest(*cut(tensor, (slice(top, bottom, 1), slice(left, right, 1))))
    assert total % 2**64 == tensor_digest(tensor)


def test_any_order_of_a_parameter_has_its_digest():
    """Interleaved dimensions, of which no one is inside of the other, are a box too; so is a scalar."""
    tensor = torch.arange(6.0)
    interleaved = tensor.as_strided((3, 2), (2, 1)).clone()
    assert box_digest(interleaved, 0, (2, 1)) == tensor_digest(tensor)
    crossed = torch.tensor([[0.0, 3.0], [2.0, 5.0], [4.0, 7.0]])
    parameter = torch.tensor([0.0, 0.0, 2.0, 3.0, 4.0, 5.0, 0.0, 7.0])
    assert box_digest(crossed, 0, (2, 3)) == tensor_digest(parameter)
    assert box_digest(torch.tensor(2.5), 3, ()) == digest_bytes(bytes_of(torch.tensor([0.0, 0.0, 0.0, 2.5])))
    far = 5 * BLOCK_WORDS + 7
    assert box_digest(torch.ones(2), far, (3,)) == digest_bytes(bytes_of(torch.tensor([1.0, 0.0, 0.0, 1.0])), 4 * far)


def test_live_parameters():
    """A parameter that requires a gradient, and a view of one, are boxes; an empty one counts nothing."""
    parameter = torch.nn.Parameter(torch.randn(6, 8))
    assert box_digest(parameter, 0, (8, 1)) == tensor_digest(parameter)
    halves = box_digest(parameter[:, :4], 0, (8, 1)) + box_digest(parameter[:, 4:], 4, (8, 1))
    assert halves % 2**64 == tensor_digest(parameter)
    assert box_digest(parameter[:0], 5, (8, 1)) == 0


@given(shape=st.lists(st.integers(1, 9), max_size=3), dtype=st.sampled_from(DTYPES), data=st.data())
@settings(deadline=None)
def test_installed_digests_are_those_of_their_boxes(shape, dtype, data):
    """Several boxes of several parameters, read where they lie, as often as their bytes are new; parts of one place add up."""
    tensors = [random_tensor(shape, dtype) for _ in range(3)]
    subjects = []
    for tensor in tensors:
        slices = [slice(data.draw(st.integers(0, size - 1)), size, data.draw(STEPS)) for size in shape]
        region, offset, strides = cut(tensor, slices)
        subjects.append([(region, Box(offset, tuple(region.shape), strides))])
    subjects += [[*subjects[0], *subjects[1]], [], [(tensors[2].flatten(), Box.whole(shape))]]
    installed = InstalledDigests(subjects)
    for _ in range(2):
        expected = [sum(box_digest(region, box.offset, box.strides) for region, box in parts) for parts in subjects]
        assert installed.now() == [total % 2**64 for total in expected]
        for index, tensor in enumerate(tensors):
            tensor.copy_(random_tensor([index + 2, *shape], dtype)[-1])


def test_installed_digests_of_large_and_odd_boxes():
    """What is not small, or cuts words apart, has its digest beside what is small."""
    parameter = random_tensor((300, 400), torch.bfloat16)
    odd = random_tensor((5, 7), torch.bfloat16)
    regions = [
        cut(parameter, (slice(100, 300, 1), slice(0, 400, 1))),
        cut(parameter, (slice(0, 300, 1), slice(100, 301, 1))),
    ]
    regions += [cut(odd, (slice(0, 5, 1), slice(1, 4, 1))), cut(odd, (slice(1, 2, 1), slice(0, 7, 1)))]
    regions += [cut(odd.view(7, 5), (slice(2, 4, 1), slice(0, 5, 1))), (parameter[2], 800, (1,))]
    boxes = [(region, Box(offset, tuple(region.shape), strides)) for region, offset, strides in regions]
    boxes += [(parameter[100:].flatten(), Box(40_000, (80_000,), (1,))), (odd[:0], Box(0, (0, 7), (7, 1)))]
    found = InstalledDigests([[box] for box in boxes]).now()
    assert found == [box_digest(region, box.offset, box.strides) for region, box in boxes]


def test_factors_of_a_box_that_cuts_words():
    """Elements of less than a word have no factors of their own, unless they come in whole words."""
    cpu = torch.device("cpu")
    assert box_factors(cpu, 2, Box(2, (3, 4), (6, 1))) is not None
    for box in (Box(1, (4,), (1,)), Box(0, (3,), (1,)), Box(0, (2, 4), (5, 1)), Box(0, (4,), (2,)), Box(0, (), ())):
        assert box_factors(cpu, 2, box) is None
    assert len(box_factors(cpu, 8, Box(1, (2, 3), (7, 2)))) == 12


@pytest.mark.parametrize(("offset", "strides"), [(0, (1,)), (-1, (2, 1)), (0, (0, 1)), (0, (2, -1))])
def test_what_is_no_box_is_refused(offset, strides):
    """The error shows the box and says what was expected."""
    with pytest.raises(ValueError, match=r"shape \(2, 2\).*expected one positive stride"):
        box_digest(torch.zeros(2, 2), offset, strides)


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_equals_the_cpu(dtype):
    """A device computes the same number: rows, columns, steps, transposed ones, rows in two blocks."""
    tensor = random_tensor((1001, 517), dtype)
    for slices in (
        (slice(0, 1001, 1), slice(256, 512, 1)),
        (slice(1, 1000, 1), slice(3, 400, 1)),
        (slice(0, 1001, 2), slice(1, 517, 3)),
    ):
        region, offset, strides = cut(tensor, slices)
        assert box_digest(region.cuda(), offset, strides) == box_digest(region, offset, strides), slices
        assert box_digest(region.cuda().t(), offset, strides[::-1]) == box_digest(region, offset, strides), slices
