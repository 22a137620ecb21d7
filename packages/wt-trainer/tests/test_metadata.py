"""What a round sends, as both sides compute it."""

import re
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import pytest
import torch

from wt_common import PlanError
from wt_common.session import metadata_digest
from wt_trainer import ParamMeta, WeightSource
from wt_trainer.metadata import RoundMetadata


class Listed(WeightSource):
    aliases: ClassVar[dict[str, str]] = {}

    def __init__(self, *metas):
        self.metas = metas

    @cached_property
    def metadata(self):
        return list(self.metas)


METAS = [
    ParamMeta("a", torch.bfloat16, (3, 2)),
    ParamMeta("b", torch.float32, (), owners=(1, 0)),
    ParamMeta("c", torch.int8, (5,), owners=(2, 1)),
]


def test_metadata_is_that_of_the_source_in_order():
    """Names, dtypes, shapes and sizes are the source's, in its order; the digest is that of the wire."""
    metadata = RoundMetadata.of(Listed(*METAS), 3)
    assert metadata.names == ("a", "b", "c")
    assert metadata.dtype_names == ("bfloat16", "float32", "int8")
    assert metadata.shapes == ((3, 2), (), (5,))
    assert metadata.sizes_bytes == (12, 4, 5)
    assert metadata.num_elements == (6, 1, 5)
    rows = [("a", "bfloat16", (3, 2), 0), ("b", "float32", (), 0), ("c", "int8", (5,), 2)]
    assert metadata.digest == metadata_digest(rows)


def test_root_is_the_sender_where_it_owns_the_parameter():
    """Rank 0 sends what it holds, else the first owner does."""
    assert RoundMetadata.of(Listed(*METAS), 3).roots == (0, 0, 2)


def test_message_carries_it():
    """The session's message has the same lists, for the round that is asked for."""
    message = RoundMetadata.of(Listed(*METAS), 3).message(7)
    assert message.round == 7
    assert message.names == ["a", "b", "c"]
    assert message.dtype_names == ["bfloat16", "float32", "int8"]
    assert message.shapes == [[3, 2], [], [5]]
    assert message.roots == [0, 0, 2]


def test_cast_metadata_have_the_dtypes_of_the_wire():
    """Casts change dtypes and sizes of the named parameters, and so the digest; without casts nothing changes."""
    metadata = RoundMetadata.of(Listed(*METAS), 3)
    assert metadata.cast({}) is metadata
    cast = metadata.cast({"b": "bfloat16", "a": "float32"})
    assert cast.dtype_names == ("float32", "bfloat16", "int8")
    assert cast.sizes_bytes == (24, 2, 5)
    assert cast.num_elements == (6, 1, 5)
    assert (cast.names, cast.shapes, cast.roots) == (metadata.names, metadata.shapes, metadata.roots)
    assert cast.digest != metadata.digest


def test_name_that_comes_twice_is_refused():
    """Two parameters of one name are a plan error that names it."""
    with pytest.raises(PlanError, match="parameter 'b' comes twice") as caught:
        RoundMetadata.of(Listed(*METAS, METAS[1], METAS[0]), 3)
    assert (caught.value.param, caught.value.side) == ("b", "trainer")


def test_source_without_parameters_is_refused():
    """A source that declares nothing would leave every model as it was."""
    with pytest.raises(PlanError, match="names no parameter"):
        RoundMetadata.of(Listed(), 1)


def test_owner_that_is_no_trainer_rank_is_refused():
    """A parameter that only an absent rank owns cannot be sent: the error names it, the owners and the ranks."""
    with pytest.raises(
        PlanError, match=r"parameter 'c': owners \(2, 1\) name a rank outside the 2 trainer ranks"
    ) as caught:
        RoundMetadata.of(Listed(*METAS), 2)
    assert caught.value.param == "c"


@pytest.mark.parametrize(
    ("changes", "param", "how"),
    [
        ({"names": ["a", "x", "c"]}, "x", "place 1: expected 'x' float32"),
        ({"shapes": [[3, 2], [], [6]]}, "c", r"int8 \[6\] sent by rank 2 as on rank 0, got 'c' int8 \[5\]"),
        ({"roots": [1, 0, 2]}, "a", "sent by rank 1 as on rank 0, got 'a' .* by rank 0"),
        ({"aliases": {"x": "a"}}, "x", "alias 'x': expected one of 'a' as on rank 0, got one of None"),
        ({"optional": [1]}, "b", "'b' is optional on rank 0 only"),
        ({"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[3, 2]], "roots": [0]}, "b", "expected nothing"),
    ],
)
def test_difference_names_the_first_parameter(changes, param, how):
    """Two ranks' metadata that differ: the first parameter that does, with both sides' description."""
    ours = RoundMetadata.of(Listed(*METAS), 3)
    message = ours.message(1)
    assert ours.difference(message) == ("", "only in their digests")
    name, text = ours.difference(replace(message, **changes))
    assert name == param
    assert re.search(how, text)


@pytest.mark.parametrize("aliases", [{"b": "a"}, {"x": "y"}], ids=["sent as well", "of nothing"])
def test_alias_that_is_none_is_refused(aliases):
    """An alias is a name that is not sent, of one that is."""
    source = Listed(*METAS)
    source.aliases = aliases
    with pytest.raises(
        PlanError, match="expected a name that the source's metadata lacks, for one that it has"
    ) as caught:
        RoundMetadata.of(source, 3)
    assert caught.value.param in aliases


def test_aliases_and_optional_parameters_are_part_of_the_metadata():
    """They are in the message and in the digest; names that match a pattern are optional as buffers are."""
    source = Listed(replace(METAS[0], optional=True), *METAS[1:])
    plain = RoundMetadata.of(Listed(*METAS), 3)
    marked = RoundMetadata.of(source, 3, ["c*", "z"])
    assert (plain.optional, marked.optional) == ((), (0, 2))
    source.aliases = {"x": "a"}
    aliased = RoundMetadata.of(source, 3)
    assert len({plain.digest, marked.digest, aliased.digest}) == 3
    message = aliased.message(1)
    assert (message.aliases, message.optional, message.digest) == ({"x": "a"}, [0], aliased.digest)
