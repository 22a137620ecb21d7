"""The life of a built-in engine on a worker rank, against a sender that the test scripts; only the transfer is a fake."""

import logging
import os
import socket
import threading
import time
import traceback
from types import SimpleNamespace

import pytest
import torch

from wt_common import (
    SCHEMA,
    AgreementError,
    ConfigurationError,
    IntegrityError,
    Outcome,
    PeerLostError,
    PlanError,
    RoundTimeoutError,
    StaleSessionError,
    TransportError,
)
from wt_common.broadcast import SessionInitInfo, SessionUpdateInfo
from wt_common.digest import digest_bytes
from wt_common.errors import error_from_wire, error_to_wire
from wt_common.packing import plan_groups
from wt_common.session import (
    Abort,
    Accepted,
    AskState,
    Committed,
    Ended,
    Failed,
    Finishing,
    Go,
    Held,
    Hello,
    Holding,
    Installed,
    Leave,
    Metadata,
    Placed,
    Ready,
    Refused,
    State,
    metadata_digest,
)
from wt_worker import WeightTransferConfig
from wt_worker.installers.base import InstallResult, Prepared
from wt_worker.lifecycle import SessionWeightTransferEngine
from wt_worker.placement.binding import Binding
from wt_worker.placement.inbox import Arrival

WAIT_S = 10
NAMES, DTYPES, SHAPES = ["a", "b"], ["float32", "int8"], [[2], [3]]
DIGEST = metadata_digest(
    (name, dtype, tuple(shape), 0) for name, dtype, shape in zip(NAMES, DTYPES, SHAPES, strict=True)
)


# --- what takes part -------------------------------------------------------------------------------------------


class ToyEngine(SessionWeightTransferEngine[SessionInitInfo]):
    """A backend that receives ones, or the tensors of `sent`; a test may have it do `before` any byte, `between` parameters."""

    init_info_cls = SessionInitInfo
    _cut_bytes = 1 << 10

    def __init__(self, *args):
        super().__init__(*args)
        self.sent = {}  # by name
        self.ended = []
        self.open_at_end = None  # what the sender would be told if it asked as soon as the round is over here
        self.before = self.between = lambda round_: None

    def _receive(self, session, round_, go, metadata, writer, limit):
        self.go, self.metadata = go, metadata
        self.before(round_)
        for number, group in enumerate(plan_groups(writer.sizes, max_bytes=self._cut_bytes, max_pieces=1)):
            if number:
                self.between(round_)
            index = group.pieces[0].index
            name = metadata.names[index]
            dtype = getattr(torch, go.casts.get(name, metadata.dtype_names[index]))
            tensor = self.sent.get(name, torch.ones(metadata.shapes[index])).to(dtype)
            writer.take(group, Arrival.staged(group, tensor.reshape(-1).view(torch.uint8)), number)

    def _end_transfer(self, *, failed):
        self.ended.append(failed)
        self.open_at_end = self._open


class Books:
    """What vLLM's worker does around an engine: it knows whether an update is open, and refuses calls out of order."""

    def __init__(self, engine):
        self.engine = engine
        self.open = False

    def init(self, init_info):
        self.engine.init_transfer_engine(self.engine.parse_init_info(init_info))

    def start(self):
        if self.open:
            raise RuntimeError("start while an update is open")
        self.engine.start_weight_update()
        self.open = True

    def update(self, number, session=None, digest=DIGEST):
        if not self.open:
            raise RuntimeError("update without a start")
        info = {"session": session or self.engine._session.id, "round": number, "metadata_digest": digest}
        try:
            self.engine.update_weights(info)
        except BaseException:
            self.open = False
            raise

    def finish(self):
        if not self.open:
            raise RuntimeError("finish without a start")
        self.engine.finish_weight_update()
        self.open = False


def metadata_of(number, **fields):
    return Metadata(**{"round": number, "names": NAMES, "dtype_names": DTYPES, "shapes": SHAPES, **fields})


def go(number, remaining_s=WAIT_S, **fields):
    return Go(round=number, epoch=1, rank=1, world_size=2, remaining_s=remaining_s, **fields)


def digest_of(tensor):
    """By the definition."""
    return digest_bytes(bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()))


def digests_of(tensors):
    return [digest_of(tensor) for tensor in tensors.values()]


def abort(number, error):
    return Abort(round=number, error=error_to_wire(error))


def state(peer, repairs=False):
    """(open, poisoned), as the worker answers; `repairs` announces a finish call without a round."""
    peer.send(AskState(round=0, repairs=repairs))
    answer = peer.receive(State)
    return answer.open, answer.poisoned


def failure(peer):
    """The error that the worker says it failed with, and whether its model was touched: `Failed`, then `Ended`."""
    failed = peer.receive(Failed)
    ended = peer.receive(Ended)
    assert failed.round == ended.round
    return error_from_wire(failed.error), ended.touched


def hold(peer):
    """The sender says that it is about to pause the server, and the worker that it has heard it."""
    peer.send(Held(round=1, held=True))
    assert peer.receive(Holding) == Holding(round=1, held=True)


class Rank:
    """A worker rank, and the sender's end of its session."""

    def __init__(self, books, sender, in_thread):
        self.books = books
        self.engine = books.engine
        self.sender = sender
        self.placed = None  # what the worker has said in the last round that was begun
        self._in_thread = in_thread

    def join(self, sender=None, reply=None, **fields):
        """Init with `sender`, which takes the hello."""
        sender = sender or self.sender
        init = self.call(lambda: self.books.init(sender.info(dict, **fields)))
        peer = sender.accept(reply)
        init.value()
        self.peer = peer
        self.engine.ended.clear()
        return peer

    @property
    def installer(self):
        """The model's, for as long as the engine lives."""
        return self.engine._installer()

    def call(self, call):
        return self._in_thread(call)

    def hang(self):
        """The next update goes no further than its first parameter; returned is the event that says it is there."""
        there = threading.Event()

        def between(round_):
            there.set()
            round_.wait(lambda: False, "the next group")

        self.engine.between = between
        return there

    def begin(self, number, until=Go, received=(), **options):
        """Start a round and begin its update; the sender has said everything up to `until`. Returned is the call."""
        if not self.books.open:
            self.books.start()
        updating = self.call(lambda: self.books.update(number, **options))
        if until is not None:
            self.placed = self.agree(metadata_of(number))
            if until is Go:
                self.peer.send(go(number, received=list(received)))
        return updating

    def agree(self, metadata):
        """The worker has said that it is ready; returned is what it said before of its placement, or None."""
        placed, message = None, self.peer.receive((Ready, Placed))
        if isinstance(message, Ready) and not message.knows_metadata:
            self.peer.send(metadata)
            message = self.peer.receive((Ready, Placed))
        if isinstance(message, Placed):
            placed, message = message, self.peer.receive(Ready)
        assert message.knows_metadata
        return placed

    def die(self, updating):
        """The sender is gone, and the update has ended with that."""
        self.peer.hang_up()
        with pytest.raises(PeerLostError):
            updating.value()

    def update(self, number, **options):
        """A good update, up to its `Installed`, which is returned."""
        updating = self.begin(number, **options)
        installed = self.peer.receive(Installed)
        updating.value()
        return installed

    def repair(self):
        """The sender closes an update that was left open."""
        state(self.peer, repairs=True)
        self.books.finish()

    def finish(self, number):
        """A good finish; returned are the digests that the worker posted."""
        finishing = self.call(self.books.finish)
        message = self.peer.receive(Finishing)
        assert message.round == number
        self.peer.send(Committed(round=number))
        finishing.value()
        return message.digests


@pytest.fixture
def make_rank(sender, in_thread):
    """Makes worker ranks, each with a model of its own; they shut down with the test."""
    engines = []

    def make(rank=0, size=1, instance_id="e0", **parallel):
        model = torch.nn.Module()
        model.register_parameter("a", torch.nn.Parameter(torch.zeros(2), requires_grad=False))
        model.register_parameter("b", torch.nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False))
        parallel_config = SimpleNamespace(rank=rank, world_size=size, **{"data_parallel_index": 0, **parallel})
        vllm_config = SimpleNamespace(parallel_config=parallel_config, model_config="own", instance_id=instance_id)
        engine = ToyEngine(WeightTransferConfig(backend="toy"), vllm_config, torch.device("cpu"), model)
        engines.append(engine)
        return Rank(Books(engine), sender, in_thread)

    yield make
    for engine in engines:
        engine.shutdown()


