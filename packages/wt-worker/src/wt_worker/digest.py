"""The digest of `wt_common.digest` over tensors, on whatever device they are.

A block at a time: its words as int64 and its factors (1 MiB together) stay in a core's cache; whole-tensor arithmetic is ten
times slower. Sums stay on the device until the last one is known, so that a call waits for its device once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache

import torch

from wt_common import digest

__all__ = [
    "SmallDigests",
    "block_factors",
    "block_sums",
    "digest_total",
    "tensor_digest",
    "tensor_digests",
    "to_unsigned",
    "unsigned",
    "word_factors",
]

SMALL_BYTES = 1 << 14
"""Up to here a tensor costs more in calls than in arithmetic: those of one shape are computed together."""

HELD_BYTES = 1 << 24
"""So much of small tensors waits for more of their shape."""

BLOCK_BYTES = 4 * digest.BLOCK_WORDS
MAX_BLOCKS = 128
"""At once, where a cache does not limit it: 32 MiB of words, whose products are 64 MiB."""

COPIED_BLOCKS = 16
"""At least as many, where it must be copied to be contiguous: twice as fast as one at a time on the CPU."""


def tensor_digest(tensor: torch.Tensor, offset_bytes: int = 0) -> int:
    """The digest, below 2^64, of the bytes of `tensor` in row-major order, which begin at byte `offset_bytes` of the parameter.

    Digests of pieces add up modulo 2^64 to that of the whole, wherever it is cut. Any dtype, layout and offset will do; bytes at
    their words' places are read where they lie, others are copied, a bounded number at a time. It runs on the device's current
    stream, which is waited for.
    """
    return to_unsigned(digest_total(tensor, offset_bytes))


@torch.no_grad()
def tensor_digests(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The digest of each tensor, in order, as `tensor_digest` computes it; each device is waited for once.

    Small tensors of one shape are held, a few megabytes in all, and computed together: a microsecond or two for each.
    """
    totals: dict[torch.device, list[torch.Tensor]] = {}
    places: dict[torch.device, list[int]] = {}  # in the list that is returned
    groups: dict[tuple[torch.device, torch.dtype, torch.Size], tuple[list[int], list[torch.Tensor]]] = {}

    def found(device: torch.device, total: torch.Tensor, indexes: list[int]) -> None:
        totals.setdefault(device, []).append(total)
        places.setdefault(device, []).extend(indexes)

    def flush() -> None:
        for (device, _, _), (indexes, members) in groups.items():
            # Stacked, tensors may keep a layout that they share.
            words = torch.stack(members).contiguous().view(len(members), -1).view(torch.int32)
            found(device, _row_sums(words, _first_factors(device, words.shape[1])), indexes)
        groups.clear()

    count = held = 0
    for count, tensor in enumerate(tensors, 1):
        size = tensor.nbytes
        if 0 < size <= SMALL_BYTES and size % 4 == 0 and not tensor.is_complex():
            indexes, members = groups.setdefault((tensor.device, tensor.dtype, tensor.shape), ([], []))
            indexes.append(count - 1)
            members.append(tensor)
            held += size
            if held >= HELD_BYTES:
                flush()
                held = 0
        else:
            found(tensor.device, digest_total(tensor).unsqueeze(0), [count - 1])
    flush()
    digests = [0] * count
    for device, parts in totals.items():
        for place, total in zip(places[device], unsigned(torch.cat(parts)), strict=True):
            digests[place] = total
    return digests


