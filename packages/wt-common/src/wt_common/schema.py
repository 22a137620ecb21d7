"""The version of the wire: what the two sides must agree on, apart from the packages' own versions."""

from __future__ import annotations

from wt_common.errors import AgreementError

__all__ = ["SCHEMA", "check_schema"]

SCHEMA = (1, 0)
"""`(major, minor)`. A different major cannot talk; a higher minor only adds fields that the other side may ignore."""


def check_schema(theirs: object) -> tuple[int, int]:
    """`theirs` as `(major, minor)`, if this side can talk to it.

    Raises:
        AgreementError: the majors differ, or `theirs` is not two integers.
    """
    if not isinstance(theirs, (tuple, list)) or [type(part) for part in theirs] != [int, int]:
        raise AgreementError(f"wire schema: expected [major, minor], got {theirs!r}")
    major, minor = theirs
    if major != SCHEMA[0]:
        raise AgreementError(
            f"wire schema: this side speaks {SCHEMA[0]}.{SCHEMA[1]}, the other {major}.{minor}; install wt-trainer and "
            "wt-worker releases that require the same major of wt-common's schema"
        )
    return major, minor
