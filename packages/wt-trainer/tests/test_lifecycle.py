"""The life of a built-in engine: its init, rounds and how each ends. Workers are plain sockets behind a fake client."""

import gc
import logging
import os
import queue
import signal
import socket
import threading
import time
import weakref
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import pytest
import torch

from wt_common import (
    AgreementError,
    ConfigurationError,
    IntegrityError,
    Outcome,
    PeerLostError,
    PlanError,
    RoundTimeoutError,
    SourceModeError,
    StaleSessionError,
    TransportError,
)
from wt_common.digest import digest_bytes
from wt_common.errors import error_from_wire, error_to_wire
from wt_common.session import (
    Abort,
    AskState,
    Committed,
    Ended,
    Failed,
    Finishing,
    Go,
    Held,
    Holding,
    Installed,
    Metadata,
    Placed,
    Position,
    Ready,
    State,
)
from wt_trainer import ParamMeta, TrainerInitInfo, WeightSource
from wt_trainer.client import ServingControl
from wt_trainer.init_infos import SessionFields
from wt_trainer.leading import _run_to
from wt_trainer.lifecycle import SessionTrainerEngine
from wt_trainer.metadata import RoundMetadata
from wt_trainer.round import Round
from wt_trainer.session import Session

WAIT_S = 10


# --- what takes part -------------------------------------------------------------------------------------------


class Source(WeightSource):
    """Two parameters; a test may have the iterator raise."""

    error = None

    @cached_property
    def metadata(self):
        return [ParamMeta("a", torch.float32, (2,)), ParamMeta("b", torch.int8, (3,))]

    def iter_full(self):
        yield "a", torch.tensor([1.0, 2.0])
        if self.error is not None:
            raise self.error
        yield "b", torch.tensor([1, 2, 3], dtype=torch.int8)


class LocalOnly(WeightSource):
    """One without the iterator that the engine needs."""

    metadata = Source.metadata


@dataclass
class ToyInitInfo(SessionFields, TrainerInitInfo):
    backend: ClassVar[str] = "toy"


class ToyEngine(SessionTrainerEngine[ToyInitInfo]):
    """A backend whose transfer is one `Go`: it runs the source, and lays the bytes before the workers."""

    ended = ()

    def _init_fields(self):
        return {"toy": 1}

    def _transmit(self, session, round_, metadata, casts, received):
        self.sent = metadata.cast(casts)
        workers = session.workers
        for index, peer in enumerate(workers):
            go = Go(round=round_.number, epoch=1, rank=1 + index, world_size=1 + len(workers), remaining_s=1)
            session.send([peer], replace(go, casts=casts, received=received))
        round_.num_entered = 1
        items = list(self._round_source)
        assert [name for name, _ in items] == list(metadata.names)
        data = [
            bytes(tensor.to(getattr(torch, dtype)).reshape(-1).view(torch.uint8).tolist())
            for (_, tensor), dtype in zip(items, self.sent.dtype_names, strict=True)
        ]
        for worker in self.client.workers:
            worker.received = list(data)
        if self._verifies:
            round_.digests.update(enumerate(map(digest_bytes, data)))
        return sum(self.sent.sizes_bytes)

    def _assist(self, session, round_, metadata):
        raise NotImplementedError

    def _end_transfer(self, *, failed):
        self.ended = (*self.ended, failed)


def placing(digested, parts=(), not_in_place=None, **fields):
    """The fields of a `Placed` of a worker that takes what it digests."""
    takes = digested.translate(str.maketrans("rw", "aa"))
    parts = [list(part) for part in parts]
    return {"takes": takes, "digested": digested, "parts": parts, "not_in_place": not_in_place or {}, **fields}


class ToyWorker:
    """One worker rank: a reader that answers questions at once, and the protocol of the two calls.

    `placed` says what its digests are over, all received bytes where it is None; it is said when it is another than before.
    """

    def __init__(self, peer, verify):
        self.peer = peer
        self.verify = verify
        self.placed = None
        self.said = {}
        self.received = []  # the bytes of each parameter
        self.open = False
        self.touched = False  # what it answers to an abort; None is no answer
        self.number = 0  # of the round of its last update
        self.knows = set()
        self.casts = {}
        self.poisoned = False  # whether it says that something stays half-written
        self.announced = []  # for each question, whether it announced a repair
        self.heard = []  # every message but questions, in order
        self.inbox = queue.Queue()
        self.over = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        try:
            while True:
                message = self.peer.receive()
                if isinstance(message, AskState):
                    self.announced.append(message.repairs)
                    self.peer.send(State(round=message.round, open=self.open, poisoned=False))
                    continue
                self.heard.append(message)
                self.inbox.put(message)
                if isinstance(message, Held) and message.held:
                    self.peer.send(Holding(round=message.round, held=True))
                if isinstance(message, Abort) and self.touched is not None:
                    self.peer.send(Ended(round=message.round, touched=self.touched))
        except (EOFError, OSError):
            self.over.set()
            self.inbox.put(None)

    def heard_abort(self, timeout_s):
        """The abort, as soon as it is there."""
        deadline = time.monotonic() + timeout_s
        while not (aborts := [message for message in self.heard if isinstance(message, Abort)]):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return aborts[0]

    def die(self):
        self.peer.sock.shutdown(socket.SHUT_RDWR)

    def take(self, kind):
        """The next message of this round, which must be a `kind`; the error of an abort is raised."""
        message = self.inbox.get(timeout=WAIT_S)
        while isinstance(message, Held) or getattr(message, "round", self.number) < self.number:
            message = self.inbox.get(timeout=WAIT_S)
        if message is None:
            raise PeerLostError("the trainer is gone")
        if isinstance(message, Abort):
            raise error_from_wire(message.error)
        assert isinstance(message, kind), message
        return message

    def update(self, info):
        number, digest = info["round"], info["metadata_digest"]
        self.number = number
        if digest not in self.knows:
            self.peer.send(Ready(round=number, knows_metadata=False))
            self.metadata = self.take(Metadata)
            self.knows.add(digest)
        self.place(number, digest)
        self.peer.send(Ready(round=number, knows_metadata=True, casts=self.casts))
        self.go = self.take(Go)
        seconds = {"receive": 0.5}
        self.peer.send(Installed(round=number, num_bytes=11, seconds=seconds, not_synced=["c"], poisoned=self.poisoned))

    def place(self, number, digest):
        count = len(self.metadata.names)
        placed = self.placed or placing("r" * count)
        if self.said.get(digest) != placed:
            self.said[digest] = placed
            self.peer.send(Placed(round=number, **placed))

    def digests(self):
        """Those of whole parameters; a test that places parts has its own."""
        return [] if self.verify == "off" else [digest_bytes(data) for data in self.received]

    def finish(self, number):
        self.peer.send(Finishing(round=number, digests=self.digests()))
        self.take(Committed)