@dataclass(slots=True)
class _Rows:
    """Tensors of one shape at equal distances in memory."""

    first: torch.Tensor
    last: torch.Tensor
    count: int = 1
    step_bytes: int = 0

    def take(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is the next of them."""
        step = tensor.data_ptr() - self.last.data_ptr()
        if (
            (self.count > 1 and step != self.step_bytes)
            or step < 0
            or step % tensor.itemsize
            or tensor.stride() != self.first.stride()
            or (self.count + 1) * tensor.nbytes > _at_once_bytes(tensor.device)
            or tensor.untyped_storage().data_ptr() != self.first.untyped_storage().data_ptr()
        ):
            return False
        self.last, self.count, self.step_bytes = tensor, self.count + 1, step
        return True

    def view(self) -> torch.Tensor:
        """All of them, as the rows of one tensor."""
        strides = (self.step_bytes // self.first.itemsize, *self.first.stride())
        return self.first.as_strided((self.count, *self.first.shape), strides, self.first.storage_offset())


class SmallDigests:
    """The digests of small tensors that stay where they are, computed again whenever their bytes are new.

    What can be known beforehand is worked out once. Those of one shape that lie at equal distances are read as the rows of one
    tensor: a tenth of a microsecond for each; others cost one or two, as in `tensor_digests`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._rows: dict[tuple[object, ...], tuple[torch.Tensor, list[_Rows], list[int]]] = {}
        self._chunks: list[tuple[list[torch.Tensor], torch.Tensor]] | None = None
        self._places = torch.empty(0, dtype=torch.int64)

    @staticmethod
    def takes(tensor: torch.Tensor) -> bool:
        """Whether `tensor` is small, and its bytes are whole words."""
        return 0 < tensor.nbytes <= SMALL_BYTES and tensor.nbytes % 4 == 0 and not tensor.is_complex()

    def add(self, place: int, tensor: torch.Tensor, factors: torch.Tensor | None = None) -> None:
        """`tensor` is digested, too; `factors` are those of its words, if it is not a parameter's beginning."""
        if factors is None:
            factors = _first_factors(self.device, tensor.nbytes // 4)
        key = (tensor.dtype, tensor.shape, factors.data_ptr())
        _, rows, places = self._rows.setdefault(key, (factors, [], []))
        if not rows or not rows[-1].take(tensor):
            rows.append(_Rows(tensor, tensor))
        places.append(place)

    @torch.no_grad()
    def add_to(self, totals: torch.Tensor) -> None:
        """In `totals`, of int64 on the same device, each digest is added at its place. Nothing is waited for."""
        if self._chunks is None:
            self._chunks = list(self._cut())
            places = [place for _, _, places in self._rows.values() for place in places]
            self._places = torch.tensor(places, dtype=torch.int64, device=self.device)
        if self._chunks:
            totals.index_add_(0, self._places, torch.cat([_small_sums(*chunk) for chunk in self._chunks]))

    def _cut(self) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
        """What is computed at once."""
        for factors, rows, _ in self._rows.values():
            views: list[torch.Tensor] = []
            held = 0
            for view in (each.view() for each in rows):
                if views and held + view.nbytes > _at_once_bytes(self.device):
                    yield views, factors
                    views, held = [], 0
                views.append(view)
                held += view.nbytes
            yield views, factors


def _small_sums(views: list[torch.Tensor], factors: torch.Tensor) -> torch.Tensor:
    """For each row of `views` its digest."""
    rows = torch.cat(views).contiguous()  # concatenated, tensors may keep a layout that they share
    return _row_sums(rows.view(len(rows), -1).view(torch.int32), factors)


def to_unsigned(total: torch.Tensor) -> int:
    """A total that is on its device as the number below 2^64 that it stands for; the device's current stream is waited for."""
    return int(total.item()) % (1 << 64)


def unsigned(totals: torch.Tensor) -> list[int]:
    """The same of a list of totals."""
    return list(totals.view(torch.uint64).tolist())


@torch.no_grad()
def digest_total(tensor: torch.Tensor, offset_bytes: int = 0) -> torch.Tensor:
    """What `tensor_digest` returns, as a 0-d int64 tensor on the tensor's device that wraps around; nothing is waited for."""
    words = _one_block(tensor) if offset_bytes == 0 else None
    if words is not None:  # a fifth of the time that the way for all tensors takes
        factors = word_factors(tensor.device)[: len(words)]
        return torch.dot(words.to(torch.int64), factors) * block_factors(tensor.device, 1)[0]
    sums: list[torch.Tensor] = []
    blocks: list[slice] = []  # of the sums
    for words, first in _word_runs(tensor, offset_bytes):
        block, place = divmod(first, digest.BLOCK_WORDS)
        sums.append(block_sums(words, place))
        blocks.append(slice(block, block + len(sums[-1])))
    if not sums:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    table = block_factors(tensor.device, max(each.stop for each in blocks))
    return (torch.cat(sums) * torch.cat([table[each] for each in blocks])).sum()


@cache
def word_factors(device: torch.device) -> torch.Tensor:
    """t(j) for every place j in a block, as int64."""
    return _signed(list(digest.word_factors()), device)


_block_factors: dict[torch.device, torch.Tensor] = {}


def block_factors(device: torch.device, num_blocks: int) -> torch.Tensor:
    """c(k) for at least the first `num_blocks` blocks, as int64."""
    table = _block_factors.get(device)
    if table is None or len(table) < num_blocks:
        size = max(256, 1 << (num_blocks - 1).bit_length())  # it doubles: growing costs no more than the last time
        table = _block_factors[device] = _signed([digest.block_factor(block) for block in range(size)], device)
    return table


@lru_cache(maxsize=1024)
def _first_factors(device: torch.device, num_words: int) -> torch.Tensor:
    """m(i) of the first words, which are in block 0."""
    return word_factors(device)[:num_words] * block_factors(device, 1)[0]


def _signed(factors: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([each - (each >> 63 << 64) for each in factors], dtype=torch.int64, device=device)


def _max_blocks(device: torch.device) -> int:
    return 1 if device.type == "cpu" else MAX_BLOCKS


def _at_once_bytes(device: torch.device) -> int:
    return BLOCK_BYTES * _max_blocks(device)


def block_sums(words: torch.Tensor, place: int) -> torch.Tensor:
    """For each block that `words` are of, from `place` in the first one on, the sum of its words times their factors."""
    factors = word_factors(words.device)
    head = min(-place % digest.BLOCK_WORDS, len(words))
    pieces = [(words[:head], factors[place : place + head])] if head else []
    if words.is_cpu:
        pieces += [
            (piece, factors[: len(piece)]) for piece in torch.split(words[head:], digest.BLOCK_WORDS) if len(piece)
        ]
        wide = torch.empty(min(digest.BLOCK_WORDS, len(words)), dtype=torch.int64, device=words.device)
        # A copy and a dot product take four fifths of the time of a product and its sum.
        return torch.stack([torch.dot(wide[: len(piece)].copy_(piece), row) for piece, row in pieces])
    full = (len(words) - head) // digest.BLOCK_WORDS * digest.BLOCK_WORDS
    pieces += [
        (piece, factors) for piece in torch.split(words[head : head + full], digest.BLOCK_WORDS * MAX_BLOCKS) if full
    ]
    if rest := len(words) - head - full:
        pieces.append((words[head + full :], factors[:rest]))
    return torch.cat([_row_sums(piece.view(-1, len(row)), row) for piece, row in pieces])


def _row_sums(words: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """For each row of `words` the sum of its words times `factors`; only the CPU multiplies matrices of int64."""
    if words.is_cpu:
        return torch.mv(words.to(torch.int64), factors)
    return torch.mul(words, factors).sum(1)


def _words_in_place(tensor: torch.Tensor) -> bool:
    """Whether int32 can be read where the elements lie, from the first one on."""
    return (
        tensor.is_contiguous()
        and tensor.data_ptr() % 4 == 0
        and tensor.storage_offset() * tensor.itemsize % 4 == 0
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _one_block(tensor: torch.Tensor) -> torch.Tensor | None:
    """All words of `tensor`, if they are in one block of memory of the CPU's; else None."""
    if (
        tensor.is_cpu
        and 0 < tensor.nbytes <= BLOCK_BYTES
        and tensor.ndim
        and tensor.shape[-1] * tensor.itemsize % 4 == 0
        and tensor.stride(-1) == 1
        and _words_in_place(tensor)
    ):
        return tensor.view(torch.int32).flatten()
    return None


def _word_runs(tensor: torch.Tensor, offset_bytes: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Consecutive words of int32, and the place of the first one in the parameter; those of the last run may be overwritten."""
    for data, offset in _byte_runs(tensor.detach(), offset_bytes):
        done = 0
        if offset % 4 == 0 and _words_in_place(data):
            done = len(data) // 4 * 4
            if done:
                yield data[:done].view(torch.int32), offset // 4
        chunk_bytes = BLOCK_BYTES * _max_blocks(tensor.device)
        while done < len(data):
            begin = offset + done
            piece = data[done : done + chunk_bytes - begin % chunk_bytes]
            end = begin % 4 + len(piece)
            padded = torch.zeros(end + -end % 4, dtype=torch.uint8, device=tensor.device)
            padded[begin % 4 : end] = piece
            yield padded.view(torch.int32), begin // 4
            done += len(piece)


def _byte_runs(tensor: torch.Tensor, offset_bytes: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Consecutive bytes, and the place of the first one; what is not contiguous is copied in pieces."""
    scratch_bytes = BLOCK_BYTES * max(COPIED_BLOCKS, _max_blocks(tensor.device))
    if not tensor.numel():
        return
    if tensor.is_contiguous() or tensor.nbytes <= scratch_bytes:
        whole = tensor.resolve_conj().resolve_neg().contiguous()
        # Not reshape: a dimension of one element may keep a stride that no view of bytes can have.
        yield whole.as_strided((whole.numel(),), (1,)).view(torch.uint8), offset_bytes
        return
    row_bytes = tensor[0].nbytes
    pieces = torch.split(tensor, scratch_bytes // row_bytes) if row_bytes <= scratch_bytes else tensor.unbind()
    for piece in pieces:
        yield from _byte_runs(piece, offset_bytes)
        offset_bytes += piece.nbytes
