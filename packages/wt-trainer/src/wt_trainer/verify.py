"""What the workers' digests must be: those of the bytes that were sent. Plain data in, errors out; no session, no tensor.

A worker has said (`Placed`) what each of its digests is over: a parameter's bytes as received or as installed, or parts of it as
installed. Digests of parts add up, so the parts of all ranks of an engine together are compared with the number that the trainer
has of the whole, without moving a byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from wt_common import AgreementError, IntegrityError, Side
from wt_common.session import Placed

__all__ = ["PlacedRank", "Placement", "sent_digests"]

_MASK = (1 << 64) - 1
_MAX_NAMES = 5  # of other parameters that differ: an error is read by people


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRank:
    """What a worker rank has said of the round's parameters.

    Attributes:
        name: what errors call it.
        engine, rank: which it is.
        placed: its words.
        shares_model: as in `Hello`.
    """

    name: str
    engine: str
    rank: int
    placed: Placed
    shares_model: str = ""

    @property
    def model(self) -> str:
        """The same for all ranks that hold one model together."""
        return self.shares_model or self.engine


class Placement:
    """Where every digest of a round's workers belongs. Made once, for as long as no worker says otherwise.

    For 30,000 parameters that costs 0.1 s for each worker; a round's check then 10 ms, or 0.3 ms where all have whole parameters.

    Args, which are attributes as well:
        ranks: all worker ranks.
        names: of the parameters.
        num_elements: how many each has.
        given: places in the metadata of the parameters of which a worker cannot digest what it installs.

    Attributes:
        received: the places of the parameters whose digests must be over the bytes received: those given, and those whose parts
            on all ranks of an engine are not the whole, so that their digests do not add up to the whole's.

    Raises:
        AgreementError: a worker's placement does not fit the metadata.
    """

    def __init__(
        self,
        ranks: Sequence[PlacedRank],
        *,
        names: Sequence[str],
        num_elements: Sequence[int],
        given: Sequence[int] = (),
    ) -> None:
        self.ranks = ranks
        self.names = names
        self.given = given
        engines: dict[str, list[PlacedRank]] = {}
        for rank in ranks:
            _check_placed(rank, names, num_elements)
            engines.setdefault(rank.model, []).append(rank)
        received = set(given).union(*(_not_whole(engine, num_elements) for engine in engines.values()))
        self.received = sorted(received)
        self._engines = [_Engine(engine, frozenset(received)) for _, engine in sorted(engines.items())]

    def check(self, sent: list[int], digests: Mapping[tuple[str, int], list[int]]) -> None:
        """Every worker has what was sent, as far as its digests reach.

        Args:
            sent: the digest of each parameter.
            digests: by engine and rank, what each worker has posted.

        Raises:
            AgreementError: a worker has another number of digests than its placement says.
            IntegrityError: a digest differs; the text names the first parameter, and others that differ as well.
        """
        found = [(engine, engine.wrong_places(sent, digests)) for engine in self._engines]
        wrong = set().union(*(places for _, places in found))
        if not wrong:
            return
        place = min(wrong)
        engine = next(engine for engine, places in found if place in places)
        rank, text = engine.difference(place, sent[place], digests)
        raise IntegrityError(
            f"parameter {self.names[place]!r}: {text}{self._others(sorted(wrong - {place}))}. Send again: a full round repairs "
            "it; if it repeats on the same host, check its memory or network",
            side=Side.WORKER,
            engine=engine.ranks[0].engine,
            rank=rank,
            param=self.names[place],
        )

    def _others(self, places: list[int]) -> str:
        if not places:
            return ""
        named = ", ".join(repr(self.names[place]) for place in places[:_MAX_NAMES])
        return f"; {len(places)} more differ: {named}{', ...' if len(places) > _MAX_NAMES else ''}"


class _Engine:
    """Where the digests of one engine's ranks belong. A slot is a digest's place in those of all ranks, one rank after the other.

    Parallel lists of numbers: objects for each parameter would cost more than the comparison.
    """

    def __init__(self, ranks: Sequence[PlacedRank], received: frozenset[int]) -> None:
        self.ranks = ranks
        self._received = received
        self._counts: list[int] = []
        self._whole_slots: list[int] = []
        self._whole_places: list[int] = []  # in the metadata
        self._part_slots: list[int] = []  # one for each part, whoever has it
        self._part_places: list[int] = []
        self._same: list[tuple[int, int, int]] = []  # place, and two slots of one part
        self._is_plain = not any({"p", "n"} & {*rank.placed.digested} for rank in ranks)
        first_slots: dict[tuple[int, int], int] = {}
        for rank in ranks:
            places, keys = _subjects(rank.placed, received)
            for slot, (place, key) in enumerate(zip(places, keys, strict=True), sum(self._counts)):
                if key is None:
                    self._whole_slots.append(slot)
                    self._whole_places.append(place)
                elif (first := first_slots.setdefault((place, key), slot)) != slot:
                    self._same.append((place, first, slot))
                else:
                    self._part_slots.append(slot)
                    self._part_places.append(place)
            self._counts.append(len(places))

    def wrong_places(self, sent: list[int], digests: Mapping[tuple[str, int], list[int]]) -> set[int]:
        """The places of the parameters that this engine does not have as they were sent."""
        own = [digests[rank.engine, rank.rank] for rank in self.ranks]
        if self._is_plain and all(each == sent for each in own):
            return set()
        for rank, each, count in zip(self.ranks, own, self._counts, strict=True):
            if len(each) != count:
                raise _agreement_error(
                    rank, f"finishing.digests: expected {count}, as it said before the round, got {len(each)}"
                )
        flat = list(chain.from_iterable(own))
        wholes = zip(self._whole_slots, self._whole_places, strict=True)
        result = {place for slot, place in wholes if flat[slot] != sent[place]}
        result.update(place for place, one, other in self._same if flat[one] != flat[other])
        totals = dict.fromkeys(self._part_places, 0)
        for slot, place in zip(self._part_slots, self._part_places, strict=True):
            totals[place] += flat[slot]
        result.update(place for place, total in totals.items() if total & _MASK != sent[place])
        return result

    def difference(self, place: int, sent: int, digests: Mapping[tuple[str, int], list[int]]) -> tuple[int | None, str]:
        """Which rank has the parameter otherwise than it was sent, and how. A sum of several ranks' parts does not say which."""
        flat = [(rank, digest) for rank in self.ranks for digest in digests[rank.engine, rank.rank]]
        for slot, at in zip(self._whole_slots, self._whole_places, strict=True):
            rank, got = flat[slot]
            if at == place and got != sent:
                installed = rank.placed.digested[place] == "w" and place not in self._received
                how = "installed on" if installed else "received by"
                return (
                    rank.rank,
                    f"expected digest {sent:016x}, as sent, got {got:016x} over the bytes {how} {rank.name}",
                )
        parts = [flat[slot] for slot, at in zip(self._part_slots, self._part_places, strict=True) if at == place]
        total = sum(digest for _, digest in parts) & _MASK
        same = [(flat[one], flat[other]) for at, one, other in self._same if at == place]
        for one, other in same:
            if one[1] == other[1]:
                continue
            # The other one is wrong, unless it is the one that makes up the whole.
            right, wrong = (other, one) if (total - one[1] + other[1]) & _MASK == sent else (one, other)
            return wrong[0].rank, (
                f"expected digest {right[1]:016x} of a part, as installed on {right[0].name}, got {wrong[1]:016x} over the bytes "
                f"of the same part installed on {wrong[0].name}"
            )
        holders = {rank.rank: rank.name for rank, _ in [*parts, *(other for _, other in same)]}
        return next(iter(holders)) if len(holders) == 1 else None, (
            f"expected digest {sent:016x}, as sent, got {total:016x} over the bytes of its parts installed on "
            + ", ".join(holders.values())
        )


