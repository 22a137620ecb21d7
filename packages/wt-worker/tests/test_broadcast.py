"""Dense broadcast on a worker rank: whole transfers from a root that the test plays."""

import threading
import time
from math import prod
from types import SimpleNamespace

import pytest
import torch

from wt_common import PlanError, TransportError
from wt_common.broadcast import DenseBroadcastInitInfo
from wt_common.digest import digest_bytes
from wt_common.errors import error_from_wire, error_to_wire
from wt_common.packing import plan_groups
from wt_common.session import (
    Abort,
    Committed,
    Credit,
    Ended,
    Enter,
    Failed,
    Finishing,
    Go,
    Installed,
    Metadata,
    Placed,
    Ready,
    StoreSet,
    metadata_digest,
)
from wt_worker import WeightTransferConfig, WeightTransferEngineFactory
from wt_worker.channels.base import Membership
from wt_worker.channels.gloo import GlooChannel
from wt_worker.store import RendezvousStore

WAIT_S = 10
MANY_PIECES = 4096


def name_of(dtype):
    return str(dtype).rpartition(".")[2]


def some_tensor(dtype, shape, seed=0):
    """A tensor of random bytes, which is any value of its dtype, NaNs included."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randint(2 if dtype == torch.bool else 256, (prod(shape) * dtype.itemsize,), generator=generator)
    return flat.to(torch.uint8).view(dtype).reshape(shape)


def bytes_of(tensor):
    """The tensor's bytes; two that are NaN are compared so, too."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def metadata_of(tensors, number=1, roots=()):
    return Metadata(
        round=number,
        names=list(tensors),
        dtype_names=[name_of(tensor.dtype) for tensor in tensors.values()],
        shapes=[list(tensor.shape) for tensor in tensors.values()],
        roots=list(roots),
    )


def digest_of(metadata):
    roots = metadata.roots or [0] * len(metadata.names)
    return metadata_digest(zip(metadata.names, metadata.dtype_names, map(tuple, metadata.shapes), roots, strict=True))


def fill(buffer, group, tensors):
    """Put the group's pieces where they belong, as a root does; between them lies something else."""
    buffer.fill_(0xEE)
    values = list(tensors.values())
    for piece in group.pieces:
        source = bytes_of(values[piece.index])[piece.start : piece.start + piece.num_bytes]
        buffer[piece.offset : piece.offset + piece.num_bytes].copy_(source)
    return buffer[: group.num_bytes]


def assert_same(tensor, expected):
    """Same dtype, shape and bytes."""
    assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
    assert torch.equal(bytes_of(tensor), bytes_of(expected))


# --- whole transfers -------------------------------------------------------------------------------------------


