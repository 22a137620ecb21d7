"""The error tree and its wire form."""

import json
import pickle

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import wt_common
from wt_common import FailureCode, Outcome, Phase, Side, WeightTransferError
from wt_common.errors import error_from_wire, error_to_wire

# Class, the builtin that the documented API promises, and the code that crosses the wire.
TREE = [
    (wt_common.AgreementError, RuntimeError, "agreement"),
    (wt_common.BackendUnavailableError, RuntimeError, "backend_unavailable"),
    (wt_common.ConfigurationError, ValueError, "configuration"),
    (wt_common.IntegrityError, RuntimeError, "integrity"),
    (wt_common.PeerLostError, RuntimeError, "peer_lost"),
    (wt_common.PlanError, ValueError, "plan"),
    (wt_common.PoisonedError, RuntimeError, "poisoned"),
    (wt_common.RoundTimeoutError, TimeoutError, "timeout"),
    (wt_common.SourceModeError, TypeError, "source_mode"),
    (wt_common.StaleSessionError, RuntimeError, "stale_session"),
    (wt_common.TransportError, RuntimeError, "transport"),
]
CLASSES = [cls for cls, _, _ in TREE]
ATTRIBUTES = {
    "side": Side.WORKER,
    "rank": 3,
    "engine": "engine-1",
    "phase": Phase.UPDATE,
    "param": "layers.0.weight",
    "backend": "gloo",
    "round": 7,
    "elapsed_s": 1.5,
    "outcome": Outcome.POISONED,
}

json_values = st.one_of(
    st.sampled_from([None, True, "", "worker", "update", "poisoned", "plan", "x", "\ud800", [], [None], {}, {"a": []}]),
    st.integers(),
    st.floats(),
)


def over_the_wire(exc):
    return error_from_wire(json.loads(json.dumps(error_to_wire(exc))))


@pytest.mark.parametrize(("cls", "builtin", "code"), TREE, ids=lambda value: getattr(value, "__name__", value))
def test_class_is_ours_and_the_documented_builtin(cls, builtin, code):
    """Each class is a WeightTransferError and the builtin that the documented API promises, with a code of its own."""
    assert issubclass(cls, WeightTransferError)
    assert issubclass(cls, builtin)
    assert cls.code == code


def test_tree_is_complete():
    """Every public error class and every failure code is in this file's table, once."""
    public = {value for value in vars(wt_common).values() if isinstance(value, type) and issubclass(value, Exception)}
    assert public == {*CLASSES, WeightTransferError}
    assert sorted(code for _, _, code in TREE) == sorted(FailureCode)


@pytest.mark.parametrize("cls", CLASSES)
def test_wire_keeps_class_message_and_all_attributes(cls):
    """An error arrives on the other side as the same class, with the same message and every attribute."""
    arrived = over_the_wire(cls("what broke", **ATTRIBUTES))
    assert type(arrived) is cls
    assert arrived.message == "what broke"
    assert {name: getattr(arrived, name) for name in ATTRIBUTES} == ATTRIBUTES


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_wire_keeps_each_attribute_alone(name):
    """An attribute crosses the wire whether or not the others are set, and what is unset stays unset."""
    arrived = over_the_wire(wt_common.PlanError("x", **{name: ATTRIBUTES[name]}))
    assert {each: getattr(arrived, each) for each in ATTRIBUTES} == {
        **dict.fromkeys(ATTRIBUTES),
        name: ATTRIBUTES[name],
    }


def test_enumerated_attributes_are_enumerations_after_the_wire():
    """`side`, `phase` and `outcome` are the enumerations again on the other side, not only equal strings."""
    arrived = over_the_wire(wt_common.TransportError("x", **ATTRIBUTES))
    assert isinstance(arrived.side, Side)
    assert isinstance(arrived.phase, Phase)
    assert isinstance(arrived.outcome, Outcome)


@pytest.mark.parametrize("zero", [{"rank": 0}, {"round": 0}, {"elapsed_s": 0.0}, {"engine": ""}], ids=str)
def test_wire_keeps_values_that_are_false(zero):
    """Zero and the empty string are values: only None is left out."""
    ((name, value),) = zero.items()
    assert getattr(over_the_wire(wt_common.TransportError("x", **zero)), name) == value


