"""Comparing the workers' digests with those of what was sent: plain data, no session."""

import random
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wt_common import AgreementError, IntegrityError
from wt_common.digest import digest_bytes
from wt_common.session import Placed
from wt_trainer.verify import PlacedRank, Placement, sent_digests

NAMES = ("a", "b", "c")
NUM_ELEMENTS = (4, 6, 0)
SENT = [11, 2**64 - 5, 0]


def rank_of(kinds, *parts, rank=0, engine="e0"):
    """A worker rank that digests as `kinds` say, and `parts` as (place, elements, key); it takes what it digests."""
    takes = kinds.translate(str.maketrans("rw", "aa"))
    placed = Placed(round=1, takes=takes, digested=kinds, parts=[list(part) for part in parts], not_in_place={})
    return PlacedRank(name=f"worker rank {rank} of engine {engine} (host)", engine=engine, rank=rank, placed=placed)


def placement_of(*ranks, given=(), names=NAMES, num_elements=NUM_ELEMENTS):
    return Placement(ranks, names=names, num_elements=num_elements, given=given)


def refusal(placement, digests, sent=SENT):
    """The error of a check that must fail. `digests` are those of rank 0, 1, ... of engine e0, or by engine and rank."""
    if not isinstance(digests, dict):
        digests = {("e0", rank): own for rank, own in enumerate(digests)}
    with pytest.raises(IntegrityError) as caught:
        placement.check(list(sent), digests)
    return caught.value


# --- before a byte moves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "text", "param"),
    [
        (rank_of("rw"), "placed.takes: expected one for each of the 3 parameters, got 2", None),
        (rank_of("rwrr"), "placed.takes: expected one for each of the 3 parameters, got 4", None),
        (rank_of("rpr", (1, 7, 0)), "placed.parts: expected at most the 6 elements of 'b' in a part, got 7", "b"),
        (
            rank_of("rpr", (1, 2, 0), (1, -1, 1)),
            "placed.parts: expected at most the 6 elements of 'b' in a part, got -1",
            "b",
        ),
    ],
    ids=["few", "many", "large", "negative"],
)
def test_placement_that_does_not_fit_the_metadata_is_refused(rank, text, param):
    """What a worker says must be about these parameters: the error names worker, field, expected and got."""
    with pytest.raises(AgreementError) as caught:
        placement_of(rank_of("rrr", rank=1), rank)
    error = caught.value
    assert error.message == f"worker rank 0 of engine e0 (host): {text}"
    assert (error.side, error.engine, error.rank, error.param) == ("worker", "e0", 0, param)


@pytest.mark.parametrize(
    ("ranks", "received"),
    [
        ([rank_of("rrr")], []),
        ([rank_of("rwn"), rank_of("wnr", rank=1)], []),
        ([rank_of("rpr", (1, 6, 0))], []),
        ([rank_of("rpr", (1, 2, 0), (1, 4, 9))], []),
        ([rank_of("rpr", (1, 2, 0)), rank_of("rpr", (1, 4, 1), rank=1)], []),
        ([rank_of("rpr", (1, 2, 0)), rank_of("rpr", (1, 2, 0), (1, 4, 1), rank=1)], []),
        ([rank_of("rpr", (1, 6, 0)), rank_of("rnr", rank=1)], []),
        ([rank_of("rpr", (1, 6, 0)), rank_of("rwr", rank=1)], []),
        ([rank_of("rpr", (1, 5, 0))], [1]),
        ([rank_of("rpr", (1, 4, 0), (1, 4, 1))], [1]),
        ([rank_of("rpr", (1, 2, 0)), rank_of("rpr", (1, 2, 0), rank=1)], [1]),
        ([rank_of("rpr", (1, 2, 0)), rank_of("rwr", rank=1)], [1]),
        ([rank_of("rpr", (1, 2, 0)), rank_of("rpr", (1, 4, 0), rank=1)], [1]),
        ([rank_of("rpr", (1, 6, 0)), rank_of("rpr", (1, 2, 0), rank=1)], [1]),
        ([rank_of("rpr", (1, 2, 0)), rank_of("rpr", (1, 4, 1), engine="e1")], [1]),
        ([rank_of("rpr", (1, 6, 0)), rank_of("ppr", (0, 1, 0), (1, 6, 0), engine="e1")], [0]),
        ([rank_of("rrp", (2, 0, 0))], []),
    ],
)
def test_parts_that_are_not_the_whole_are_digested_as_received(ranks, received):
    """Where the different parts on an engine's ranks are not exactly the parameter, their digests do not add up to its own."""
    assert placement_of(*ranks).received == received