class ToyClient:
    """A client of exactly the four calls over worker ranks that are plain sockets.

    `before` and `after` are called with a call's name on its thread, so that a test can have it wait or fail.
    """

    is_draft = False

    def __init__(self, connect, ranks=(("e0", 0, 1),), **hello):
        self.connect = connect
        self.hello = hello
        self.ranks = list(ranks)
        self.workers = []
        self.calls = []
        self.before = self.after = lambda name: None

    def init_weight_transfer_engine(self, init_info):
        self._begin("init")
        self.init_info = init_info
        for engine, rank, size in self.ranks:
            peer = self.connect(init_info, engine=engine, rank=rank, size=size, **self.hello)
            self.workers.append(ToyWorker(peer, init_info["verify"]))
        self.after("init")

    def start_weight_update(self):
        self._begin("start")
        self.after("start")

    def update_weights(self, update_info):
        self._begin("update")
        self.round = update_info["round"]
        self._on_all(lambda worker: worker.update(update_info))
        self.after("update")

    def finish_weight_update(self, weight_version=None):
        self._begin(f"finish {weight_version}")
        if weight_version is not None or self.is_draft:
            self._on_all(lambda worker: worker.finish(self.round))
        for worker in self.workers:
            worker.open = False
        self.after("finish")

    def _begin(self, name):
        self.calls.append(name)
        self.before(name.split()[0])

    def _on_all(self, call):
        errors = []

        def run(worker):
            try:
                call(worker)
            except Exception as exc:  # raised below
                errors.append(exc)

        threads = [threading.Thread(target=run, args=(worker,), daemon=True) for worker in self.workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


class ServingClient(ToyClient):
    """One that can also be asked and paused."""

    timeout = 60.0
    size = 1
    notes = ()
    held = False
    version = "v0"

    @contextmanager
    def bounded(self, seconds):
        self.bounds = [*getattr(self, "bounds", []), seconds]
        yield

    def hosts(self):
        return ["127.0.0.1"]

    def world_size(self):
        return self.size

    def servers(self):
        return ["a"]

    def label(self, server, *, within):
        return self.version

    def set_label(self, server, label, *, within):
        self.version = label

    def running(self, *, may_sleep=True):
        self._begin("pause")
        self.may_sleep = may_sleep
        return [] if self.held else [0]

    def pause_server(self, server):
        self.held = True

    def resume_server(self, server, *, within):
        self.held = False
        self.calls.append("resume")

    def finish_weight_update(self, weight_version=None):
        super().finish_weight_update(weight_version)
        self.version = self.version if weight_version is None else weight_version

    def reset_caches(self):
        self._begin("reset")
        return list(self.notes)


class Address:
    """What a peer needs to know of a session, from an init info."""

    def __init__(self, init_info):
        self.port = init_info["session_port"]
        self.secret = init_info["session_secret"]
        self.id = init_info["session"]


@pytest.fixture
def make_client(join):
    def make(kind=ToyClient, **options):
        return kind(lambda init_info, **hello: join(Address(init_info), **hello), **options)

    return make


@pytest.fixture
def make_engine():
    """Connects engines; they shut down with the test."""
    engines = []

    def make(client, source=None, **fields):
        info = ToyInitInfo("127.0.0.1", rank=0, **{"timeout_s": WAIT_S, **fields})
        engine = ToyEngine.trainer_init(info, client=client, source=source or Source())
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.shutdown()


TWO = (("e0", 0, 2), ("e0", 1, 2))


# --- init ------------------------------------------------------------------------------------------------------


def test_init_ships_what_the_sides_must_agree_on(make_client, make_engine):
    """The init info says where and how to connect, what the sides must agree on, and the backend's own fields."""
    client = make_client()
    make_engine(client, timeout_s=7, check_cover=False, verify="received")
    info = client.init_info
    assert (info["session_address"], info["schema"], info["timeout_s"]) == ("127.0.0.1", [1, 0], 7)
    assert (info["check_cover"], info["verify"], info["toy"]) == (False, "received", 1)
    assert client.calls == ["init"]


@pytest.mark.parametrize(
    ("source", "error", "text"),
    [
        (None, ConfigurationError, "pass a WeightSource"),
        (LocalOnly(), SourceModeError, r"iter_full\(\)"),
    ],
    ids=["no source", "no iter_full"],
)
def test_source_that_cannot_serve_is_refused_before_anything(make_client, source, error, text):
    """A full-resync engine without a source, or with one that lacks its iterator, is refused before any call."""
    client = make_client()
    with pytest.raises(error, match=text) as caught:
        ToyEngine.trainer_init(ToyInitInfo(rank=0), client=client, source=source)
    assert isinstance(caught.value, (ValueError, TypeError))
    assert client.calls == []


def test_delta_engine_refuses_a_source(make_client):
    """An engine that sends what it is given takes no source."""
    delta = type("DeltaEngine", (ToyEngine,), {"needs": None})
    with pytest.raises(ConfigurationError, match="expected source=None"):
        delta.trainer_init(ToyInitInfo(rank=0), client=make_client(), source=Source())


@pytest.mark.parametrize(
    ("ranks", "world_size", "text"),
    [
        ((), None, "no worker connected"),
        ((("e0", 1, 2),), None, r"engine e0 has 2 ranks, of which \[0\] did not connect"),
        ((("e0", 0, 1),), 3, "expected 2 worker ranks, got 1"),
    ],
)
def test_wrong_workers_fail_the_init(make_client, make_engine, ranks, world_size, text):
    """Who is missing fails the init with its phase and backend, and the session is closed: workers see the end."""
    client = make_client(ranks=ranks)
    with pytest.raises(AgreementError, match=text) as caught:
        make_engine(client, world_size=world_size)
    assert (caught.value.phase, caught.value.backend, caught.value.side) == ("init", "toy", "trainer")
    assert all(worker.over.wait(WAIT_S) for worker in client.workers)


def test_servers_that_count_otherwise_fail_the_init(make_client, make_engine):
    """A world size that the servers contradict is refused before any call to them changes anything."""
    client = make_client(ServingClient)
    with pytest.raises(ConfigurationError, match=r"expected 1 \(the sender\) \+ 1 worker ranks .*, got 5"):
        make_engine(client, world_size=5)
    assert client.calls == []


def test_failed_init_call_is_the_inits_error(make_client, make_engine):
    """What the client raises in the init is raised, and the session is closed."""
    client = make_client()

    def fail(name):
        raise PlanError("no plugin")

    client.after = fail
    with pytest.raises(PlanError, match="no plugin") as caught:
        make_engine(client)
    assert caught.value.phase == "init"
    assert client.workers[0].over.wait(WAIT_S)


def test_foreign_error_in_the_init_closes_the_session(make_client):
    """Whatever ends the init, the session is closed: its port is free again."""
    ports = []

    class Broken(ToyEngine):
        def _init_fields(self):
            ports.append(self._session.port)
            raise KeyError("fields")

    with pytest.raises(KeyError):
        Broken.trainer_init(ToyInitInfo("127.0.0.1", rank=0), client=make_client(), source=Source())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", *ports), timeout=WAIT_S)


def test_hanging_init_call_is_ended_by_the_deadline(make_client, make_engine):
    """An init that does not return costs the timeout; the error names the call."""
    client, go_on = make_client(), threading.Event()
    client.after = lambda name: go_on.wait(WAIT_S)
    started = time.monotonic()
    with pytest.raises(RoundTimeoutError, match="the reply to init_weight_transfer_engine"):
        make_engine(client, timeout_s=0.3)
    assert time.monotonic() - started < 5
    go_on.set()


# --- a good round ----------------------------------------------------------------------------------------------


def test_round_commits_and_reports(make_client, make_engine, caplog):
    """A round makes its calls in order and reports what was sent, by whom it was received, and how long it took."""
    caplog.set_level(logging.INFO, "wt_trainer")
    client = make_client(ranks=TWO)
    engine = make_engine(client)
    caplog.clear()
    report = engine.send_weights()
    assert client.calls == ["init", "start", "update", "finish 1"]
    assert (report.round, report.version, report.outcome, report.backend) == (1, "1", Outcome.COMMITTED, "toy")
    assert (report.num_parameters, report.num_bytes) == (2, 11)
    assert [(worker.engine, worker.rank) for worker in report.workers] == [("e0", 0), ("e0", 1)]
    assert (report.workers[0].num_bytes, report.workers[0].not_synced) == (11, ["c"])
    assert set(report.seconds) == {"start", "update", "finish", "total"}
    assert [worker.go.rank for worker in client.workers] == [1, 2]
    assert engine.ended == (False,)
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.INFO] == [f"toy: {report}"]


