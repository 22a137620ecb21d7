"""The digest of a parameter's bytes: what both sides compute, on any device, and on any slicing, to the same number.

D = sum of w_i * m(i) modulo 2^64, over the 32-bit little-endian words w_i (signed) of the full tensor's bytes, filled up with
zeros to a whole word. m(i) = c(i >> 16) * t(i & 0xffff), all odd, so that every single changed bit changes D. A piece counts
as if all other bytes were zero, so the digests of pieces add up to the whole's, and moved words do not cancel out.

What is here is the definition, and a plain implementation to test others against; the packages have fast ones.
"""

from __future__ import annotations

import struct
from functools import cache

__all__ = ["BLOCK_WORDS", "VERIFY", "block_factor", "digest_bytes", "word_factors"]

BLOCK_WORDS = 1 << 16
"""Words per block: its table of factors (512 KiB) stays in a core's cache."""

VERIFY = ("full", "received", "off")
"""What a session's workers digest: the bytes installed, where they are written in place, and those received elsewhere; those
received; nothing."""

_MASK = (1 << 64) - 1
_BLOCK_SEED = 1 << 32  # apart from the seeds of the words, which are below 2^16


@cache
def word_factors() -> tuple[int, ...]:
    """t(j) for every place j in a block, as unsigned 64-bit numbers."""
    return tuple(_splitmix64(place) | 1 for place in range(BLOCK_WORDS))


def block_factor(block: int) -> int:
    """c(k) for block k, as an unsigned 64-bit number."""
    return _splitmix64(_BLOCK_SEED + block) | 1


def digest_bytes(data: bytes, offset: int = 0) -> int:
    """The digest of `data`, which begins at byte `offset` of its parameter; unsigned, below 2^64."""
    start = offset % 4
    padded = bytes(start) + data + bytes(-(start + len(data)) % 4)
    total = 0
    for index, (word,) in enumerate(struct.iter_unpack("<i", padded), offset // 4):
        total += word * block_factor(index // BLOCK_WORDS) * word_factors()[index % BLOCK_WORDS]
    return total & _MASK


def _splitmix64(state: int) -> int:
    """One output of the generator of that name, which maps a counter to a number of well-mixed bits."""
    mixed = (state + 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