def _subjects(placed: Placed, received: frozenset[int]) -> tuple[list[int], list[int | None]]:
    """What each digest of a worker is of: parameters' places in the metadata, and the keys of parts, or None for the whole."""
    places: list[int] = []
    keys: list[int | None] = []
    parts = placed.parts
    next_part = 0
    for place, kind in enumerate(placed.digested):
        is_whole = place in received or kind in "rw"
        if is_whole:
            places.append(place)
            keys.append(None)
        while next_part < len(parts) and parts[next_part][0] == place:
            if not is_whole and kind == "p":
                places.append(place)
                keys.append(parts[next_part][2])
            next_part += 1
    return places, keys


def _check_placed(rank: PlacedRank, names: Sequence[str], num_elements: Sequence[int]) -> None:
    if len(rank.placed.takes) != len(names):
        raise _agreement_error(
            rank, f"placed.takes: expected one for each of the {len(names)} parameters, got {len(rank.placed.takes)}"
        )
    for place, count, _ in rank.placed.parts:
        if not 0 <= count <= num_elements[place]:
            raise _agreement_error(
                rank,
                f"placed.parts: expected at most the {num_elements[place]} elements of {names[place]!r} in a part, got {count}",
                param=names[place],
            )


def _not_whole(engine: Sequence[PlacedRank], num_elements: Sequence[int]) -> set[int]:
    """The places of the parameters whose parts, over the engine's ranks, are more or less than the whole, or unclear."""
    result: set[int] = set()
    sizes: dict[int, dict[int, int]] = {}
    for rank in engine:
        for place, count, key in rank.placed.parts:
            if rank.placed.digested[place] == "p" and sizes.setdefault(place, {}).setdefault(key, count) != count:
                result.add(place)
    return result.union(place for place, parts in sizes.items() if sum(parts.values()) != num_elements[place])


def _agreement_error(rank: PlacedRank, text: str, *, param: str | None = None) -> AgreementError:
    return AgreementError(f"{rank.name}: {text}", side=Side.WORKER, engine=rank.engine, rank=rank.rank, param=param)


def sent_digests(
    roots: Sequence[int], own: Mapping[int, int], others: Mapping[int, tuple[str, Sequence[int]]]
) -> list[int]:
    """The digest of each parameter as it was sent.

    Args:
        roots: the trainer rank that has sent each.
        own: digests of the sender's own, by place in the metadata.
        others: by trainer rank, what errors call it, and its digests in order.

    Raises:
        AgreementError: a rank has not said one digest for each parameter that it is the root of.
    """
    rest: dict[int, Iterator[int]] = {}
    for rank, (name, digests) in others.items():
        if len(digests) != roots.count(rank):
            raise AgreementError(
                f"{name}: sent.digests: expected {roots.count(rank)}, one for each parameter that it is the root of, got "
                f"{len(digests)}; verify must be the same on every trainer rank",
                side=Side.TRAINER,
                rank=rank,
            )
        rest[rank] = iter(digests)
    return [next(rest[root]) if root in rest else own[place] for place, root in enumerate(roots)]