def test_metadata_is_sent_once(make_client, make_engine):
    """A worker gets the metadata in the first round, and not again while it knows them."""
    client = make_client()
    engine = make_engine(client)
    for _ in range(3):
        engine.send_weights()
    kinds = [type(message) for message in client.workers[0].heard]
    assert kinds == [Metadata, Go, Committed, Go, Committed, Go, Committed]
    assert client.workers[0].metadata.names == ["a", "b"]


def test_metadata_is_sent_again_to_who_has_forgotten(make_client, make_engine):
    """A worker that does not know the digest any more gets the metadata in the same round, and only that one does."""
    client = make_client(ranks=TWO)
    engine = make_engine(client)
    engine.send_weights()
    client.workers[1].knows.clear()
    for worker in client.workers:
        worker.heard.clear()
    engine.send_weights()
    assert [type(message) for message in client.workers[0].heard] == [Go, Committed]
    assert [type(message) for message in client.workers[1].heard] == [Metadata, Go, Committed]


def test_version_is_the_callers_or_the_rounds_number(make_client, make_engine):
    """The published version is what the caller says, and the round's number otherwise."""
    client = make_client()
    engine = make_engine(client)
    assert engine.send_weights(weight_version="step-7").version == "step-7"
    assert engine.send_weights().version == "2"
    assert client.calls[3::3] == ["finish step-7", "finish 2"]


def test_dtype_that_all_workers_hold_is_sent(make_client, make_engine):
    """Where every worker holds a parameter in the same other dtype, the sender casts; where they differ, the workers do."""
    client = make_client(ranks=TWO)
    engine = make_engine(client)
    client.workers[0].casts = {"a": "bfloat16"}
    assert engine.send_weights().num_cast == 0
    client.workers[1].casts = {"a": "bfloat16"}
    report = engine.send_weights()
    assert (report.num_cast, report.num_bytes) == (1, 7)
    assert engine.sent.dtype_names == ("bfloat16", "int8")


def test_another_source_is_sent_for_one_round(make_client, make_engine):
    """A source that is given for a round is sent in it, with its own metadata, and the engine's own in the next."""
    client = make_client()
    engine = make_engine(client)
    other = type("Other", (Source,), {"metadata": cached_property(lambda self: Source.metadata.func(self)[:1])})()
    other.iter_full = lambda: iter([("a", torch.zeros(2))])
    assert engine.send_weights(source=other).num_parameters == 1
    assert client.workers[0].metadata.names == ["a"]
    assert engine.send_weights().num_parameters == 2
    assert client.workers[0].metadata.names == ["a", "b"]
    with pytest.raises(SourceModeError):
        engine.send_weights(source=LocalOnly())


def test_draft_round_publishes_no_version(make_client, make_engine):
    """A round of the draft model finishes without a version, and the report says none."""
    client = make_client()
    engine = make_engine(client)
    client.is_draft = True
    assert engine.send_weights(weight_version="v").version is None
    assert client.calls[-1] == "finish None"


def test_backend_without_draft_support_refuses_before_a_call(make_client, make_engine):
    """A backend that cannot update draft models says so before anything is called."""
    client = make_client()
    engine = make_engine(client)
    engine.supports_draft_weight_update = False
    client.is_draft = True
    with pytest.raises(ConfigurationError, match="backend 'toy' cannot update draft models"):
        engine.send_weights()
    assert client.calls == ["init"]


def test_client_whose_finish_takes_no_version_is_called_without(make_client, make_engine):
    """A finish without the argument is called so, and the report says that no version was published."""
    client = make_client()
    finish = client.finish_weight_update
    client.finish_weight_update = lambda: finish("none")
    report = make_engine(client).send_weights(weight_version="v")
    assert report.version is None
    assert "takes no version" in report.notes[0]


def test_client_whose_engines_publish_no_version_is_called_without(make_client, make_engine):
    """A client that says that no engine behind it publishes a version is given none, and the report says so."""
    client = make_client()
    client.publishes_version = False
    finish, versions = client.finish_weight_update, []
    client.finish_weight_update = lambda weight_version=None: versions.append(weight_version) or finish("none")
    report = make_engine(client).send_weights(weight_version="v")
    assert versions == [None]
    assert report.version is None
    assert "its engines publish none" in report.notes[0]


def test_servers_are_held_for_the_round(make_client, make_engine):
    """A client that can pause is paused around the calls; caches are reset with the new weights there, and notes reported."""
    client = make_client(ServingClient)
    assert isinstance(client, ServingControl)
    client.notes = ("a cache was not reset",)
    engine = make_engine(client)
    client.before = lambda name: name == "pause" or client.held or pytest.fail(f"{name} while a server runs")
    report = engine.send_weights()
    assert client.calls[:4] == ["init", "pause", "start", "update"]
    assert set(client.calls[4:-1]) == {"finish 1", "reset"}  # at the same time
    assert client.calls[-1] == "resume"
    assert report.notes == ("a cache was not reset",)
    assert {"pause", "resume"} <= set(report.seconds)


@pytest.mark.parametrize("can_sleep", [True, False])
def test_servers_are_asked_for_sleep_only_where_they_can(make_client, make_engine, can_sleep):
    """The workers say in their hellos whether their weights can leave the memory between rounds."""
    client = make_client(ServingClient, can_sleep=can_sleep)
    make_engine(client).send_weights()
    assert client.may_sleep == can_sleep


def test_shorter_timeout_of_client_and_engine_counts(make_client, make_engine):
    """The earlier of the two timeouts bounds the calls and is what the workers are told."""
    client = make_client(ServingClient)
    client.timeout = 5.0
    make_engine(client, timeout_s=7).send_weights()
    assert client.init_info["timeout_s"] == 5
    assert set(client.bounds) == {5}


