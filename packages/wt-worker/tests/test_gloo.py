"""Bytes over gloo: every member of a channel is a thread of its own, and all share one rendezvous."""

import os
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from wt_common import RoundTimeoutError, TransportError
from wt_worker.channels.base import Membership
from wt_worker.channels.gloo import GlooChannel
from wt_worker.store import RendezvousStore

WAIT_S = 10


def soon():
    return time.monotonic() + WAIT_S


def never():
    return False


@pytest.fixture
def store():
    """One rendezvous for all members, with nobody else to publish to."""
    return RendezvousStore(threading.Condition(), lambda message, origin: None)


@pytest.fixture
def short_ops(monkeypatch):
    """An operation may take half a second, so that an abandoned one ends with its test."""
    monkeypatch.setattr("wt_worker.channels.gloo.OP_TIMEOUT_S", 0.5)


@pytest.fixture
def join(store, in_thread):
    """Makes the channels of all members at once; they close with the test."""
    channels = []

    def make(world_size=2, *, epoch=1, root=0, ranks=None, deadline=None, abandoned=never):
        options = {
            "epoch": epoch,
            "root": root,
            "world_size": world_size,
            "address": "127.0.0.1",
            "device": torch.device("cpu"),
            "deadline": deadline or soon(),
            "abandoned": abandoned,
        }
        ranks = range(world_size) if ranks is None else ranks
        joining = [
            in_thread(lambda rank=rank: GlooChannel(Membership(store=store, rank=rank, **options))) for rank in ranks
        ]
        made = [each.value() for each in joining]
        channels.extend(made)
        return made

    yield make
    for channel in channels:
        channel.close()


@pytest.fixture
def broadcast(in_thread):
    """Has every channel enter a broadcast of its buffer at once."""

    def run(channels, buffers):
        running = [
            in_thread(lambda channel=channel, buffer=buffer: channel.broadcast([buffer], soon()))
            for channel, buffer in zip(channels, buffers, strict=True)
        ]
        for each in running:
            each.value()

    return run


def some_bytes(num_bytes, seed=0):
    return torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_member_gets_what_the_root_has(join, broadcast, world_size):
    """A broadcast fills every receiver's buffer with the root's bytes, of any size, one after the other."""
    channels = join(world_size)
    for seed, num_bytes in enumerate((1, 7, 64, 1 << 20, 3)):
        sent = some_bytes(num_bytes, seed)
        buffers = [sent.clone(), *(torch.zeros(num_bytes, dtype=torch.uint8) for _ in channels[1:])]
        broadcast(channels, buffers)
        assert all(torch.equal(buffer, sent) for buffer in buffers)


def test_receiver_may_fill_a_part_of_its_buffer(join, broadcast):
    """A slice of a staging buffer is filled, and the rest of it is left alone."""
    channels = join()
    staging = torch.full((100,), 9, dtype=torch.uint8)
    broadcast(channels, [some_bytes(40), staging[30:70]])
    assert torch.equal(staging[30:70], some_bytes(40))
    assert staging[:30].eq(9).all()
    assert staging[70:].eq(9).all()


def test_several_roots_do_not_mix(join, broadcast):
    """Trainer ranks that each send have channels of their own in one epoch; what one sends, the other's does not carry."""
    first, second = join(root=0), join(root=3)
    received = [torch.zeros(50, dtype=torch.uint8) for _ in range(2)]
    broadcast(
        [*second, *first],
        [some_bytes(50, 1), received[1], some_bytes(50, 2), received[0]],
    )
    assert torch.equal(received[1], some_bytes(50, 1))
    assert torch.equal(received[0], some_bytes(50, 2))


def test_next_epoch_is_a_new_group(join, broadcast):
    """After a channel is given up its members meet again under a new epoch, of another size too."""
    for channel in join(2, epoch=1):
        channel.close()
    channels = join(3, epoch=2)
    buffers = [some_bytes(10), *(torch.zeros(10, dtype=torch.uint8) for _ in range(2))]
    broadcast(channels, buffers)
    assert all(torch.equal(buffer, some_bytes(10)) for buffer in buffers)


def listening():
    """Where this process listens."""
    found = set()
    for name in sockets():
        with socket.socket(fileno=os.dup(int(name))) as copy:
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(copy.getsockname())
    return found


def sockets():
    """The descriptors of this process's sockets."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that lists them is gone
            if str(entry.readlink()).startswith("socket:"):
                found.append(entry.name)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_strangers_at_gloos_ports_disturb_no_group_that_is_made(join, broadcast):
    """Each costs a descriptor for as long as the group lives, whatever it says: gloo's ports stay open and take anybody."""
    before = listening()
    channels = join()
    ports = listening() - before
    assert len(ports) == len(channels)
    own = len(sockets())
    strangers = [socket.create_connection(port, timeout=WAIT_S) for port in ports for _ in range(5)]
    for index, stranger in enumerate(strangers):
        stranger.sendall(bytes(index % 3 * 8))
    received = torch.zeros(50, dtype=torch.uint8)
    broadcast(channels, [some_bytes(50), received])
    assert torch.equal(received, some_bytes(50))
    for stranger in strangers:
        stranger.close()
    broadcast(channels, [some_bytes(50, 1), received])
    assert torch.equal(received, some_bytes(50, 1))
    assert len(sockets()) == own + len(strangers), "gloo lets go of strangers: say so in docs/security.md"
    for channel in channels:
        channel.close()
    assert listening() == before
    assert len(sockets()) < own


