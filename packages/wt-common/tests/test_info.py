"""The documented base classes and request classes."""

import dataclasses

import pytest

from wt_common import (
    WeightTransferInitInfo,
    WeightTransferInitRequest,
    WeightTransferUpdateInfo,
    WeightTransferUpdateRequest,
)


@pytest.mark.parametrize("base", [WeightTransferInitInfo, WeightTransferUpdateInfo])
def test_user_subclass_is_a_plain_dataclass(base):
    """A user's subclass takes its fields positionally and by keyword, may be changed, and needs no options."""

    @dataclasses.dataclass
    class Mine(base):
        url: str
        retries: int = 3

    info = Mine("here")
    info.retries = 4
    assert dataclasses.asdict(info) == {"url": "here", "retries": 4}
    assert Mine(url="here", retries=4) == info


@pytest.mark.parametrize(
    ("cls", "field"), [(WeightTransferInitRequest, "init_info"), (WeightTransferUpdateRequest, "update_info")]
)
def test_request_has_the_documented_field(cls, field):
    """A request carries its payload under the documented name, also positionally; empty by default, never shared."""
    assert dataclasses.asdict(cls(**{field: {"a": 1}})) == {field: {"a": 1}} == dataclasses.asdict(cls({"a": 1}))
    assert getattr(cls(), field) == {}
    assert getattr(cls(), field) is not getattr(cls(), field)