class Root:
    """The trainer's end of one worker's session: a thread that reads, and the broadcasts of all roots."""

    def __init__(self, peer):
        self.peer = peer
        self.changed = threading.Condition()
        self.store = RendezvousStore(self.changed, self._publish)
        self.limit = 0
        self.limits = []  # every credit, in order
        self.messages = []
        self.placed = None  # what the worker said last of its placement
        self.over = False
        self.channels = {}
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _publish(self, message, origin):
        if origin is None:
            self.peer.send(message)

    def _read(self):
        try:
            while True:
                message = self.peer.receive()
                if isinstance(message, StoreSet):
                    self.store.receive(message, origin=self.peer)
                    continue
                with self.changed:
                    if isinstance(message, Credit):
                        self.limit = message.limit
                        self.limits.append(message.limit)
                    else:
                        self.messages.append(message)
                    self.changed.notify_all()
        except EOFError:
            with self.changed:
                self.over = True
                self.changed.notify_all()

    def wait(self, ready):
        with self.changed:
            assert self.changed.wait_for(ready, WAIT_S), self.messages

    def take(self, kind):
        """The next message but credits and keys, which must be a `kind`, or one of several."""
        self.wait(lambda: self.messages)
        message = self.messages.pop(0)
        assert isinstance(message, kind), message
        return message

    def agree(self, metadata, *, epoch=1, **fields):
        """Up to `Go`: the worker knows the metadata. The credit in its `Ready` counts if it expected this `Go`."""
        number = metadata.round
        message = self.take((Ready, Placed))
        if isinstance(message, Ready) and not message.knows_metadata:
            self.peer.send(metadata)
            message = self.take((Ready, Placed))
        if isinstance(message, Placed):
            self.placed, message = message, self.take(Ready)
        assert message.knows_metadata
        self.ready = message
        go = Go(round=number, epoch=epoch, rank=1, world_size=2, remaining_s=WAIT_S, **fields)
        self.limit = message.limit if go.casts == message.casts and not go.received else 0
        self.peer.send(go)

    def channel(self, root, epoch):
        """The channel of one root, who is rank 0 of it."""
        if (root, epoch) not in self.channels:
            self.channels[root, epoch] = GlooChannel(
                Membership(
                    store=self.store,
                    epoch=epoch,
                    root=root,
                    rank=0,
                    world_size=2,
                    address="127.0.0.1",
                    device=torch.device("cpu"),
                    deadline=time.monotonic() + WAIT_S,
                    abandoned=lambda: self.over,
                )
            )
        return self.channels[root, epoch]

    def enter(self, number, group):
        """Let the worker enter the group, once it has room."""
        self.wait(lambda: self.limit > group)
        self.peer.send(Enter(round=number, group=group))

    def transmit(self, info, metadata, tensors, *, epoch=1, stop_at=None):
        """Send all groups, or those before `stop_at`; returned is how many there are."""
        groups = plan_groups(
            [tensor.nbytes for tensor in tensors.values()],
            max_bytes=info.max_group_bytes,
            max_pieces=info.max_group_pieces,
            roots=metadata.roots or None,
        )
        buffer = torch.empty(info.max_group_bytes, dtype=torch.uint8)
        for root in sorted({group.root for group in groups}):
            self.channel(root, epoch)
        for number, group in enumerate(groups[:stop_at]):
            self.enter(metadata.round, number)
            self.channel(group.root, epoch).broadcast([fill(buffer, group, tensors)], time.monotonic() + WAIT_S)
        return len(groups)

    def close(self):
        for channel in self.channels.values():
            channel.close()
        self.peer.hang_up()
        self.reader.join(WAIT_S)


class Worker:
    """An engine around a plain module, its root, and the calls that vLLM would make."""

    def __init__(self, sender, in_thread, tensors, **bounds):
        model = torch.nn.Module()
        for name, tensor in tensors.items():
            model.register_parameter(name, torch.nn.Parameter(torch.zeros_like(tensor), requires_grad=False))
        parallel_config = SimpleNamespace(rank=0, world_size=1, data_parallel_index=0)
        vllm_config = SimpleNamespace(parallel_config=parallel_config, model_config=None, instance_id="e0")
        self.engine = WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(backend="gloo"), vllm_config, torch.device("cpu"), model
        )
        self._in_thread = in_thread
        fields = {"max_group_bytes": 256, "max_group_pieces": MANY_PIECES, "num_buffers": 2, **bounds}
        self.info = sender.info(DenseBroadcastInitInfo, **fields)
        init = in_thread(lambda: self.engine.init_transfer_engine(self.info))
        self.root = Root(sender.accept())
        init.value()

    def update(self, metadata):
        info = {"session": self.info.session, "round": metadata.round, "metadata_digest": digest_of(metadata)}
        self.engine.start_weight_update()
        return self._in_thread(lambda: self.engine.update_weights(info))

    def round(self, tensors, number=1, *, roots=(), epoch=1, **fields):
        """A good round, digested as it was sent; returned are what `Installed` said, and the number of groups."""
        metadata = metadata_of(tensors, number, roots)
        updating = self.update(metadata)
        self.root.agree(metadata, epoch=epoch, **fields)
        num_groups = self.root.transmit(self.info, metadata, tensors, epoch=epoch)
        installed = self.root.take(Installed)
        updating.value()
        finishing = self._in_thread(self.engine.finish_weight_update)
        assert self.root.take(Finishing).digests == [
            digest_bytes(bytes(bytes_of(each).tolist())) for each in tensors.values()
        ]
        self.root.peer.send(Committed(round=number))
        finishing.value()
        return installed, num_groups

    def failed(self, updating):
        """What the worker said of its failure, and what its call raised: (error, touched, exception)."""
        error = error_from_wire(self.root.take(Failed).error)
        touched = self.root.take(Ended).touched
        with pytest.raises(Exception) as caught:  # for the caller to look at
            updating.value()
        return error, touched, caught.value


