"""Side threads that are used again."""

import os
import signal
import threading

from wt_trainer import threads as module
from wt_trainer.threads import run_in_thread


def run(name):
    """The thread on which a call ran, and its name meanwhile; returns once it is idle again."""
    found, done = [], threading.Event()

    def call():
        found.append((threading.current_thread(), threading.current_thread().name))
        done.set()

    run_in_thread(name, call)
    assert done.wait(10)
    return found[0]


def test_thread_is_named_and_used_again(until):
    """A call has a thread of its name; the next one gets the same thread, under its own name."""
    first, name = run("wt-one")
    assert (name, first.daemon) == ("wt-one", True)
    until(lambda: first in module._idle)
    second, name = run("wt-two")
    assert (second, name) == (first, "wt-two")


def test_calls_at_the_same_time_have_threads_of_their_own():
    """A call that blocks holds up no other."""
    go, blocked = threading.Event(), threading.Event()
    run_in_thread("wt-blocked", lambda: blocked.set() or (go.wait(10) and None))
    assert blocked.wait(10)
    assert run("wt-other")[1] == "wt-other"
    assert "wt-blocked" in [thread.name for thread in threading.enumerate()]
    go.set()


def test_idle_thread_ends(until, monkeypatch):
    """A thread that has nothing to do for a while is gone, and the next call gets another one."""
    until(lambda: not module._idle)
    monkeypatch.setattr(module, "_KEPT_S", 0.1)
    first, _ = run("wt-one")
    until(lambda: not first.is_alive())
    assert run("wt-two")[0] is not first


def test_child_process_has_threads_of_its_own():
    """After a fork no call is given to a thread that exists only in the parent."""
    run("wt-parent")
    pid = os.fork()
    if pid == 0:
        os._exit(0 if run("wt-child")[1] == "wt-child" else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_child_process_does_not_wait_for_the_parents_lock():
    """A thread of the parent may be taking a side thread at the moment of the fork; it is not there to give the lock back."""
    with module._lock:
        pid = os.fork()
        if pid == 0:
            signal.alarm(10)  # a child that waits is ended
            os._exit(0 if run("wt-child")[1] == "wt-child" else 1)
    assert os.waitpid(pid, 0)[1] == 0
