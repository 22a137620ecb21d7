"""What workers take, held against what is announced: plain data, no session."""

import re
from fnmatch import fnmatchcase

import pytest

from wt_common import PlanError
from wt_common.session import Placed
from wt_trainer.metadata import RoundMetadata
from wt_trainer.takes import Takes, check_takes, check_tied
from wt_trainer.verify import PlacedRank

METADATA = RoundMetadata(
    names=("a", "b", "c", "empty"),
    dtype_names=("bfloat16",) * 4,
    shapes=((2, 2), (6,), (3,), (0,)),
    sizes_bytes=(8, 12, 6, 0),
    roots=(0,) * 4,
)


def rank_of(takes, *parts, rank=0, engine="e0", shares_model="", **fields):
    """A worker rank that takes so, and the parts (place, elements, key)."""
    placed = Placed(
        round=1, takes=takes, digested="r" * len(takes), parts=[list(part) for part in parts], not_in_place={}, **fields
    )
    return PlacedRank(name=f"rank {rank}", engine=engine, rank=rank, placed=placed, shares_model=shares_model)


def optional(*places):
    return RoundMetadata(**{**vars_of(METADATA), "optional": places})


def vars_of(metadata):
    return {name: getattr(metadata, name) for name in ("names", "dtype_names", "shapes", "sizes_bytes", "roots")}


def refusal(*ranks, metadata=METADATA):
    with pytest.raises(PlanError) as caught:
        check_takes(ranks, metadata, check_cover=True)
    assert caught.value.side == "worker"
    return caught.value


@pytest.mark.parametrize(
    "ranks",
    [
        [rank_of("aaan")],
        [rank_of("aana"), rank_of("nnan", rank=1)],
        [rank_of("apaa", (1, 6, 0))],
        [rank_of("apaa", (1, 2, 0)), rank_of("apaa", (1, 4, 1), rank=1)],
        [rank_of("apaa", (1, 2, 0), (1, 4, 1)), rank_of("apaa", (1, 2, 0), rank=1)],
        [rank_of("apaa", (1, 2, 0)), rank_of("aaaa", rank=1)],
        [rank_of("aaaa"), rank_of("aaaa", engine="e1")],
        [rank_of("anaa", shares_model="m"), rank_of("naaa", engine="e1", shares_model="m")],
        [rank_of("apaa", (1, 2, 0), shares_model="m"), rank_of("apaa", (1, 4, 1), engine="e1", shares_model="m")],
    ],
    ids=["whole", "stages", "part", "shards", "replicated", "both", "engines", "experts", "expert shards"],
)
def test_model_that_takes_everything_passes(ranks):
    """What all ranks of a model take together counts; a parameter without elements need not be taken."""
    assert check_takes(ranks, METADATA, check_cover=True) == Takes(ignored=(), unknown=())


@pytest.mark.parametrize(
    ("ranks", "engine", "names"),
    [
        ([rank_of("naaa")], "e0", "1 parameter(s): 'a'."),
        ([rank_of("nnna"), rank_of("naaa", rank=1)], "e0", "1 parameter(s): 'a'."),
        ([rank_of("aaaa"), rank_of("nnaa", engine="e1")], "e1", "2 parameter(s): 'a', 'b'."),
        ([rank_of("naaa", shares_model="m"), rank_of("naaa", engine="e1", shares_model="m")], "e0, e1", "'a'."),
    ],
    ids=["one", "all ranks", "second engine", "shared model"],
)
def test_parameter_that_no_rank_takes_is_refused(ranks, engine, names):
    """The error names the engines of that model, the parameters, and the setting that allows it."""
    error = refusal(*ranks)
    assert error.message.startswith(f"engine {engine} takes nothing of ")
    assert names in error.message
    assert "ignore=('a',) in the init info" in error.message
    assert (error.param, error.engine) == ("a", engine.partition(",")[0])