@pytest.mark.parametrize("cls", CLASSES)
def test_subclass_arrives_as_the_class_of_its_code(cls):
    """A side's private subclass arrives as the public class that its code stands for."""
    private = type("PrivateError", (cls,), {})
    assert type(over_the_wire(private("x"))) is cls


def test_foreign_exception_becomes_transport_with_its_name():
    """An exception that is not ours arrives as TransportError, its class name in front of its text."""
    arrived = over_the_wire(KeyError("weight"))
    assert type(arrived) is wt_common.TransportError
    assert arrived.message == "KeyError: 'weight'"
    assert arrived.attributes() == {}


def test_unknown_code_becomes_the_base_class():
    """A newer peer's code arrives as WeightTransferError, with its message and the attributes that this side knows."""
    arrived = error_from_wire({"code": "gravity", "message": "fell", "rank": 2, "altitude": 9})
    assert type(arrived) is WeightTransferError
    assert (arrived.message, arrived.rank) == ("fell", 2)


def test_empty_payload_says_that_there_was_no_message():
    """A payload without anything is still an error with a text."""
    arrived = error_from_wire({})
    assert type(arrived) is WeightTransferError
    assert "no message" in str(arrived)


@pytest.mark.parametrize("bad", [{"side": "moon"}, {"phase": 4}, {"outcome": []}, {"elapsed_s": "long"}], ids=str)
def test_bad_attributes_do_not_cost_class_and_message(bad):
    """A payload whose attributes are unreadable keeps its class and message."""
    arrived = error_from_wire({"code": "plan", "message": "no room", **bad})
    assert type(arrived) is wt_common.PlanError
    assert arrived.message == "no room"
    assert str(arrived) == "no room"


@given(st.fixed_dictionaries({}, optional=dict.fromkeys([*ATTRIBUTES, "code", "message", "else"], json_values)))
@example({"elapsed_s": 10**400})
def test_any_json_object_is_an_error_that_can_be_printed_and_passed_on(payload):
    """Whatever object a peer sends as its error, this side has an error with a text that goes over the wire again."""
    error = error_from_wire(payload)
    assert isinstance(error, WeightTransferError)
    assert isinstance(str(error), str)
    json.dumps(error_to_wire(error))


def test_message_is_cut_to_fit_a_frame():
    """The longest text stays within a few thousand characters on the wire, its beginning kept."""
    for exc in (wt_common.TransportError("start " + "x" * 10**6), ValueError("x" * 10**6)):
        message = error_to_wire(exc)["message"]
        assert len(message) <= 4000
        assert message.startswith(("start ", "ValueError: x"))


def test_payload_is_not_changed_by_reading_it():
    """Reading a payload leaves it as it was: it may be read again."""
    payload = error_to_wire(wt_common.PlanError("x", **ATTRIBUTES))
    before = dict(payload)
    error_from_wire(payload)
    assert payload == before


def test_text_ends_with_the_attributes_that_are_set():
    """The text is the message and, in brackets, what is known; a message alone stands alone."""
    error = wt_common.PlanError("no room", side="trainer", rank=0, elapsed_s=1.23456)
    assert str(error) == "no room [side trainer, rank 0, elapsed_s 1.235]"
    assert str(wt_common.PlanError("no room")) == "no room"


def test_fill_sets_only_what_is_unset():
    """An outer layer adds what an inner one did not know, and never overwrites what it did."""
    error = wt_common.TransportError("x", rank=0)
    assert error.fill(rank=5, round=2) is error
    assert (error.rank, error.round) == (0, 2)


def test_fill_refuses_an_attribute_that_does_not_exist():
    """A misspelled attribute is an error where it is written, not a silent extra."""
    with pytest.raises(AttributeError):
        wt_common.TransportError("x").fill(rnak=1)


@pytest.mark.parametrize("bad", [{"side": "moon"}, {"phase": "lunch"}, {"outcome": "fine"}], ids=str)
def test_enumerated_attributes_refuse_other_values(bad):
    """`side`, `phase` and `outcome` take their enumeration's values only."""
    with pytest.raises(ValueError, match=next(iter(bad.values()))):
        wt_common.TransportError("x", **bad)


@pytest.mark.parametrize("cls", [WeightTransferError, *CLASSES])
def test_pickle_keeps_everything(cls):
    """An error survives pickling, which is how it crosses an actor's boundary."""
    error = cls("what broke", **ATTRIBUTES)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert (copy.message, copy.attributes(), str(copy)) == (error.message, error.attributes(), str(error))
