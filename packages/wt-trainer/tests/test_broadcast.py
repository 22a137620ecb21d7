"""Dense broadcast from one trainer rank and from two: real gloo groups, to workers that are sockets of the test's."""

import gc
import queue
import socket
import threading
import time
import weakref
from functools import cached_property
from math import prod

import pytest
import torch

from wt_common import (
    AgreementError,
    BackendUnavailableError,
    ConfigurationError,
    IntegrityError,
    Outcome,
    PlanError,
    SourceModeError,
    WeightTransferError,
)
from wt_common.digest import digest_bytes
from wt_common.errors import error_from_wire
from wt_common.packing import plan_groups
from wt_common.session import (
    Abort,
    AskState,
    Committed,
    Credit,
    DigestedAgain,
    Ended,
    Enter,
    Finishing,
    Go,
    Held,
    Installed,
    Metadata,
    Placed,
    Ready,
    Sent,
    State,
    StoreSet,
)
from wt_trainer import GlooTrainerInitInfo, NCCLTrainerInitInfo, ParamMeta, WeightSource
from wt_trainer.backends.broadcast import GlooTrainerWeightTransferEngine, NCCLTrainerWeightTransferEngine
from wt_trainer.channels.base import Membership
from wt_trainer.channels.gloo import GlooChannel
from wt_trainer.follower import FollowerSession
from wt_trainer.store import RendezvousStore

WAIT_S = 10
# Of two trainer ranks: a large parameter that is cut, a small one, one without elements, and one that is cast, from either.
OWNERS = {
    "a": (torch.float32, (700,), None),
    "b": (torch.int8, (3,), (1,)),
    "c": (torch.bfloat16, (0, 4), (1, 0)),
    "d": (torch.float32, (5, 3), (1,)),
    "e": (torch.bfloat16, (2, 2), None),
    "f": (torch.int16, (0,), (1,)),
    "g": (torch.float32, (900,), (1,)),
}


class Source(WeightSource):
    """Rank `rank`'s view of `OWNERS`, or of those named."""

    yields_stable = True

    def __init__(self, rank=0, names=tuple(OWNERS)):
        self.rank = rank
        self.names = names
        self.tensors = {
            name: torch.arange(1, 1 + prod(shape)).reshape(shape).to(dtype)
            for name, (dtype, shape, _) in OWNERS.items()
            if name in names
        }

    @cached_property
    def metadata(self):
        return [ParamMeta(name, *OWNERS[name][:2], owners=OWNERS[name][2]) for name in self.names]

    def iter_full(self):
        for name in self.owned_names(self.rank):
            yield name, self.tensors[name]


class Address:
    """What a peer needs to know of a session, from an init info."""

    def __init__(self, init_info):
        self.port = init_info["session_port"]
        self.secret = init_info["session_secret"]
        self.id = init_info["session"]