@pytest.fixture
def rank(make_rank):
    """The only rank of an engine, its init done."""
    rank = make_rank()
    rank.join()
    return rank


@pytest.fixture
def silent(make_rank):
    """Rank 0 of 2, its init done: it never raises."""
    silent = make_rank(rank=0, size=2)
    silent.join()
    return silent


def installed(rank):
    return {name: parameter.tolist() for name, parameter in rank.engine.model.named_parameters()}


ONES = {"a": torch.ones(2), "b": torch.ones(3, dtype=torch.int8)}
OLD = {"a": [0, 0], "b": [0, 0, 0]}
MIXED = {"a": [1, 1], "b": [0, 0, 0]}
NEW = {"a": [1, 1], "b": [1, 1, 1]}


def fail(error):
    """A call that raises `error`, whatever it is called with."""

    def call(*args, **kwargs):
        raise error

    return call


# --- init ------------------------------------------------------------------------------------------------------


def test_hello_says_who_is_there(make_rank):
    """The hello has everything that the sender numbers and checks ranks by, and the state of the model."""
    rank = make_rank(rank=1, size=2, instance_id="inst", data_parallel_index=3)
    hello = rank.join().hello
    assert (hello.role, hello.engine, hello.rank, hello.size) == ("worker", "inst/3", 1, 2)
    assert (tuple(hello.schema), hello.device, hello.pid) == (SCHEMA, "cpu", os.getpid())
    assert hello.versions["torch"] == torch.__version__
    assert (hello.open, hello.poisoned, hello.server) == (False, False, None)
    assert rank.join(server=3).hello.server == 3


@pytest.mark.parametrize(
    ("model_config", "expected"),
    [
        (None, True),
        (SimpleNamespace(enable_sleep_mode=False), False),
        (SimpleNamespace(enable_sleep_mode=True), True),
        (SimpleNamespace(enable_sleep_mode=False, enable_cumem_allocator=True), True),
    ],
    ids=["unknown", "no", "yes", "by its allocator"],
)
def test_hello_says_whether_weights_can_sleep(sender, in_thread, model_config, expected):
    """As vLLM was started; where nothing says it, they may."""
    vllm_config = SimpleNamespace(parallel_config=None, model_config=model_config)
    engine = ToyEngine(WeightTransferConfig(), vllm_config, torch.device("cpu"), torch.nn.Linear(1, 1))
    assert Rank(Books(engine), sender, in_thread).join().hello.can_sleep == expected
    engine.shutdown()


def test_engine_without_an_instance_has_an_id_of_its_own(make_rank):
    """Two engines that nobody has named are not taken for one."""
    names = {make_rank(instance_id=None).join().hello.engine for _ in range(2)}
    assert len(names) == 2


def test_configuration_that_says_nothing_is_one_rank(sender, in_thread):
    """Outside vLLM a configuration may say nothing of parallelism: the engine is then its own last rank."""
    vllm_config = SimpleNamespace(parallel_config=None, model_config=None)
    engine = ToyEngine(WeightTransferConfig(), vllm_config, torch.device("cpu"), torch.nn.Linear(1, 1))
    rank = Rank(Books(engine), sender, in_thread)
    hello = rank.join().hello
    assert (hello.rank, hello.size) == (0, 1)
    engine.shutdown()


def test_init_moves_and_touches_nothing(rank):
    """After the init nothing is open, and the model is as it was."""
    assert state(rank.peer) == (False, False)
    assert installed(rank) == OLD


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"schema": [9, 0]}, AgreementError, r"this side speaks 1\.\d+, the other 9\.0"),
        ({"schema": [9, 0], "colour": "red"}, AgreementError, r"this side speaks 1\.\d+, the other 9\.0"),
        ({"schema": "1.0"}, AgreementError, r"wire schema: expected \[major, minor\]"),
        ({"timeout_s": "soon"}, ConfigurationError, "timeout_s"),
        ({"timeout_s": 0}, ConfigurationError, "timeout_s must be positive"),
        ({"session_port": 0}, ConfigurationError, "session_port"),
        ({"colour": "red"}, ConfigurationError, "colour"),
    ],
    ids=["schema", "schema with a new field", "no schema", "type", "timeout", "port", "unknown"],
)
def test_init_that_cannot_be_is_refused_and_the_session_stays(rank, fields, error, text):
    """A bad init info is refused before it replaces anything: the session that was there goes on."""
    with pytest.raises(error, match=text) as caught:
        rank.books.init(rank.sender.info(dict, **fields))
    assert caught.value.side == "worker"
    rank.update(1)
    rank.finish(1)


def test_fields_of_a_newer_minor_are_left_out(rank, caplog):
    """A sender of a higher minor may say more, in its init and in every round; of our own minor it may not."""
    caplog.set_level(logging.DEBUG, "wt_worker.lifecycle")
    rank.join(schema=[SCHEMA[0], SCHEMA[1] + 1], colour="red")
    assert "init_info: fields of a newer schema are left out: ['colour']" in caplog.text
    update = {"session": "s", "round": 1, "metadata_digest": DIGEST, "size": 7}
    assert rank.engine.parse_update_info(update).round == 1
    assert "update_info: fields of a newer schema are left out: ['size']" in caplog.text
    rank.update(1)
    rank.finish(1)
    rank.join(schema=list(SCHEMA))
    with pytest.raises(ConfigurationError, match="size"):
        rank.engine.parse_update_info(update)


@pytest.mark.parametrize("wrong", [["5ec2e7"], {"5ec2e7": "5ec2e7"}, "x5ec2e7", "5ec2e7f"], ids=str)
def test_init_info_that_cannot_be_read_keeps_its_secret(make_rank, caplog, wrong):
    """A secret that is none is refused by name: its value is in no error, in no cause of it, and in no log."""
    caplog.set_level(logging.DEBUG)
    for engine_rank in (0, 1):  # the last one raises, the other one logs
        rank = make_rank(rank=engine_rank, size=2)
        shown = ""
        try:
            rank.books.init(rank.sender.info(dict, session_secret=wrong))
        except ConfigurationError as exc:
            shown = "".join(traceback.format_exception(exc))
        shown += caplog.text
        assert "session_secret" in shown
        assert "5ec2e7" not in shown
        caplog.clear()


def test_refused_hello_fails_the_init(rank):
    """A sender that does not take this rank is the init's error; the session that was there goes on."""
    refusal = Refused(error=error_to_wire(AgreementError("e0/0 is connected twice", side="trainer")))
    with pytest.raises(AgreementError, match="connected twice") as caught:
        rank.join(reply=refusal)
    assert (caught.value.side, caught.value.phase, caught.value.engine) == ("trainer", "init", "e0/0")
    rank.update(1)
    rank.finish(1)


