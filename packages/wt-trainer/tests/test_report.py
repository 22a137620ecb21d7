"""What a round reports."""

import dataclasses
import json

import pytest

from wt_common import Outcome
from wt_trainer import TransferReport, WorkerReport


@pytest.fixture
def report():
    return TransferReport(
        round=3,
        version="v3",
        outcome=Outcome.COMMITTED,
        backend="gloo",
        num_parameters=12,
        num_cast=2,
        num_bytes=5_000_000,
        seconds={"update": 0.02, "total": 0.025},
        workers=(
            WorkerReport(
                engine="a",
                rank=0,
                num_bytes=5_000_000,
                seconds={"receive": 0.01},
                not_synced=["lm_head.weight"],
                not_in_place={"quantized by fp8": ["layers.0.mlp"]},
            ),
            WorkerReport(engine="a", rank=1, num_bytes=5_000_000, seconds={}, not_synced=[]),
        ),
        verify="received",
        ignored=("rotary.inv_freq",),
        unknown=("layers.0.a_log",),
        aliases={"lm_head.weight": "model.embed_tokens.weight"},
        notes=("a cache was not reset",),
    )


def test_report_survives_json(report):
    """A report that travels to another trainer rank is equal there, in type too."""
    arrived = TransferReport.from_dict(json.loads(json.dumps(report.to_dict())))
    assert arrived == report
    assert isinstance(arrived.outcome, Outcome)
    assert all(isinstance(worker, WorkerReport) for worker in arrived.workers)


def test_report_without_notes_or_version_survives_json(report):
    """What is empty by default is so again after the wire."""
    plain = dataclasses.replace(report, notes=(), ignored=(), unknown=(), version=None, workers=())
    assert TransferReport.from_dict(json.loads(json.dumps(plain.to_dict()))) == plain


def test_reading_a_payload_does_not_change_it(report):
    """A payload may be read again."""
    payload = report.to_dict()
    TransferReport.from_dict(payload)
    assert payload == report.to_dict()


def test_rate_is_payload_over_the_whole_round(report):
    """The rate counts payload bytes over the whole round, in 10^9 bytes per second."""
    assert report.gb_per_s == pytest.approx(0.2)


def test_text_is_one_line_with_what_matters(report):
    """A report prints as one line: round, outcome, version, size, workers, time, rate, and what did not get through."""
    whole = dataclasses.replace(report, workers=report.workers[1:], ignored=())
    assert str(whole) == "round 3 committed, version v3: 5.0 MB to 1 worker(s) in 25 ms (0.20 GB/s)"
    text = "round 3 committed, version v3: 5.0 MB to 2 worker(s) in 25 ms (0.20 GB/s)"
    assert str(report) == f"{text}; not synced: lm_head.weight; ignored: rotary.inv_freq"
    many = dataclasses.replace(report, workers=report.workers[1:], ignored=tuple("abcde"))
    assert str(many).endswith("; ignored: a, b, c and 2 more")


def test_what_some_worker_lacks_is_not_synced(report):
    """Names of several workers are there once, in order."""
    more = dataclasses.replace(report.workers[1], not_synced=["norm.weight", "lm_head.weight"])
    both = dataclasses.replace(report, workers=(report.workers[0], more))
    assert both.not_synced == ("lm_head.weight", "norm.weight")


def test_report_cannot_be_changed(report):
    """A report is a record."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.round = 4


def test_unknown_outcome_is_refused(report):
    """A payload with an outcome that does not exist is no report."""
    with pytest.raises(ValueError, match="perhaps"):
        TransferReport.from_dict({**report.to_dict(), "outcome": "perhaps"})
