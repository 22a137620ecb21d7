"""Daemon threads that are used again. Starting one costs half a short HTTP call, and a round makes a dozen calls on side threads.

Plain daemon threads, not an executor's: those are joined when the process ends, and one of ours may hang in a dead server.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["run_in_thread", "run_into"]

T = TypeVar("T")

_KEPT_S = 2.0  # an idle thread ends after this

_lock = threading.Lock()
_idle: list[_Thread] = []


def run_in_thread(name: str, call: Callable[[], None]) -> None:
    """`call` runs on a daemon thread that has this name meanwhile. It must not raise; nobody would hear it."""
    with _lock:
        thread = _idle.pop() if _idle else None
    if thread is None:
        thread = _Thread(daemon=True)
        thread.start()
    thread.calls.put((name, call))


def run_into(future: Future[T], call: Callable[[], T]) -> None:
    """`future` has what `call` returns, or raises."""
    try:
        future.set_result(call())
    except BaseException as exc:
        future.set_exception(exc)


class _Thread(threading.Thread):
    calls: queue.SimpleQueue[tuple[str, Callable[[], None]]]

    def start(self) -> None:
        self.calls = queue.SimpleQueue()
        super().start()

    def run(self) -> None:
        while True:
            try:
                self.name, call = self.calls.get(timeout=_KEPT_S)
            except queue.Empty:
                with _lock:
                    if self in _idle:
                        _idle.remove(self)
                        return
                continue  # it has just been given a call
            call()
            del call  # and with it what it refers to
            self.name = "wt-idle"
            with _lock:
                _idle.append(self)


def _forget() -> None:
    """In a forked child, which has none of its parent's threads, also not the one that may hold the lock."""
    global _lock  # noqa: PLW0603  # the module's one lock
    _lock = threading.Lock()
    _idle.clear()


os.register_at_fork(after_in_child=_forget)
