"""Digests of many runs and boxes at once: what the kernels are told, and, where there is a GPU, what they compute."""

from __future__ import annotations

import random

import pytest
import torch

from wt_common.digest import BLOCK_WORDS, block_factor, digest_bytes, word_factors
from wt_worker.digest import tensor_digest
from wt_worker.digest_runs import CHUNK_BLOCKS, TILE_WORDS, RunDigests, kernel, run_table
from wt_worker.placement.digest import box_digest, word_rows
from wt_worker.placement.installed import InstalledDigests
from wt_worker.placement.plan import Box

MASK = (1 << 64) - 1
TILE, CHUNK = TILE_WORDS, CHUNK_BLOCKS
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def words_of_program(row, local):
    """The words of a run, by their place in it, that one of its programs reads: what the kernel's arithmetic comes to."""
    _, first, count, _, _, num_tiles, first_tile = row
    tile = first_tile + local % num_tiles
    begin = first // BLOCK_WORDS + local // num_tiles * CHUNK
    end = min(begin + CHUNK, (first + count - 1) // BLOCK_WORDS + 1)
    for block in range(begin, end):
        start = block * BLOCK_WORDS + tile * TILE - first
        yield from range(max(start, 0), min(start + TILE, count))


@pytest.mark.parametrize(
    ("first", "count"),
    [
        (0, 1),
        (5, 1),
        (BLOCK_WORDS - 1, 1),
        (BLOCK_WORDS - 1, 2),
        (0, BLOCK_WORDS),
        (1, BLOCK_WORDS),
        (TILE - 1, 2),
        (3 * TILE + 7, 5 * TILE),
        (17 * BLOCK_WORDS + 11, 40 * BLOCK_WORDS),
        (2, 33 * BLOCK_WORDS - 2),
    ],
)
def test_programs_of_a_run_read_each_word_once(first, count):
    """However a run lies in its parameter's blocks, its programs together read all of it, and nothing twice."""
    (_, row), (before, programs), num_blocks = run_table([(9, 1 << 20, 7, 0), (3, 1 << 30, count, first)])
    assert row[4] == before == 1
    seen = torch.zeros(count, dtype=torch.int64)
    for local in range(programs):
        places = torch.tensor(list(words_of_program(row, local)), dtype=torch.int64)
        seen.index_add_(0, places, torch.ones_like(places))
    assert seen.min() == seen.max() == 1
    assert num_blocks == (first + count - 1) // BLOCK_WORDS + 1


def test_cpu_tensors_are_not_for_the_kernel():
    """Bytes that are not on a GPU are left to torch."""
    assert not RunDigests.takes(torch.zeros(8, dtype=torch.uint8), 0)


def digest_of_rows(rows):
    """The sum that the kernel of boxes makes, word by word."""
    total = 0
    for words, first, step in rows:
        for row, values in enumerate(words.tolist()):
            for column, word in enumerate(values):
                place = first + row * step + column
                total += word * block_factor(place // BLOCK_WORDS) * word_factors()[place % BLOCK_WORDS]
    return total & MASK


BOXES = [
    (torch.bfloat16, (8, 12), (slice(0, 8), slice(4, 12))),
    (torch.bfloat16, (8, 12), (slice(2, 5), slice(None))),
    (torch.float32, (7, 9), (slice(1, 6), slice(3, 8))),
    (torch.float32, (5, 6, 7), (slice(1, 4), slice(2, 6), slice(3, 5))),
    (torch.float64, (5, 6), (slice(1, 4), slice(2, 5))),
    (torch.int8, (4, 16), (slice(0, 3), slice(8, 16))),
    (torch.bfloat16, (600, 700), (slice(0, 600), slice(350, 700))),
]


@pytest.mark.parametrize(("dtype", "shape", "part"), BOXES[:-1])
def test_rows_of_a_box_are_its_words(dtype, shape, part):
    """What the kernel is told of a box adds up to the box's digest, wherever the box itself is stored."""
    whole = torch.randint(-100, 100, shape).to(dtype)
    box = whole[part]
    for region in (box, box.contiguous()):
        rows = word_rows(region, box.storage_offset(), whole[part].stride())
        assert rows is not None
        assert digest_of_rows(rows) == box_digest(region, box.storage_offset(), whole[part].stride())


@pytest.mark.parametrize(
    "box",
    [torch.zeros(6, 7, dtype=torch.bfloat16)[:, 1:], torch.zeros(6, 8).t(), torch.zeros(8, dtype=torch.int8)[1:6]],
)
def test_box_that_is_not_made_of_rows_of_words(box):
    """Where words are cut apart, or do not follow one another, torch computes the digest."""
    assert word_rows(box, box.storage_offset(), torch.zeros(box.shape).stride()) is None


# --- on a GPU ------------------------------------------------------------------------------------------------------


@on_gpu
def test_kernel_is_there():
    """Torch's CUDA builds bring Triton; without it digests would be slow, and say nothing."""
    assert kernel() is not None


@on_gpu
def test_runs_on_a_gpu():
    """Runs of all sizes and places, aligned and not, several of one parameter, give what the plain definition gives."""
    generator = random.Random(1)
    memory = torch.randint(0, 256, (64 << 20,), dtype=torch.uint8, device="cuda")
    for aligned in (True, False):
        runs, expected = [], [0] * 40
        for size in (4, 8, 400, 1 << 13, 1 << 18, (1 << 18) + 12, 3 << 18, 5 << 20):
            for _ in range(5):
                step = 16 if aligned else 4
                start = generator.randrange(0, (len(memory) - size) // step) * step
                offset = generator.choice([0, step, 1 << 18, (1 << 18) - step, 7 << 20])
                place = generator.randrange(40)
                data = memory[start : start + size]
                assert RunDigests.takes(data, offset)
                runs.append((place, data, offset))
                expected[place] = (expected[place] + _digest(data, offset)) & MASK
        totals = torch.zeros(40, dtype=torch.int64, device="cuda")
        digests = RunDigests(memory.device, runs)
        digests.add_to(totals)
        assert [int(total) & MASK for total in totals] == expected
        digests.add_to(totals)
        assert [int(total) & MASK for total in totals] == [2 * each & MASK for each in expected]


@on_gpu
@pytest.mark.parametrize(("dtype", "shape", "part"), BOXES)
def test_boxes_on_a_gpu(dtype, shape, part):
    """Installed boxes have the same digest on a GPU and on the CPU, also where torch computes it."""
    whole = torch.randint(-100, 100, shape).to(dtype)
    box = whole[part]
    where = Box(box.storage_offset(), tuple(box.shape), tuple(box.stride()))
    odd = torch.randint(-100, 100, (9, 7)).to(torch.bfloat16)
    odd_where = Box(1, (9, 6), (7, 1))
    subjects = [[(box, where)], [(odd[:, 1:], odd_where)], [(whole, Box(0, shape, tuple(whole.stride())))]]
    expected = InstalledDigests(subjects).now()
    found = InstalledDigests([[(each.cuda(), place) for each, place in parts] for parts in subjects])
    assert found.now() == expected == found.now()


def _digest(data, offset):
    data = data.cpu()
    return digest_bytes(bytes(data.tolist()), offset) if data.numel() < 1 << 15 else tensor_digest(data, offset)