def test_client_that_cannot_pause_is_mentioned_once(make_client, make_engine, caplog):
    """That pausing is the caller's task is logged in the first round only."""
    engine = make_engine(make_client())
    for _ in range(2):
        engine.send_weights()
    assert [record.levelname for record in caplog.records if "pause" in record.getMessage()] == ["WARNING"]


# --- rounds that fail ------------------------------------------------------------------------------------------


def failing(name, error):
    """A hook that raises `error` in the call `name`."""

    def fail(called):
        if called == name:
            raise error

    return fail


@pytest.mark.parametrize("name", ["start", "update"])
def test_failed_call_fails_the_round(make_client, make_engine, name):
    """A call that fails ends the round with its error and phase; nothing was touched, and the next round is well."""
    client = make_client()
    engine = make_engine(client)
    client.before = failing(name, TransportError("500 from the server"))
    with pytest.raises(TransportError, match="500 from the server") as caught:
        engine.send_weights()
    error = caught.value
    assert (error.phase, error.round, error.backend, error.outcome) == (name, 1, "toy", Outcome.UNCHANGED)
    assert error.elapsed_s < 5
    client.before = lambda name: None
    client.workers[0].inbox = queue.Queue()
    assert engine.send_weights().round == 2
    assert isinstance(client.workers[0].heard[0], Abort)
    assert engine.ended == (True, False)


def test_workers_hear_why_the_round_is_over(make_client, make_engine):
    """Every worker gets the abort, with the error itself."""
    client = make_client(ranks=TWO)
    engine = make_engine(client)
    client.before = failing("update", PlanError("no room", param="a"))
    with pytest.raises(PlanError):
        engine.send_weights()
    for worker in client.workers:
        abort = worker.inbox.get(timeout=WAIT_S)
        assert isinstance(abort, Abort)
        error = error_from_wire(abort.error)
        assert (type(error), error.message, error.param) == (PlanError, "no room", "a")


@pytest.mark.parametrize(
    ("touched", "outcome"), [(False, Outcome.UNCHANGED), (True, Outcome.POISONED), (None, Outcome.POISONED)]
)
def test_failed_worker_decides_the_outcome(make_client, make_engine, touched, outcome):
    """A worker that fails is raised as its own error; what it says of its model, or may not say, is the outcome."""
    client = make_client()
    engine = make_engine(client)
    client.workers[0].touched = touched

    def update(info):
        worker = client.workers[0]
        worker.peer.send(Placed(round=1, **placing("rr")))
        worker.peer.send(Ready(round=1, knows_metadata=True))
        worker.take(Go)
        worker.peer.send(Failed(round=1, error=error_to_wire(PlanError("no such layer", param="b"))))
        raise TransportError("500, as the worker failed")

    client.update_weights = update
    with pytest.raises(PlanError, match="no such layer") as caught:
        engine.send_weights()
    error = caught.value
    assert (error.side, error.engine, error.rank, error.param) == ("worker", "e0", 0, "b")
    assert (error.phase, error.outcome) == ("update", outcome)


@pytest.mark.parametrize("version", ["v0", "v0+poisoned"])
def test_poisoned_servers_say_so(make_client, make_engine, version):
    """Where a failed round left bytes behind, the servers' label gets a suffix, once."""
    client = make_client(ServingClient)
    engine = make_engine(client)
    client.version = version
    client.workers[0].touched = True
    client.after = failing("update", TransportError("500"))
    with pytest.raises(TransportError) as caught:
        engine.send_weights()
    assert caught.value.outcome == Outcome.POISONED
    assert client.version == "v0+poisoned"


def test_unchanged_servers_keep_their_label(make_client, make_engine):
    """A round that touched nothing changes no label."""
    client = make_client(ServingClient)
    engine = make_engine(client)
    client.after = failing("start", TransportError("500"))
    with pytest.raises(TransportError, match="500"):
        engine.send_weights()
    assert client.version == "v0"


@pytest.mark.parametrize("kind", [ToyClient, ServingClient])
def test_label_that_cannot_be_set_is_noted(make_client, make_engine, kind):
    """Where the label of poisoned servers cannot be set, the error says so, and is still the round's own."""
    client = make_client(kind)
    engine = make_engine(client)
    client.version = None
    client.workers[0].touched = True
    client.after = failing("update", TransportError("500"))
    with pytest.raises(TransportError, match="500") as caught:
        engine.send_weights()
    assert caught.value.outcome == Outcome.POISONED
    assert "label not set" in "".join(caught.value.__notes__)


def test_dead_worker_fails_this_round_and_the_next(make_client, make_engine):
    """A worker that dies in a round is named at once, and no later round begins without it."""
    client = make_client(ranks=TWO)
    engine = make_engine(client)
    client.before = lambda name: client.workers[1].die() if name == "update" else None
    with pytest.raises(PeerLostError, match="worker rank 1 of engine e0") as caught:
        engine.send_weights()
    assert (caught.value.rank, caught.value.outcome) == (1, Outcome.UNCHANGED)
    calls = list(client.calls)
    with pytest.raises(PeerLostError, match="worker rank 1") as caught:
        engine.send_weights()
    assert caught.value.round == 2
    assert client.calls == calls


def test_workers_hear_of_a_failure_while_the_source_runs(make_client, make_engine, in_thread):
    """Nobody waits for the sender's own thread, which may be in a collective of the source's: the others are free at once."""
    client, in_source, go_on = make_client(ranks=TWO), threading.Event(), threading.Event()

    class Slow(Source):
        def iter_full(self):
            in_source.set()
            assert go_on.wait(WAIT_S)
            yield from super().iter_full()

    engine = make_engine(client, Slow())
    sending = in_thread(engine.send_weights)
    assert in_source.wait(WAIT_S)
    client.workers[1].die()
    message = client.workers[0].heard_abort(WAIT_S)
    assert error_from_wire(message.error).rank == 1
    go_on.set()
    with pytest.raises(PeerLostError, match="worker rank 1") as caught:
        sending.value()
    assert caught.value.outcome == Outcome.POISONED  # the dead one may have had bytes


def test_subclass_of_an_error_is_raised_as_what_the_other_ranks_raise(make_client, make_engine):
    """A client's own kind of error is the class that crosses the wire, with the client's error as its cause."""

    class StatusError(TransportError):
        pass

    client = make_client()
    engine = make_engine(client)
    client.before = failing("update", StatusError("500"))
    with pytest.raises(TransportError, match="500") as caught:
        engine.send_weights()
    assert type(caught.value) is TransportError
    assert isinstance(caught.value.__cause__, StatusError)