def test_sender_that_cannot_be_reached_replaces_nobody(rank):
    """An init that names an address where nobody listens fails; the round in progress goes on, and the sender hears nothing."""
    rank.update(1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(PeerLostError, match="cannot connect"):
        rank.books.init(rank.sender.info(dict, session_port=port, timeout_s=0.3))
    rank.finish(1)
    assert installed(rank) == NEW


def test_sender_that_refuses_leaves_the_round_aborted(rank, open_sender):
    """A round is over once another sender was told how it left the model; where that one refuses, the earlier one hears it."""
    rank.update(1)
    refusing = open_sender(session="2222")
    init = rank.call(lambda: rank.books.init(refusing.info(dict)))
    assert refusing.accept(Refused(error=error_to_wire(AgreementError("sealed")))).hello.poisoned
    with pytest.raises(AgreementError, match="sealed"):
        init.value()
    error, touched = failure(rank.peer)
    assert isinstance(error, StaleSessionError)
    assert touched
    rank.repair()
    rank.update(2)
    rank.finish(2)


def test_hold_that_comes_during_another_init_does_not_count(rank, open_sender):
    """The next sender's hello says what is held; what the earlier sender says from then on is answered with no."""
    hold(rank.peer)
    following = open_sender(session="2222")
    init = rank.call(lambda: rank.books.init(following.info(dict)))
    peer, _ = following.challenge()
    assert peer.receive(Hello).held
    rank.peer.send(Held(round=2, held=True))
    assert rank.peer.receive(Holding) == Holding(round=2, held=False)
    rank.peer.send(Held(round=2, held=False))
    assert state(rank.peer) == (False, False)
    assert rank.engine._held
    peer.send(Accepted())
    init.value()


@pytest.mark.parametrize("replaced", [True, False], ids=["later init", "shutdown"])
def test_sender_hears_whether_another_one_has_the_worker(rank, open_sender, replaced):
    """After a later init, what the earlier sender holds is the new one's; after a shutdown, it is nobody else's."""
    old = rank.peer
    rank.join(open_sender(session="2222")) if replaced else rank.engine.shutdown()
    (leave,) = old.rest()
    assert leave.replaced is replaced


def test_late_end_of_an_earlier_session_touches_nothing(rank, open_sender):
    """The reader thread of a session that was replaced may be late: the transfer is the new session's by then."""
    old = rank.engine._session
    rank.join(open_sender(session="2222"))
    old._on_lost(PeerLostError("late"))
    assert rank.engine.ended == []
    rank.engine._session._on_lost(PeerLostError("now"))
    assert rank.engine.ended == [True]


def test_later_init_tells_the_earlier_sender(rank, open_sender):
    """The last init wins: the old sender hears that its session is stale, and then the end; the new one is served."""
    old, new = rank.peer, open_sender(session="2222")
    rank.join(new)
    (leave,) = old.rest()
    assert isinstance(leave, Leave)
    error = error_from_wire(leave.error)
    assert isinstance(error, StaleSessionError)
    assert "call trainer_init again" in error.message
    rank.update(1)
    rank.finish(1)


def test_init_ends_the_round_in_progress(rank, open_sender):
    """A round that was installed and not committed is over with its session; the hello says how it left the model."""
    rank.update(1)
    old = rank.peer
    hello = rank.join(open_sender(session="2222")).hello
    assert [type(message) for message in old.rest()] == [Leave]
    assert (hello.open, hello.poisoned) == (True, True)
    rank.repair()
    assert state(rank.peer) == (False, True)
    rank.update(1)
    rank.finish(1)
    assert state(rank.peer) == (False, False)


def test_update_of_a_replaced_session_is_refused(rank, open_sender):
    """An update that an old trainer still sends is refused by the session's name; the new session's round is untouched."""
    old = rank.sender.session
    rank.join(open_sender(session="2222"))
    rank.books.start()
    with pytest.raises(StaleSessionError, match=f"expected an update of session 2222, got one of {old}") as caught:
        rank.books.update(1, session=old)
    assert (caught.value.round, caught.value.phase, caught.value.engine) == (1, "update", "e0/0")
    rank.update(1)
    rank.finish(1)


# --- probe -----------------------------------------------------------------------------------------------------


def test_probe_finds_a_live_session_and_leaves_it(rank, open_sender):
    """A probe of an engine that is being served is refused with session and round, and replaces nothing."""
    rank.update(1)
    rank.finish(1)
    with pytest.raises(
        AgreementError, match=rf"busy: session {rank.sender.session} is \d+ s old and in round 1"
    ) as caught:
        rank.books.init(open_sender(session="2222").info(dict, probe=True))
    assert caught.value.phase == "init"
    rank.update(2)
    rank.finish(2)


def test_probe_of_a_dead_session_connects(rank, open_sender, until):
    """Where the sender is gone a probe is an init like any other."""
    rank.peer.hang_up()
    until(lambda: rank.engine._session.lost is not None)
    rank.join(open_sender(session="2222"), probe=True)
    rank.update(1)
    rank.finish(1)


def test_probe_of_an_unused_engine_connects(make_rank):
    """Where nobody was before, too."""
    rank = make_rank()
    rank.join(probe=True)
    rank.update(1)


# --- a good round ----------------------------------------------------------------------------------------------


def test_round_goes_through_its_steps(rank):
    """Ready, metadata, placed, ready, go, installed; finishing, committed: then the model has the weights and nothing is open."""
    rank.books.start()
    assert state(rank.peer) == (True, False)
    updating = rank.call(lambda: rank.books.update(1))
    assert rank.peer.receive() == Ready(round=1, knows_metadata=False)
    rank.peer.send(metadata_of(1))
    assert rank.peer.receive() == Placed(round=1, takes="aa", digested="ww", parts=[], not_in_place={})
    assert rank.peer.receive() == Ready(round=1, knows_metadata=True)
    assert installed(rank) == OLD
    rank.peer.send(go(1))
    message = rank.peer.receive(Installed)
    assert (message.round, message.num_bytes, message.not_synced) == (1, 11, [])
    assert set(message.seconds) == {"agree", "receive", "install"}
    updating.value()
    assert installed(rank) == NEW
    assert state(rank.peer) == (True, False)
    finishing = rank.call(rank.books.finish)
    assert rank.peer.receive() == Finishing(round=1, digests=digests_of(ONES))
    assert finishing.thread.is_alive()
    rank.peer.send(Committed(round=1))
    finishing.value()
    assert state(rank.peer) == (False, False)
    assert (rank.engine.go, rank.engine.metadata) == (go(1), metadata_of(1))
    assert rank.engine.ended == [False]


def test_metadata_is_asked_for_once(rank):
    """Metadata that were checked are known in the next rounds, by their digest."""
    for number in (1, 2, 3):
        rank.books.start()
        updating = rank.call(lambda number=number: rank.books.update(number))
        if number == 1:
            assert not rank.peer.receive(Ready).knows_metadata
            rank.peer.send(metadata_of(1))
            rank.peer.receive(Placed)
        assert rank.peer.receive(Ready).knows_metadata
        rank.peer.send(go(number))
        rank.peer.receive(Installed)
        updating.value()
        rank.finish(number)


def test_new_metadata_are_asked_for(rank):
    """A round with another digest brings its own metadata; those of the round before stay known."""
    rank.update(1)
    rank.finish(1)
    roots = [0, 1]
    digest = metadata_digest(zip(NAMES, DTYPES, map(tuple, SHAPES), roots, strict=True))
    rank.books.start()
    updating = rank.call(lambda: rank.books.update(2, digest=digest))
    assert not rank.peer.receive(Ready).knows_metadata
    rank.peer.send(metadata_of(2, roots=roots))
    rank.peer.receive(Placed)
    assert rank.peer.receive(Ready).knows_metadata
    rank.peer.send(go(2))
    rank.peer.receive(Installed)
    updating.value()
    assert rank.engine.metadata.roots == roots
    rank.finish(2)
    updating = rank.begin(3, until=None)
    rank.peer.receive(Placed)  # a plain module has one plan at a time
    assert rank.peer.receive(Ready).knows_metadata
    rank.die(updating)


def test_metadata_are_forgotten_with_their_session(rank, open_sender):
    """Another trainer's digest means nothing here, though it be the same."""
    rank.update(1)
    rank.finish(1)
    rank.join(open_sender(session="2222"))
    updating = rank.begin(1, until=None)
    assert not rank.peer.receive(Ready).knows_metadata
    rank.die(updating)


def test_each_target_has_metadata_of_its_own(rank):
    """What was checked against the model was not checked against the draft model, and is still known afterwards."""
    rank.update(1)
    rank.finish(1)
    draft = torch.nn.Module()
    for name, parameter in rank.engine.model.named_parameters():
        draft.register_parameter(name, torch.nn.Parameter(parameter.clone(), requires_grad=False))
    rank.engine.set_weight_update_target(draft, None)
    updating = rank.begin(2, until=None)
    assert not rank.peer.receive(Ready).knows_metadata
    rank.peer.send(metadata_of(2))
    rank.peer.receive(Placed)
    assert rank.peer.receive(Ready).knows_metadata
    rank.peer.send(go(2))
    rank.peer.receive(Installed)
    updating.value()
    rank.finish(2)
    rank.engine.reset_weight_update_target()
    updating = rank.begin(3, until=None)
    assert rank.peer.receive(Ready).knows_metadata
    rank.die(updating)


def test_ready_says_which_dtypes_are_wanted(rank):
    """What the model holds in another floating dtype is told before anything is sent."""
    dtypes = ["float64", "int8"]
    digest = metadata_digest(zip(NAMES, dtypes, map(tuple, SHAPES), [0, 0], strict=True))
    updating = rank.begin(1, until=None, digest=digest)
    rank.peer.receive(Ready)
    rank.peer.send(metadata_of(1, dtype_names=dtypes))
    rank.peer.receive(Placed)
    assert rank.peer.receive() == Ready(round=1, knows_metadata=True, casts={"a": "float32"})
    rank.die(updating)


def test_what_was_not_sent_is_reported(make_rank):
    """With the cover check off, parameters that the round leaves out are named in `Installed`."""
    rank = make_rank()
    rank.join(check_cover=False)
    digest = metadata_digest([("b", "int8", (3,), 0)])
    updating = rank.begin(1, until=None, digest=digest)
    rank.peer.receive(Ready)
    rank.peer.send(metadata_of(1, names=["b"], dtype_names=["int8"], shapes=[[3]]))
    rank.peer.receive(Placed)
    assert rank.peer.receive(Ready).knows_metadata
    rank.peer.send(go(1))
    assert rank.peer.receive(Installed).not_synced == ["a"]
    updating.value()


def test_senders_deadline_counts(rank):
    """`Go` says what is left of the round, in the sender's reckoning."""
    seen = []
    rank.engine.before = lambda round_: seen.append(round_.deadline - time.monotonic())
    updating = rank.begin(1, until=Ready)
    rank.peer.send(go(1, remaining_s=77))
    rank.peer.receive(Installed)
    updating.value()
    assert 70 < seen[0] <= 77


def test_finish_without_a_round_only_closes(rank, make_rank):
    """An update that was opened in vain is closed: by a sender that has announced it, or by hand where there is none."""
    rank.books.start()
    rank.repair()
    assert (rank.books.open, rank.engine._open) == (False, False)
    assert state(rank.peer) == (False, False)  # the answer is the first message: nothing was said before it
    assert installed(rank) == OLD
    alone = make_rank()
    alone.books.start()
    alone.books.finish()
    assert (alone.books.open, alone.engine._open) == (False, False)


def test_finish_of_somebody_else_fails(rank, open_sender):
    """A finish without a round that the connected sender has not announced fails: it would publish somebody else's version."""
    rank.update(1)
    rank.join(open_sender(session="2222"))
    with pytest.raises(StaleSessionError, match="No version is published") as caught:
        rank.books.finish()
    assert (caught.value.phase, caught.value.side) == ("finish", "worker")
    assert state(rank.peer)[0] is rank.books.open is True
    rank.repair()
    assert state(rank.peer)[0] is rank.books.open is False
    with pytest.raises(StaleSessionError, match="No version"):  # the announcement counts once
        rank.engine.finish_weight_update()


def test_announcement_ends_with_the_next_round(rank):
    """A repair that was announced and not made does not let a later stranger in."""
    state(rank.peer, repairs=True)
    rank.update(1)
    rank.finish(1)
    with pytest.raises(StaleSessionError):
        rank.engine.finish_weight_update()


def test_finish_of_somebody_else_on_a_rank_that_must_not_raise(silent, caplog, open_sender):
    """It is logged there, and closes the update as vLLM does: the last rank is the one that fails the call."""
    caplog.set_level(logging.ERROR)
    silent.update(1)
    silent.join(open_sender(session="2222"))
    silent.books.finish()
    assert "finish failed on rank 0" in caplog.text
    assert state(silent.peer)[0] is silent.books.open is False


def test_finish_by_hand_after_an_update_that_did_not_commit(rank):
    """Without a trainer, the first one fails, since it may be the late call of the one that is gone; the next one closes."""
    rank.update(1)
    rank.engine.shutdown()
    with pytest.raises(StaleSessionError, match="did not commit"):
        rank.books.finish()
    rank.books.finish()
    assert rank.books.open is False


def test_update_before_any_init_is_refused(make_rank):
    """Without a trainer there is nothing to receive, and the text says what comes first."""
    rank = make_rank()
    rank.books.start()
    with pytest.raises(StaleSessionError, match="init_weight_transfer_engine comes first") as caught:
        rank.books.update(1, session="any")
    assert (caught.value.side, caught.value.rank, caught.value.phase) == ("worker", 0, "update")
    assert rank.engine._open is rank.books.open is False


def test_stale_round_is_refused(rank):
    """A round's number counts once; the refusal closes the update as vLLM does, and the next round is well."""
    rank.update(4)
    rank.finish(4)
    rank.books.start()
    with pytest.raises(StaleSessionError, match="round 4 is over; expected one above 4"):
        rank.books.update(4)
    assert state(rank.peer) == (False, False) == (rank.books.open, False)
    rank.update(5)
    rank.finish(5)


# --- a server that was started with random weights ---------------------------------------------------------------


@pytest.fixture
def random_rank(make_rank):
    """A rank of a vLLM that was started with `--load-format dummy`; its model has a buffer that a checkpoint fills."""
    rank = make_rank()
    rank.engine.vllm_config.load_config = SimpleNamespace(load_format="dummy")
    rank.engine.model.register_buffer("bias", torch.zeros(2))
    return rank


def test_hello_says_how_the_server_got_its_weights(random_rank, make_rank):
    """The sender can tell random weights from a checkpoint's, and which engines hold one model together."""
    assert make_rank().engine._hello().load_format == ""
    assert random_rank.engine._hello().load_format == "dummy"
    assert random_rank.engine._hello().shares_model == ""
    random_rank.engine.parallel_config.enable_expert_parallel = True
    random_rank.engine.parallel_config.data_parallel_size = 2
    assert random_rank.engine._hello().shares_model == random_rank.engine._hello().engine.rpartition("/")[0] != ""


def test_what_is_still_random_is_told_until_a_round_has_written_it(random_rank):
    """What no committed round has written since the start is told as unset; afterwards it is only not synced."""
    rank = random_rank
    assert rank.engine._unset_names(("bias", "x")) == {"bias", "x"}
    rank.join(check_cover=False)
    rank.update(1)
    assert (rank.placed.not_synced, rank.placed.unset) == (["bias"], ["bias"])
    rank.finish(1)
    assert rank.engine._unset_names(("bias", "a")) == {"bias"}


def test_loader_that_leaves_random_weights_fails_the_round(random_rank):
    """Where only the loader shows what it has left out, the round fails as soon as it is known."""
    rank = random_rank
    rank.join()
    finish = rank.installer.finish

    def finish_with_rest():
        finish()
        return InstallResult(not_synced=("a",))

    rank.installer.finish = finish_with_rest
    rank.installer.check_cover = True
    updating = rank.begin(1)
    error, touched = failure(rank.peer)
    assert isinstance(error, PlanError)
    assert "random weights" in error.message
    assert touched
    with pytest.raises(PlanError):
        updating.value()


# --- what is digested ------------------------------------------------------------------------------------------


SENT = {"a": torch.tensor([1.5, -2.0]), "b": torch.tensor([3, -4, 5], dtype=torch.int8)}
VERIFY = ["full", "received", "off"]
KINDS = {"full": "ww", "received": "rr", "off": "rr"}


def test_placement_is_told_once(rank):
    """What digests are over is told before the first `Ready` and not again while it holds, also after a round that failed."""
    rank.update(1)
    assert rank.placed == Placed(round=1, takes="aa", digested="ww", parts=[], not_in_place={})
    rank.finish(1)
    _break_between(rank)
    updating = rank.begin(2)
    failure(rank.peer)
    with pytest.raises(OSError, match="on purpose"):
        updating.value()
    assert rank.placed is None
    _mend(rank)
    rank.update(3)
    rank.finish(3)
    assert rank.placed is None


def test_placement_is_told_to_each_sender(rank, open_sender):
    """A new session's sender knows nothing of what the earlier one was told."""
    rank.update(1)
    rank.finish(1)
    rank.join(open_sender(session="2222"))
    rank.update(1)
    assert rank.placed == Placed(round=1, takes="aa", digested="ww", parts=[], not_in_place={})


def test_placement_is_told_again_when_it_has_changed(rank):
    """When another tensor serves, or something else is in place, the sender hears of it before the next `Ready`."""
    rank.update(1)
    rank.finish(1)
    rank.engine.model.a = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    rank.update(2)
    assert rank.placed == Placed(round=2, takes="aa", digested="ww", parts=[], not_in_place={})
    rank.finish(2)
    assert installed(rank) == NEW
    key, prepared, anchors = rank.installer._prepared
    fewer = Binding(prepared.binding.plan, dict(rank.engine.model.named_parameters()), ["b"])
    rank.installer._prepared = key, Prepared(binding=fewer, not_in_place={"moved": ["a"]}), anchors
    rank.installer.route_id += 1
    rank.update(3)
    assert rank.placed == Placed(round=3, takes="aa", digested="rw", parts=[], not_in_place={"moved": ["a"]})
    assert rank.finish(3) == digests_of(ONES)
    rank.installer._prepared = key, prepared, anchors
    rank.installer.route_id += 1
    rank.update(4)
    assert rank.placed == Placed(round=4, takes="aa", digested="ww", parts=[], not_in_place={})
    assert rank.finish(4) == digests_of(ONES)


def _update_from(rank, number, root):
    """A round of metadata that differ by their root; whether the worker asked for them, and what it told of them."""
    metadata = metadata_of(number, roots=[root] * 2)
    rows = zip(NAMES, DTYPES, map(tuple, SHAPES), metadata.roots, strict=True)
    rank.books.start()
    updating = rank.call(lambda: rank.books.update(number, digest=metadata_digest(rows)))
    first = rank.peer.receive((Ready, Placed))
    asked = isinstance(first, Ready) and not first.knows_metadata
    if asked:
        rank.peer.send(metadata)
        first = rank.peer.receive((Ready, Placed))
    if isinstance(first, Placed):
        assert rank.peer.receive(Ready).knows_metadata
    rank.peer.send(go(number))
    rank.peer.receive(Installed)
    updating.value()
    rank.finish(number)
    return asked


def test_sources_that_alternate_are_known(rank):
    """Metadata of a few sources in turn are asked for once each, and not again."""
    assert [_update_from(rank, number, number % 3) for number in range(1, 10)] == [True] * 3 + [False] * 6


def test_what_is_known_of_metadata_is_bounded(rank):
    """A run that always sends other parameters grows nothing; what was not used for longest is asked for and told again."""
    for number in range(1, 21):
        assert _update_from(rank, number, number)
        assert len(rank.engine._known) <= 8
    assert not _update_from(rank, 21, 20)
    assert not _update_from(rank, 22, 13)
    assert _update_from(rank, 23, 12)


def test_placement_that_was_told_in_a_failed_round_is_known(rank):
    """The sender files it although the round is over, so it is not told again."""
    updating = rank.begin(1, until=Ready)
    assert rank.placed is not None
    rank.peer.send(abort(1, PlanError("no room")))
    rank.peer.receive(Ended)
    with pytest.raises(PlanError):
        updating.value()
    rank.update(2)
    assert rank.placed is None


@pytest.mark.parametrize("verify", VERIFY)
def test_finishing_has_the_digests(make_rank, verify):
    """One for each parameter, over the bytes installed or received, in every round anew; none where nothing is verified."""
    rank = make_rank()
    rank.join(verify=verify)
    for number, sent in ((1, SENT), (2, ONES)):
        rank.engine.sent = sent
        rank.update(number)
        assert number > 1 or rank.placed.digested == KINDS[verify]
        assert rank.finish(number) == ([] if verify == "off" else digests_of(sent))


def test_verification_is_the_sessions(rank, open_sender):
    """Each sender says for its own session what is digested."""
    rank.update(1)
    assert rank.finish(1) == digests_of(ONES)
    for session, verify in (("2222", "off"), ("3333", "received"), ("4444", "full")):
        rank.join(open_sender(session=session), verify=verify)
        rank.update(1)
        assert rank.placed.digested == KINDS[verify]
        assert rank.finish(1) == ([] if verify == "off" else digests_of(ONES))


@pytest.mark.parametrize("verify", VERIFY)
def test_bit_that_flips_in_the_live_parameter(make_rank, verify):
    """Between update and finish, a changed bit of what serves changes the digest of what is installed, and only of that."""
    rank = make_rank()
    rank.join(verify=verify)
    rank.engine.sent = SENT
    rank.update(1)
    rank.engine.model.a.data.view(torch.int32)[1] ^= 1 << 7
    expected = {"full": digests_of({**SENT, "a": rank.engine.model.a}), "received": digests_of(SENT), "off": []}
    assert rank.finish(1) == expected[verify]
    assert digests_of(SENT)[0] != expected["full"][0]


@pytest.mark.parametrize("verify", VERIFY)
def test_sender_may_ask_for_received_bytes(make_rank, verify):
    """What `Go.received` lists is digested as it came, whatever the placement says; in the next round it may be another."""
    rank = make_rank()
    rank.join(verify=verify)
    rank.engine.sent = SENT
    for number, received in ((1, [0]), (2, [1]), (3, []), (4, [0, 1])):
        rank.update(number, received=received)
        rank.engine.model.a.data.fill_(7)
        rank.engine.model.b.data.fill_(7)
        live, came = digests_of({**SENT, **dict(rank.engine.model.named_parameters())}), digests_of(SENT)
        full = [came[index] if index in received else live[index] for index in (0, 1)]
        assert rank.finish(number) == {"full": full, "received": came, "off": []}[verify]


def test_cast_on_the_wire_is_what_is_digested(rank):
    """Where the sender casts to the dtype that was asked for, what is installed has the bytes that were sent."""
    dtypes = ["float64", "int8"]
    digest = metadata_digest(zip(NAMES, dtypes, map(tuple, SHAPES), [0, 0], strict=True))
    rank.engine.sent = SENT
    updating = rank.begin(1, until=None, digest=digest)
    assert rank.agree(metadata_of(1, dtype_names=dtypes)).digested == "ww"
    rank.peer.send(go(1, casts={"a": "float32"}))
    assert rank.peer.receive(Installed).num_bytes == 11
    updating.value()
    assert rank.finish(1) == digests_of(SENT)


def test_digests_that_cannot_be_computed_fail_the_round(rank, monkeypatch):
    """A digest that fails is a failed finish: the sender hears why, and no verdict is waited for."""
    rank.update(1)
    monkeypatch.setattr("wt_worker.shares.Shares.digests", fail(OSError("broken on purpose")))
    finishing = rank.call(rank.books.finish)
    error, touched = failure(rank.peer)
    assert ("broken on purpose" in error.message, touched) == (True, True)
    with pytest.raises(OSError, match="on purpose"):
        finishing.value()
    assert state(rank.peer) == (True, True)


# --- the installer's life --------------------------------------------------------------------------------------


@pytest.fixture
def calls(rank):
    """What the rank's installer is called, in order."""
    calls = []

    def listen(name, call):
        def called(*args):
            calls.append(name)
            return call(*args)

        return called

    for name in ("prepare", "begin", "finish", "commit", "abort"):
        setattr(rank.installer, name, listen(name, getattr(rank.installer, name)))
    return calls


def test_installer_lives_as_long_as_the_engine(rank, calls, open_sender):
    """Each round of each session is the same installer's, which remembers; each target has one of its own."""
    installer = rank.installer
    for session in ("2222", "3333"):
        rank.update(1)
        rank.finish(1)
        rank.join(open_sender(session=session))
    assert calls == ["prepare", "begin", "finish", "commit"] * 2
    rank.engine.set_weight_update_target(torch.nn.Linear(1, 1), None)
    assert rank.installer is not installer
    rank.engine.reset_weight_update_target()
    assert rank.installer is installer


def test_check_cover_is_the_sessions(make_rank, open_sender):
    """What one sender has turned off counts for its own session only, though the installer is the same."""
    rank = make_rank()
    digest = metadata_digest([("b", "int8", (3,), 0)])
    metadata = {"names": ["b"], "dtype_names": ["int8"], "shapes": [[3]]}
    rank.join(check_cover=False)
    updating = rank.begin(1, until=None, digest=digest)
    rank.agree(metadata_of(1, **metadata))
    rank.peer.send(go(1))
    assert rank.peer.receive(Installed).not_synced == ["a"]
    updating.value()
    rank.finish(1)
    rank.join(open_sender(session="2222"))
    updating = rank.begin(1, until=None, digest=digest)
    rank.peer.receive(Ready)
    rank.peer.send(metadata_of(1, **metadata))
    error, touched = failure(rank.peer)
    assert ("does not send 1 of the model's parameters: ['a']" in error.message, touched) == (True, False)
    with pytest.raises(PlanError):
        updating.value()


def test_commit_comes_with_the_verdict(rank, calls):
    """Not before the sender has said that every rank has the weights is the installer told to count on them."""
    rank.update(1)
    finishing = rank.call(rank.books.finish)
    rank.peer.receive(Finishing)
    assert calls == ["prepare", "begin", "finish"]
    rank.peer.send(Committed(round=1))
    finishing.value()
    assert calls == ["prepare", "begin", "finish", "commit"]
    rank.engine.shutdown()
    assert calls[4:] == []


@pytest.mark.parametrize("how", ["abort", "deadline", "death", "start", "init", "shutdown"])
def test_round_without_a_commit_is_aborted(rank, calls, open_sender, monkeypatch, how):
    """Whatever ends an installed round but the verdict `Committed`, the installer hears it once, and no commit."""
    monkeypatch.setattr("wt_worker.lifecycle._VERDICT_GRACE_S", 0)
    updating = rank.begin(1, until=Ready)
    rank.peer.send(go(1, remaining_s=0.3 if how == "deadline" else WAIT_S))
    rank.peer.receive(Installed)
    updating.value()
    finishing = None
    if how in {"abort", "deadline", "death"}:
        finishing = rank.call(rank.books.finish)
        rank.peer.receive(Finishing)
    if how == "abort":
        rank.peer.send(abort(1, PlanError("no room")))
    elif how == "death":
        rank.peer.hang_up()
    elif how == "start":
        rank.engine.start_weight_update()
    elif how == "init":
        rank.join(open_sender(session="2222"))
    elif how == "shutdown":
        rank.engine.shutdown()
    if finishing is not None:
        with pytest.raises((PlanError, RoundTimeoutError, PeerLostError)):
            finishing.value()
    assert calls == ["prepare", "begin", "finish", "abort"]
    assert rank.engine.last_outcome == "poisoned"


@pytest.mark.parametrize(
    ("break_", "until_", "expected"),
    [
        (lambda rank: setattr(rank.installer, "prepare", fail(OSError("broken"))), None, []),
        (lambda rank: setattr(rank.installer, "begin", fail(OSError("broken"))), None, ["prepare", "abort"]),
        (lambda rank: setattr(rank.engine, "before", fail(OSError("broken"))), Go, ["prepare", "begin", "abort"]),
        (lambda rank: setattr(rank.engine, "between", fail(OSError("broken"))), Go, ["prepare", "begin", "abort"]),
        (
            lambda rank: setattr(rank.engine, "synchronize", fail(OSError("broken"))),
            Go,
            ["prepare", "begin", "finish", "abort"],
        ),
    ],
    ids=["prepare", "begin", "before", "between", "synchronize"],
)
def test_installer_of_a_failed_update(rank, calls, break_, until_, expected):
    """From `begin` on, also if that itself fails, a failure aborts the installer, once; before, there is nothing to abort."""
    break_(rank)
    updating = rank.begin(1, until=until_)
    if until_ is None:
        rank.peer.receive(Ready)
        rank.peer.send(metadata_of(1))
    if "prepare" in expected and until_ is None:
        rank.peer.receive(Placed)
    failure(rank.peer)
    with pytest.raises(OSError, match="broken"):
        updating.value()
    assert calls == expected


def test_update_after_an_update_begins_anew(rank, calls):
    """Without a finish call in between the second round is one of its own, and it alone is committed."""
    for number in (1, 2):
        rank.update(number)
    rank.finish(2)
    assert calls == ["prepare", "begin", "finish"] * 2 + ["commit"]
    assert installed(rank) == NEW


def test_update_that_fails_after_an_update_was_not_finished(rank):
    """What the first one has installed serves, and nobody has committed it."""
    rank.update(1)
    rank.installer.prepare = fail(OSError("broken"))
    updating = rank.call(lambda: rank.books.update(2))
    _, touched = failure(rank.peer)
    with pytest.raises(OSError, match="broken"):
        updating.value()
    assert touched


def test_buffers_of_a_session_are_let_go_with_it(rank, open_sender):
    """What was planned for one session's buffers and groups is not used in the next one's, which may be others."""
    rank.update(1)
    rank.finish(1)
    assert rank.engine._writer_cache._programs
    rank.join(open_sender(session="2222"))
    assert not rank.engine._writer_cache._programs


# --- failures in an update -------------------------------------------------------------------------------------


def _break_choice(rank):
    rank.engine._installer = fail(OSError("broken on purpose"))


def _break_metadata(rank):
    rank.engine._agree_on_metadata = fail(OSError("broken on purpose"))


def _break_before(rank):
    rank.engine.before = fail(PlanError("broken on purpose", side="worker", param="a"))


def _break_between(rank):
    rank.engine.between = fail(OSError("broken on purpose"))


def _break_installer(rank):
    rank.installer.finish = fail(OSError("broken on purpose"))


def _break_synchronize(rank):
    rank.engine.synchronize = fail(OSError("broken on purpose"))


def _interrupt(rank):
    rank.engine.between = fail(KeyboardInterrupt("broken on purpose"))


def _mend(rank):
    for name in ("_installer", "_agree_on_metadata", "synchronize"):
        vars(rank.engine).pop(name, None)
    vars(rank.installer).pop("finish", None)
    rank.engine.before = rank.engine.between = lambda round_: None


BREAKS = [
    (_break_choice, None, TransportError, OLD),
    (_break_metadata, None, TransportError, OLD),
    (_break_before, Go, PlanError, OLD),
    (_break_between, Go, TransportError, MIXED),
    (_break_installer, Go, TransportError, NEW),
    (_break_synchronize, Go, TransportError, NEW),
]
BREAK_IDS = [each[0].__name__.removeprefix("_break_") for each in BREAKS]


@pytest.mark.parametrize(("break_", "until_", "kind", "left"), BREAKS, ids=BREAK_IDS)
def test_failed_step_of_an_update(rank, break_, until_, kind, left):
    """The sender hears why, then whether the model was touched; the call raises; the next round repairs everything."""
    break_(rank)
    updating = rank.begin(1, until=until_)
    error, touched = failure(rank.peer)
    assert (type(error), error.side, error.round) == (kind, "worker", 1)
    assert "broken on purpose" in error.message
    with pytest.raises((OSError, PlanError), match="broken on purpose"):
        updating.value()
    assert installed(rank) == left
    assert touched is (left is not OLD)
    assert state(rank.peer) == (rank.books.open, touched) == (False, touched)
    assert rank.engine.ended == [True]
    assert rank.engine.open_at_end is False
    assert rank.engine.last_outcome == ("poisoned" if touched else "unchanged")
    _mend(rank)
    rank.update(2)
    rank.finish(2)
    assert installed(rank) == NEW
    assert state(rank.peer) == (False, False)


@pytest.mark.parametrize(("break_", "until_", "kind", "left"), BREAKS, ids=BREAK_IDS)
def test_failed_step_on_a_rank_that_must_not_raise(silent, caplog, break_, until_, kind, left):
    """Any rank but the last tells the sender the same and returns, so that vLLM's replies stay in step; it logs why."""
    break_(silent)
    updating = silent.begin(1, until=until_)
    error, touched = failure(silent.peer)
    updating.value()
    assert (type(error), touched) == (kind, left is not OLD)
    assert "broken on purpose" in caplog.text
    assert "update failed on rank 0; the last rank reports it" in caplog.text
    assert state(silent.peer) == (silent.books.open, touched) == (True, touched)
    assert silent.engine.open_at_end is True
    silent.books.finish()  # the sender closes what is open before the next round
    assert state(silent.peer) == (silent.books.open, touched) == (False, touched)
    _mend(silent)
    silent.update(2)
    silent.finish(2)
    assert state(silent.peer) == (False, False)


def test_poison_stays_until_a_round_commits(rank):
    """A later round that fails before its first byte does not make the model whole again."""
    for break_, expected in ((_break_between, True), (_break_before, False)):
        break_(rank)
        updating = rank.begin(rank.engine._session.last_round + 1)
        assert failure(rank.peer)[1] is expected
        with pytest.raises((OSError, PlanError)):
            updating.value()
        _mend(rank)
        assert state(rank.peer) == (False, True)
    rank.update(3)
    assert state(rank.peer) == (True, True)
    rank.finish(3)
    assert state(rank.peer) == (False, False)


def test_finish_after_a_failed_update_only_closes(rank):
    """Whatever a round failed of, it is over: the finish of an update that was opened since has nothing to do with it."""
    for break_, until_, *_ in BREAKS:
        number = rank.engine._session.last_round + 1
        break_(rank)
        updating = rank.begin(number, until=until_)
        failure(rank.peer)
        with pytest.raises((OSError, PlanError)):
            updating.value()
        _mend(rank)
        rank.books.start()
        rank.repair()
        assert state(rank.peer)[0] is False


PARTS = {
    name: metadata_digest([(name, dtype, tuple(shape), 0)])
    for name, dtype, shape in zip(NAMES, DTYPES, SHAPES, strict=True)
}


@pytest.fixture
def poisoned(make_rank):
    """A rank that takes rounds of a part of its parameters; one of all failed after the first of them."""
    rank = make_rank()
    rank.join(check_cover=False)
    _break_between(rank)
    updating = rank.begin(1)
    assert failure(rank.peer)[1]
    with pytest.raises(OSError, match="on purpose"):
        updating.value()
    _mend(rank)
    return rank


def part(rank, number, name):
    """A good round of this parameter alone; whether the worker said that something stays half-written."""
    rank.books.start()
    updating = rank.call(lambda: rank.books.update(number, digest=PARTS[name]))
    place = NAMES.index(name)
    rank.agree(metadata_of(number, names=[name], dtype_names=[DTYPES[place]], shapes=[SHAPES[place]]))
    rank.peer.send(go(number))
    message = rank.peer.receive(Installed)
    updating.value()
    rank.finish(number)
    return message.poisoned


def test_poison_stays_until_all_that_was_touched_is_written(poisoned):
    """Rounds of parts repair the model together; each says before its verdict whether something is left."""
    assert part(poisoned, 2, "a")
    assert state(poisoned.peer) == (False, True)
    assert part(poisoned, 3, "a")
    assert not part(poisoned, 4, "b")
    assert state(poisoned.peer) == (False, False)


def test_full_round_repairs_at_once(poisoned):
    """It says so before its verdict."""
    assert not poisoned.update(2).poisoned
    poisoned.finish(2)
    assert state(poisoned.peer) == (False, False)


def test_poison_of_another_model_stays(poisoned):
    """A round of the target does not repair a draft, nor the other way round: the worker says that something is left."""
    draft = torch.nn.Module()
    for name, parameter in poisoned.engine.model.named_parameters():
        draft.register_parameter(name, torch.nn.Parameter(parameter.clone(), requires_grad=False))
    poisoned.engine.set_weight_update_target(draft, None)
    assert poisoned.update(2).poisoned
    poisoned.finish(2)
    poisoned.engine.reset_weight_update_target()
    assert state(poisoned.peer) == (False, True)
    assert not poisoned.update(3).poisoned
    poisoned.finish(3)
    assert state(poisoned.peer) == (False, False)


def test_interrupt_ends_the_round_and_stays_an_interrupt(rank, silent):
    """An interrupt is no failure to be swallowed, on whichever rank; the sender hears of it all the same."""
    for each in (rank, silent):
        _interrupt(each)
        updating = each.begin(1)
        error, touched = failure(each.peer)
        assert "KeyboardInterrupt" in error.message
        assert touched
        with pytest.raises(KeyboardInterrupt):
            updating.value()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"shapes": [[2], [4]]}, r"'b': the model has shape \[3\], the trainer sends \[4\]"),
        ({"dtype_names": ["float32", "float32"]}, "'b': the model has torch.int8, the trainer sends torch.float32"),
    ],
    ids=["shape", "dtype"],
)
def test_metadata_that_do_not_fit_the_model(rank, fields, text):
    """A model without a place for what is announced refuses before a byte moves, naming the parameter."""
    metadata = metadata_of(1, **fields)
    digest = metadata_digest(
        zip(metadata.names, metadata.dtype_names, map(tuple, metadata.shapes), [0, 0], strict=True)
    )
    updating = rank.begin(1, until=None, digest=digest)
    assert not rank.peer.receive(Ready).knows_metadata
    rank.peer.send(metadata)
    error, touched = failure(rank.peer)
    assert isinstance(error, PlanError)
    assert error.param in {"b", "c"}
    assert touched is False
    with pytest.raises(PlanError, match=text) as caught:
        updating.value()
    assert (caught.value.rank, caught.value.engine, caught.value.round) == (0, "e0/0", 1)
    updating = rank.begin(2, until=None, digest=digest)
    error, touched = failure(rank.peer)  # without asking for them again
    assert (type(error), error.param in {"b", "c"}, touched) == (PlanError, True, False)
    with pytest.raises(PlanError, match=text):
        updating.value()