@pytest.fixture
def make_worker(sender, in_thread):
    """Makes worker ranks; they and their roots end with the test."""
    made = []

    def make(tensors, **bounds):
        made.append(Worker(sender, in_thread, tensors, **bounds))
        return made[-1]

    yield make
    for worker in made:
        worker.engine.shutdown()
        worker.root.close()


@pytest.fixture
def short_ops(monkeypatch):
    """A blocked operation ends soon, so that no test waits for an abandoned one."""
    monkeypatch.setattr("wt_worker.channels.gloo.OP_TIMEOUT_S", 1.0)


TENSORS = {
    "norm": some_tensor(torch.bfloat16, (5,), 1),
    "large": some_tensor(torch.float32, (200,), 2),
    "none": torch.empty(0, 3),
    "flags": some_tensor(torch.bool, (3,), 3),
    "scalar": some_tensor(torch.int64, (), 4),
    "tail": some_tensor(torch.float64, (7, 3), 5),
}


def other(seed):
    """Tensors like `TENSORS`, with other bytes."""
    return {name: some_tensor(value.dtype, value.shape, seed) for name, value in TENSORS.items()}


def assert_holds(worker, tensors):
    for name, parameter in worker.engine.model.named_parameters():
        assert_same(parameter, tensors[name])


@pytest.mark.parametrize(
    ("bounds", "num_groups"),
    [
        ({"max_group_bytes": 1 << 16}, 1),
        ({}, 6),
        ({"num_buffers": 1}, 6),
        ({"num_buffers": 50}, 6),
        ({"max_group_pieces": 1}, 8),
    ],
    ids=["one group", "small groups", "one buffer", "many buffers", "unpacked"],
)
def test_rounds_arrive(make_worker, bounds, num_groups):
    """Whatever the bounds, the model has the sender's bytes after each round, and the worker says how many there were."""
    worker = make_worker(TENSORS, **bounds)
    for number in (1, 2, 3):
        tensors = other(10 * number)
        installed, got = worker.round(tensors, number)
        assert got == num_groups
        assert installed.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
        assert installed.not_synced == []
        assert_holds(worker, tensors)


def test_several_roots_send_their_parts(make_worker):
    """Each trainer rank that holds a part is a root of its own; together they are the model."""
    worker = make_worker(TENSORS)
    for number in (1, 2):
        tensors = other(number)
        worker.round(tensors, number, roots=[0, 0, 0, 2, 2, 0])
        assert_holds(worker, tensors)
    assert set(worker.engine._channels) == {0, 2}


def test_channel_and_buffers_are_kept(make_worker):
    """Good rounds of one epoch use the same group and the same staging memory."""
    worker = make_worker(TENSORS)
    worker.round(other(1), 1)
    channel, (_, inbox) = worker.engine._channels[0], worker.engine._writer_cache.inbox
    worker.round(other(2), 2)
    assert worker.engine._channels[0] is channel
    assert worker.engine._writer_cache.inbox[1] is inbox
    assert 0 < inbox.num_bytes <= 2 * 256


def test_new_epoch_is_a_new_group(make_worker):
    """When the sender says another epoch, the old group is left and the new one joined."""
    worker = make_worker(TENSORS)
    worker.round(other(1), 1, epoch=1)
    channel = worker.engine._channels[0]
    worker.round(other(2), 2, epoch=5)
    assert worker.engine._channels[0] is not channel
    assert channel._group is None
    assert_holds(worker, other(2))


