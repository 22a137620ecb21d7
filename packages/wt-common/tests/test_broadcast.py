"""What the dense broadcast backends put into their calls."""

import dataclasses
import json

import pytest

from wt_common import SCHEMA, WeightTransferInitInfo, WeightTransferUpdateInfo
from wt_common.broadcast import DenseBroadcastInitInfo, SessionInitInfo, SessionUpdateInfo
from wt_common.digest import VERIFY

SESSION = {
    "session_address": "10.0.0.1",
    "session_port": 4711,
    "session_secret": "ab" * 32,
    "session": "0123456789abcdef",
    "schema": SCHEMA,
    "timeout_s": 300.0,
}
DENSE = {**SESSION, "max_group_bytes": 1 << 26, "max_group_pieces": 4096, "num_buffers": 2}
UPDATE = {"session": "0123456789abcdef", "round": 1, "metadata_digest": "ff" * 32}
ALL = [(SessionInitInfo, SESSION), (DenseBroadcastInitInfo, DENSE), (SessionUpdateInfo, UPDATE)]


@pytest.mark.parametrize(("cls", "fields"), ALL, ids=lambda value: getattr(value, "__name__", ""))
def test_info_survives_json(cls, fields):
    """What the sender ships arrives as the same value, through JSON, which has no tuples."""
    info = cls(**fields)
    assert cls(**json.loads(json.dumps(dataclasses.asdict(info)))) == info


def test_infos_are_the_documented_bases():
    """The init infos are WeightTransferInitInfo and the update info is WeightTransferUpdateInfo."""
    assert issubclass(DenseBroadcastInitInfo, SessionInitInfo)
    assert issubclass(SessionInitInfo, WeightTransferInitInfo)
    assert issubclass(SessionUpdateInfo, WeightTransferUpdateInfo)


def test_checks_are_on_and_probe_is_off_unless_told():
    """An init that says nothing checks coverage, verifies what is installed, and replaces a live session."""
    info = SessionInitInfo(**SESSION)
    assert info.check_cover is True
    assert info.verify == "full"
    assert info.probe is False


def test_verify_is_one_of_three():
    """Each of the three is taken, and no other word."""
    assert VERIFY == ("full", "received", "off")
    assert [SessionInitInfo(**SESSION, verify=verify).verify for verify in VERIFY] == list(VERIFY)
    with pytest.raises(TypeError, match="verify"):
        SessionInitInfo(**SESSION, verify=True)


def test_whole_seconds_are_seconds():
    """A timeout that JSON made an int is taken."""
    assert SessionInitInfo(**{**SESSION, "timeout_s": 5}).timeout_s == 5


@pytest.mark.parametrize(
    ("cls", "fields", "name"),
    [(cls, fields, name) for cls, fields in ALL for name in fields],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("bad", [None, True, [object()]], ids=["none", "bool", "list"])
def test_wrong_type_is_refused(cls, fields, name, bad):
    """No field takes None, a bool or a list in place of its type."""
    with pytest.raises(TypeError):
        cls(**{**fields, name: bad})


@pytest.mark.parametrize(
    ("cls", "fields", "name"),
    [(cls, fields, name) for cls, fields in ALL for name in fields],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", ""),
)
def test_missing_field_is_refused_by_name(cls, fields, name):
    """Every field that the two sides must agree on is required, and by keyword."""
    with pytest.raises(TypeError, match=name):
        cls(**{key: value for key, value in fields.items() if key != name})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"session_port": 0}, "session_port must be in [1, 65535], got 0"),
        ({"session_port": 65536}, "session_port must be in [1, 65535], got 65536"),
        ({"timeout_s": 0.0}, "timeout_s must be positive, got 0.0"),
        ({"timeout_s": -1}, "timeout_s must be positive, got -1"),
        ({"verify": "on"}, "verify must be one of full, received, off, got 'on'"),
        ({"verify": ""}, "verify must be one of full, received, off, got ''"),
        ({"max_group_bytes": 0}, "max_group_bytes must be at least 1, got 0"),
        ({"max_group_pieces": 0}, "max_group_pieces must be at least 1, got 0"),
        ({"num_buffers": -3}, "num_buffers must be at least 1, got -3"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_value_out_of_range_is_refused(change, text):
    """A number outside its range is a ValueError that says field, range and value."""
    with pytest.raises(ValueError) as caught:  # compared whole below
        DenseBroadcastInitInfo(**{**DENSE, **change})
    assert str(caught.value) == text