@pytest.mark.parametrize("version", [5, "v"])
def test_call_with_a_wrong_argument_is_a_call(make_client, make_engine, version):
    """It has a number as any other, since all ranks count their calls."""
    engine = make_engine(make_client())
    if version == 5:
        with pytest.raises(ConfigurationError) as caught:
            engine.send_weights(weight_version=version)
        assert (caught.value.round, caught.value.outcome) == (1, Outcome.UNCHANGED)
    else:
        engine.send_weights(weight_version=version)
    assert engine.send_weights().round == 2


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [
        ((5, False), [(3, False), (-1, False)], 5),
        ((2, False), [(3, False)], 3),
        ((2, False), [(7, True)], 6),
        ((7, True), [(3, False), (6, False)], 6),
        ((2, False), [(3, True), (9, False)], 2),
        ((-1, True), [(4, False)], -1),
        ((2, False), [None, (4, False)], -1),
        ((2, False), [], -1),
        ((-1, False), [(-1, False)], -1),
    ],
)
def test_all_run_to_the_furthest_that_all_can_reach(own, others, expected):
    """That is what any has begun, but not where one's source stopped; with a rank that says nothing, or alone, none runs."""
    round_ = Round(1, WAIT_S, threading.Condition())
    round_.begun, round_.stopped = own
    positions = [other and Position(round=1, index=other[0], stopped=other[1]) for other in others]
    assert _run_to(round_, positions) == expected


def test_frozen_worker_is_ended_by_the_deadline(make_client, make_engine):
    """A worker that says nothing costs the round's time and at most a second; the error names it and the outcome."""
    client, go_on = make_client(), threading.Event()
    engine = make_engine(client, timeout_s=0.5)
    client.workers[0].update = lambda info: go_on.wait(WAIT_S)
    started = time.monotonic()
    with pytest.raises(RoundTimeoutError, match="'ready' from worker rank 0 of engine e0") as caught:
        engine.send_weights()
    assert 0.5 <= time.monotonic() - started < 5
    assert (caught.value.phase, caught.value.outcome) == ("update", Outcome.UNCHANGED)
    go_on.set()


def test_source_that_raises_fails_the_round(make_client, make_engine):
    """What the user's iterator raises is a TransportError that has it as its cause, and the workers hear it."""
    client, source = make_client(), Source()
    engine = make_engine(client, source)
    source.error = KeyError("b")
    with pytest.raises(TransportError, match="KeyError") as caught:
        engine.send_weights()
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.phase == "update"
    assert Abort in [type(message) for message in client.workers[0].heard]


def test_interrupt_ends_the_round_and_stays_an_interrupt(make_client, make_engine):
    """An interrupt is raised as it is, after the workers have heard that the round is over."""
    client, source = make_client(ServingClient), Source()
    engine = make_engine(client, source)
    source.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.send_weights()
    assert not client.held
    assert Abort in [type(message) for message in client.workers[0].heard]


@pytest.mark.parametrize("name", ["start", "update", "finish"])
def test_servers_are_resumed_after_a_failed_round(make_client, make_engine, name):
    """Whatever fails, the servers run again."""
    client = make_client(ServingClient)
    engine = make_engine(client)
    client.before = failing(name, TransportError("500"))
    with pytest.raises(TransportError, match="500"):
        engine.send_weights()
    assert client.calls[-1] == "resume"
    assert not client.held


def test_workers_know_whether_their_server_is_held(make_client, make_engine, until):
    """They hear it before the pause and after the resume, also of a round that failed; a server left paused is resumed."""
    client = make_client(ServingClient)
    engine = make_engine(client)
    engine.send_weights()
    client.before = failing("update", TransportError("500"))
    with pytest.raises(TransportError, match="500"):
        engine.send_weights()

    def held():
        return [message.held for message in client.workers[0].heard if isinstance(message, Held)]

    until(lambda: held() == [True, False] * 2)


@pytest.mark.parametrize("version", [5, b"v", ["v"], True])
def test_version_must_be_text(make_client, make_engine, version):
    """Any other label is refused before a call; the next round is not affected."""
    client = make_client()
    engine = make_engine(client)
    with pytest.raises(ConfigurationError, match="weight_version: expected a str or None"):
        engine.send_weights(weight_version=version)
    assert client.calls == ["init"]
    assert engine.send_weights(weight_version="").version == ""


def test_one_round_at_a_time(make_client, make_engine, in_thread):
    """A second thread that sends meanwhile is told so at once, and the first round goes on."""
    client = make_client()
    engine = make_engine(client)
    refused = []

    def second(name):
        if name == "update":
            with pytest.raises(ConfigurationError, match="in progress on another thread") as caught:
                engine.send_weights()
            refused.append(caught.value)

    client.before = second
    engine.send_weights()
    assert len(refused) == 1


