"""The version of the wire."""

import pytest

from wt_common import SCHEMA, AgreementError
from wt_common.schema import check_schema

MAJOR, MINOR = SCHEMA


@pytest.mark.parametrize("theirs", [SCHEMA, [MAJOR, MINOR], [MAJOR, MINOR + 9]], ids=str)
def test_same_major_is_taken(theirs):
    """Any minor of the same major can talk, given as a tuple or as JSON's list."""
    assert check_schema(theirs) == tuple(theirs)


@pytest.mark.parametrize("major", [MAJOR - 1, MAJOR + 1])
def test_other_major_is_refused_with_both_versions(major):
    """Another major is an AgreementError that names both versions and what to install."""
    with pytest.raises(AgreementError, match=f"speaks {MAJOR}.{MINOR}, the other {major}.5; install"):
        check_schema([major, 5])


@pytest.mark.parametrize("theirs", [None, 1, "1.0", [], [1], [1, 0, 0], ["1", "0"], [True, 0], [1.0, 0], {}], ids=repr)
def test_anything_but_two_integers_is_refused(theirs):
    """What is not [major, minor] is an AgreementError that shows what came."""
    with pytest.raises(AgreementError, match=r"expected \[major, minor\], got"):
        check_schema(theirs)