def test_what_cannot_be_digested_as_installed_is_received_as_well():
    """What is given for another reason comes with what has been found, each once and in order."""
    ranks = [rank_of("ppw", (0, 1, 0), (1, 6, 0))]
    assert placement_of(*ranks, given=[2, 0]).received == [0, 2]


# --- before the verdict ----------------------------------------------------------------------------------------


def test_equal_digests_pass():
    """Whole parameters, received or installed, on several ranks and engines, pass where all digests are those sent."""
    ranks = [rank_of("rww"), rank_of("wrr", rank=1), rank_of("rrr", engine="e1")]
    placement_of(*ranks).check(SENT, {("e0", 0): SENT, ("e0", 1): list(SENT), ("e1", 0): SENT})


def test_parameters_that_are_not_there_have_no_digest():
    """Kind n has no digest, on a rank with others that have; a rank that takes nothing has none at all."""
    placement = placement_of(rank_of("nwn"), rank_of("nnn", rank=1))
    placement.check(SENT, {("e0", 0): SENT[1:2], ("e0", 1): []})
    assert refusal(placement, [[7], []]).param == "b"


@pytest.mark.parametrize(("kinds", "how"), [("rrr", "received by"), ("rwr", "installed on")])
@pytest.mark.parametrize("others", ["rrr", "rnr", "rpr"])
def test_whole_parameter_that_differs_is_named(kinds, how, others):
    """The error says parameter, engine, rank, both digests, and whether it is about bytes received or installed."""
    parts = [(1, 6, 0)] if "p" in others else []
    placement = placement_of(rank_of(others, *parts), rank_of(kinds, rank=1))
    error = refusal(placement, [[SENT[0], SENT[2]] if "n" in others else SENT, [SENT[0], 255, SENT[2]]])
    assert error.message == (
        "parameter 'b': expected digest fffffffffffffffb, as sent, got 00000000000000ff over the bytes "
        f"{how} worker rank 1 of engine e0 (host). Send again: a full round repairs it; if it repeats on the same host, check "
        "its memory or network"
    )
    assert (error.side, error.engine, error.rank, error.param) == ("worker", "e0", 1, "b")


def test_received_bytes_are_what_go_asked_for():
    """A parameter that must be digested as received has one digest on every rank, also where parts or nothing was placed."""
    ranks = [rank_of("rpr", (1, 1, 0), (1, 2, 1)), rank_of("rnr", rank=1), rank_of("rwr", rank=2)]
    placement = placement_of(*ranks)
    assert placement.received == [1]
    placement.check(SENT, {("e0", rank): SENT for rank in range(3)})
    for rank in range(3):
        error = refusal(placement, [[11, 1, 0] if each == rank else SENT for each in range(3)])
        assert (error.rank, error.param) == (rank, "b")
        assert "over the bytes received by" in error.message


def test_parts_add_up_modulo_2_to_the_64():
    """Digests of the different parts of all ranks add up to the parameter's, and each counts once, however many have it."""
    placement = placement_of(
        rank_of("rpr", (1, 2, 0), (1, 1, 5)), rank_of("rpr", (1, 1, 5), rank=1), rank_of("rpr", (1, 3, 1), rank=2)
    )
    assert placement.received == []
    digests = [[11, 2**64 - 1, 2**64 - 6, 0], [11, 2**64 - 6, 0], [11, 2, 0]]
    placement.check(SENT, {("e0", rank): own for rank, own in enumerate(digests)})


def test_sum_that_differs_names_all_who_have_a_part():
    """A sum does not say whose part is wrong: the error names every rank that has one, and no rank as its own."""
    placement = placement_of(rank_of("rpr", (1, 2, 0)), rank_of("rpr", (1, 4, 1), rank=1), rank_of("rnr", rank=2))
    error = refusal(placement, [[11, 1, 0], [11, 2, 0], [11, 0]])
    assert (
        "expected digest fffffffffffffffb, as sent, got 0000000000000003 over the bytes of its parts installed on"
        in str(error)
    )
    assert "worker rank 0 of engine e0 (host), worker rank 1 of engine e0 (host). Send" in error.message
    assert (error.engine, error.rank, error.param) == ("e0", None, "b")


