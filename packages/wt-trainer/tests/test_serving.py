"""What is done to servers around a round. Workers are plain sockets on a real session, the servers are fakes behind a client."""

import threading
import time
from contextlib import contextmanager, nullcontext

import pytest

from wt_common import Outcome, RoundTimeoutError, StaleSessionError, TransportError
from wt_common.errors import error_to_wire
from wt_common.session import Ended, Held, Holding, Installed, Leave
from wt_trainer import serving
from wt_trainer.client import ServingControl
from wt_trainer.serving import Serving

WAIT_S = 10


class Server:
    """A server that can be paused and labelled; `fails` has what the next calls of a name raise or wait for, in order."""

    def __init__(self, label="v0"):
        self.label = label
        self.paused = False
        self.events = []  # what was done to it, in order
        self.fails = {"pause": [], "label": [], "resume": []}

    def called(self, name):
        if self.fails[name]:
            fault = self.fails[name].pop(0)
            if isinstance(fault, threading.Event):
                assert fault.wait(WAIT_S)
            else:
                raise fault


class Control:
    """Serving control over fakes."""

    timeout = float(WAIT_S)

    def __init__(self, *servers):
        self.fakes = servers

    def bounded(self, seconds):
        return nullcontext()

    def hosts(self):
        return []

    def world_size(self):
        return None

    def reset_caches(self):
        return []

    def init_weight_transfer_engine(self, init_info): ...

    def start_weight_update(self): ...

    def update_weights(self, update_info): ...

    def finish_weight_update(self, weight_version=None): ...

    def servers(self):
        return [f"server {index}" for index in range(len(self.fakes))]

    def running(self, *, may_sleep=True):
        return [index for index, server in enumerate(self.fakes) if not server.paused]

    def pause_server(self, server):
        self.fakes[server].called("pause")
        self.fakes[server].events.append("pause")
        self.fakes[server].paused = True

    def resume_server(self, server, *, within):
        self.fakes[server].called("resume")
        self.fakes[server].events.append("resume")
        self.fakes[server].paused = False

    def label(self, server, *, within):
        self.fakes[server].called("label")
        return self.fakes[server].label

    def set_label(self, server, label, *, within):
        self.fakes[server].events.append(label)
        self.fakes[server].label = label


class Worker:
    """The rank of an engine: it answers the sender, and knows whether its server is held."""

    def __init__(self, peer):
        self.peer = peer
        self.held = []  # what it heard of that, in order
        self.counts = True  # what it answers
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        try:
            while True:
                message = self.peer.receive(Held)
                self.held.append(message.held)
                if message.held:
                    self.peer.send(Holding(round=message.round, held=self.counts))
        except (EOFError, OSError):
            pass

    def leave(self, *, replaced):
        error = StaleSessionError("left")
        self.peer.send(Leave(error=error_to_wire(error), replaced=replaced))


class Scene:
    """Servers with one worker each, and the trainer's side of them."""

    def __init__(self, session, join, fakes, hellos):
        self.session = session
        self.fakes = fakes
        self.control = Control(*fakes)
        fields = [{"server": index, **hello} for index, hello in enumerate(hellos)]
        self.workers = [Worker(join(session, engine=f"e{index}", **each)) for index, each in enumerate(fields)]
        self.serving = Serving(self.control)
        self.serving.take_over(session)
        self.number = 0

    @contextmanager
    def round(self, version="v1"):
        """A round in which the servers are held."""
        self.number += 1
        with (
            self.session.running(self.number, WAIT_S) as round_,
            self.serving.held(self.session, round_, version) as self.hold,
        ):
            yield round_

    def commit(self, version="v1", *, left=(), publish=None):
        """A round that commits, after which the workers of `left` say that something stays half-written."""
        with self.round(version) as round_:
            assert all(server.paused for server in self.fakes)
            for index, peer in enumerate(self.session.workers):
                post = Installed(round=self.number, num_bytes=1, seconds={}, not_synced=[], poisoned=index in left)
                round_.posts.setdefault(Installed, {})[peer.key] = post
            round_.outcome = Outcome.COMMITTED
            for server in self.fakes:
                published = version if publish is None else publish
                server.label = server.label if published is None or server.label is None else published
        return self.hold

    def fail(self, touched=(0,), error=None, then=lambda round_: None, raises=None):
        """A round that fails and has touched the models of these workers, after `then`; the error that was raised."""
        error = TransportError("the round failed") if error is None else error

        def run():
            with self.round() as round_:
                self.touch(round_, touched)
                then(round_)
                raise error

        with pytest.raises(raises or type(error)) as caught:
            run()
        return caught.value

    def touch(self, round_, touched):
        round_.num_entered = 1
        for index, peer in enumerate(self.session.workers):
            ended = Ended(round=self.number, touched=index in touched)
            round_.posts.setdefault(Ended, {})[peer.key] = ended
        round_.outcome = Outcome.POISONED if touched else Outcome.UNCHANGED


