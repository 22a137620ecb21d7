"""What the trainer sends: names, dtypes, shapes and layout, and the iterators that yield the tensors."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import getattr_static
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from wt_common import ConfigurationError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = [
    "ModuleSource",
    "ParamMeta",
    "Placement",
    "RenamedSource",
    "Replicate",
    "Shard",
    "WeightSource",
    "materialize_full_tensor",
]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank along this mesh axis holds the whole parameter."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The ranks along this mesh axis hold pieces of tensor dimension `dim`, split as `torch.chunk` does."""

    dim: int


Placement: TypeAlias = Replicate | Shard


@dataclass(frozen=True)
class ParamMeta:
    """One parameter as it is sent: identical on every trainer rank, so that every rank plans without an exchange.

    Attributes:
        name: checkpoint name, as the inference engine's loader takes it.
        dtype: dtype of the yielded tensors.
        shape: full (unsharded) shape.
        owners: trainer ranks that hold it, in mesh order; None is all.
        mesh_shape: row-major shape of the owners' mesh; default `(len(owners),)`.
        placements: one per mesh axis, describing what `iter_local()` yields; None (also given as all `Replicate`) is
            replicated. When two axes shard one dim, the outer axis splits first.
        optional: an inference model need not have it (a buffer that its code computes, say). A parameter that is not optional,
            and of which no worker takes a byte, is a PlanError.

    Raises:
        ValueError: owners are empty, repeated or negative; mesh_shape does not multiply to their number; placements are not
            one per axis or name a dim that the shape lacks; an owner is no int; mesh_shape or placements without owners.
        TypeError: a placement is neither `Replicate` nor `Shard`.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = field(default=None, kw_only=True)
    mesh_shape: tuple[int, ...] | None = field(default=None, kw_only=True)
    placements: tuple[Placement, ...] | None = field(default=None, kw_only=True)
    optional: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        set_ = object.__setattr__  # the dataclass is frozen; normalised once, here
        set_(self, "shape", tuple(int(size) for size in self.shape))
        if self.owners is None:
            if self.mesh_shape is not None or self.placements is not None:
                raise ValueError(f"parameter {self.name!r}: mesh_shape and placements need owners, got owners=None")
            return
        set_(self, "owners", tuple(self.owners))
        _check_owners(self.name, self.owners)
        set_(self, "mesh_shape", (len(self.owners),) if self.mesh_shape is None else tuple(self.mesh_shape))
        assert self.mesh_shape is not None  # for the type checker; set on the line above
        if any(size < 1 for size in self.mesh_shape) or prod(self.mesh_shape) != len(self.owners):
            raise ValueError(
                f"parameter {self.name!r}: mesh_shape {self.mesh_shape} must multiply to the {len(self.owners)} owners"
            )
        if self.placements is not None:
            set_(self, "placements", _checked_placements(self.name, self.placements, self.mesh_shape, len(self.shape)))

    @property
    def num_bytes(self) -> int:
        """Bytes of the full tensor."""
        return prod(self.shape) * self.dtype.itemsize


def _check_owners(name: str, owners: tuple[int, ...]) -> None:
    if any(type(owner) is not int for owner in owners):
        raise ValueError(f"parameter {name!r}: owners must be ints, got {owners!r}")
    if not owners or len(set(owners)) != len(owners) or min(owners) < 0:
        raise ValueError(f"parameter {name!r}: owners must be distinct trainer ranks, at least one, got {owners!r}")


def _checked_placements(
    name: str, placements: Sequence[Placement], mesh_shape: tuple[int, ...], ndim: int
) -> tuple[Placement, ...] | None:
    if len(placements) != len(mesh_shape):
        raise ValueError(
            f"parameter {name!r}: expected one placement for each of the {len(mesh_shape)} mesh axes, got {len(placements)}"
        )
    for placement in placements:
        if not isinstance(placement, (Replicate, Shard)):
            raise TypeError(f"parameter {name!r}: a placement is Replicate() or Shard(dim), got {placement!r}")
        if isinstance(placement, Shard) and not 0 <= placement.dim < ndim:
            raise ValueError(f"parameter {name!r} shards dim {placement.dim} of a {ndim}-D tensor")
    if all(isinstance(placement, Replicate) for placement in placements):
        return None
    return tuple(placements)


class WeightSource(ABC):
    """The trainer's weights: `metadata` says what will come, an iterator yields it, freshly on each call.

    1. Every trainer rank builds one with identical `metadata`.
    2. Each round, every rank runs the iterator that the backend needs, once: `iter_full()` yields whole tensors (broadcast,
       shared memory, rdt), `iter_local()` this rank's shards (mesh to mesh). Both yield exactly `owned_names(rank)`, in
       metadata order, with the declared dtypes and shapes, on the caller's current stream.
    3. A yielded tensor stays as it is until the next one is asked for: its bytes are copied by then. A source that also keeps it
       as it is until `send_weights()` returns says so with `yields_stable`. Then there is no copy: large tensors are sent from
       where they lie. What is written to such a tensor meanwhile is an error.
    4. An iterator is closed when its round has failed: one that changes weights for the time of a `yield` restores them in a
       `finally`.
    5. An iterator may run collectives among a parameter's owners, so all ranks iterate in the same order.

    Names that share a layer index (the outermost all-digit segment of the name) are contiguous in `metadata`.

    Attributes:
        yields_stable: whether the tensor yielded last is stable: nobody writes to its memory before `send_weights()` returns. It
            is looked up once for each tensor, so it may be a property. It is a promise that cannot be checked in full: torch
            counts the writes to a tensor, but not those through `.data`. A subclass that overrides an iterator does not inherit
            it.

    Raises:
        TypeError: when a subclass is created whose `metadata` is not a `functools.cached_property` (it is read on every
            round, and may cost a collective).
    """

    yields_stable: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Whoever writes an iterator must say what becomes of its tensors: it may wrap the base's, and write between two of them.
        if not cls.__dict__.keys().isdisjoint({"iter_full", "iter_local"}) and "yields_stable" not in cls.__dict__:
            cls.yields_stable = False
        declared = getattr_static(cls, "metadata")
        if declared is not getattr_static(WeightSource, "metadata") and not isinstance(declared, cached_property):
            raise TypeError(
                f"{cls.__name__}.metadata must be a functools.cached_property, got {type(declared).__name__}: decorate it "
                "with @functools.cached_property"
            )

    @property
    @abstractmethod
    def metadata(self) -> Sequence[ParamMeta]:
        """Every parameter of the model, in the order of sending, the same on every trainer rank."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """Further names of tensors that are sent under another name (tied weights): each with that name.

        No byte is sent for them. A worker whose model has a tensor of its own for an alias fills it from the same bytes.
        """
        return {}

    def owned_names(self, rank: int) -> list[str]:
        """The names that trainer rank `rank` yields, in metadata order."""
        return [meta.name for meta in self.metadata if meta.owners is None or rank in meta.owners]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor) for each name this rank owns."""
        raise NotImplementedError(f"{type(self).__name__} does not implement iter_full()")

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, this rank's shard) for each name this rank owns."""
        raise NotImplementedError(f"{type(self).__name__} does not implement iter_local()")

    def implements_iter_full(self) -> bool:
        """Whether this source overrides `iter_full`."""
        return type(self).iter_full is not WeightSource.iter_full

    def implements_iter_local(self) -> bool:
        """Whether this source overrides `iter_local`."""
        return type(self).iter_local is not WeightSource.iter_local

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.iter_full()


PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types whose storage is where their elements are. Of a subclass it may be empty, or that of a tensor which it stands for."""


def _is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a DTensor, without importing DTensor's module (0.5 s) where nobody has used it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def materialize_full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as one whole local tensor: a DTensor is gathered (a collective of its mesh), others are returned as they are."""
    full_tensor = getattr(tensor, "full_tensor", None)
    return full_tensor() if callable(full_tensor) else tensor


class ModuleSource(WeightSource):
    """The parameters and persistent buffers of a module, plain or sharded by FSDP2 or tensor parallelism (DTensor).

    A plain tensor is owned by every rank; a DTensor by the ranks of its mesh, with its placements; one on a slice of a mesh (as
    `mesh["tp"]`) by the ranks of the whole mesh, replicated over its other axes, since every slice has one like it. A `Partial`
    or strided placement is declared replicated and gathered in both modes. Tied tensors come once, under their first
    name; their further names are `aliases`.

    Args:
        module: the names of its `state_dict()` must be those that the inference engine's loader takes.
        buffers: whether persistent buffers are sent, such as a router's `e_score_correction_bias`. They are optional: an engine
            whose model has none of that name ignores them, and the report says so.
    """

    yields_stable = True
    """Its parameters and buffers do not change while `send_weights()` runs, and what it gathers nobody else has."""

    def __init__(self, module: torch.nn.Module, *, buffers: bool = True) -> None:
        self._module = module
        self._buffers = buffers

    @cached_property
    def metadata(self) -> Sequence[ParamMeta]:
        """Names, dtypes and global shapes; no gather."""
        return [self._describe(name, tensor) for name, tensor in self._tensors()]

    @property
    def aliases(self) -> Mapping[str, str]:
        """The further names of tied parameters and buffers, each with the first."""
        first: dict[int, str] = {}
        everything = self._tensors(remove_duplicate=False)
        return {name: first[id(tensor)] for name, tensor in everything if first.setdefault(id(tensor), name) != name}

    def owned_names(self, rank: int) -> list[str]:
        """The names that trainer rank `rank` yields.

        Raises:
            ConfigurationError: there are DTensors, whose owners are ranks of the default process group, and this process
                has another rank there than `rank`.
        """
        if any(meta.owners is not None for meta in self.metadata) and torch.distributed.get_rank() != rank:
            raise ConfigurationError(
                f"ModuleSource: a DTensor's owners are ranks of the default process group; expected rank {rank} as in the "
                f"init info, the default group has {torch.distributed.get_rank()}. Number trainer ranks as that group does",
                side="trainer",
            )
        return super().owned_names(rank)

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors; a DTensor costs one all-gather of its mesh."""
        for name, tensor in self._owned_tensors():
            yield name, materialize_full_tensor(tensor.detach())

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's shards (whole tensors where the metadata declares a parameter replicated)."""
        placements = {meta.name: meta.placements for meta in self.metadata}
        for name, tensor in self._owned_tensors():
            if placements[name] is not None:
                yield name, tensor.detach().to_local()  # type: ignore[attr-defined]  # placements: a DTensor
            else:
                yield name, materialize_full_tensor(tensor.detach())

    def _owned_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._tensors():
            # A rank outside a DTensor's mesh holds no shard of it and must not join its gather.
            if not _is_dtensor(tensor) or tensor.device_mesh.get_coordinate() is not None:  # type: ignore[attr-defined]
                yield name, tensor

    def _tensors(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """What is sent, module by module: each one's parameters, then its buffers, so that a layer is complete at once."""
        seen: set[int] = set()
        for prefix, module in self._module.named_modules(remove_duplicate=remove_duplicate):
            found = [*module._parameters.items()]  # noqa: SLF001  # named_parameters() reads it too, and lists no buffers
            if self._buffers:
                temporary = module._non_persistent_buffers_set  # noqa: SLF001  # torch has no other way
                found += [item for item in module._buffers.items() if item[0] not in temporary]  # noqa: SLF001
            for leaf, tensor in found:
                if tensor is None or (remove_duplicate and id(tensor) in seen):
                    continue
                seen.add(id(tensor))
                yield f"{prefix}.{leaf}" if prefix else leaf, tensor

    def _describe(self, name: str, described: torch.Tensor) -> ParamMeta:
        optional = not isinstance(described, torch.nn.Parameter)
        if not _is_dtensor(described):
            return ParamMeta(name, described.dtype, tuple(described.shape), optional=optional)
        tensor: DTensor = described  # type: ignore[assignment]  # checked two lines above
        mesh = _whole_mesh(tensor.device_mesh)
        placements = _placements_of(tensor)
        outer = mesh.ndim - tensor.device_mesh.ndim
        return ParamMeta(
            name,
            tensor.dtype,
            tuple(tensor.shape),
            owners=tuple(int(rank) for rank in mesh.flatten().tolist()),
            mesh_shape=tuple(mesh.shape),
            placements=None if placements is None else (Replicate(),) * outer + placements,
            optional=optional,
        )


class RenamedSource(WeightSource):
    """Another source's parameters under other names, or cut into several: where a module's names are not the checkpoint's.

    Such are prefixes of wrappers (`_orig_mod.` of torch.compile, `module.` of DDP), and what transformers 5 keeps fused and a
    checkpoint has apart (`experts.gate_up_proj`).

    Args:
        source: where the parameters come from.
        fn: `fn(name, tensor)` is the parameter's new name, or the (name, tensor) pairs into which it is taken apart; no pair
            (`[]`) leaves it out. It is called with the tensor to send, and for the metadata with one on the meta device: views
            and slices work on both. What is taken apart has no shards, so only `iter_full` can yield it. It must not write to
            the tensor.

    `yields_stable` of the other source holds for its tensors and for views of them, if `fn` has returned a name, a list or a
    tuple: a generator may still write. A tensor that `fn` has computed is new, but `fn` may keep it and write to it again in its
    next call; so it is not stable, and is copied.
    """

    def __init__(
        self, source: WeightSource, fn: Callable[[str, torch.Tensor], str | Iterable[tuple[str, torch.Tensor]]]
    ) -> None:
        self._source = source
        self._fn = fn
        self._is_stable = False

    @property
    def yields_stable(self) -> bool:  # type: ignore[override]  # only read, by those who run the iterators
        """Whether the tensor yielded last is the other source's memory, which is stable there."""
        return self._is_stable

    @cached_property
    def metadata(self) -> Sequence[ParamMeta]:
        """The new names, with the dtypes and shapes of what they stand for."""
        result: list[ParamMeta] = []
        for meta in self._source.metadata:
            whole = torch.empty(meta.shape, dtype=meta.dtype, device="meta")
            for name, tensor in self._parts(meta.name, whole):
                if tensor is whole:
                    result.append(replace(meta, name=name))
                else:
                    owned = {"owners": meta.owners, "mesh_shape": meta.mesh_shape, "optional": meta.optional}
                    result.append(ParamMeta(name, tensor.dtype, tuple(tensor.shape), **owned))  # type: ignore[arg-type]
        return result

    @property
    def aliases(self) -> Mapping[str, str]:
        """Those of the other source, renamed."""
        metas = {meta.name: meta for meta in self._source.metadata}
        result: dict[str, str] = {}
        for name, by in self._source.aliases.items():
            whole = torch.empty(metas[by].shape, dtype=metas[by].dtype, device="meta")
            aliases, sent = list(self._parts(name, whole)), list(self._parts(by, whole))
            looks = [[_look(part, whole) for _, part in parts] for parts in (aliases, sent)]
            if aliases and looks[0] != looks[1]:
                raise ConfigurationError(
                    f"RenamedSource: {name!r} is tied to {by!r}, whose tensor is sent for both; expected fn to take both apart "
                    f"alike, in one order, got {[part for part, _ in aliases]} and {[part for part, _ in sent]}; have it "
                    f"leave out {name!r}, or make the same of both",
                    side="trainer",
                    param=name,
                )
            # A tied name that fn leaves out is not the checkpoint's.
            result |= {alias: of for (alias, _), (of, _) in zip(aliases, sent, strict=False) if alias != of}
        return result

    def owned_names(self, rank: int) -> list[str]:
        """The names that trainer rank `rank` yields. Raises what the other source raises."""
        self._source.owned_names(rank)
        return super().owned_names(rank)

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what the other source yields, renamed."""
        for name, tensor in self._source.iter_full():
            is_stable = self._source.yields_stable
            parts = self._parts(name, tensor)
            is_stable &= isinstance(parts, (list, tuple))
            for new_name, part in parts:
                self._is_stable = is_stable and _shares_memory(part, tensor)
                yield new_name, part

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the other source's shards, renamed.

        Raises:
            ConfigurationError: a parameter is taken apart, which its shards cannot be.
        """
        for name, tensor in self._source.iter_local():
            self._is_stable = self._source.yields_stable
            parts = self._parts(name, tensor)
            self._is_stable &= isinstance(parts, (list, tuple))
            for new_name, part in parts:
                if part is not tensor:
                    raise ConfigurationError(
                        f"RenamedSource: {name!r} is taken apart ({new_name!r}, ...), so it cannot be sent as shards; use a "
                        "backend that sends whole tensors",
                        side="trainer",
                    )
                yield new_name, part

    def implements_iter_full(self) -> bool:
        """Whether the other source does."""
        return self._source.implements_iter_full()

    def implements_iter_local(self) -> bool:
        """Whether the other source does."""
        return self._source.implements_iter_local()

    def _parts(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        """What `fn` makes of a parameter: a list or a tuple if it is done, else a generator of what `fn` goes on to yield."""
        parts: Any = self._fn(name, tensor)  # a user's own, which may return anything
        if isinstance(parts, str):
            return [(parts, tensor)]
        checked = self._checked(name, parts)
        return list(checked) if isinstance(parts, (list, tuple)) else checked

    @staticmethod
    def _checked(name: str, parts: Any) -> Iterator[tuple[str, torch.Tensor]]:
        are_several = isinstance(parts, Iterable) and not isinstance(parts, torch.Tensor)
        for part in parts if are_several else [parts]:
            is_pair = isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], str)
            if not (is_pair and isinstance(part[1], torch.Tensor)):
                raise ConfigurationError(
                    f"RenamedSource: for parameter {name!r} expected fn to return its new name, or (name, tensor) pairs ([] "
                    f"leaves it out), got {parts if parts is None else type(parts).__name__}",
                    side="trainer",
                    param=name,
                )
            yield part


