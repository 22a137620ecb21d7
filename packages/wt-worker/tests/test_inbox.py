"""Where a round's groups are received."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wt_common.packing import plan_groups
from wt_worker.placement.inbox import Arrival, Inbox, ring

MIB = 1 << 20


@given(st.lists(st.integers(0, 12), max_size=40), st.integers(12, 40))
def test_nothing_in_a_ring_is_overwritten_while_it_is_there(sizes, capacity):
    """Whatever is put into the ring overlaps only what must be gone by then, and all is within its bounds."""
    offsets, afters, used = ring(sizes, capacity)
    assert len(offsets) == len(afters) == len(sizes)
    assert used <= capacity
    assert afters == sorted(afters)
    for number, (size, offset, after) in enumerate(zip(sizes, offsets, afters, strict=True)):
        assert after < number
        assert offset >= 0
        assert offset + size <= used
        for earlier in range(after + 1, number):
            apart = offset + size <= offsets[earlier] or offsets[earlier] + sizes[earlier] <= offset
            assert apart or not size or not sizes[earlier]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=40), st.integers(12, 40))
def test_ring_is_left_empty_only_where_it_must_be(sizes, capacity):
    """A thing waits for earlier ones only where all of them do not fit."""
    _, afters, used = ring(sizes, capacity)
    if sum(sizes) <= capacity:
        assert afters == [-1] * len(sizes)
        assert used == sum(sizes)


def groups_of(*sizes, max_bytes=8 * MIB):
    return plan_groups(sizes, max_bytes=max_bytes, max_pieces=4096)


def inbox(groups, find=lambda piece: None, *, num_buffers=2, max_bytes=8 * MIB):
    return Inbox(groups, find, torch.device("cpu"), num_buffers=num_buffers, max_group_bytes=max_bytes)


def test_each_piece_is_where_its_operation_puts_it():
    """Writing the operations' buffers one after the other leaves every piece's bytes at its place, whoever's memory that is."""
    groups = groups_of(100, 3, 2 * MIB, 7, MIB, 5 * MIB, 64)
    home = torch.zeros(2 * MIB, dtype=torch.uint8)
    found = inbox(groups, lambda piece: home if piece.index == 2 else None)
    for group, arrival in zip(groups, found.arrivals, strict=True):
        for piece, data, is_direct in zip(group.pieces, arrival.data, arrival.direct, strict=True):
            assert data.numel() == piece.num_bytes
            assert is_direct is (piece.index == 2)
            assert (data.data_ptr() == home.data_ptr()) is is_direct
        sent = torch.randint(0, 255, (group.num_bytes,), dtype=torch.uint8)
        at = Arrival.staged(group, sent)
        for buffer, source in zip(arrival.buffers, at.buffers, strict=True):
            buffer.copy_(source)
        assert all(torch.equal(here, there) for here, there in zip(arrival.data, at.data, strict=True))


def test_pieces_can_be_viewed_as_any_dtype():
    """Every place in the buffer begins at a multiple of 64 bytes from its start."""
    found = inbox(groups_of(1, 70, 3 * MIB + 5, 9, 8 * MIB - 1))
    start = min(data.data_ptr() for arrival in found.arrivals for data in arrival.data)
    assert all((data.data_ptr() - start) % 64 == 0 for arrival in found.arrivals for data in arrival.data)


def test_limits_let_in_what_has_a_place():
    """Groups that are received in place wait for nothing; others for those whose place they take."""
    groups = groups_of(*[4 * MIB] * 6, max_bytes=4 * MIB)
    assert inbox(groups, max_bytes=4 * MIB).limits == [2, 3, 4, 5, 6, 6, 6]
    homes = [torch.zeros(4 * MIB, dtype=torch.uint8) for _ in groups]
    direct = inbox(groups, lambda piece: homes[piece.index], max_bytes=4 * MIB)
    assert direct.limits == [6] * 7
    assert direct.num_bytes == 0
    some = inbox(groups, lambda piece: homes[piece.index] if piece.index % 2 else None, max_bytes=4 * MIB)
    assert some.limits == [4, 6, 6, 6, 6, 6, 6]


@pytest.mark.parametrize("num_buffers", [1, 2, 3])
def test_buffer_is_not_larger_than_allowed_nor_than_needed(num_buffers):
    """So many groups of the largest size, and less where the round has less to put there."""
    groups = groups_of(*[8 * MIB - 7] * 9)
    assert inbox(groups, num_buffers=num_buffers).num_bytes <= num_buffers * 8 * MIB
    assert inbox(groups_of(10, 10), num_buffers=num_buffers).num_bytes == 128