class Worker:
    """One worker rank: it receives all groups, and digests what has come."""

    def __init__(self, peer, init_info):
        self.peer = peer
        self.init_info = init_info
        self.casts = {"d": "bfloat16"}
        self.limit = 0  # of the credit in its `Ready`
        self.placed = {}
        self.channels = {}
        self.inbox = queue.Queue()
        self.changed = threading.Condition()
        self.store = RendezvousStore(self.changed, self._publish)
        threading.Thread(target=self._read, daemon=True).start()

    def _publish(self, message, origin):
        if origin is None:
            self.peer.send(message)

    def _read(self):
        try:
            while True:
                message = self.peer.receive()
                if isinstance(message, StoreSet):
                    self.store.receive(message, origin=self)
                elif isinstance(message, AskState):
                    self.peer.send(State(round=message.round, open=False, poisoned=False))
                elif not isinstance(message, Held):
                    if isinstance(message, Abort):
                        self.peer.send(Ended(round=message.round, touched=True))
                    self.inbox.put(message)
        except (EOFError, OSError):
            self.inbox.put(None)

    def take(self, kind):
        message = self.inbox.get(timeout=WAIT_S)
        if isinstance(message, Abort):
            raise error_from_wire(message.error)
        assert isinstance(message, kind), message
        return message

    def update(self, info):
        number = info["round"]
        self.peer.send(Ready(round=number, knows_metadata=False))
        metadata = self.take(Metadata)
        casts = {name: dtype for name, dtype in self.casts.items() if name in metadata.names}
        count = len(metadata.names)
        placed = {"takes": "a" * count, "digested": "r" * count, "parts": [], "not_in_place": {}, **self.placed}
        self.peer.send(Placed(round=number, **placed))
        self.peer.send(Ready(round=number, knows_metadata=True, casts=casts, limit=self.limit))
        self.go = go = self.take(Go)
        dtypes = [go.casts.get(*pair) for pair in zip(metadata.names, metadata.dtype_names, strict=True)]
        sizes = [
            prod(shape) * getattr(torch, dtype).itemsize for shape, dtype in zip(metadata.shapes, dtypes, strict=True)
        ]
        self.names, self.received = metadata.names, [bytearray(size) for size in sizes]
        groups = plan_groups(
            sizes,
            max_bytes=self.init_info["max_group_bytes"],
            max_pieces=self.init_info["max_group_pieces"],
            roots=metadata.roots,
        )
        deadline = time.monotonic() + WAIT_S
        for root in sorted({group.root for group in groups} - set(self.channels)):  # no round fails and another follows
            self.channels[root] = GlooChannel(
                Membership(
                    store=self.store,
                    epoch=go.epoch,
                    root=root,
                    rank=go.rank,
                    world_size=go.world_size,
                    address="127.0.0.1",
                    device=torch.device("cpu"),
                    deadline=deadline,
                    abandoned=lambda: False,
                )
            )
        if self.limit < len(groups) or go.casts != casts or go.received:
            self.peer.send(Credit(round=number, limit=len(groups)))
        for index, group in enumerate(groups):
            assert index < go.entered or self.take(Enter).group == index
            buffer = torch.zeros(group.num_bytes, dtype=torch.uint8)
            self.channels[group.root].broadcast([buffer], deadline)
            for piece in group.pieces:
                part = bytes(buffer[piece.offset : piece.offset + piece.num_bytes].tolist())
                self.received[piece.index][piece.start : piece.start + piece.num_bytes] = part
        self.peer.send(Installed(round=number, num_bytes=sum(sizes), seconds={}, not_synced=[]))

    def finish(self, number):
        is_off = self.init_info["verify"] == "off"
        digests = [] if is_off else [digest_bytes(bytes(data)) for data in self.received]
        self.peer.send(Finishing(round=number, digests=digests))
        self.take(Committed)

    def close(self):
        for channel in self.channels.values():
            channel.close()


class Client:
    """The four calls, to one worker; `between` is called between update and finish, with the worker."""

    between = staticmethod(lambda worker: None)

    def __init__(self, join):
        self.join = join
        self.worker = None

    def init_weight_transfer_engine(self, init_info):
        self.worker = Worker(self.join(Address(init_info)), init_info)

    def start_weight_update(self):
        pass

    def update_weights(self, update_info):
        self.round = update_info["round"]
        self.worker.update(update_info)

    def finish_weight_update(self, weight_version=None):
        self.between(self.worker)
        self.worker.finish(self.round)


@pytest.fixture
def client(join):
    client = Client(join)
    yield client
    if client.worker is not None:
        client.worker.close()


@pytest.fixture
def connect(client, in_thread):
    """Connects as many engines as there are sources, on trainer ranks from 0; they shut down with the test."""
    engines = []

    def make(*sources, verify=("full", "full"), **fields):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        infos = [
            GlooTrainerInitInfo(
                "127.0.0.1",
                port,
                packed_buffer_size_bytes=1000,
                rank=rank,
                timeout_s=WAIT_S,
                session_secret="ab" * 32,
                num_trainer_ranks=len(sources),
                verify=verify[rank],
                **fields,
            )
            for rank in range(len(sources))
        ]
        begun = [
            in_thread(
                lambda info=info, source=source: GlooTrainerWeightTransferEngine.trainer_init(
                    info, client=client, source=source
                )
            )
            for info, source in zip(infos, sources, strict=True)
        ]
        engines.extend(each.value() for each in begun)
        return engines

    yield make
    for engine in engines:
        engine.shutdown()


@pytest.fixture
def send(in_thread):
    """One round on all engines at once: what each returned, or raised."""

    def run(engines):
        def result(engine):
            try:
                return engine.send_weights()
            except Exception as exc:
                return exc

        return [each.value() for each in [in_thread(lambda engine=engine: result(engine)) for engine in engines]]

    return run