def test_metadata_that_differ_from_their_digest(rank):
    """Metadata other than those that the update call named are refused."""
    updating = rank.begin(1, until=None, digest="ab" * 32)
    rank.peer.receive(Ready)
    rank.peer.send(metadata_of(1))
    error, touched = failure(rank.peer)
    assert (type(error), touched) == (IntegrityError, False)
    with pytest.raises(IntegrityError, match=f"expected digest abababababab, got {DIGEST[:12]}"):
        updating.value()


def test_bad_update_info(rank, silent, caplog):
    """An update call that cannot be parsed is raised by the last rank alone, and leaves the update as vLLM has it."""
    rank.books.start()
    with pytest.raises(ValueError, match=r"update_info for ToyEngine is invalid.*round"):
        rank.books.update("first")
    assert state(rank.peer) == (rank.books.open, False) == (False, False)
    silent.books.start()
    silent.books.update("first")
    assert "update_info for ToyEngine is invalid" in caplog.text
    assert state(silent.peer) == (silent.books.open, False) == (True, False)


@pytest.mark.parametrize("step", ["ready", "go", "installing"])
def test_abort_ends_an_update(rank, step):
    """An abort ends the update wherever it is, with the sender's error; the worker answers `Ended` and nothing else."""
    there = rank.hang()
    updating = rank.begin(1, until={"ready": None, "go": Ready, "installing": Go}[step])
    if step == "ready":
        rank.peer.receive(Ready)
    assert step != "installing" or there.wait(WAIT_S)
    rank.peer.send(abort(1, PlanError("no room", side="worker", rank=7, engine="e9/0")))
    touched = step == "installing"
    assert rank.peer.receive() == Ended(round=1, touched=touched)
    with pytest.raises(PlanError, match="no room") as caught:
        updating.value()
    assert (caught.value.rank, caught.value.engine) == (7, "e9/0")
    assert state(rank.peer) == (rank.books.open, touched) == (False, touched)


