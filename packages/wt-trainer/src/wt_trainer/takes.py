"""What the workers say that they take, held against what the trainer announces. It is done before a byte moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from glob import escape

from wt_common import PlanError, Side
from wt_trainer.metadata import RoundMetadata
from wt_trainer.verify import PlacedRank

__all__ = ["Takes", "check_takes", "check_tied"]

_MAX_NAMES = 5  # of those in an error: people read it


@dataclass(frozen=True, slots=True, kw_only=True)
class Takes:
    """What `check_takes` has found; all are places in the metadata, in order.

    Attributes:
        ignored: of which the ranks of some model take nothing, which is allowed.
        unknown: of which it is not known what the ranks of some model take; their loaders decide.
    """

    ignored: tuple[int, ...]
    unknown: tuple[int, ...]


def check_takes(ranks: Sequence[PlacedRank], metadata: RoundMetadata, *, check_cover: bool) -> Takes:
    """Return what is known of what the models take.

    The unit is a model: an engine's ranks together, or those of several engines that share one.

    Args:
        ranks: all worker ranks.
        metadata: what is announced.
        check_cover: whether a server's first, random values may not remain.

    Raises:
        PlanError: a model takes nothing of a parameter that is not optional, it takes a part only, or it would go on with random
            values; the text names the first few, and says how many there are.
    """
    ignored: set[int] = set()
    unknown: set[int] = set()
    models: dict[str, list[PlacedRank]] = {}
    for rank in ranks:
        models.setdefault(rank.model, []).append(rank)
    for model in models.values():
        untaken, short = _examine(model, metadata, ignored, unknown)
        _refuse_untaken(model, metadata, untaken)
        _refuse_short(model, metadata, short)
        if check_cover:
            _refuse_unset(model)
    return Takes(ignored=tuple(sorted(ignored)), unknown=tuple(sorted(unknown)))


def check_tied(
    ranks: Sequence[PlacedRank], metadata: RoundMetadata, casts: Mapping[str, str], sent: Sequence[int]
) -> None:
    """Check that names which a server serves from one memory were sent with the same values.

    Args:
        ranks: all worker ranks.
        metadata: what was sent.
        casts: the dtypes on the wire of parameters that were not sent in their declared ones.
        sent: the digest of each parameter. It tells only where both have the same dtype on the wire.

    Raises:
        PlanError: two differ; the text names them.
    """

    def wire(place: int) -> str:
        return casts.get(metadata.names[place], metadata.dtype_names[place])

    for rank in ranks:
        for place, of in rank.placed.tied:
            if sent[place] != sent[of] and wire(place) == wire(of):
                name = metadata.names[place]
                raise _error(
                    [rank],
                    f"ties {name!r} to {metadata.names[of]!r}, and the trainer sends other values for it: send equal ones, or "
                    "start the server from a checkpoint that has both, and different",
                    name,
                )


def _examine(
    model: Sequence[PlacedRank], metadata: RoundMetadata, ignored: set[int], unknown: set[int]
) -> tuple[list[int], dict[int, int]]:
    """The places of which nothing is taken though something should be, and those of which a part is taken: how many elements."""
    untaken: list[int] = []
    sizes: dict[int, dict[int, int]] = {}  # of parts, by place and key
    optional = {*metadata.optional, *(pair[0] for rank in model for pair in rank.placed.tied)}
    for rank in model:
        for place, count, key in rank.placed.parts:
            sizes.setdefault(place, {})[key] = count
    short: dict[int, int] = {}
    for place, taken in enumerate(zip(*(rank.placed.takes for rank in model), strict=True)):
        if "a" in taken or not metadata.num_elements[place]:
            continue
        if "u" in taken:
            unknown.add(place)
        elif "p" in taken:
            found = sum(sizes[place].values())
            if found < metadata.num_elements[place]:
                short[place] = found
            elif found > metadata.num_elements[place]:  # different parts overlap, and may leave something out
                unknown.add(place)
        elif place in optional:
            ignored.add(place)
        else:
            untaken.append(place)
    return untaken, short


def _refuse_untaken(model: Sequence[PlacedRank], metadata: RoundMetadata, untaken: list[int]) -> None:
    if not untaken:
        return
    names = [metadata.names[place] for place in untaken]
    raise _error(
        model,
        f"takes nothing of {_counted(names)}. It would not compute what the trainer computes. Compare the names with the "
        f"checkpoint that the server was started from; leave out of the source what the server has no use for, or allow it with "
        f"ignore=({escape(names[0])!r},) in the init info",
        names[0],
    )


def _refuse_short(model: Sequence[PlacedRank], metadata: RoundMetadata, short: dict[int, int]) -> None:
    if not short:
        return
    names = [metadata.names[place] for place in short]
    place, found = next(iter(short.items()))
    raise _error(
        model,
        f"takes {found} of the {metadata.num_elements[place]} elements of {names[0]!r}, which has shape "
        f"{list(metadata.shapes[place])}; {_counted(names)} would be cut. Compare shapes with the checkpoint that the server was "
        "started from",
        names[0],
    )


def _refuse_unset(model: Sequence[PlacedRank]) -> None:
    names = list(dict.fromkeys(name for rank in model for name in rank.placed.unset))
    if names:
        raise _error(
            model,
            f"was started with random weights (load_format dummy), and the trainer does not send {_counted(names)}. Send all of "
            "the model, persistent buffers too, or start the server from a checkpoint",
            names[0],
        )


def _counted(names: Sequence[str]) -> str:
    listed = ", ".join(map(repr, names[:_MAX_NAMES]))
    return f"{len(names)} parameter(s): {listed}{', ...' if len(names) > _MAX_NAMES else ''}"


def _error(model: Sequence[PlacedRank], text: str, param: str) -> PlanError:
    engines = ", ".join(dict.fromkeys(rank.engine for rank in model))
    return PlanError(f"engine {engines} {text}", side=Side.WORKER, phase="update", engine=model[0].engine, param=param)