@pytest.fixture
def said(monkeypatch):
    """Every `Sent` of another trainer rank."""
    messages, usual = [], FollowerSession.send

    def record(self, message):
        if isinstance(message, Sent):
            messages.append(message)
        usual(self, message)

    monkeypatch.setattr(FollowerSession, "send", record)
    return messages


def sent_bytes(source, casts=("d",)):
    tensors = [tensor.to(torch.bfloat16) if name in casts else tensor for name, tensor in source.tensors.items()]
    return [bytes(tensor.reshape(-1).view(torch.uint8).tolist()) for tensor in tensors]


def test_bytes_of_one_sender_arrive_and_are_verified(client, connect, send):
    """A round of a trainer with one rank: bytes as they were, the digests too, round after round."""
    names = ("a", "e")
    engines = connect(Source(names=names))
    for number in (1, 2):
        (report,) = send(engines)
        assert (report.round, report.outcome, report.verify) == (number, Outcome.COMMITTED, "full")
        assert client.worker.received == sent_bytes(Source(names=names))


def test_each_rank_sends_and_digests_what_it_is_the_root_of(client, connect, send):
    """Two data senders: all bytes arrive, cut, packed or cast; each sender's digests are compared, and both report the same."""
    engines = connect(Source(0), Source(1))
    for _ in range(2):
        reports = send(engines)
        assert reports[0] == reports[1]
        assert (reports[0].outcome, reports[0].num_cast) == (Outcome.COMMITTED, 1)
        assert client.worker.received == sent_bytes(Source())


def test_other_rank_posts_the_digests_of_its_own(connect, send, said):
    """One message, with the digests of what it is the root of in the order of the metadata; 0 for what has no elements."""
    send(connect(Source(0), Source(1)))
    data = dict(zip(OWNERS, sent_bytes(Source()), strict=True))
    assert said == [Sent(round=1, digests=[digest_bytes(data[name]) for name in "bdfg"])]
    assert said[0].digests[2] == 0


def test_rank_that_sends_nothing_has_nothing_to_say(connect, send, said):
    """A rank that is the root of nothing posts no digests, and the verdict does not wait for any."""
    reports = send(connect(Source(0, ("a", "e")), Source(1, ("a", "e"))))
    assert [report.outcome for report in reports] == [Outcome.COMMITTED] * 2
    assert said == []


def test_sender_that_sends_nothing_keeps_the_communicators(client, connect, send):
    """Where every parameter is another rank's, a round makes no new communicators; one after a failure does."""
    engines = connect(Source(0, ("b", "d")), Source(1, ("b", "d")))
    epochs, channels = [], []
    for _ in range(2):
        assert [report.outcome for report in send(engines)] == [Outcome.COMMITTED] * 2
        epochs.append(client.worker.go.epoch)
        channels.append(engines[1]._channel)
    assert epochs[0] == epochs[1]
    assert channels[0] is channels[1] is not None
    engines[0]._end_transfer(failed=True)
    client.worker.channels.clear()  # as a worker does when the epoch is new
    assert [report.outcome for report in send(engines)] == [Outcome.COMMITTED] * 2
    assert client.worker.go.epoch == epochs[0] + 1


class Gathering(Source):
    """Yields tensors that nobody else holds, as gathered ones are; `alive` are those that somebody holds."""

    fails = False

    def __init__(self, rank=0, names=("a", "b", "d", "e")):
        super().__init__(rank, names)
        self.alive = weakref.WeakSet()

    def iter_full(self):
        for name in self.owned_names(self.rank):
            tensor = self.tensors[name].clone()
            self.alive.add(tensor)
            yield name, tensor
            if self.fails:
                raise RuntimeError("broken on purpose")
            del tensor


def test_gathered_parameters_are_let_go_with_the_round(connect, send, until):
    """No rank holds a tensor that its source has made, after a round that commits and after one that fails."""
    sources = Gathering(0), Gathering(1)
    engines = connect(*sources)
    for fails in (False, True):
        sources[1].fails = fails
        results = send(engines)
        assert [isinstance(result, Exception) for result in results] == [fails] * 2
        del results
        gc.collect()  # an error's traceback holds frames in cycles
        until(lambda: not any(source.alive for source in sources), "the end of the last tensor")