@pytest.fixture
def scene(session, join):
    """Makes a scene of so many servers, whose workers say these hellos."""

    def make(*hellos, fakes=None):
        hellos = hellos or ({},)
        return Scene(session, join, fakes or [Server() for _ in hellos], hellos)

    return make


def notes(error):
    return "\n".join(getattr(error, "__notes__", []))


# --- a round ---------------------------------------------------------------------------------------------------


def test_client_has_serving_control():
    """Else nothing here would be tested."""
    assert isinstance(Control(), ServingControl)


def test_server_is_held_for_a_round(scene, until):
    """It is paused when its worker knows of it, and runs after the round; then the worker knows that too."""
    one = scene()
    one.commit()
    assert one.fakes[0].events == ["pause", "resume"]
    until(lambda: one.workers[0].held == [True, False])
    assert one.hold.notes == []


def test_server_that_the_user_paused_stays_so(scene):
    """Only what was running is paused, held and resumed."""
    one = scene({}, {})
    one.fakes[1].paused = True
    one.commit()
    assert (one.fakes[1].events, one.workers[1].held) == ([], [])
    assert one.fakes[0].events == ["pause", "resume"]


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), TransportError("500")], ids=["interrupt", "error"])
def test_failed_round_resumes(scene, fault):
    """Whatever ended it, servers that were paused run, under the label that they had."""
    one = scene()
    assert one.fail(touched=(), error=fault) is fault
    assert one.fakes[0].events == ["pause", "resume"]


def test_failed_pause_resumes_all(scene):
    """When one server cannot be paused, the round does not run, and what was done is undone."""
    one = scene({}, {})
    one.fakes[1].fails["pause"] = [TransportError("busy")]
    with pytest.raises(TransportError, match="busy"), one.round():
        pytest.fail("the round ran")
    assert not any(server.paused for server in one.fakes)


def test_interrupted_pause_is_resumed_after_it(scene, monkeypatch, until):
    """A pause that is still on its way when an interrupt comes is waited for, or it would pause the server for good."""
    one, go_on = scene(), threading.Event()
    one.fakes[0].fails["pause"] = [go_on]
    wait_for = serving.wait

    def interrupt(futures, timeout):
        monkeypatch.setattr(serving, "wait", wait_for)
        if one.serving._pauses:
            raise KeyboardInterrupt
        monkeypatch.setattr(serving, "wait", interrupt)

    monkeypatch.setattr(serving, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt), one.round():
        pytest.fail("the round ran")
    assert one.fakes[0].events == []
    go_on.set()
    until(lambda: one.fakes[0].events == ["pause", "resume"])


# --- labels ----------------------------------------------------------------------------------------------------


def test_label_comes_before_the_resume(scene):
    """A server whose model is half-written never runs under the version from before."""
    one = scene()
    error = one.fail()
    assert one.fakes[0].events == ["pause", "v0+poisoned", "resume"]
    assert notes(error) == ""


def test_suffix_comes_once(scene):
    """A second failed round does not add another."""
    one = scene()
    one.fail()
    one.fail()
    assert one.fakes[0].label == "v0+poisoned"


def test_only_servers_that_were_touched_are_labelled(scene):
    """A server beside a poisoned one is whole, and says so."""
    one = scene({}, {})
    one.fail(touched=(1,))
    assert [server.label for server in one.fakes] == ["v0", "v0+poisoned"]


def test_client_that_does_not_tell_servers_apart(scene):
    """There all servers are labelled, and the error says why."""
    one = scene({"server": None}, {"server": None})
    error = one.fail(touched=(1,))
    assert [server.label for server in one.fakes] == ["v0+poisoned"] * 2
    assert "which server has which engine" in notes(error)


def test_round_of_unknown_end_counts_as_touched(scene):
    """Where an interrupt came before the outcome was known, a worker that has not answered may have been touched."""
    one = scene()

    def forget(round_):
        round_.outcome = None
        round_.posts.clear()

    one.fail(error=KeyboardInterrupt(), then=forget)
    assert one.fakes[0].events == ["pause", "v0+poisoned", "resume"]


