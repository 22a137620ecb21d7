"""A source's parameters on their way out, each checked against the metadata before a byte of it is used."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from wt_common import PlanError, Side
from wt_common.packing import Piece
from wt_trainer.digest import tensor_digest, unsigned
from wt_trainer.metadata import RoundMetadata
from wt_trainer.round import Round
from wt_trainer.source import PLAIN, WeightSource

__all__ = ["CheckedStream", "LentMemory", "Loan"]

logger = logging.getLogger(__name__)

_MASK = (1 << 64) - 1
_END = object()  # of a source's iterator
_NOTHING = torch.empty(0, dtype=torch.uint8)
CPU = torch.device("cpu")


class Loan:
    """A tensor of the source's that is sent from where it lies, as its source allows (`yields_stable`)."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self._name = name
        self._tensor = tensor
        # torch counts the writes to a tensor and its views; not those through `.data`, nor to one made in inference mode.
        self._version = None if tensor.is_inference() else tensor._version  # noqa: SLF001  # documented, if private

    def check(self) -> None:
        """Raise if it was written to since it was yielded, as far as torch counts that. `LentMemory` finds the rest."""
        if self._version is not None and self._tensor._version != self._version:  # noqa: SLF001
            raise _plan_error(
                self._name,
                f"parameter {self._name!r} was written to while it was being sent, although its source says that its tensors are "
                "stable (yields_stable): do not train before send_weights() has returned, or let the source say False",
            )


class LentMemory:
    """The source's memory that a whole parameter was sent from, to be digested again when its digests differ.

    It keeps nothing alive: a gathered tensor is freed as soon as it is sent.
    """

    def __init__(self, data: torch.Tensor) -> None:
        self._storage = StorageWeakRef(data.untyped_storage())  # type: ignore[no-untyped-call]
        self._start = data.storage_offset()
        self._num_bytes = data.numel()

    def digest(self) -> int | None:
        """The digest of what is there now; None if the memory was freed."""
        # The only way from torch's weak reference back to the storage; torch shares tensors between processes with it.
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)  # noqa: SLF001
        if storage is None or storage.nbytes() < self._start + self._num_bytes:
            return None
        data = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return tensor_digest(data.set_(storage, self._start, (self._num_bytes,), (1,)))


