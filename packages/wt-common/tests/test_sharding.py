"""The splitting rule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wt_common import shard_bounds


def chunks(size, num_shards):
    """What `torch.chunk(torch.arange(size), num_shards)` yields, by its documentation, filled up with empty pieces."""
    if size == 0:
        return [[]] * num_shards
    step, rest = divmod(size, num_shards)
    step += bool(rest)
    pieces = [list(range(size))[start : start + step] for start in range(0, size, step)]
    return pieces + [[]] * (num_shards - len(pieces))


@given(size=st.integers(0, 200), num_shards=st.integers(1, 40))
def test_bounds_are_those_of_chunk(size, num_shards):
    """The shards hold exactly the elements of `torch.chunk`'s pieces, in order; the pieces it leaves out are empty."""
    bounds = [shard_bounds(size, num_shards, index) for index in range(num_shards)]
    assert [list(range(*each)) for each in bounds] == chunks(size, num_shards)


@given(size=st.integers(0, 2**62), num_shards=st.integers(1, 200))
def test_bounds_cover_the_range_once_and_in_order(size, num_shards):
    """Each shard starts where the one before it stops, from 0 to `size`, at any size."""
    stop = 0
    for index in range(num_shards):
        start, next_stop = shard_bounds(size, num_shards, index)
        assert start == stop <= next_stop
        stop = next_stop
    assert stop == size


@pytest.mark.parametrize(
    ("size", "num_shards", "expected"),
    [
        (11, 6, [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10), (10, 11)]),
        (12, 6, [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10), (10, 12)]),
        (13, 6, [(0, 3), (3, 6), (6, 9), (9, 12), (12, 13), (13, 13)]),
        (1, 3, [(0, 1), (1, 1), (1, 1)]),
        (0, 2, [(0, 0), (0, 0)]),
        (5, 1, [(0, 5)]),
    ],
)
def test_bounds_of_known_splits(size, num_shards, expected):
    """The examples of torch.chunk's documentation, an empty dimension, and more shards than elements."""
    assert [shard_bounds(size, num_shards, index) for index in range(num_shards)] == expected


@pytest.mark.parametrize(
    ("arguments", "subject"),
    [((-1, 2, 0), "size"), ((4, 0, 0), "num_shards"), ((4, 2, 2), "index"), ((4, 2, -1), "index")],
)
def test_impossible_arguments_are_refused_by_name(arguments, subject):
    """A negative size, no shards, or an index that does not exist is a ValueError that names the argument."""
    with pytest.raises(ValueError, match=f"^{subject} must be"):
        shard_bounds(*arguments)