@pytest.mark.parametrize("step", ["ready", "go", "installing"])
def test_sender_that_dies_ends_an_update(rank, open_sender, step):
    """A sender that is gone frees the worker at once; the next one's hello says how the model was left."""
    there = rank.hang()
    updating = rank.begin(1, until={"ready": None, "go": Ready, "installing": Go}[step])
    if step == "ready":
        rank.peer.receive(Ready)
    assert step != "installing" or there.wait(WAIT_S)
    rank.peer.hang_up()
    with pytest.raises(PeerLostError, match="the trainer is gone"):
        updating.value()
    hello = rank.join(open_sender(session="2222")).hello
    assert (hello.open, hello.poisoned) == (False, step == "installing")
    _mend(rank)
    rank.update(1)
    rank.finish(1)


@pytest.mark.parametrize("step", ["metadata", "go"])
def test_sender_that_says_nothing_costs_the_deadline(make_rank, step):
    """Without the sender's next word the update ends at the session's timeout, naming the message."""
    rank = make_rank()
    rank.join(timeout_s=0.5)
    updating = rank.begin(1, until=None if step == "metadata" else Ready)
    if step == "metadata":
        rank.peer.receive(Ready)
    error, touched = failure(rank.peer)
    assert (type(error), touched) == (RoundTimeoutError, False)
    with pytest.raises(RoundTimeoutError, match=f"still waiting for the trainer's '{step}'"):
        updating.value()