class CheckedStream:
    """The parameters that this rank's source yields, each checked against `metadata` and cast to its dtype in `wire`.

    With `digest`, whoever makes the bytes ready to be sent digests them there: it hands the digests to `add_digest` or
    `take_digests`, or on a GPU adds them to `totals`. So they are over the bytes that go out, and a worker finds out also about
    bytes that changed here on their way.

    Where the source's iterator raises or ends early, `round_.stopped` says so: it cannot be run to where other ranks are.

    Attributes:
        round: in which it is taken from.
        is_digested: whether digests are wanted.
        totals: on a GPU, by place in the metadata, digests as int64 that wrap around.
    """

    def __init__(
        self,
        source: WeightSource,
        metadata: RoundMetadata,
        wire: RoundMetadata,
        rank: int,
        round_: Round,
        *,
        digest: bool,
        device: torch.device = CPU,
    ) -> None:
        self.round = round_
        self._rank = rank
        self._source = source
        self.is_digested = digest
        self._metadata = metadata
        self._wire = wire
        self._expected = _owned_places(source.owned_names(rank), metadata, rank)
        self._items: Iterator[Any] = iter(source.iter_full())
        self._position = -1
        self._tensor = self._flat = _NOTHING
        self._is_stable = False
        self._device = device
        self._digests: dict[int, int] = {}  # on the CPU, by place in the metadata, of the pieces so far
        num_totals = len(metadata.names) if digest and device.type != "cpu" else 0
        self.totals = torch.zeros(num_totals, dtype=torch.int64, device=device)

    @property
    def current(self) -> str:
        """The name that the source yielded last, or is to yield first."""
        return self._metadata.names[self._expected[max(self._position, 0)]]

    def piece(self, piece: Piece) -> torch.Tensor:
        """The bytes of `piece`, as 1-D uint8 on the device; it is of the current parameter or a later one.

        Raises:
            PlanError: what the source yields differs from its metadata.
        """
        while self._position < 0 or self._expected[self._position] < piece.index:
            self._advance()
        return self._flat[piece.start : piece.start + piece.num_bytes]

    def whole(self, index: int) -> torch.Tensor:
        """Parameter `index`, a later one than the current, as the source yields it.

        Its digest is left to the caller: for one tensor of many it costs more than all else.

        Raises:
            PlanError: what the source yields differs from its metadata.
        """
        while self._expected[self._position + 1] < index:
            self._advance()
        self._take()
        self._flat = _NOTHING
        return self._tensor.detach() if self._tensor.requires_grad else self._tensor

    def take_digests(self, indexes: Sequence[int], digests: Sequence[int]) -> None:
        """The digests of whole parameters that this rank is the root of."""
        self.round.digests.update(zip(indexes, digests, strict=True))

    def add_digest(self, index: int, digest: int) -> None:
        """The digest of a piece of parameter `index`, which this rank is the root of; those of its pieces add up."""
        self.round.digests[index] = self._digests[index] = (self._digests.get(index, 0) + digest) & _MASK

    @property
    def is_lent(self) -> bool:
        """Whether what was given out last is the source's own memory: neither cast, nor moved, nor made contiguous."""
        if self._flat is _NOTHING or type(self._tensor) not in PLAIN:
            return True
        return self._flat.untyped_storage().data_ptr() == self._tensor.untyped_storage().data_ptr()

    @property
    def must_be_copied(self) -> bool:
        """Whether what was given out last may be other bytes as soon as the source is asked for its next tensor."""
        return not self._is_stable and self.is_lent

    def loan(self) -> Loan:
        """The current parameter, which is lent; to be checked when it has been read for the last time."""
        return Loan(self.current, self._tensor)

    def sent_in_place(self) -> None:
        """The current parameter, or a piece of it, is lent until its bytes have gone out."""
        index = self._expected[self._position]
        if self.is_digested and index not in self.round.lent and type(self._flat) in PLAIN:
            self.round.lent[index] = LentMemory(self._flat)

    def finish(self) -> None:
        """Check what is left: parameters that another rank sends, empty ones, and that nothing comes after the last."""
        while self._position < len(self._expected) - 1:
            self._take()
        roots, sizes = self._metadata.roots, self._wire.sizes_bytes
        if len(self.totals):
            found = unsigned(self.totals)
            self.round.digests.update((place, found[place]) for place in self._expected if roots[place] == self._rank)
        elif self.is_digested and 0 in sizes:
            empty = (place for place in self._expected if roots[place] == self._rank and not sizes[place])
            self.round.digests.update(dict.fromkeys(empty, 0))
        extra = next(self._items, _END)
        if extra is not _END:
            got, _ = _checked_item(extra, self.current)
            raise _plan_error(got, f"the source yields {got!r} after the last parameter that this rank owns")

    def run_to(self, index: int) -> None:
        """After a failure: take parameters up to `index`, for the sake of the other ranks' collectives.

        Without a limit of ours: a rank that gave up in the middle would leave those alone that have begun `index`.
        """
        try:
            while self._position < len(self._expected) - 1 and self._expected[self._position + 1] <= index:
                self._position += 1
                next(self._items, None)
        except Exception:
            logger.exception("the source failed at %r after the round had", self.current)

    def close(self) -> None:
        """End the source's iterator, so that its `finally` blocks run now and not when Python frees it."""
        close = getattr(self._items, "close", None)  # a generator's
        try:
            if close is not None:
                close()
        except Exception:
            logger.exception("the source failed at %r, where it was left", self.current)

    def _advance(self) -> None:
        """The source's next parameter is the current one, and its bytes are at hand."""
        self._take()
        index = self._expected[self._position]
        tensor = self._tensor.detach().resolve_neg().resolve_conj()
        # Cast where the tensor is, then move: half the bytes to move where float32 becomes bfloat16.
        cast = tensor.to(self._wire.dtypes[index]).to(self._device)
        self._flat = cast.contiguous().reshape(-1).view(torch.uint8)

    def _take(self) -> None:
        """The source's next parameter is the current one. A model may have 30,000 of them: 2 microseconds each."""
        index = self._expected[self._position + 1]
        self.round.begin_parameter(index)
        self._position += 1
        metadata = self._metadata
        try:
            item = next(self._items, _END)
        except BaseException:
            self.round.stopped = True
            raise
        if isinstance(item, tuple) and len(item) == 2 and item[0] == metadata.names[index]:
            tensor = item[1]
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.dtype == metadata.dtypes[index]
                and tensor.shape == metadata.shapes[index]
                and tensor.layout == torch.strided
                and not tensor.is_meta
                and not hasattr(tensor, "full_tensor")  # a DTensor, which has the shape of the whole one
            ):
                self._tensor = tensor
                self._is_stable = self._source.yields_stable
                return
        self._refuse(item, index)

    def _refuse(self, item: Any, index: int) -> NoReturn:
        """Say how `item`, which the source yields, differs from parameter `index` of the metadata."""
        metadata = self._metadata
        name = metadata.names[index]
        if item is _END:
            self.round.stopped = True
            raise _plan_error(name, f"the source ended before parameter {name!r}, which its metadata declares")
        got, tensor = _checked_item(item, name)
        if got != name:
            raise _plan_error(name, f"expected parameter {name!r} next, as in the metadata, the source yields {got!r}")
        if hasattr(tensor, "full_tensor"):
            raise _plan_error(
                name,
                f"parameter {name!r}: expected a whole tensor, the source yields a DTensor, of which this rank has a part; "
                "gather it: yield materialize_full_tensor(tensor)",
            )
        raise _plan_error(
            name,
            f"parameter {name!r}: the metadata declares {metadata.dtype_names[index]} {list(metadata.shapes[index])}, the "
            f"source yields {str(tensor.dtype).rpartition('.')[2]} {list(tensor.shape)}; metadata hold for a source's life, so "
            "make a new one when they change",
        )