def test_server_whose_label_cannot_be_set_stays_paused(scene, until):
    """It is not resumed in this call, which says so; the next round labels it, then resumes it."""
    one = scene()
    one.fakes[0].fails["label"] = [TransportError("503")]
    error = one.fail()
    assert "label not set: server 0 stays paused" in notes(error)
    assert one.fakes[0].events == ["pause"]
    one.fail(touched=())
    assert one.fakes[0].events == ["pause", "v0+poisoned", "resume"]
    until(lambda: one.workers[0].held == [True, False])


def test_label_that_is_owed_is_the_commits(scene):
    """A round that commits gives the version; nothing of the poison is left."""
    one = scene()
    one.fakes[0].fails["label"] = [TransportError("503")]
    one.fail()
    one.commit("v2")
    assert (one.fakes[0].label, one.fakes[0].paused) == ("v2", False)


def test_slow_label_holds_the_resume_up(scene, until):
    """The error is raised in time; the server is labelled when it answers, and runs then."""
    one, go_on = scene(), threading.Event()
    one.fakes[0].fails["label"] = [go_on]
    started = time.monotonic()
    error = one.fail()
    assert time.monotonic() - started < 2
    assert "may still be paused" in notes(error)
    assert one.fakes[0].events == ["pause"]
    go_on.set()
    until(lambda: one.fakes[0].events == ["pause", "v0+poisoned", "resume"])
    until(lambda: one.workers[0].held == [True, False])


def test_second_interrupt_changes_no_order(scene, monkeypatch, until):
    """One that comes while the servers are being set right ends the wait, not what is waited for."""
    one, go_on = scene(), threading.Event()
    one.fakes[0].fails["label"] = [go_on]
    wait_for = serving.wait

    def interrupt(futures, timeout):
        if threading.current_thread() is not threading.main_thread():
            return wait_for(futures, timeout)
        monkeypatch.setattr(serving, "wait", wait_for)
        raise KeyboardInterrupt

    one.fail(then=lambda _: monkeypatch.setattr(serving, "wait", interrupt), raises=KeyboardInterrupt)
    assert one.fakes[0].events == ["pause"]
    go_on.set()
    until(lambda: one.fakes[0].events == ["pause", "v0+poisoned", "resume"])


def test_server_without_labels_is_resumed_with_a_note(scene):
    """It cannot say what it has; the error says that."""
    one = scene(fakes=[Server(label=None)])
    error = one.fail()
    assert one.fakes[0].events == ["pause", "resume"]
    assert "label not set: server 0 publishes none" in notes(error)


def test_what_is_left_half_written_keeps_the_suffix(scene):
    """A round of a part commits; the servers whose workers say that something is left are labelled before they run."""
    one = scene({}, {})
    one.fail(touched=(0, 1))
    one.commit("v1", left=(1,))
    assert [server.label for server in one.fakes] == ["v1", "v1+poisoned"]
    assert one.fakes[1].events[-2:] == ["v1+poisoned", "resume"]
    one.commit("v2")
    assert [server.label for server in one.fakes] == ["v2"] * 2


def test_round_without_a_version_takes_the_suffix_away(scene):
    """A draft that was half-written is whole after its own round, which publishes no version; the target's label is back."""
    one = scene()
    one.fail()
    one.commit(None, left=(0,))
    assert one.fakes[0].label == "v0+poisoned"
    one.commit(None)
    assert one.fakes[0].label == "v0"


def test_label_of_somebody_elses_finish_is_corrected(scene):
    """Another trainer's late finish may have published its version in this round: the label becomes this one's, with a note."""
    one = scene()
    hold = one.commit("v14", publish="v13")
    assert one.fakes[0].events == ["pause", "v14", "resume"]
    assert "had the label 'v13'" in hold.notes[0]


def test_label_of_a_failed_finish_is_set(scene):
    """After the verdict the weights are those of the version, whatever became of the call that publishes it."""
    one = scene()
    one.fail(then=lambda round_: setattr(round_, "outcome", Outcome.COMMITTED))
    assert one.fakes[0].events == ["pause", "v1", "resume"]


def test_servers_without_labels_publish_nothing(scene):
    """The report must not say that they do."""
    one = scene(fakes=[Server(label=None)])
    hold = one.commit()
    assert not hold.publishes
    assert hold.notes == ["server 0 publishes no version"]


# --- resuming --------------------------------------------------------------------------------------------------


def test_failed_resume_is_tried_again(scene):
    """One lost call is a note."""
    one = scene()
    one.fakes[0].fails["resume"] = [TransportError("503")]
    hold = one.commit()
    assert not one.fakes[0].paused
    assert "took the second resume" in hold.notes[0]


def test_server_that_cannot_be_resumed_is_an_error_and_stays_ours(scene):
    """The weights are there, and the server may be paused: that is said, and the next round resumes what it finds paused."""
    one = scene()
    one.fakes[0].fails["resume"] = [TransportError("503")] * 4
    with pytest.raises(TransportError, match="server 0 may still be paused"):
        one.commit()
    assert one.fakes[0].paused
    one.commit("v2")
    assert not one.fakes[0].paused


