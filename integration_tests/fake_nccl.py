"""A stand-in for NCCL and for CUDA's streams, so that backend `nccl` runs between processes that have no GPU.

It is nccl4py's interface as far as `channels/nccl.py` uses it, over sockets, and it keeps NCCL's manners: what is begun goes on
by itself on a stream and writes into the buffers that it was given, whatever becomes of the round; a peer that is gone is waited
for silently; and only an abort ends that.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import queue
import socket
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import torch

VERSION = "WT_TEST_NCCL_VERSION"
"""Environment variable: the release that this process believes to have."""


class UniqueId:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def __bytes__(self) -> bytes:
        return self._data

    @classmethod
    def from_bytes(cls, data: bytes) -> UniqueId:
        return cls(data)


_listeners: dict[bytes, socket.socket] = {}


def get_unique_id() -> UniqueId:
    listener = socket.create_server(("127.0.0.1", 0))
    data = f"{listener.getsockname()[1]:05}".encode().ljust(128)
    _listeners[data] = listener
    return UniqueId(data)


class Communicator:
    def __init__(self, rank: int, peers: list[socket.socket]) -> None:
        self._rank = rank
        self._peers = peers
        self._aborted = threading.Event()

    @classmethod
    def init(cls, num_ranks: int, rank: int, unique_id: UniqueId) -> Communicator:
        data = bytes(unique_id)
        if rank:
            return cls(rank, [socket.create_connection(("127.0.0.1", int(data)))])
        with _listeners.pop(data) as listener:
            return cls(rank, [listener.accept()[0] for _ in range(num_ranks - 1)])

    def broadcast(self, sent: torch.Tensor, received: torch.Tensor, root: int, *, stream: HostQueue) -> None:
        assert sent is received
        assert root == 0
        data = memoryview((ctypes.c_char * received.numel()).from_address(received.data_ptr())).cast("B")
        stream.submit(lambda: self._move(data))

    def _move(self, data: memoryview) -> None:
        try:
            for peer in self._peers:
                if self._rank == 0:
                    peer.sendall(data)
                    continue
                done = 0
                while done < len(data):
                    count = peer.recv_into(data[done:])
                    if not count:
                        raise ConnectionError
                    done += count
        except OSError:
            self._aborted.wait()

    def get_async_error(self) -> int:
        return 0

    def abort(self) -> None:
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
            peer.close()
        self._aborted.set()


@contextlib.contextmanager
def group() -> Any:
    yield


def get_version() -> Any:
    return types.SimpleNamespace(libnccl=types.SimpleNamespace(version=os.environ.get(VERSION, "2.28.9")))


class _Mark:
    def __init__(self) -> None:
        self._reached = threading.Event()

    def reach(self) -> None:
        self._reached.set()

    def query(self) -> bool:
        return self._reached.is_set()


class HostQueue:
    """In place of `DeviceQueue`: a thread that does one thing after the other."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cpu"
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.stream = self
        threading.Thread(target=self._run, name="fake stream", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._work.get()()

    def submit(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def active(self) -> Any:
        return contextlib.nullcontext()

    def wait(self, mark: Any) -> None:
        raise AssertionError("a CPU's work is done when a call returns")

    def mark(self) -> _Mark:
        mark = _Mark()
        self.submit(mark.reach)
        return mark

    def mark_current(self) -> None:
        return None


def install(package: str) -> None:
    """Backend `nccl` of `package` (`wt_trainer` or `wt_worker`) runs on this process's CPU from now on."""
    core = sys.modules[__name__]
    driver = types.ModuleType("cuda.bindings.driver")
    driver.cuDriverGetVersion = lambda: (0, 13000)  # type: ignore[attr-defined]
    sys.modules |= {"nccl": types.ModuleType("nccl"), "nccl.core": core, "cuda.bindings.driver": driver}
    channel = importlib.import_module(f"{package}.channels.nccl")
    channel.DeviceQueue = HostQueue
    channel.has_gpu = lambda: True
    if package == "wt_trainer":
        backend = importlib.import_module("wt_trainer.backends.broadcast")
        backend.NCCLTrainerWeightTransferEngine._own_device = staticmethod(lambda: torch.device("cpu"))