@pytest.mark.parametrize("kind", [RuntimeError, PlanError])
def test_source_that_fails_when_all_is_committed_raises_on_its_rank(connect, in_thread, caplog, until, kind):
    """Its rank raises what happened, as committed; the other one has the report, and both can send again."""
    returned = threading.Event()

    class Late(Source):
        def iter_full(self):
            yield from super().iter_full()
            if not returned.is_set():
                assert returned.wait(WAIT_S)
                raise kind("broken on purpose")

    first, second = connect(Source(0, ("a", "e")), Late(1, ("a", "e")))
    other = in_thread(second.send_weights)
    assert first.send_weights().outcome == Outcome.COMMITTED
    returned.set()
    with pytest.raises(WeightTransferError, match="broken on purpose") as caught:
        other.value()
    assert caught.value.outcome == Outcome.COMMITTED
    assert (caught.value.side, caught.value.rank) == ("trainer", 1)
    assert isinstance(caught.value.__cause__ or caught.value, kind)
    until(lambda: "trainer rank 1" in caplog.text)
    assert "failed when round 1 was over" in caplog.text
    other = in_thread(second.send_weights)
    assert first.send_weights() == other.value()


class LocalOnly(Source):
    """One that yields shards alone."""

    iter_full = WeightSource.iter_full

    def iter_local(self):
        yield from ()


@pytest.mark.parametrize(
    ("source", "error"), [(None, ConfigurationError), (LocalOnly(), SourceModeError)], ids=["none", "shards"]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_wrong_argument_is_told_before_what_the_machine_lacks(client, monkeypatch, source, error, rank):
    """What was passed is wrong on any machine, so that comes first, on every rank."""

    def lacking():
        raise BackendUnavailableError("nccl4py cannot be imported")

    monkeypatch.setattr(NCCLTrainerWeightTransferEngine, "_own_device", staticmethod(lacking))
    info = NCCLTrainerInitInfo("127.0.0.1", 1, rank=rank, session_secret="ab", num_trainer_ranks=2, timeout_s=1)
    with pytest.raises(error):
        NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=source)
    with pytest.raises(BackendUnavailableError):
        NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=Source())


class Watched(Source):
    """A source of one rank that notes each pass over it."""

    def __init__(self, names):
        super().__init__(names=names)
        self.passes = []
        self.is_broken = False

    @cached_property
    def metadata(self):
        return [ParamMeta(name, *OWNERS[name][:2]) for name in self.names]

    def iter_full(self):
        self.passes.append([])
        for name, tensor in super().iter_full():
            if self.is_broken:
                raise OSError("broken on purpose")
            self.passes[-1].append(name)
            yield name, tensor


@pytest.mark.parametrize("limit", [0, 1, 9])
def test_round_like_the_last_one_takes_fewer_steps(client, connect, send, limit):
    """The first group is made ready while the workers are; where they have room for it, all enter it with `Go`."""
    source = Watched(("a", "d", "e"))
    engines = connect(source)
    client.worker.limit = limit
    for number in (1, 2, 3):
        send(engines)
        assert client.worker.go.entered == (number > 1 and limit > 0)
        assert client.worker.received == sent_bytes(source)
        assert source.passes == [list(source.names)] * number


def test_nothing_is_entered_where_the_worker_expected_something_else(client, connect, send):
    """Credit from `Ready` is void where digests must be over what comes; the round goes on with the worker's next one."""
    engines = connect(Watched(("a", "b", "e")))
    client.worker.limit = 9
    client.worker.placed = {"digested": "rpr", "parts": [[1, 2, 0]]}
    for _ in range(2):
        (report,) = send(engines)
        assert report.outcome == Outcome.COMMITTED
        assert (client.worker.go.received, client.worker.go.entered) == ([1], 0)


def test_what_was_made_ready_for_another_dtype_is_not_sent(client, connect, send):
    """A worker that wants another dtype than in the last round gets it: the source is taken from the beginning again."""
    source = Watched(("a", "d"))
    engines = connect(source)
    client.worker.limit = 9
    send(engines)
    client.worker.casts = {}
    (report,) = send(engines)
    assert (report.outcome, client.worker.go.casts) == (Outcome.COMMITTED, {})
    assert client.worker.received == sent_bytes(source, casts=())
    assert source.passes[1:] == [["a"], ["a", "d"]]