def test_capabilities_are_attributes():
    """What gloo cannot do is said by the class, so that an engine need not know the channel's name."""
    assert GlooChannel.receives_in_place is False
    assert GlooChannel.blocks is True


# --- what goes wrong -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("buffer", "got"),
    [
        (torch.zeros(4), "torch.float32 on cpu"),
        (torch.zeros(8, dtype=torch.uint8)[::2], "torch.uint8 on cpu"),
        (torch.zeros(4, dtype=torch.uint8, device="meta"), "torch.uint8 on meta"),
    ],
    ids=["dtype", "strided", "device"],
)
def test_wrong_buffer_is_refused(join, broadcast, buffer, got):
    """Only contiguous bytes on the CPU are taken; a refusal leaves the channel as it was."""
    channels = join()
    with pytest.raises(TransportError, match=f"expected a contiguous uint8 CPU tensor, got {got}"):
        channels[1].broadcast([buffer], soon())
    received = torch.zeros(4, dtype=torch.uint8)
    broadcast(channels, [some_bytes(4), received])
    assert torch.equal(received, some_bytes(4))


def test_deadline_that_has_passed_is_not_entered(join):
    """After the round's deadline nobody enters, at once."""
    started = time.monotonic()
    with pytest.raises(RoundTimeoutError, match="deadline passed before the broadcast was entered"):
        join()[1].broadcast([torch.zeros(4, dtype=torch.uint8)], time.monotonic() - 1)
    assert time.monotonic() - started < 5


def test_missing_root_costs_the_rounds_rest(join):
    """A receiver that is alone in a broadcast gives up at the round's deadline, if that is sooner than the timeout."""
    _, receiver = join()
    started = time.monotonic()
    with pytest.raises(TransportError, match="a broadcast of 4 bytes failed"):
        receiver.broadcast([torch.zeros(4, dtype=torch.uint8)], started + 0.2)
    assert time.monotonic() - started < 3


@pytest.mark.usefixtures("short_ops")
def test_missing_root_costs_one_timeout(join):
    """A receiver that is alone gives up at the operation's timeout, however far the round's deadline is."""
    _, receiver = join()
    started = time.monotonic()
    with pytest.raises(TransportError, match="a broadcast of 4 bytes failed"):
        receiver.broadcast([torch.zeros(4, dtype=torch.uint8)], soon())
    assert 0.4 < time.monotonic() - started < 5


def test_root_that_is_gone_is_noticed(join):
    """A root that has left its group ends its receivers' broadcasts."""
    root, receiver = join()
    root.close()
    started = time.monotonic()
    with pytest.raises(TransportError):
        receiver.broadcast([torch.zeros(4, dtype=torch.uint8)], started + 1)
    assert time.monotonic() - started < 5


def test_closed_channel_is_refused(join):
    """Closing is final, and may be done again."""
    channel = join()[1]
    channel.close()
    channel.close()
    with pytest.raises(TransportError, match="the channel is closed"):
        channel.broadcast([torch.zeros(4, dtype=torch.uint8)], soon())


@pytest.mark.usefixtures("short_ops")
def test_closing_does_not_wait_for_a_blocked_operation(join, in_thread):
    """Whoever closes goes on at once, while the abandoned operation ends by itself at its timeout."""
    _, receiver = join()
    entered = threading.Event()

    class Group:
        """The receiver's group, which says when the operation has begun."""

        def __init__(self, group):
            self._group = group

        def broadcast(self, *args):
            work = self._group.broadcast(*args)
            entered.set()
            return work

    receiver._group = Group(receiver._group)
    blocked = in_thread(lambda: receiver.broadcast([torch.zeros(4, dtype=torch.uint8)], soon()))
    assert entered.wait(WAIT_S)
    started = time.monotonic()
    receiver.close()
    assert time.monotonic() - started < 0.3
    with pytest.raises(TransportError):
        blocked.value()


# --- joining ---------------------------------------------------------------------------------------------------


def test_missing_member_costs_the_deadline(join):
    """A member that is alone waits for the others to the round's deadline and no longer."""
    started = time.monotonic()
    with pytest.raises(RoundTimeoutError, match="nobody published '0/0/0' of communicator 1 in time"):
        join(ranks=[1], deadline=started + 0.3)
    assert 0.2 < time.monotonic() - started < 5


def test_abandoned_join_ends_at_once(store, in_thread):
    """When the round has failed nobody goes on waiting for a member that will not come."""
    failed = threading.Event()
    options = {"epoch": 1, "root": 0, "rank": 1, "world_size": 2, "address": "127.0.0.1", "device": torch.device("cpu")}
    joining = in_thread(
        lambda: GlooChannel(Membership(store=store, deadline=soon(), abandoned=failed.is_set, **options))
    )
    with store._changed:
        failed.set()
        store._changed.notify_all()
    started = time.monotonic()
    with pytest.raises(RoundTimeoutError, match="nobody published"):
        joining.value()
    assert time.monotonic() - started < 5