def test_model_that_cannot_be_restored_is_taken_for_touched(rank, caplog):
    """If the installer cannot even abort, the model counts as touched, the log says so, and the first error is raised."""
    rank.installer.abort = fail(RuntimeError("stuck"))
    _break_before(rank)
    updating = rank.begin(1)
    error, touched = failure(rank.peer)
    assert (type(error), touched) == (PlanError, True)
    with pytest.raises(PlanError, match="on purpose"):
        updating.value()
    assert "restart this engine" in caplog.text
    assert state(rank.peer) == (False, True)


# --- failures in a finish --------------------------------------------------------------------------------------


def test_abort_is_a_verdict(rank):
    """A finish whose verdict is an abort raises it, so that vLLM publishes no version; vLLM's update then stays open."""
    rank.update(1)
    finishing = rank.call(rank.books.finish)
    rank.peer.receive(Finishing)
    rank.peer.send(abort(1, IntegrityError("rank 1 has other bytes", side="trainer")))
    assert rank.peer.receive() == Ended(round=1, touched=True)
    with pytest.raises(IntegrityError, match="other bytes") as caught:
        finishing.value()
    assert (caught.value.phase, caught.value.engine) == ("finish", "e0/0")
    assert state(rank.peer) == (rank.books.open, True) == (True, True)
    rank.repair()
    assert state(rank.peer) == (rank.books.open, True) == (False, True)
    rank.update(2)
    rank.finish(2)
    assert state(rank.peer) == (False, False)