def test_hung_resume_of_a_failed_round_is_repeated(scene, monkeypatch):
    """A call that was never answered does not keep the next round from holding the server, and resuming it."""
    monkeypatch.setattr(serving, "_LATE_S", 0.1)
    one, never = scene(), threading.Event()
    one.fakes[0].fails["resume"] = [never]
    assert "may still be paused" in notes(one.fail(touched=()))
    one.commit()
    assert one.fakes[0].events == ["pause", "resume"]
    never.set()


def test_resume_that_comes_late_is_waited_for(scene):
    """The next round does not begin while an earlier one's resume may still reach the server."""
    one, go_on = scene(), threading.Event()
    one.fakes[0].fails["resume"] = [go_on]
    one.fail(touched=())
    threading.Timer(0.3, go_on.set).start()
    one.commit()
    assert one.fakes[0].events == ["pause", "resume"] * 2


def test_shutdown_tries_once_more(scene):
    """What is still paused when the trainer goes is resumed."""
    one = scene()
    one.fakes[0].fails["resume"] = [TransportError("503")] * 4
    with pytest.raises(TransportError):
        one.commit()
    one.serving.let_go()
    assert not one.fakes[0].paused


def test_hung_resume_ends_a_good_round(scene):
    """A server that does not answer costs the round's time, not more; the error is a timeout."""
    one, never = scene(), threading.Event()
    one.fakes[0].fails["resume"] = [never, RoundTimeoutError("again")]
    one.number += 1
    with (
        pytest.raises(RoundTimeoutError, match="server 0 may still be paused"),
        one.session.running(one.number, 0.3) as round_,
        one.serving.held(one.session, round_, None),
    ):
        round_.outcome = Outcome.COMMITTED
    never.set()


# --- whose the servers are -------------------------------------------------------------------------------------


def test_trainer_that_was_replaced_pauses_nothing(scene, until):
    """It looks whether its round can run before it touches a server."""
    one = scene()
    one.workers[0].leave(replaced=True)
    until(lambda: one.session.workers[0].lost)
    with pytest.raises(StaleSessionError), one.round():
        pytest.fail("the round ran")
    assert one.fakes[0].events == []


def test_hold_that_no_worker_confirms_pauses_nothing(scene, until):
    """While another trainer connects, what would be paused now would be nobody's."""
    one = scene({}, {})
    one.workers[1].counts = False
    with pytest.raises(StaleSessionError, match="another trainer is connecting"), one.round():
        pytest.fail("the round ran")
    assert [server.events for server in one.fakes] == [[], []]
    until(lambda: one.workers[0].held == [True, False])


def test_server_that_another_trainer_has_taken_is_left_alone(scene, until):
    """That one has heard what is held, and may be in the middle of a round; a server that it has not taken is set right."""
    one = scene({}, {})

    def replace(_):
        one.workers[0].leave(replaced=True)
        until(lambda: one.session.workers[0].replaced)

    one.fail(touched=(0, 1), then=replace)
    assert [server.events for server in one.fakes] == [["pause"], ["pause", "v0+poisoned", "resume"]]
    one.serving.let_go()
    assert one.fakes[0].events == ["pause"]


def test_server_whose_engine_was_shut_down_is_still_ours(scene, until):
    """Nobody else resumes it."""
    one = scene()

    def shut_down(_):
        one.workers[0].leave(replaced=False)
        until(lambda: one.session.workers[0].lost)

    one.fail(touched=(), then=shut_down)
    assert one.fakes[0].events == ["pause", "resume"]


def test_init_sets_right_what_a_dead_trainer_has_left(scene, until):
    """A server that it held and half wrote is labelled, then resumed; one beside it is left alone."""
    left, fresh, users = Server(), Server("default"), Server()
    left.paused = users.paused = True
    one = scene({"held": True, "poisoned": True}, {}, {}, fakes=[left, fresh, users])
    assert left.events == ["v0+poisoned", "resume"]
    assert (fresh.events, users.events) == ([], [])
    until(lambda: one.workers[0].held == [False])


def test_init_that_cannot_set_right_leaves_it_to_the_round(scene):
    """The first round does it, also where it finds the server paused and fails."""
    left = Server()
    left.paused, left.fails["label"] = True, [TransportError("503")]
    one = scene({"held": True, "poisoned": True}, fakes=[left])
    assert left.events == []
    one.fail(touched=())
    assert left.events == ["v0+poisoned", "resume"]