def test_sum_of_one_ranks_parts_names_it():
    """Where one rank has all the parts, it is the one."""
    placement = placement_of(rank_of("rpr", (1, 2, 0), (1, 4, 1)), rank_of("rnr", rank=1))
    assert refusal(placement, [[11, 1, 2, 0], [11, 0]]).rank == 0


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_part_that_differs_between_ranks_names_the_one_that_does_not_fit(wrong):
    """Of two ranks that have the same part, the one with which the sum is not that of the whole is named."""
    placement = placement_of(*(rank_of("rpr", (1, 2, 0), (1, 4, 1), rank=rank) for rank in range(3)))
    digests = [[11, 2**64 - 8, 3, 0] for _ in range(3)]
    digests[wrong][2] = 77
    error = refusal(placement, digests)
    assert error.rank == wrong
    assert "expected digest 0000000000000003 of a part, as installed on worker rank" in error.message
    assert f"got 000000000000004d over the bytes of the same part installed on worker rank {wrong} of" in error.message


def test_same_part_that_is_wrong_everywhere_names_all():
    """Where all ranks agree, and the sum is not the parameter's, each of them may have it from the others."""
    placement = placement_of(*(rank_of("rpr", (1, 6, 0), rank=rank) for rank in range(2)))
    error = refusal(placement, [[11, 3, 0]] * 2)
    assert "worker rank 0 of engine e0 (host), worker rank 1 of engine e0 (host)" in error.message


def test_part_of_another_engine_does_not_count():
    """Engines are checked each on its own."""
    placement = placement_of(rank_of("rpr", (1, 6, 0)), rank_of("rpr", (1, 6, 0), engine="e1"))
    right, wrong = [11, SENT[1], 0], [11, 4, 0]
    placement.check(SENT, {("e0", 0): right, ("e1", 0): right})
    error = refusal(placement, {("e0", 0): right, ("e1", 0): wrong})
    assert (error.engine, error.rank) == ("e1", 0)


def test_first_parameter_is_named_and_up_to_five_more():
    """The error is about the first parameter of the metadata that differs anywhere, and says how many more there are."""
    names = tuple("abcdefgh")
    sent = list(range(8))
    ranks = [rank_of("w" * 8), rank_of("w" * 8, rank=1), rank_of("w" * 8, engine="d")]
    placement = placement_of(*ranks, names=names, num_elements=(1,) * 8)

    def error_of(*wrong):
        digests = {("e0", 0): sent, ("e0", 1): [99 if place in wrong else place for place in sent], ("d", 0): sent}
        return refusal(placement, digests, sent)

    assert "differ" not in error_of(3).message
    error = error_of(6, 3, 4)
    assert (error.param, error.rank) == ("d", 1)
    assert "(host); 2 more differ: 'e', 'g'. Send again" in error.message
    assert "; 5 more differ: 'b', 'c', 'd', 'e', 'f'. Send" in error_of(0, 1, 2, 3, 4, 5).message
    assert "; 6 more differ: 'b', 'c', 'd', 'e', 'f', .... Send" in error_of(0, 1, 2, 3, 4, 5, 6).message
    digests = {("e0", 0): sent, ("e0", 1): [0, 1, 99, *sent[3:]], ("d", 0): [0, 1, 2, 99, *sent[4:]]}
    assert (refusal(placement, digests, sent).engine, refusal(placement, digests, sent).param) == ("e0", "c")
    digests[("d", 0)] = digests[("e0", 1)]
    assert refusal(placement, digests, sent).engine == "d"


@pytest.mark.parametrize(
    ("rank", "digests", "expected"),
    [
        (rank_of("rrr"), SENT[:2], 3),
        (rank_of("rrr"), [*SENT, 0], 3),
        (rank_of("rrr"), [], 3),
        (rank_of("rpr", (1, 2, 0), (1, 4, 1)), SENT, 4),
        (rank_of("rpr", (1, 2, 0), (1, 3, 1)), [*SENT, 0], 3),
        (rank_of("nnn"), [0], 0),
    ],
)
def test_other_number_of_digests_than_announced_is_an_agreement_error(rank, digests, expected):
    """Digests cannot be told apart where their number is another: the error names worker, field, expected and got."""
    with pytest.raises(AgreementError) as caught:
        placement_of(rank).check(SENT, {("e0", 0): digests})
    error = caught.value
    assert error.message == (
        f"worker rank 0 of engine e0 (host): finishing.digests: expected {expected}, as it said before the round, "
        f"got {len(digests)}"
    )
    assert (error.side, error.engine, error.rank) == ("worker", "e0", 0)