def test_pattern_that_an_error_proposes_matches():
    """Also where the name has characters that mean something in a pattern."""
    name = "experts.[0]*.w"
    fields = {"names": (name,), "dtype_names": ("bfloat16",), "shapes": ((1,),), "sizes_bytes": (2,), "roots": (0,)}
    error = refusal(rank_of("n"), metadata=RoundMetadata(**fields))
    (pattern,) = re.findall(r"ignore=\('(.*?)',\)", error.message)
    assert fnmatchcase(name, pattern)
    assert not fnmatchcase("experts.0x.w", pattern)


def test_error_names_a_few_of_many():
    """The first five and their number."""
    metadata = RoundMetadata(
        names=tuple("abcdefgh"),
        dtype_names=("int8",) * 8,
        shapes=((1,),) * 8,
        sizes_bytes=(1,) * 8,
        roots=(0,) * 8,
    )
    assert "8 parameter(s): 'a', 'b', 'c', 'd', 'e', ...." in refusal(rank_of("n" * 8), metadata=metadata).message


def test_optional_parameter_may_be_ignored():
    """It is told which these are: optional ones, and names that the server ties to others."""
    assert check_takes([rank_of("nana")], optional(0, 2), check_cover=True).ignored == (0, 2)
    tied = [rank_of("naaa", tied=[[0, 1]]), rank_of("naaa", rank=1)]
    assert check_takes(tied, METADATA, check_cover=True).ignored == (0,)
    assert refusal(rank_of("nana"), metadata=optional(2)).param == "a"


@pytest.mark.parametrize(
    "ranks",
    [
        [rank_of("apaa", (1, 4, 0))],
        [rank_of("apaa", (1, 2, 0)), rank_of("apaa", (1, 2, 1), rank=1)],
        [rank_of("apaa", (1, 4, 0)), rank_of("apaa", (1, 4, 0), rank=1)],
        [rank_of("apaa", (1, 4, 0)), rank_of("anaa", rank=1)],
    ],
    ids=["alone", "shards", "replicated", "other takes nothing"],
)
def test_parameter_that_would_be_cut_is_refused(ranks):
    """Parts that are less than the announced shape are an error, also for an optional parameter."""
    for metadata in (METADATA, optional(1)):
        error = refusal(*ranks, metadata=metadata)
        assert "takes 4 of the 6 elements of 'b', which has shape [6]" in error.message
        assert error.param == "b"


def test_what_nobody_knows_is_reported():
    """A loader that was not followed may take anything, and so may different parts that overlap."""
    assert check_takes([rank_of("uaaa"), rank_of("nnna", rank=1)], METADATA, check_cover=True).unknown == (0,)
    overlap = [rank_of("apaa", (1, 4, 0)), rank_of("apaa", (1, 4, 1), rank=1)]
    assert check_takes(overlap, METADATA, check_cover=True).unknown == (1,)


def test_random_weights_must_not_remain():
    """The error counts those of all ranks once; without the check of cover they may."""
    ranks = [
        rank_of("aaaa", not_synced=["x", "y"], unset=["x"]),
        rank_of("aaaa", not_synced=["x", "y"], unset=["x", "y"], rank=1),
    ]
    error = refusal(*ranks)
    assert "2 parameter(s): 'x', 'y'" in error.message
    assert "load_format dummy" in error.message
    check_takes(ranks, METADATA, check_cover=False)


def test_tied_names_need_equal_values():
    """Digests of names that share memory must be equal, where both were sent in one dtype."""
    ranks = [rank_of("aaaa"), rank_of("aana", tied=[[2, 0]], rank=1)]
    check_tied(ranks, METADATA, {}, [5, 6, 5, 0])
    with pytest.raises(PlanError, match="engine e0 ties 'c' to 'a', and the trainer sends other values for it"):
        check_tied(ranks, METADATA, {}, [5, 6, 7, 0])
    check_tied(ranks, METADATA, {"a": "float32"}, [5, 6, 7, 0])
    with pytest.raises(PlanError):
        check_tied(ranks, METADATA, {"a": "float32", "c": "float32"}, [5, 6, 7, 0])