def _shares_memory(one: object, other: torch.Tensor) -> bool:
    """Whether both are the same tensor or views of the same memory; `one` is whatever a user's function has made of `other`."""
    if one is other or type(one) not in PLAIN or type(other) not in PLAIN:
        return one is other
    assert isinstance(one, torch.Tensor)  # for the type checker
    return one.layout == torch.strided and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _look(part: torch.Tensor, whole: torch.Tensor) -> tuple[object, ...]:
    """Equal for parts of `whole`, on the meta device, that have the same elements; of two computed ones that is not known."""
    view = None
    if part.untyped_storage()._cdata == whole.untyped_storage()._cdata:  # noqa: SLF001  # data_ptr() is 0 on the meta device
        view = (part.storage_offset(), part.stride())
    return part.dtype, part.shape, view


def _whole_mesh(mesh: DeviceMesh) -> torch.Tensor:
    """Ranks of `mesh`, and where it is a slice of another mesh, of all slices like it, along axes put in front.

    On another rank the same parameter lies on another slice; the metadata must not depend on who asks.
    """
    ranks = mesh.mesh
    # Private, and the only way from a slice to its mesh. Without it metadata differ between ranks, which the first round refuses.
    get_root = getattr(mesh, "_get_root_mesh", None)
    whole = ranks if get_root is None else get_root().mesh
    if whole.numel() == ranks.numel():
        return ranks
    # The slice's axes are those of the whole mesh along which its ranks differ: one of ours may be several of them, flattened.
    places = [(whole == rank).nonzero()[0] for rank in ranks.flatten()]
    inner = [axis for axis in range(whole.ndim) if len({int(place[axis]) for place in places}) > 1]
    outer = [axis for axis in range(whole.ndim) if axis not in inner]
    return whole.permute(*outer, *inner).reshape(*(whole.shape[axis] for axis in outer), *ranks.shape)


def _placements_of(tensor: DTensor) -> tuple[Placement, ...] | None:
    """DTensor's placements in ours, or None where they cannot be sent as pieces (Partial, strided shards)."""
    result: list[Placement] = []
    for placement in tensor.placements:
        kind = type(placement).__name__  # by name: a strided shard subclasses Shard, and its class is private
        if kind == "Replicate":
            result.append(Replicate())
        elif kind == "Shard":
            result.append(Shard(placement.dim % tensor.ndim))  # type: ignore[attr-defined]
        else:
            return None
    return tuple(result)