def test_casts_of_the_sender_are_followed(make_worker):
    """Where the sender casts, the bytes on the wire are of the dtype that it names."""
    wide = some_tensor(torch.int8, (6,)).to(torch.float64)
    tensors = {"w": wide, "v": torch.arange(4.0)}
    worker = make_worker({"w": wide.to(torch.bfloat16), "v": tensors["v"]})
    metadata = metadata_of(tensors)
    updating = worker.update(metadata)
    worker.root.agree(metadata, casts={"w": "bfloat16"})
    sent = {**tensors, "w": wide.to(torch.bfloat16)}
    worker.root.transmit(worker.info, metadata, sent)
    assert worker.root.take(Installed).num_bytes == 6 * 2 + 4 * 4
    updating.value()
    assert_holds(worker, sent)


def test_worker_casts_what_the_sender_does_not(make_worker):
    """Where the sender does not cast, the declared dtype arrives and is cast here; the digest is then over what arrived."""
    wide = some_tensor(torch.int8, (6,)).to(torch.float64)
    worker = make_worker({"w": wide.to(torch.float32)})
    worker.round({"w": wide}, received=[0])
    assert_holds(worker, {"w": wide.to(torch.float32)})


def test_worker_gives_credit_for_the_buffers_it_has(make_worker):
    """The sender may be as many groups ahead as fit into the worker's buffers, and no more."""
    worker = make_worker(TENSORS, num_buffers=2)
    metadata = metadata_of(TENSORS)
    updating = worker.update(metadata)
    worker.root.agree(metadata)
    worker.root.transmit(worker.info, metadata, TENSORS, stop_at=2)
    _, inbox = worker.engine._writer_cache.inbox
    first, *expected = sorted(set(inbox.limits[:3]))
    assert expected
    worker.root.wait(lambda: len(worker.root.limits) == len(expected))
    assert worker.root.ready.limit == first > 0
    assert worker.root.limits == expected
    assert 256 < inbox.num_bytes <= 2 * 256
    worker.root.peer.hang_up()
    with pytest.raises(Exception, match="the trainer is gone"):
        updating.value()


def test_first_credit_comes_with_ready(make_worker):
    """A worker that beginning costs nothing has room before it says so: the groups of `Go.entered` are entered at once."""
    worker = make_worker(TENSORS, max_group_bytes=1 << 16)
    metadata = metadata_of(TENSORS)
    updating = worker.update(metadata)
    worker.root.agree(metadata, entered=1)
    assert (worker.root.ready.limit, worker.root.limits) == (1, [])
    sizes = [tensor.nbytes for tensor in TENSORS.values()]
    (group,) = plan_groups(sizes, max_bytes=1 << 16, max_pieces=MANY_PIECES)
    buffer = fill(torch.empty(1 << 16, dtype=torch.uint8), group, TENSORS)
    worker.root.channel(0, 1).broadcast([buffer], time.monotonic() + WAIT_S)
    worker.root.take(Installed)
    updating.value()
    assert_holds(worker, TENSORS)


def test_credit_for_what_was_not_expected(make_worker):
    """Where the sender casts otherwise than `Ready` said, its credit is void: another one comes, and `Ready` has none again."""
    wide = some_tensor(torch.int8, (6,)).to(torch.float64)
    worker = make_worker({"w": wide.to(torch.float32)})
    for number, limit in ((1, 1), (2, 0)):
        worker.round({"w": wide}, number, received=[0])
        assert (worker.root.ready.casts, worker.root.ready.limit) == ({"w": "float32"}, limit)
        assert worker.root.limits == [1] * number
    assert_holds(worker, {"w": wide.to(torch.float32)})


def until_no_receiver(worker, until):
    """Return once no thread of the worker receives."""
    name = f"wt-receive {worker.info.session}"
    until(lambda: name not in {thread.name for thread in threading.enumerate()}, "the receiving thread's end")


# --- failures --------------------------------------------------------------------------------------------------


def abort(number):
    return Abort(round=number, error=error_to_wire(PlanError("no room", side="trainer")))