def test_interrupt_after_the_verdict_leaves_no_worker_without_it(make_client, make_engine, monkeypatch, until):
    """Between deciding that a round is committed and saying so, an interrupt must not leave the workers waiting."""
    client = make_client()
    engine = make_engine(client)
    send = Session.send

    def interrupted(self, peers, message):
        if isinstance(message, Committed):
            monkeypatch.setattr(Session, "send", send)
            raise KeyboardInterrupt
        send(self, peers, message)

    monkeypatch.setattr(Session, "send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.send_weights()
    monkeypatch.undo()
    worker = client.workers[0]
    until(lambda: Committed in map(type, worker.heard) and worker.inbox.empty())  # its finish call has gone on
    assert engine.send_weights().round == 2
    assert [type(message) for message in worker.heard].count(Committed) == 2


def test_sources_of_one_round_are_forgotten(make_client, make_engine):
    """What is sent once is not kept: a new draft source each step would keep every model alive."""
    engine = make_engine(make_client())
    source = Source()
    forgotten = weakref.ref(source)
    engine.send_weights(source=source)
    del source
    gc.collect()
    assert forgotten() is None


def test_failed_pause_fails_the_round_before_any_call(make_client, make_engine):
    """A server that cannot be paused leaves everything as it was."""
    client = make_client(ServingClient)
    engine = make_engine(client)
    client.before = failing("pause", ConfigurationError("asleep"))
    with pytest.raises(ConfigurationError, match="asleep") as caught:
        engine.send_weights()
    assert caught.value.outcome == Outcome.UNCHANGED
    assert client.calls == ["init", "pause"]


def test_verdict_is_final(make_client, make_engine):
    """A finish that fails after the verdict is raised as committed, and no worker hears anything after `Committed`."""
    client = make_client(ranks=TWO)
    engine = make_engine(client)
    client.after = failing("finish", TransportError("the connection broke"))
    with pytest.raises(TransportError, match="the connection broke") as caught:
        engine.send_weights()
    assert (caught.value.outcome, caught.value.phase) == (Outcome.COMMITTED, "finish")
    engine.shutdown()
    for worker in client.workers:
        assert worker.over.wait(WAIT_S)
        assert type(worker.heard[-1]) is Committed


def test_verdict_comes_first_where_nothing_is_verified(make_client, make_engine):
    """With every worker's `Installed` there is nothing more to wait for: the finish call finds the verdict there."""
    client = make_client(ranks=TWO)
    engine = make_engine(client, verify="off")

    def heard(name):
        deadline = time.monotonic() + WAIT_S
        while name == "finish" and not all(isinstance(worker.heard[-1], Committed) for worker in client.workers):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    client.before = heard
    assert engine.send_weights().outcome == Outcome.COMMITTED


def test_finish_call_that_missed_a_worker_is_noticed(make_client, make_engine):
    """Also where the verdict came before it: the round is committed, and somebody's label is not known."""
    client = make_client(ranks=TWO)
    engine = make_engine(client, verify="off")
    client.before = lambda name: name == "finish" and client.workers.pop()
    with pytest.raises(AgreementError, match="did not reach worker rank 1") as caught:
        engine.send_weights()
    assert caught.value.outcome == Outcome.COMMITTED


def test_failed_cache_reset_is_raised_as_committed(make_client, make_engine):
    """Caches that could not be reset are an error of a round that is committed."""
    client = make_client(ServingClient)
    engine = make_engine(client)
    client.before = failing("reset", TransportError("the prefix cache was not reset"))
    with pytest.raises(TransportError, match="prefix cache") as caught:
        engine.send_weights()
    assert caught.value.outcome == Outcome.COMMITTED
    assert not client.held


def test_open_update_is_closed_first(make_client, make_engine):
    """An update that an earlier round left open on a worker is closed before the next begins."""
    client = make_client()
    engine = make_engine(client)
    client.workers[0].open = True
    engine.send_weights()
    assert client.calls == ["init", "finish None", "start", "update", "finish 1"]


def test_update_left_open_on_the_last_rank_is_opened_on_all_and_closed(make_client, make_engine):
    """Where only an engine's last rank is open, a start comes first, so that the finish is refused by none."""
    client = make_client(ranks=TWO)
    engine = make_engine(client)
    client.workers[1].open = True
    engine.send_weights()
    assert client.calls == ["init", "start", "finish None", "start", "update", "finish 1"]


def test_finish_that_repairs_is_announced(make_client, make_engine):
    """Every worker knows that it is the sender's own before the call is made: any other one without a round is a stranger's."""
    client = make_client(ranks=TWO)
    engine = make_engine(client)
    client.workers[0].open = True
    announced = []
    client.before = lambda name: announced.append([worker.announced[-1] for worker in client.workers])
    engine.send_weights()
    assert announced[0] == [True, True]
    assert client.calls[1] == "finish None"


def test_finish_of_somebody_else_in_a_round_fails_it(make_client, make_engine):
    """Workers that are in a finish call before the sender's have somebody else's: no version is published for it."""
    client = make_client()
    engine = make_engine(client)
    update = client.workers[0].update

    def and_finish(info):
        update(info)
        client.workers[0].peer.send(Finishing(round=1, digests=client.workers[0].digests()))
        deadline = time.monotonic() + WAIT_S
        while not engine._session.round.posts.get(Finishing):
            assert time.monotonic() < deadline
            time.sleep(0.005)

    client.workers[0].update = and_finish
    client.workers[0].touched = True
    with pytest.raises(AgreementError, match="finish_weight_update was called by somebody else") as caught:
        engine.send_weights()
    assert caught.value.outcome == Outcome.POISONED
    assert client.calls == ["init", "start", "update"]


@pytest.mark.parametrize("kind", [ToyClient, ServingClient])
def test_round_that_leaves_something_half_written_says_so(make_client, make_engine, kind):
    """The version that is published has the suffix, the report as well, and a note that says what to do."""
    client = make_client(kind)
    engine = make_engine(client)
    client.workers[0].poisoned = True
    report = engine.send_weights(weight_version="v8")
    assert report.version == "v8+poisoned"
    assert "still half-written: worker rank 0 of engine e0" in report.notes[0]
    assert client.version == "v8+poisoned" if kind is ServingClient else "finish v8+poisoned" in client.calls
    client.workers[0].poisoned = False
    report = engine.send_weights(weight_version="v9")
    assert (report.version, report.notes) == ("v9", ())


def test_servers_that_publish_no_version_get_none_in_the_report(make_client, make_engine):
    """The finish call took one, and no server shows it."""
    client = make_client(ServingClient)
    engine = make_engine(client)
    finish = client.finish_weight_update

    def forget(weight_version=None):
        finish(weight_version)
        client.version = None

    client.finish_weight_update = forget
    report = engine.send_weights(weight_version="v8")
    assert (report.version, report.notes) == (None, ("a publishes no version",))


def test_failed_init_sets_right_what_its_workers_were_held_for(make_client, make_engine):
    """They have left the trainer that held them for this one; nobody else would resume their server."""
    client = make_client(ServingClient, ranks=(("e0", 0, 2),), held=True, poisoned=True)
    client.size = 1
    with pytest.raises(AgreementError, match="did not connect"):
        make_engine(client)
    assert (client.version, client.calls) == ("v0+poisoned", ["init", "resume"])


def test_second_interrupt_while_the_workers_are_asked(make_client, make_engine, monkeypatch):
    """A worker that has not said how the round left it may be touched: its server is labelled, and then runs."""
    client, source = make_client(ServingClient), Source()
    engine = make_engine(client, source)
    client.workers[0].touched = None
    source.error = KeyboardInterrupt("first")
    notify = Session.notify

    def interrupted(self, peers, message):
        notify(self, peers, message)
        if isinstance(message, Abort):  # the calling thread waits for what the workers will say
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    monkeypatch.setattr(Session, "notify", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        engine.send_weights()
    assert "first" not in str(caught.value)
    assert (client.version, client.calls[-1], client.held) == ("v0+poisoned", "resume", False)


def test_repeated_interrupts_do_not_keep_the_outcome_from_the_other_ranks(make_client, make_engine, monkeypatch, until):
    """However often the calling thread is interrupted, all ranks are told at once how the round ended."""
    client, source = make_client(), Source()
    engine = make_engine(client, source)
    source.error = KeyboardInterrupt("first")
    fail, tell, told = Round.fail, Session.tell_outcome, threading.Event()

    def interrupted(self, error, *args, **options):
        for _ in range(2):  # while it is waited for a better cause
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        fail(self, error, *args, **options)

    monkeypatch.setattr(Round, "fail", interrupted)
    monkeypatch.setattr(Session, "tell_outcome", lambda self, outcome: tell(self, outcome) or told.set())
    with pytest.raises(KeyboardInterrupt):
        engine.send_weights()
    assert told.wait(5)


def test_update_that_stays_open_names_the_engine(make_client, make_engine):
    """An engine whose update cannot be closed must be restarted; the round ends before it begins."""
    client = make_client()
    engine = make_engine(client)
    client.workers[0].open = True
    client.finish_weight_update = lambda weight_version=None: None
    with pytest.raises(AgreementError, match=r"engine e0: .*restart it") as caught:
        engine.send_weights()
    assert (caught.value.engine, caught.value.outcome) == ("e0", Outcome.UNCHANGED)
    assert "update" not in client.calls


# --- verification ----------------------------------------------------------------------------------------------


def wrong(worker, index=0):
    """Has `worker` find one byte of a parameter changed."""
    digests = worker.digests

    def changed():
        worker.received[index] = bytes([worker.received[index][0] ^ 1]) + worker.received[index][1:]
        return digests()

    worker.digests = changed


def sent_digest(data):
    return digest_bytes(bytes(data))


def test_committed_round_says_what_was_verified(make_client, make_engine):
    """The report has the mode, what no rank of an engine took, and what each worker has not written in place."""
    client = make_client(ranks=TWO)
    engine = make_engine(client, ignore=("b",))
    client.workers[0].placed = placing("wn", not_in_place={"fp8": ["layers.0"]})
    client.workers[1].placed = placing("rn")
    for worker in client.workers:
        worker.digests = lambda worker=worker: [digest_bytes(worker.received[0])]
    report = engine.send_weights()
    assert (report.verify, report.ignored) == ("full", ("b",))
    assert [worker.not_in_place for worker in report.workers] == [{"fp8": ["layers.0"]}, {}]


@pytest.mark.parametrize("kind", ["r", "w"])
def test_byte_that_changed_fails_the_round(make_client, make_engine, kind):
    """A worker that has not what was sent ends the round, poisoned: no version is published, and the workers hear why."""
    client = make_client(ranks=TWO)
    engine = make_engine(client)
    for worker in client.workers:
        worker.placed = placing(kind * 2)
        worker.touched = True
    wrong(client.workers[1], 1)
    with pytest.raises(IntegrityError, match="parameter 'b': expected digest") as caught:
        engine.send_weights()
    error = caught.value
    assert (error.phase, error.outcome, error.backend, error.round) == ("finish", Outcome.POISONED, "toy", 1)
    assert (error.side, error.engine, error.rank, error.param) == ("worker", "e0", 1, "b")
    assert f"as sent, got {sent_digest([0, 2, 3]):016x} over the bytes" in error.message
    for worker in client.workers:
        assert [type(message) for message in worker.heard] == [Metadata, Go, Abort]
        assert isinstance(error_from_wire(worker.heard[-1].error), IntegrityError)
    client.workers[1].digests = type(client.workers[1]).digests.__get__(client.workers[1])
    for worker in client.workers:
        worker.inbox = queue.Queue()
        worker.open = False
    assert engine.send_weights().round == 2


def test_parts_of_all_ranks_make_up_what_was_sent(make_client, make_engine):
    """Ranks that have different parts of a parameter pass where these add up, and not where one of them is wrong."""
    client = make_client(ranks=TWO)
    engine = make_engine(client)
    one, other = client.workers
    one.placed = placing("pw", parts=[[0, 1, 5]])
    other.placed = placing("pw", parts=[[0, 1, 6]])
    one.digests = lambda: [digest_bytes(one.received[0][:4]), digest_bytes(one.received[1])]
    other.digests = lambda: [digest_bytes(other.received[0][4:], 4), digest_bytes(other.received[1])]
    engine.send_weights()
    assert [worker.go.received for worker in client.workers] == [[], []]
    other.digests = lambda: [digest_bytes(other.received[0][:4]), digest_bytes(other.received[1])]
    with pytest.raises(
        IntegrityError, match=r"over the bytes of its parts installed on worker rank 0 .* worker rank 1"
    ):
        engine.send_weights()


def test_parts_that_do_not_make_up_a_parameter_are_verified_as_received(make_client, make_engine):
    """Where parts cannot be added up to the whole, all workers hear so with `Go`, and digest what they receive."""
    client = make_client(ranks=(*TWO, ("e1", 0, 1)))
    engine = make_engine(client)
    client.workers[1].placed = placing("rp", parts=[[1, 2, 0]])
    engine.send_weights()
    assert [worker.go.received for worker in client.workers] == [[1]] * 3
    wrong(client.workers[1], 1)
    with pytest.raises(IntegrityError, match="over the bytes received by worker rank 1"):
        engine.send_weights()


def test_what_a_worker_casts_is_verified_as_received(make_client, make_engine):
    """A worker that holds another dtype than the wire's cannot digest what it has installed; where all hold it, it can."""
    client = make_client(ranks=TWO)
    engine = make_engine(client)
    client.workers[0].placed = placing("wp", parts=[[1, 3, 0]])
    client.workers[0].casts = {"a": "bfloat16"}
    engine.send_weights()
    assert [worker.go.received for worker in client.workers] == [[0], [0]]
    client.workers[1].casts = {"a": "bfloat16"}
    engine.send_weights()
    assert [worker.go.received for worker in client.workers] == [[], []]


def test_session_that_verifies_nothing_commits_what_it_has(make_client, make_engine):
    """With `off` nobody digests anything, and a worker need not send digests; what it has placed does not matter."""
    client = make_client()
    engine = make_engine(client, verify="off")
    client.workers[0].placed = placing("rp", parts=[[1, 3, 0]])
    assert engine.send_weights().verify == "off"
    assert client.workers[0].go.received == []


@pytest.mark.parametrize("verify", ["full", "received", "off"])
def test_worker_that_says_nothing_of_its_digests_is_refused(make_client, make_engine, verify):
    """A worker that is ready without having said what it digests is named before a byte moves, whatever is verified."""
    client = make_client(ranks=TWO)
    engine = make_engine(client, verify=verify)
    client.workers[1].place = lambda number, digest: None
    with pytest.raises(AgreementError, match=r"worker rank 1 of engine e0 .*: expected 'placed' before") as caught:
        engine.send_weights()
    assert (caught.value.engine, caught.value.rank, caught.value.outcome) == ("e0", 1, Outcome.UNCHANGED)
    assert Go not in [type(message) for message in client.workers[0].heard]


def test_placement_of_other_parameters_is_refused(make_client, make_engine):
    """One that does not fit the metadata is an error that names worker and field, before a byte moves."""
    client = make_client()
    engine = make_engine(client)
    client.workers[0].placed = placing("r")
    with pytest.raises(
        AgreementError, match=r"placed\.takes: expected one for each of the 2 parameters, got 1"
    ) as caught:
        engine.send_weights()
    assert (caught.value.rank, caught.value.outcome) == (0, Outcome.UNCHANGED)


@pytest.mark.parametrize("verify", ["full", "received", "off"])
@pytest.mark.parametrize(
    ("placed", "param", "text"),
    [
        (placing("rn"), "b", r"engine e0 takes nothing of 1 parameter\(s\): 'b'\. .* ignore=\('b',\)"),
        (placing("rp", [(1, 2, 0)]), "b", r"engine e0 takes 2 of the 3 elements of 'b', which has shape \[3\]"),
        (placing("rr", unset=["c"], not_synced=["c"]), "c", r"engine e0 was started with random weights .*: 'c'\."),
    ],
    ids=["nothing", "a part", "random"],
)
def test_worker_that_would_not_compute_what_was_sent_is_refused(make_client, make_engine, placed, param, text, verify):
    """Before a byte moves, whatever is verified: the error names engine and parameter, and no worker is told to go."""
    client = make_client()
    engine = make_engine(client, verify=verify)
    client.workers[0].placed = placed
    with pytest.raises(PlanError, match=text) as caught:
        engine.send_weights()
    assert (caught.value.engine, caught.value.param, caught.value.outcome) == ("e0", param, Outcome.UNCHANGED)
    assert Go not in [type(message) for message in client.workers[0].heard]


def test_random_weights_may_remain_where_cover_is_not_checked(make_client, make_engine):
    """A trainer that sends parts on purpose says so."""
    client = make_client()
    engine = make_engine(client, check_cover=False)
    client.workers[0].placed = placing("rr", unset=["c"], not_synced=["c"])
    assert engine.send_weights().not_synced == ("c",)


def test_what_is_not_synced_is_logged_once_for_each_set(make_client, make_engine, caplog):
    """The log warns of what the servers have from before; the same again in the next round is no news."""
    client = make_client()
    engine = make_engine(client)
    for _ in range(3):
        engine.send_weights()
    warnings = [record.getMessage() for record in caplog.records if "still have from before" in record.getMessage()]
    assert warnings == [
        "toy: the servers still have from before 1 parameters or buffers that the trainer does not send: c"
    ]


@pytest.mark.parametrize("verify", ["full", "received"])
def test_tied_names_with_other_values_are_refused(make_client, make_engine, verify):
    """A name that the server serves from another one's memory must have come with the same values."""
    client = make_client()
    engine = make_engine(client, verify=verify)
    client.workers[0].placed = placing("rr", takes="an", tied=[[1, 0]])
    engine.send_weights()  # of another dtype, so that nothing can be told
    client.workers[0].casts = {"a": "int8"}
    with pytest.raises(PlanError, match=r"engine e0 ties 'b' to 'a', and the trainer sends other values") as caught:
        engine.send_weights()
    assert caught.value.param == "b"


def test_placement_counts_until_another_is_said(make_client, make_engine):
    """What a worker has said holds for later rounds of the same parameters; what it says anew replaces it."""
    client = make_client()
    engine = make_engine(client, ignore=("b",))
    worker = client.workers[0]
    engine.send_weights()
    engine.send_weights()
    worker.placed = placing("wn", not_in_place={"fp8": ["layers.0"]})
    worker.digests = lambda: [digest_bytes(worker.received[0])]
    assert engine.send_weights().ignored == ("b",)
    assert engine.send_weights().workers[0].not_in_place == {"fp8": ["layers.0"]}


def test_placement_of_a_draft_model_is_its_own(make_client, make_engine):
    """Target and draft may have the same parameters, and other places for them: each counts in its own rounds."""
    client = make_client()
    engine = make_engine(client, ignore=("b",))
    worker = client.workers[0]
    engine.send_weights()
    client.is_draft = True
    worker.placed = placing("rn")
    whole = worker.digests
    worker.digests = lambda: whole()[:1]
    assert engine.send_weights().ignored == ("b",)
    client.is_draft = False
    worker.place = lambda number, digest: None
    worker.digests = whole
    assert engine.send_weights().ignored == ()


@pytest.mark.parametrize("late", [False, True], ids=["in time", "late"])
def test_placement_of_a_failed_round_counts(make_client, make_engine, until, late):
    """A worker says it once, also in a round that fails meanwhile, or has failed already: the next round knows it."""
    client = make_client()
    engine = make_engine(client)
    worker = client.workers[0]

    def update(info):
        worker.peer.send(Ready(round=1, knows_metadata=False))
        worker.metadata = worker.take(Metadata)
        worker.knows.add(info["metadata_digest"])
        if not late:
            worker.place(1, info["metadata_digest"])
        raise TransportError("500, for another reason")

    usual, client.update_weights = client.update_weights, update
    with pytest.raises(TransportError, match="another reason"):
        engine.send_weights()
    if late:
        worker.place(1, next(iter(worker.knows)))
    until(lambda: engine._session.workers[0].placed)
    client.update_weights = usual
    worker.inbox = queue.Queue()
    assert engine.send_weights().round == 2


def test_other_number_of_digests_than_announced_fails_the_round(make_client, make_engine):
    """A worker that posts other digests than it has placed is an agreement error, after its bytes have changed."""
    client = make_client()
    engine = make_engine(client)
    client.workers[0].touched = True
    client.workers[0].digests = lambda: [1]
    with pytest.raises(AgreementError, match=r"finishing\.digests: expected 2, .* got 1") as caught:
        engine.send_weights()
    assert (caught.value.phase, caught.value.outcome) == ("finish", Outcome.POISONED)


# --- the end ---------------------------------------------------------------------------------------------------


def test_shutdown_ends_the_session(make_client, make_engine):
    """After `shutdown`, which may be called again, workers see the end, and sending is a stale session."""
    client = make_client()
    engine = make_engine(client)
    engine.send_weights()
    engine.shutdown()
    engine.shutdown()
    assert client.workers[0].over.wait(WAIT_S)
    with pytest.raises(StaleSessionError, match="call trainer_init again") as caught:
        engine.send_weights()
    assert caught.value.backend == "toy"
    assert client.calls == ["init", "start", "update", "finish 1"]


def test_second_init_is_a_session_of_its_own(make_client, make_engine):
    """Two engines over the same client have sessions, secrets and round numbers of their own."""
    first, second = make_client(), make_client()
    one, other = make_engine(first), make_engine(second)
    one.send_weights()
    assert other.send_weights().round == 1
    assert first.init_info["session"] != second.init_info["session"]
    assert first.init_info["session_secret"] != second.init_info["session_secret"]


# --- many sources ----------------------------------------------------------------------------------------------


def test_metadata_of_sources_in_turn_are_taken_once_and_bounded(make_client, make_engine, monkeypatch):
    """A few sources in turn cost nothing from their second round on; of many, those sent last are remembered."""
    taken, usual = [], RoundMetadata.of
    monkeypatch.setattr(RoundMetadata, "of", lambda source, *args: taken.append(source) or usual(source, *args))
    engine = make_engine(make_client())
    few, many = [Source() for _ in range(3)], [Source() for _ in range(20)]
    taken.clear()
    for source in few * 3:
        engine.send_weights(source=source)
    assert taken == few
    for source in many:
        engine.send_weights(source=source)
        assert len(engine._known_metadata) <= 8
    assert taken == few + many


# --- forks -----------------------------------------------------------------------------------------------------


def test_forked_child_cannot_use_its_parents_engine(make_client, make_engine, forked):
    """A child that sends hears that the engine is another process's, before any call; its shutdown changes nothing."""
    client = make_client(ServingClient)
    engine = make_engine(client)
    calls = list(client.calls)
    session = engine._session

    def child(report, go_on, rest):
        try:
            engine.send_weights(weight_version="v")
        except StaleSessionError as exc:
            report([exc.message, client.calls == calls])
        engine.shutdown()
        session.close()
        report("done")
        rest()

    with session.changed, engine._in_send:
        process = forked(child)
    message, is_uncalled = process.told()
    assert f"forked from process {os.getpid()}" in message
    assert "call trainer_init in this process" in message
    assert is_uncalled
    assert process.told() == "done"
    assert engine.send_weights(weight_version="v").outcome == "committed"
