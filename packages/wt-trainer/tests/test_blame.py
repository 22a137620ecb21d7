"""Whose fault it is that digests differ: no more is claimed than is known."""

import re

import pytest

from wt_common import IntegrityError, PlanError
from wt_trainer.blame import blamed

FOUND = IntegrityError("parameter 'w': expected digest 1, got 2", side="worker", engine="e0", rank=3, param="w")


def test_memory_that_has_changed_is_the_trainers_fault():
    """The trainer's memory is not what it was when it was taken: the error says where, both digests, and what to do."""
    error = blamed(FOUND, root=2, sent=17, now=18)
    assert type(error) is PlanError
    assert (error.side, error.rank, error.engine, error.param) == ("trainer", 2, None, "w")
    assert "'w' changed in the memory of trainer rank 2 during the round" in error.message
    assert f"expected digest {17:016x}" in error.message
    assert f"got {18:016x} now" in error.message
    assert "yields_stable" in error.message


@pytest.mark.parametrize(
    ("now", "known"),
    [
        (
            17,
            r"trainer rank 2 still has the bytes that it took from its source, so they changed on the wire or on the worker \(or",
        ),
        (
            None,
            "It is not known where they changed: trainer rank 2 has sent them from a copy .* on the wire, or on the worker$",
        ),
    ],
    ids=["same", "gone"],
)
def test_what_is_not_known_is_not_claimed(now, known):
    """Where the trainer's memory is as it was, or cannot be looked at, the error remains the worker's, and says so."""
    error = blamed(FOUND, root=2, sent=17, now=now)
    assert type(error) is IntegrityError
    assert (error.side, error.rank, error.engine, error.param) == ("worker", 3, "e0", "w")
    assert error.message.startswith(FOUND.message)
    assert re.search(known, error.message), error.message
