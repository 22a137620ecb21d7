"""The digest's definition: golden values, additivity, and that nothing small goes unnoticed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wt_common.digest import BLOCK_WORDS, block_factor, digest_bytes, word_factors

GOLDEN = {
    b"": "0000000000000000",
    b"\x01": "d1ec9726674e7af7",
    bytes(range(16)): "f7dd98a403c305d8",
    b"\xff" * 9: "72464aea67c810f9",
    bytes(range(256)) * 1025: "5ba2c68c60799208",  # more than one block
}


def test_factors_are_odd_and_different():
    """An odd factor is invertible, so a changed word always shows; different ones, so that two swapped words do."""
    factors = word_factors()
    assert len(factors) == BLOCK_WORDS == len(set(factors))
    assert all(factor % 2 for factor in factors)
    assert len({block_factor(block) for block in range(1000)}) == 1000
    assert word_factors()[0] == 0xE220A8397B1DCDAF  # splitmix64's first output of seed 0, as published


@given(data=st.binary(max_size=64), offset=st.integers(0, 4 * BLOCK_WORDS + 8), cut=st.integers(0, 64))
def test_pieces_add_up(data, offset, cut):
    """The digests of two pieces, cut anywhere, even within a word, add up to the digest of both."""
    left, right = data[:cut], data[cut:]
    total = digest_bytes(left, offset) + digest_bytes(right, offset + len(left))
    assert total % 2**64 == digest_bytes(data, offset)


@given(data=st.binary(min_size=1, max_size=64), offset=st.integers(0, 99), bit=st.integers(0, 511))
def test_every_changed_bit_shows(data, offset, bit):
    """One flipped bit gives another digest."""
    position = bit // 8 % len(data)
    changed = bytearray(data)
    changed[position] ^= 1 << bit % 8
    assert digest_bytes(bytes(changed), offset) != digest_bytes(data, offset)


@pytest.mark.parametrize(("data", "digest"), GOLDEN.items(), ids=len)
def test_golden(data, digest):
    """The wire's digest never changes."""
    assert f"{digest_bytes(data):016x}" == digest