def test_models_of_two_dtypes_in_turn_cost_one_pass_each(client, connect, send):
    """What is made ready for the draft model is what it takes, and not what the other model took in the round before."""
    source = Watched(("a", "d"))
    engines = connect(source)
    client.worker.limit = 9
    for number, is_draft in enumerate((False, True, False, True), 1):
        client.is_draft = is_draft
        client.worker.casts = {} if is_draft else {"d": "bfloat16"}
        (report,) = send(engines)
        assert report.outcome == Outcome.COMMITTED, report
        assert client.worker.received == sent_bytes(source, casts=client.worker.casts)
        assert source.passes == [["a", "d"]] * number


def test_source_that_breaks_before_the_workers_are_ready(client, connect, send):
    """No worker is told to begin."""
    source = Watched(("a", "e"))
    engines = connect(source)
    client.worker.limit = 9
    send(engines)
    source.is_broken = True
    (error,) = send(engines)
    assert "broken on purpose" in str(error)
    assert client.worker.go.round == 1


@pytest.mark.parametrize("name", ["a", "g"])
def test_byte_that_changed_on_its_way_fails_all_ranks(client, connect, send, name):
    """A byte that is another at the worker, whoever sent it: every trainer rank raises, with the parameter's name."""

    def change(worker):
        worker.received[worker.names.index(name)][-1] ^= 1

    client.between = change
    errors = send(connect(Source(0), Source(1)))
    for error in errors:
        assert isinstance(error, IntegrityError), error
        assert (error.param, error.engine, error.rank) == (name, "e0", 0)
        assert error.outcome == Outcome.POISONED


@pytest.fixture
def nothing_is_small(monkeypatch):
    """Pieces of 1000 bytes are sent from where they lie."""
    for module in ("wt_common.packing", "wt_trainer.staging"):
        monkeypatch.setattr(f"{module}.DIRECT_BYTES", 1000)


@pytest.mark.usefixtures("nothing_is_small")
@pytest.mark.parametrize(("name", "root"), [("a", 0), ("g", 1)])
def test_trainer_memory_that_was_written_is_the_trainers_fault(client, connect, send, name, root):
    """A write that torch does not count, on whichever rank sends: all ranks raise, naming that rank and the parameter.

    The wrong bytes are at a worker by then, so the round is poisoned; the next one repairs it.
    """
    sources = [Source(0), Source(1)]
    engines = connect(*sources)

    def change(worker):
        sources[root].tensors[name].data[-1] += 1
        worker.received[worker.names.index(name)][-1] ^= 1

    client.between = change
    for error in send(engines):
        assert isinstance(error, PlanError), error
        assert (error.param, error.side, error.rank, error.outcome) == (name, "trainer", root, Outcome.POISONED)
        assert f"changed in the memory of trainer rank {root}" in error.message


@pytest.mark.usefixtures("nothing_is_small")
@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("a", "trainer rank 0 still has the bytes"),
        ("g", "trainer rank 1 still has the bytes"),
        ("b", "trainer rank 1 has sent them from a copy"),
        ("d", "trainer rank 1 has sent them from a copy"),
        ("e", "trainer rank 0 has sent them from a copy"),
    ],
)
def test_trainer_memory_that_is_as_it_was_is_not_to_blame(client, connect, send, name, known):
    """The sender says of every rank whether it still has what it sent, and claims no more."""

    def change(worker):
        worker.received[worker.names.index(name)][-1] ^= 1

    client.between = change
    for error in send(connect(Source(0), Source(1))):
        assert isinstance(error, IntegrityError), error
        assert (error.param, error.side, error.engine, error.rank) == (name, "worker", "e0", 0)
        assert known in error.message


@pytest.mark.usefixtures("nothing_is_small")
def test_what_was_lent_for_another_dtype_is_not_asked(client, connect, send):
    """Memory that a first group was made ready from, and that was not sent, says nothing of what was."""
    engines = connect(Source(names=("a", "e")))
    (report,) = send(engines)
    assert report.outcome == Outcome.COMMITTED
    client.worker.casts = {"a": "bfloat16"}
    client.between = lambda worker: worker.received[0].reverse()
    (error,) = send(engines)
    assert isinstance(error, IntegrityError), error
    assert "trainer rank 0 has sent them from a copy" in error.message


