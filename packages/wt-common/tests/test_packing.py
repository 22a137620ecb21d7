"""The grouping rule."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wt_common.packing import DIRECT_BYTES, PIECE_ALIGNMENT_BYTES, Group, Piece, operations, plan_groups

sizes = st.lists(st.integers(0, 150), max_size=12)


@st.composite
def plans(draw):
    """A plan's arguments, and the plan."""
    sizes_bytes = draw(sizes)
    roots = draw(st.none() | st.lists(st.integers(0, 2), min_size=len(sizes_bytes), max_size=len(sizes_bytes)))
    bounds = {"max_bytes": draw(st.integers(1, 400)), "max_pieces": draw(st.integers(1, 5))}
    return sizes_bytes, roots, bounds, plan_groups(sizes_bytes, roots=roots, **bounds)


@given(plans())
def test_every_byte_is_sent_once_and_in_order(plan):
    """The pieces, one after the other, are exactly the bytes of all parameters in order; an empty one has none."""
    sizes_bytes, _, _, groups = plan
    sent = [(p.index, p.start + i) for group in groups for p in group.pieces for i in range(p.num_bytes)]
    assert sent == [(index, byte) for index, size in enumerate(sizes_bytes) for byte in range(size)]
    assert all(piece.num_bytes > 0 for group in groups for piece in group.pieces)


@given(plans())
def test_bounds_are_never_exceeded(plan):
    """No group is empty, has more bytes or pieces than allowed, or a piece that reaches past its end."""
    _, _, bounds, groups = plan
    for group in groups:
        assert 1 <= len(group.pieces) <= bounds["max_pieces"]
        assert group.pieces[-1].offset + group.pieces[-1].num_bytes == group.num_bytes <= bounds["max_bytes"]


@given(plans())
def test_pieces_are_aligned_and_packed(plan):
    """A group's first piece starts at 0, and each next one at the first aligned offset behind the one before it."""
    for group in plan[3]:
        end = 0
        for piece in group.pieces:
            assert piece.offset % PIECE_ALIGNMENT_BYTES == 0
            assert 0 <= piece.offset - end < PIECE_ALIGNMENT_BYTES
            end = piece.offset + piece.num_bytes


@given(plans())
def test_roots_are_never_mixed(plan):
    """A group holds pieces of one root only, and names it; without roots it is 0."""
    sizes_bytes, roots, _, groups = plan
    roots = [0] * len(sizes_bytes) if roots is None else roots
    for group in groups:
        assert {roots[piece.index] for piece in group.pieces} == {group.root}


@given(plans())
def test_parameters_larger_than_a_group_are_cut_into_full_pieces(plan):
    """A parameter is cut only at multiples of max_bytes; a full piece is alone in its group; its tail starts one."""
    sizes_bytes, _, bounds, groups = plan
    for group in groups:
        for piece in group.pieces:
            whole = sizes_bytes[piece.index]
            assert piece.start % bounds["max_bytes"] == 0
            assert piece.num_bytes == min(whole - piece.start, bounds["max_bytes"])
            if piece.num_bytes == bounds["max_bytes"]:
                assert len(group.pieces) == 1
            if piece.start > 0:
                assert piece is group.pieces[0]


@given(plans())
def test_groups_are_as_full_as_the_bounds_allow(plan):
    """A group ends only where the next piece has another root, or would take it past its bytes or pieces."""
    _, _, bounds, groups = plan
    for group, following in itertools.pairwise(groups):
        offset = -(-group.num_bytes // PIECE_ALIGNMENT_BYTES) * PIECE_ALIGNMENT_BYTES
        assert (
            following.root != group.root
            or len(group.pieces) == bounds["max_pieces"]
            or offset + following.pieces[0].num_bytes > bounds["max_bytes"]
        )


def test_known_plan():
    """A plan written out by hand: small ones share, an empty one has no piece, a large one is cut, a root is alone."""
    groups = plan_groups([10, 0, 20, 250, 30, 5], max_bytes=100, max_pieces=8, roots=[0, 0, 0, 0, 0, 1])
    assert groups == (
        Group(0, (Piece(0, 0, 10, 0), Piece(2, 0, 20, 64)), 84),
        Group(0, (Piece(3, 0, 100, 0),), 100),
        Group(0, (Piece(3, 100, 100, 0),), 100),
        Group(0, (Piece(3, 200, 50, 0), Piece(4, 0, 30, 64)), 94),
        Group(1, (Piece(5, 0, 5, 0),), 5),
    )


def test_nothing_to_send_is_no_group():
    """No parameters, or only empty ones, need no wire operation."""
    assert plan_groups([], max_bytes=1, max_pieces=1) == ()
    assert plan_groups([0, 0], max_bytes=1, max_pieces=1) == ()


@pytest.mark.parametrize(
    ("sizes_bytes", "bounds", "text"),
    [
        ([1], {"max_bytes": 0, "max_pieces": 1}, "max_bytes and max_pieces must be positive, got 0 and 1"),
        ([1], {"max_bytes": 1, "max_pieces": 0}, "max_bytes and max_pieces must be positive, got 1 and 0"),
        ([1, -2], {"max_bytes": 1, "max_pieces": 1}, r"sizes_bytes\[1\] must be at least 0, got -2"),
    ],
)
def test_impossible_arguments_are_refused(sizes_bytes, bounds, text):
    """A bound that is not positive, or a negative size, is a ValueError that says which."""
    with pytest.raises(ValueError, match=text):
        plan_groups(sizes_bytes, **bounds)


@given(st.lists(st.sampled_from([1, 100, DIRECT_BYTES - 1, DIRECT_BYTES, 3 * DIRECT_BYTES]), min_size=1, max_size=12))
def test_large_pieces_are_operations_of_their_own(sizes_bytes):
    """The operations are the group's pieces in order; a large one is alone, and two runs of small ones never meet."""
    for group in plan_groups(sizes_bytes, max_bytes=8 * DIRECT_BYTES, max_pieces=5):
        runs = list(operations(group))
        assert [piece for run in runs for piece in run] == list(group.pieces)
        is_large = [[piece.num_bytes >= DIRECT_BYTES for piece in run] for run in runs]
        assert all(run == [True] or not any(run) for run in is_large)
        assert all(left[-1] or right[0] for left, right in itertools.pairwise(is_large))