def _owned_places(owned: list[str], metadata: RoundMetadata, rank: int) -> list[int]:
    """Where in the metadata each of `owned` is, which this rank says that it yields.

    Raises:
        PlanError: they are no part of the metadata in their order, or lack what this rank must send.
    """
    if tuple(owned) == metadata.names:
        return list(range(len(owned)))
    places = {name: index for index, name in enumerate(metadata.names)}
    result: list[int] = []
    for name in owned:
        place = places.get(name, -1)
        if place <= (result[-1] if result else -1):
            raise _plan_error(
                name, f"owned_names({rank}): expected names of the metadata, each once and in their order, got {name!r}"
            )
        result.append(place)
    missing = {name for name, root in zip(metadata.names, metadata.roots, strict=True) if root == rank} - set(owned)
    if missing:
        name = min(missing, key=places.__getitem__)
        raise _plan_error(name, f"owned_names({rank}) leaves out {name!r}, which rank {rank} must send by the metadata")
    return result


def _checked_item(item: Any, expected: str) -> tuple[str, torch.Tensor]:
    """What the source yielded, which must be a name and a dense tensor that holds data."""
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
        tensor = item[1]
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and not tensor.is_meta:
            return item[0], tensor
    raise _plan_error(
        expected,
        f"the source yields {type(item).__name__} {item!r:.80} where parameter {expected!r} is next; expected (name, tensor), a "
        "dense tensor that holds data",
    )


def _plan_error(name: str, message: str) -> PlanError:
    return PlanError(message, side=Side.TRAINER, phase="update", param=name)