def test_abort_between_update_and_finish(rank):
    """An abort that comes while no call runs is the next finish's error."""
    rank.update(1)
    rank.peer.send(abort(1, PlanError("no room")))
    assert state(rank.peer) == (True, False)
    finishing = rank.call(rank.books.finish)
    assert rank.peer.receive(Finishing).round == 1
    assert rank.peer.receive() == Ended(round=1, touched=True)
    with pytest.raises(PlanError, match="no room"):
        finishing.value()


def test_failed_finish_on_a_rank_that_must_not_raise(silent, caplog):
    """Any rank but the last returns from a failed finish, which closes vLLM's update there; it is poisoned all the same."""
    silent.update(1)
    finishing = silent.call(silent.books.finish)
    silent.peer.receive(Finishing)
    silent.peer.send(abort(1, PlanError("no room")))
    assert silent.peer.receive() == Ended(round=1, touched=True)
    finishing.value()
    assert "finish failed on rank 0; the last rank reports it" in caplog.text
    assert state(silent.peer) == (silent.books.open, True) == (False, True)


def test_broken_finish_is_told(rank, silent):
    """A finish that fails here, and not at the sender, says so on the connection, on every rank."""
    for each in (rank, silent):
        each.update(1)
        each.engine._await_verdict = fail(OSError("broken on purpose"))
        finishing = each.call(each.books.finish)
        error, touched = failure(each.peer)
        assert "broken on purpose" in error.message
        assert touched
        if each is silent:
            finishing.value()
        else:
            with pytest.raises(OSError, match="on purpose"):
                finishing.value()
        assert state(each.peer) == (each.books.open, True)