@given(data=st.binary(min_size=1, max_size=60), num_ranks=st.integers(1, 4), rng=st.randoms(use_true_random=False))
def test_any_slicing_passes_and_any_changed_bit_shows(data, num_ranks, rng):
    """However a parameter is cut, and whichever ranks have the parts, the digests fit; one changed bit anywhere does not."""
    cuts = sorted({0, len(data), *(rng.randrange(len(data) + 1) for _ in range(3))})
    parts = list(pairwise(cuts))
    holders = [sorted(rng.sample(range(num_ranks), rng.randint(1, num_ranks))) for _ in parts]
    held = [[key for key in range(len(parts)) if rank in holders[key]] for rank in range(num_ranks)]
    ranks = [
        rank_of("p" if keys else "n", *((0, parts[key][1] - parts[key][0], key) for key in keys), rank=rank)
        for rank, keys in enumerate(held)
    ]
    placement = placement_of(*ranks, names=("w",), num_elements=(len(data),))
    assert placement.received == []
    memories = [bytearray(data) for _ in ranks]

    def digests():
        return {
            ("e0", rank): [digest_bytes(bytes(memories[rank][slice(*parts[key])]), parts[key][0]) for key in keys]
            for rank, keys in enumerate(held)
        }

    placement.check([digest_bytes(data)], digests())
    key = rng.randrange(len(parts))
    rank = rng.choice(holders[key])
    memories[rank][rng.randrange(*parts[key])] ^= 1 << rng.randrange(8)
    error = refusal(placement, digests(), [digest_bytes(data)])
    assert error.param == "w"
    if len(holders[key]) > 1 or error.rank is not None:
        assert error.rank == rank


def test_usual_round_is_checked_in_no_time():
    """30,000 whole parameters on two workers: a check is far below 10 ms for each, and finds one that differs all the same."""
    count = 30_000
    rng = random.Random(1)
    sent = [rng.getrandbits(64) for _ in range(count)]
    names = tuple(f"layers.{place}.weight" for place in range(count))
    ranks = [rank_of("w" * count), rank_of("r" * count, rank=1)]
    placement = placement_of(*ranks, names=names, num_elements=(7,) * count)
    digests = {("e0", rank): list(sent) for rank in range(2)}
    took = []
    for _ in range(5):
        started = time.perf_counter()
        placement.check(sent, digests)
        took.append(time.perf_counter() - started)
    assert min(took) < 2 * 0.01
    digests["e0", 1][-1] ^= 1
    assert refusal(placement, digests, sent).param == names[-1]


def test_check_of_a_host_that_has_everything_wrong_ends():
    """The worst case costs one look at each digest too: 30,000 parameters in parts, of which none is right."""
    count = 30_000
    ranks = [rank_of("p" * count, *((place, 1, rank) for place in range(count)), rank=rank) for rank in range(2)]
    placement = placement_of(*ranks, names=tuple(map(str, range(count))), num_elements=(2,) * count)
    started = time.perf_counter()
    error = refusal(placement, [[1] * count] * 2, [3] * count)
    assert time.perf_counter() - started < 5
    assert "; 29999 more differ: '1', '2', '3', '4', '5', ..." in error.message


# --- what was sent ---------------------------------------------------------------------------------------------


def test_digests_of_all_senders_are_put_in_order():
    """Each parameter's digest is from the rank that is its root."""
    assert sent_digests((0, 0), {0: 5, 1: 6}, {}) == [5, 6]
    others = {1: ("trainer rank 1", [7, 8]), 2: ("trainer rank 2", [9])}
    assert sent_digests((1, 0, 2, 1), {1: 5}, others) == [7, 5, 9, 8]


@pytest.mark.parametrize("digests", [[], [1], [1, 2, 3]])
def test_other_number_of_digests_of_a_sender_is_an_agreement_error(digests):
    """A rank that verifies otherwise is named, with what to look at."""
    with pytest.raises(AgreementError, match="verify must be the same on every trainer rank") as caught:
        sent_digests((1, 0, 1), {1: 5}, {1: ("trainer rank 1 (host)", digests)})
    assert caught.value.message.startswith(
        f"trainer rank 1 (host): sent.digests: expected 2, one for each parameter that it is the root of, got {len(digests)};"
    )
    assert (caught.value.side, caught.value.rank) == ("trainer", 1)