@pytest.mark.usefixtures("short_ops")
@pytest.mark.parametrize("inside", [False, True], ids=["between groups", "inside a broadcast"])
def test_abort_in_a_transfer_frees_the_worker_at_once(make_worker, until, inside):
    """An abort ends the call promptly, also while the receiving thread is blocked in gloo; what was blocked ends by itself."""
    worker = make_worker(TENSORS)
    worker.round(other(1), 1)
    metadata = metadata_of(TENSORS, 2)
    updating = worker.update(metadata)
    worker.root.agree(metadata)
    worker.root.transmit(worker.info, metadata, TENSORS, stop_at=3)
    if inside:
        worker.root.enter(2, 3)
    started = time.monotonic()
    worker.root.peer.send(abort(2))
    assert worker.root.take(Ended) == Ended(round=2, touched=True)
    with pytest.raises(PlanError, match="no room"):
        updating.value()
    assert time.monotonic() - started < 0.8
    assert (worker.engine._channels, worker.engine._writer_cache.inbox) == ({}, None)
    worker.round(other(3), 3, epoch=2)
    assert_holds(worker, other(3))
    until_no_receiver(worker, until)


@pytest.mark.usefixtures("short_ops")
def test_broken_group_fails_the_round(make_worker):
    """When the root's end of the group is gone, the worker says that the transfer broke, and that bytes were installed."""
    worker = make_worker(TENSORS)
    metadata = metadata_of(TENSORS)
    updating = worker.update(metadata)
    worker.root.agree(metadata)
    worker.root.transmit(worker.info, metadata, TENSORS, stop_at=3)
    worker.root.channels.pop((0, 1)).close()
    worker.root.enter(1, 3)
    error, touched, raised = worker.failed(updating)
    assert (type(error), error.side, touched) == (TransportError, "worker", True)
    assert "gloo: a broadcast of" in error.message
    assert isinstance(raised, TransportError)
    worker.round(other(2), 2, epoch=2)
    assert_holds(worker, other(2))


def test_group_that_nobody_joins_is_given_up_with_the_round(make_worker):
    """Waiting for the root in the rendezvous ends with the sender's abort, before a byte was touched."""
    worker = make_worker(TENSORS)
    metadata = metadata_of(TENSORS)
    updating = worker.update(metadata)
    worker.root.agree(metadata)
    worker.root.wait(lambda: worker.root.limit == 2)
    worker.root.peer.send(abort(1))
    assert worker.root.take(Ended) == Ended(round=1, touched=False)
    with pytest.raises(PlanError, match="no room"):
        updating.value()
    worker.round(other(2), 2, epoch=2)
    assert_holds(worker, other(2))


def test_late_group_of_a_failed_round_is_not_kept(make_worker, until, monkeypatch):
    """A group that is complete only after its round has failed is not brought back into the next round."""
    joining, go_on = threading.Event(), threading.Event()

    def join_late(*args, **kwargs):
        joining.set()
        assert go_on.wait(WAIT_S)
        return SimpleNamespace(close=lambda: None)

    join_late.receives_in_place, join_late.blocks = False, True
    join_late.settings = join_late.versions = dict
    monkeypatch.setattr("wt_worker.backends.broadcast.GlooWeightTransferEngine.channel_class", join_late)
    worker = make_worker(TENSORS)
    metadata = metadata_of(TENSORS)
    updating = worker.update(metadata)
    worker.root.agree(metadata)
    assert joining.wait(WAIT_S)
    worker.root.peer.send(abort(1))
    worker.root.take(Ended)
    with pytest.raises(PlanError):
        updating.value()
    go_on.set()
    until_no_receiver(worker, until)
    assert worker.engine._channels == {}


def test_bug_in_the_receiving_thread_fails_the_round(make_worker, monkeypatch):
    """Whatever is raised on the thread that receives is the round's failure, and is not lost with the thread."""

    def fail(*args, **kwargs):
        raise KeyError("broken on purpose")

    fail.receives_in_place, fail.blocks = False, True
    fail.settings = fail.versions = dict
    monkeypatch.setattr("wt_worker.backends.broadcast.GlooWeightTransferEngine.channel_class", fail)
    worker = make_worker(TENSORS)
    metadata = metadata_of(TENSORS)
    updating = worker.update(metadata)
    worker.root.agree(metadata)
    error, touched, raised = worker.failed(updating)
    assert (type(error), touched, type(raised)) == (TransportError, False, TransportError)
    assert "the receiving thread failed (KeyError: 'broken on purpose')" in error.message