@pytest.mark.usefixtures("nothing_is_small")
def test_rank_that_does_not_answer_hides_nothing(client, connect, send, monkeypatch):
    """A rank that cannot say what it has costs a moment; the error is about the digests all the same."""
    monkeypatch.setattr("wt_trainer.leading._DIGEST_AGAIN_S", 0.1)
    usual = FollowerSession.send
    monkeypatch.setattr(
        FollowerSession,
        "send",
        lambda self, message: None if isinstance(message, DigestedAgain) else usual(self, message),
    )
    client.between = lambda worker: worker.received[worker.names.index("g")].reverse()
    for error in send(connect(Source(0), Source(1))):
        assert isinstance(error, IntegrityError), error
        assert "trainer rank 1 has sent them from a copy" in error.message


class Merging(Source):
    """It sends twice what it has: each tensor is doubled while it is yielded."""

    yields_stable = False

    def iter_full(self):
        for name, tensor in super().iter_full():
            tensor.data.add_(tensor)
            try:
                yield name, tensor
            finally:
                tensor.data.sub_(tensor // 2)


@pytest.mark.usefixtures("nothing_is_small")
@pytest.mark.parametrize("verify", ["full", "off"])
def test_source_that_restores_what_it_yields_sends_what_it_yielded(client, connect, send, verify):
    """Large and small, cast or not, from both ranks: the worker has what was there while the source was yielding it."""
    doubled = Source()
    doubled.tensors = {name: tensor + tensor for name, tensor in doubled.tensors.items()}
    engines = connect(Merging(0), Merging(1), verify=(verify, verify))
    for _ in range(2):
        for report in send(engines):
            assert not isinstance(report, Exception), report
        assert client.worker.received == sent_bytes(doubled)


def test_failed_round_leaves_a_source_as_it_was(connect, send):
    """When a failed round raises, its iterator is closed, on every rank: nothing stays merged."""
    sources = [Merging(0), Merging(1)]
    engines = connect(*sources)
    sources[1].tensors["d"] = sources[1].tensors["d"].double()
    before = [sent_bytes(source, casts=()) for source in sources]
    errors = send(engines)
    assert [(type(error), error.param) for error in errors] == [(PlanError, "d")] * 2
    assert [sent_bytes(source, casts=()) for source in sources] == before


@pytest.mark.usefixtures("nothing_is_small")
def test_no_tensor_of_the_source_is_kept_after_a_round(client, connect, send):
    """What a source has gathered, and nobody else holds, is freed when the round returns."""
    yielded = []

    class Gathering(Source):
        yields_stable = True

        def iter_full(self):
            for name, tensor in super().iter_full():
                whole = tensor.clone()
                yielded.append(weakref.ref(whole))
                yield name, whole

    for report in send(connect(Gathering(names=("a", "e")))):
        assert report.outcome == Outcome.COMMITTED
    assert [ref() for ref in yielded] == [None, None]


def test_ranks_must_verify_alike(connect, send):
    """A data sender that digests nothing, where the session verifies, is named: its bytes could not be verified."""
    for error in send(connect(Source(0), Source(1), verify=("full", "off"))):
        assert isinstance(error, AgreementError), error
        assert "trainer rank 1" in error.message
        assert "verify must be the same on every trainer rank" in error.message


def test_nothing_is_digested_with_off(connect, send, monkeypatch):
    """A session that verifies nothing commits without a digest on any side."""
    monkeypatch.setattr("wt_trainer.staging.tensor_digest", None)
    reports = send(connect(Source(0), Source(1), verify=("off", "off")))
    assert [(report.outcome, report.verify) for report in reports] == [(Outcome.COMMITTED, "off")] * 2


def test_what_is_verified_as_received_is_in_every_go(client, connect, send):
    """A parameter whose parts cannot be added up is named by its place, to the workers and to the other senders."""
    engines = connect(Source(0), Source(1))
    client.worker.placed = {"digested": "rprrrrr", "parts": [[1, 2, 0]]}
    assert [report.outcome for report in send(engines)] == [Outcome.COMMITTED] * 2
    assert client.worker.go.received == [1]
