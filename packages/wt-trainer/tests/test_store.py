"""The rendezvous of a communicator."""

import threading
import time

import pytest

from wt_common import RoundTimeoutError
from wt_common.session import StoreSet, decode_message, encode_message
from wt_trainer.store import RendezvousStore


def soon():
    return time.monotonic() + 10


@pytest.fixture
def published():
    """What a store has published, as (message, origin)."""
    return []


@pytest.fixture
def store(published):
    return RendezvousStore(threading.Condition(), lambda message, origin: published.append((message, origin)))


def test_what_is_set_can_be_read(store):
    """Any bytes come back as they were, as often as they are read."""
    value = bytes(range(256))
    store.set(1, "0/1", value)
    assert store.get(1, "0/1", soon()) == value
    assert store.get(1, "0/1", soon()) == value
    store.set(1, "empty", b"")
    assert store.get(1, "empty", soon()) == b""


def test_set_is_published_with_no_origin(store, published):
    """A key that this process sets goes to everybody."""
    store.set(3, "k", b"\x00\x01")
    assert published == [(StoreSet(epoch=3, key="k", value="AAE="), None)]


def test_received_key_is_passed_on_with_its_origin(store, published):
    """A key that a peer has set is kept and passed on, and whoever passes it on knows whom to leave out."""
    origin = object()
    message = StoreSet(epoch=3, key="k", value="AAE=")
    store.receive(message, origin=origin)
    assert store.get(3, "k", soon()) == b"\x00\x01"
    assert published == [(message, origin)]


def test_two_stores_meet_over_the_wire():
    """What one side sets the other reads, through the encoded message."""
    other = RendezvousStore(threading.Condition(), lambda message, origin: None)

    def publish(message, origin):
        other.receive(decode_message(encode_message(message)[4:]), origin=None)

    RendezvousStore(threading.Condition(), publish).set(1, "k", b"\xff")
    assert other.get(1, "k", soon()) == b"\xff"


def test_get_waits_until_the_key_is_set(store, in_thread):
    """A reader that is early waits, and is woken by the key it waits for and not by another."""
    reader = in_thread(lambda: store.get(1, "k", soon()))
    store.set(1, "other", b"o")
    store.set(1, "k", b"v")
    assert reader.value() == b"v"


def test_get_names_the_key_at_its_deadline(store):
    """A key that nobody sets is a RoundTimeoutError that names key and communicator, on time."""
    store.set(1, "other", b"o")
    started = time.monotonic()
    with pytest.raises(RoundTimeoutError, match="nobody published 'k' of communicator 1 in time"):
        store.get(1, "k", started + 0.1)
    assert 0.1 <= time.monotonic() - started < 5


def test_get_after_its_deadline_returns_what_is_there(store):
    """A key that is there needs no time; one that is not fails at once."""
    store.set(1, "k", b"v")
    assert store.get(1, "k", time.monotonic() - 1) == b"v"
    started = time.monotonic()
    with pytest.raises(RoundTimeoutError):
        store.get(1, "none", started - 1)
    assert time.monotonic() - started < 5


def test_get_ends_when_it_is_abandoned(in_thread):
    """A reader that is abandoned does not wait for its deadline, once the condition is notified; a key that is there counts."""
    changed, state = threading.Condition(), []
    store = RendezvousStore(changed, lambda message, origin: None)
    reader = in_thread(lambda: store.get(1, "k", soon(), lambda: bool(state)))
    with changed:
        state.append("abandoned")
        changed.notify_all()
    with pytest.raises(RoundTimeoutError, match="'k'"):
        reader.value()
    store.set(1, "k", b"v")
    assert store.get(1, "k", soon(), lambda: True) == b"v"


def test_has_does_not_wait(store):
    """`has` answers at once, for the epoch asked about."""
    assert not store.has(1, "k")
    store.set(1, "k", b"v")
    assert store.has(1, "k")
    assert not store.has(2, "k")
    assert not store.has(1, "other")


def test_new_epoch_forgets_the_old_one(store):
    """The first key of a new communicator drops what was set for the one before."""
    store.set(1, "k", b"old")
    store.set(2, "other", b"new")
    assert not store.has(1, "k")
    assert not store.has(2, "k")


def test_late_member_of_an_old_communicator_is_never_read(store):
    """What comes late for an abandoned communicator neither replaces nor drops a key of the new one."""
    store.set(2, "k", b"new")
    store.receive(StoreSet(epoch=1, key="k", value="AAAA"), origin=object())
    store.receive(StoreSet(epoch=1, key="late", value="AAAA"), origin=object())
    assert store.get(2, "k", soon()) == b"new"
    assert not store.has(2, "late")


def test_publishing_leaves_the_lock_free(in_thread):
    """While a key is on its way to a slow peer, everybody else goes on: publishing does not hold the session's lock."""
    changed = threading.Condition()
    publishing, go_on = threading.Event(), threading.Event()

    def publish(message, origin):
        publishing.set()
        assert go_on.wait(10)

    store = RendezvousStore(changed, publish)
    setting = in_thread(lambda: store.set(1, "k", b"v"))
    assert publishing.wait(10)
    assert in_thread(lambda: store.get(1, "k", soon())).value() == b"v"
    go_on.set()
    setting.value()