def test_sender_that_dies_before_its_verdict(rank, open_sender):
    """A sender that goes without a verdict has not committed: the finish raises at once, and the model counts as poisoned."""
    rank.update(1)
    finishing = rank.call(rank.books.finish)
    rank.peer.receive(Finishing)
    rank.peer.hang_up()
    with pytest.raises(PeerLostError):
        finishing.value()
    hello = rank.join(open_sender(session="2222")).hello
    assert (hello.open, hello.poisoned) == (True, True)


@pytest.mark.parametrize("gone", [False, True], ids=["there", "gone"])
def test_verdict_before_the_finish_call(rank, open_sender, gone):
    """Where nothing is verified the verdict may be there first: the call returns at once, also if the sender has died since."""
    rank.update(1)
    rank.peer.send(Committed(round=1))
    if gone:
        round_ = rank.engine._session.round
        round_.wait(lambda: Committed in round_.posts, "the verdict")
        rank.peer.hang_up()
    rank.call(rank.books.finish).value()
    assert rank.engine.last_outcome == Outcome.COMMITTED
    hello = rank.join(open_sender(session="2222")).hello
    assert (hello.open, hello.poisoned) == (False, False)
    assert installed(rank) == NEW


def test_verdict_without_a_finish_call(rank, open_sender):
    """The round counts, and the next sender hears that an update was left open."""
    rank.update(1)
    rank.peer.send(Committed(round=1))
    round_ = rank.engine._session.round
    round_.wait(lambda: Committed in round_.posts, "the verdict")
    rank.peer.hang_up()
    hello = rank.join(open_sender(session="2222")).hello
    assert (hello.open, hello.poisoned) == (True, False)
    assert rank.engine.last_outcome == Outcome.COMMITTED


def test_verdict_that_does_not_come(rank, monkeypatch):
    """A frozen sender's verdict is waited for until shortly after the deadline, not longer; then the sender is told."""
    monkeypatch.setattr("wt_worker.lifecycle._VERDICT_GRACE_S", 0.2)
    updating = rank.begin(1, until=Ready)
    rank.peer.send(go(1, remaining_s=0.3))
    rank.peer.receive(Installed)
    updating.value()
    finishing = rank.call(rank.books.finish)
    rank.peer.receive(Finishing)
    with pytest.raises(RoundTimeoutError, match="still waiting for the trainer's 'committed'") as caught:
        finishing.value()
    assert caught.value.phase == "finish"
    error, touched = failure(rank.peer)
    assert (type(error), touched) == (RoundTimeoutError, True)


def test_verdict_may_come_shortly_after_the_deadline(rank, monkeypatch, until):
    """The sender decides at the deadline, and its word takes a moment: a commit that comes just after it counts."""
    monkeypatch.setattr("wt_worker.lifecycle._VERDICT_GRACE_S", WAIT_S)
    updating = rank.begin(1, until=Ready)
    rank.peer.send(go(1, remaining_s=0.3))
    rank.peer.receive(Installed)
    updating.value()
    deadline = rank.engine._session.round.deadline
    finishing = rank.call(rank.books.finish)
    rank.peer.receive(Finishing)
    until(lambda: time.monotonic() > deadline)
    rank.peer.send(Committed(round=1))
    finishing.value()
    assert state(rank.peer) == (False, False)


def test_start_ends_a_round_that_was_never_finished(rank):
    """A round that nobody finished is over when the next update is opened, and was not committed."""
    rank.update(1)
    rank.engine.start_weight_update()
    assert state(rank.peer) == (True, True)
    rank.update(2)
    rank.finish(2)
    assert state(rank.peer) == (False, False)


# --- ranks that must not raise ---------------------------------------------------------------------------------


def test_last_rank_raises(make_rank):
    """Of two ranks the second is the one that raises."""
    last = make_rank(rank=1, size=2)
    last.join()
    _break_between(last)
    updating = last.begin(1)
    failure(last.peer)
    with pytest.raises(OSError, match="on purpose"):
        updating.value()
    assert state(last.peer) == (last.books.open, True) == (False, True)


def test_init_of_a_rank_that_must_not_raise(silent, caplog, sender):
    """A failed init of any rank but the last is logged; the sender finds the rank missing, and the last one reports."""
    caplog.set_level(logging.ERROR)
    silent.books.init(sender.info(dict, colour="red"))
    assert "colour" in caplog.text
    silent.books.init(sender.info(dict, schema=[9, 0]))
    assert "the other 9.0" in caplog.text
    assert state(silent.peer) == (False, False), "the session that was there goes on"
    peer = silent.peer
    silent.join(reply=Refused(error=error_to_wire(AgreementError("connected twice"))))
    silent.peer = peer
    assert "connected twice" in caplog.text
    assert caplog.text.count("init failed on rank 0; the last rank reports it") == 3
    silent.update(1)
    silent.finish(1)


# --- questions and the end -------------------------------------------------------------------------------------


def test_state_is_told_while_a_call_runs(rank):
    """The sender may ask in the middle of an update, whose call is then open."""
    updating = rank.begin(1, until=Ready)
    assert state(rank.peer) == (True, False)
    rank.peer.send(go(1))
    rank.peer.receive(Installed)
    updating.value()


def test_shutdown_leaves_the_session(rank):
    """The sender hears that the worker goes, and the end; shutting down again does nothing; an update is then refused.

    It is no stale session: nobody else has taken the server over. vLLM shuts its workers down when its engine has died.
    """
    peer = rank.peer
    rank.engine.shutdown()
    rank.engine.shutdown()
    (leave,) = peer.rest()
    error = error_from_wire(leave.error)
    assert isinstance(error, PeerLostError)
    assert "shut down" in error.message
    rank.books.start()
    with pytest.raises(StaleSessionError, match="not initialized"):
        rank.books.update(1, session="any")
    rank.join()
    rank.update(1)
    rank.finish(1)


def test_shutdown_before_any_init(make_rank):
    """An engine that no trainer ever met can be shut down."""
    make_rank().engine.shutdown()


def test_shutdown_in_a_round_ends_it(rank):
    """A round that was not committed is over, and its transfer is told that nothing of it may be used again."""
    rank.update(1)
    rank.engine.shutdown()
    assert rank.engine.ended[0] is False
    assert rank.engine.ended[-1] is True
    assert rank.engine._half_written


def test_update_info_names_the_round(rank):
    """The per-round info has session, round and digest, and nothing that the init has settled."""
    info = rank.engine.parse_update_info({"session": "s", "round": 1, "metadata_digest": "d"})
    assert info == SessionUpdateInfo(session="s", round=1, metadata_digest="d")
