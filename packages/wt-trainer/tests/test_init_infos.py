"""What a training script fills in."""

import dataclasses

import pytest

from wt_common import ConfigurationError
from wt_trainer import GlooTrainerInitInfo, TrainerInitInfo
from wt_trainer.init_infos import DenseBroadcastFields, SessionFields


def test_only_the_rank_is_required():
    """Everything but the trainer rank has a default, and the rank must be said, by name."""
    info = GlooTrainerInitInfo(rank=0)
    assert isinstance(info, TrainerInitInfo)
    assert isinstance(info, DenseBroadcastFields)
    assert (info.backend, info.rank, info.is_sender) == ("gloo", 0, True)
    assert (info.master_address, info.master_port, info.world_size) == (None, None, None)
    assert (info.packed, info.packed_buffer_size_bytes, info.packed_num_buffers) == (True, 64 << 20, 2)
    assert (info.timeout_s, info.check_cover, info.verify) == (300, True, "full")
    with pytest.raises(TypeError, match="rank"):
        GlooTrainerInitInfo()


def test_documented_fields_are_positional():
    """Address, port, world size and the packing come in the documented order; what is ours comes by name only."""
    info = GlooTrainerInitInfo("10.0.0.1", 4711, 3, False, 1024, 4, rank=0)
    assert (info.master_address, info.master_port, info.world_size) == ("10.0.0.1", 4711, 3)
    assert (info.packed, info.packed_buffer_size_bytes, info.packed_num_buffers) == (False, 1024, 4)
    positional = [field.name for field in dataclasses.fields(GlooTrainerInitInfo) if not field.kw_only]
    assert positional == [
        "master_address",
        "master_port",
        "world_size",
        "packed",
        "packed_buffer_size_bytes",
        "packed_num_buffers",
    ]


def test_other_ranks_do_not_send():
    """Rank 0 alone drives the inference side."""
    assert not GlooTrainerInitInfo(rank=1).is_sender


def test_secret_and_group_are_not_printed():
    """What is printed of an init info gives no secret away."""
    info = GlooTrainerInitInfo(
        "10.0.0.1", 4711, rank=0, session_secret="ab" * 32, num_trainer_ranks=2, process_group=object()
    )
    assert "abab" not in repr(info)
    assert "object at" not in repr(info)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"timeout_s": 0}, "timeout_s: expected seconds above 0, at most 1000000.0, got 0"),
        ({"timeout_s": -1.5}, "timeout_s: expected seconds above 0, at most 1000000.0, got -1.5"),
        ({"timeout_s": float("inf")}, "got inf"),
        ({"timeout_s": float("nan")}, "got nan"),
        ({"world_size": 1}, "world_size: expected 1 .the sender. plus at least one worker, got 1"),
        ({"world_size": 0}, "world_size: expected 1 .the sender. plus at least one worker, got 0"),
        ({"master_port": 0}, "master_port: expected 1 to 65535, got 0"),
        ({"master_port": 65536}, "master_port: expected 1 to 65535, got 65536"),
        ({"packed_buffer_size_bytes": 0}, "packed_buffer_size_bytes: expected at least 1, got 0"),
        ({"packed_num_buffers": 0}, "packed_num_buffers: expected at least 1, got 0"),
        ({"packed_buffer_size_bytes": (64 << 20) + 1}, "backend gloo takes at most 67108864, got 67108865"),
        ({"verify": "on"}, "verify: expected one of 'full', 'received', 'off', got 'on'"),
        ({"verify": None}, "verify: expected one of 'full', 'received', 'off', got None"),
        ({"verify": True}, "verify: expected one of 'full', 'received', 'off', got True"),
        ({"num_trainer_ranks": 0}, "num_trainer_ranks: expected at least 1, got 0"),
        ({"session_secret": "ab"}, "session_secret: needs master_address, master_port and num_trainer_ranks"),
        (
            {"session_secret": "secret", "master_address": "a", "master_port": 1, "num_trainer_ranks": 2},
            "session_secret: expected hex digits",
        ),
        (
            {"session_secret": "", "master_address": "a", "master_port": 1, "num_trainer_ranks": 2},
            "session_secret: expected hex digits",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_value_that_cannot_work_is_refused_by_name(fields, text):
    """A field that cannot work is a ConfigurationError, a ValueError, that names field, expected and got."""
    with pytest.raises(ConfigurationError, match=text) as caught:
        GlooTrainerInitInfo(rank=0, **fields)
    assert isinstance(caught.value, ValueError)
    assert caught.value.side == "trainer"


@pytest.mark.parametrize("missing", ["master_address", "master_port", "num_trainer_ranks"])
def test_secret_needs_everything_that_the_ranks_must_agree_on(missing):
    """Trainer ranks that share only a secret must be told where the sender is, and how many they are."""
    fields = {"session_secret": "ab", "master_address": "a", "master_port": 1, "num_trainer_ranks": 2}
    SessionFields(**fields)
    with pytest.raises(ConfigurationError, match="session_secret: needs"):
        SessionFields(**{**fields, missing: None})


@pytest.mark.parametrize(
    "fields",
    [
        {"world_size": 2},
        {"master_port": 1},
        {"master_port": 65535},
        {"timeout_s": 0.1},
        {"packed_buffer_size_bytes": 1},
        {"verify": "received"},
        {"verify": "off"},
    ],
    ids=str,
)
def test_limits_themselves_are_taken(fields):
    """The smallest and largest values that can work are taken as they are."""
    ((name, value),) = fields.items()
    assert getattr(GlooTrainerInitInfo(rank=0, **fields), name) == value
