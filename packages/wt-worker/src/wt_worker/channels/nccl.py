"""Bytes between GPUs over NCCL, in a communicator of our own, through nccl4py and whichever NCCL torch has brought.

wt-trainer and wt-worker each have this module, the same but for the package's name (`nox -s lint` checks it): the two packages
share what is on the wire, not code.

NCCL says nothing of a peer that was killed or has stopped: its kernels wait for ever. So nothing here waits for NCCL with a call
that blocks: joining runs on a thread that can be left behind, what was begun is polled (`Transfer.done`), and the clock is the
caller's. There is no watchdog; nobody but `close` ends an operation, and nothing ends the process.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from wt_common import BackendUnavailableError, RoundTimeoutError, TransportError
from wt_worker.channels.base import Mark, Membership

__all__ = ["NcclChannel"]

logger = logging.getLogger(__name__)

GROUP_OPERATIONS = 32
"""Operations that are launched as one, ncclGroupStart to ncclGroupEnd. Measured over NVLink with an 8B Llama's tensors: 16 or 32
are 1 % slower than one flat buffer, 64 2 %, all at once 7 %, one by one 9 %."""

ABORT_S = 1.0
"""An abort takes 0.4 s on two H200s, also where the peer is gone."""

ENTER_S = 0.3
"""For a thread that is inside a call of NCCL to come out of it, before the communicator is aborted under it."""

JOIN_POLL_S = 0.02
_POLL_S = 1e-4

SETTINGS = (
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_COLLNET_ENABLE",
    "NCCL_CROSS_NIC",
    "NCCL_CUMEM_ENABLE",
    "NCCL_IB_DISABLE",
    "NCCL_LL128_BUFFSIZE",
    "NCCL_LL_BUFFSIZE",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NET",
    "NCCL_NTHREADS",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_P2P_NET_CHUNKSIZE",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
)
"""Environment variables by which NCCL chooses how ranks talk: where two differ, one may wait for what the other never sends.
Those that name a host's own interfaces and files, and those of logging, may differ."""


class NcclChannel:
    """An NCCL communicator of one root (rank 0, a trainer) and its receivers (workers); see `Channel`.

    It has a stream of its own, of high priority, so that kernels of the current stream which fill the device do not hold up the
    wire. Joining ends with a broadcast of one byte: NCCL connects its ranks when they first talk, and a peer that cannot be
    reached is then found before any weight moves.
    """

    receives_in_place: ClassVar[bool] = True
    blocks: ClassVar[bool] = False

    def __init__(self, membership: Membership) -> None:
        self._core = _core()
        self._name = f"nccl epoch {membership.epoch} root {membership.root} rank {membership.rank}"
        self._queue = DeviceQueue(membership.device)
        self._device = membership.device
        self._lock = threading.Lock()  # held in every call of NCCL but that which aborts
        self._communicator: Any = None
        self._in_flight: deque[_Transfer] = deque()  # which keeps their buffers
        self._closing = threading.Event()
        self._join(membership)

    @staticmethod
    def settings() -> dict[str, str]:
        """NCCL's release, and what the environment tells it.

        Raises:
            BackendUnavailableError: nccl4py, NCCL or a GPU is missing.
        """
        core = _core()
        library = core.get_version().libnccl
        if library is None:
            raise BackendUnavailableError(
                "backend nccl: libnccl.so.2 was not found; install a CUDA build of torch, which brings it"
            )
        if not has_gpu():
            raise BackendUnavailableError("backend nccl: torch finds no GPU; its CPU twin is backend gloo")
        found = {name: os.environ[name] for name in SETTINGS if name in os.environ}
        return {"NCCL": str(library.version), **found}

    @staticmethod
    def versions() -> dict[str, str]:
        """The newest CUDA that the driver knows. Hosts of several releases usually understand one another."""
        try:
            driver = importlib.import_module("cuda.bindings.driver")
        except ImportError:  # then NCCL cannot be used either, which `settings` says
            return {}
        status, version = driver.cuDriverGetVersion()
        return {"CUDA driver": f"{version // 1000}.{version % 1000 // 10}"} if int(status) == 0 else {}

    def broadcast(self, buffers: Sequence[torch.Tensor], deadline: float, *, after: Mark = None) -> _Transfer:
        """`buffers` get on every rank what they hold on rank 0; returns when that is begun, on the channel's own stream.

        Every rank must enter with the same numbers of bytes.

        Args:
            buffers: each 1-D uint8, contiguous, on the channel's device. They are kept until their bytes are there.
            deadline: in seconds of the monotonic clock; only checked, since nothing is waited for.
            after: what must be done on the device before.

        Raises:
            RoundTimeoutError: the deadline has passed.
            TransportError: NCCL refuses, or the channel is closed.
        """
        for buffer in buffers:
            if buffer.dtype != torch.uint8 or not buffer.is_contiguous() or buffer.device != self._device:
                # NCCL would take the address, and as many bytes from there on.
                raise TransportError(
                    f"nccl: expected a contiguous uint8 tensor on {self._device}, got {buffer.dtype} on {buffer.device}"
                )
        if time.monotonic() >= deadline:
            raise RoundTimeoutError("nccl: the deadline passed before the broadcast was entered")
        with self._lock:
            if self._communicator is None or self._closing.is_set():
                raise TransportError("nccl: the channel is closed")
            while self._in_flight and self._in_flight[0].mark.query():
                self._in_flight.popleft()
            transfer = self._begin(self._communicator, buffers, after)
            self._in_flight.append(transfer)
        return transfer

    def check(self) -> None:
        """Raise TransportError if the channel is closed, or NCCL has noticed that an operation failed."""
        with self._lock:
            if self._communicator is None:
                raise TransportError("nccl: the channel is closed")
            status = self._communicator.get_async_error()
        if int(status) != 0:
            raise TransportError(f"nccl: an operation failed ({status!r}); NCCL_DEBUG=WARN makes NCCL say why")

    def close(self) -> None:
        """Whatever was begun is over: no kernel of the communicator reads or writes a buffer any more.

        Where NCCL does not come back within `ABORT_S`, the log names the thread that is left in it, and the buffers of what it
        was doing are never freed.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        ended = threading.Event()

        def run() -> None:
            try:
                self._abort()
            except Exception:
                logger.exception("%s: the communicator could not be aborted", self._name)
            else:
                ended.set()

        thread = threading.Thread(target=run, name=f"wt-abort {self._name}", daemon=True)
        thread.start()
        if ended.wait(ABORT_S + ENTER_S):
            self._in_flight.clear()
        else:
            _lost.append(self._in_flight)
            logger.error("%s did not end within %g s; its buffers are lost", thread.name, ABORT_S + ENTER_S)

    def _begin(self, communicator: Any, buffers: Sequence[torch.Tensor], after: Mark) -> _Transfer:
        with self._queue.active():
            if after is not None:
                self._queue.wait(after)
            try:
                for first in range(0, len(buffers), GROUP_OPERATIONS):
                    with self._core.group():
                        for buffer in buffers[first : first + GROUP_OPERATIONS]:
                            communicator.broadcast(buffer, buffer, 0, stream=self._queue.stream)
            except Exception as exc:  # nccl4py's errors have no base of their own
                num_bytes = sum(buffer.numel() for buffer in buffers)
                raise TransportError(
                    f"nccl: a broadcast of {num_bytes} bytes failed ({type(exc).__name__}: {exc})"
                ) from exc
            return _Transfer(self, self._queue.mark(), buffers)

    def _join(self, membership: Membership) -> None:
        """All members are in the communicator, and have talked."""
        joined = threading.Event()
        failures: list[Exception] = []
        unique_id = self._meet(membership)

        def run() -> None:
            try:
                with self._queue.active():
                    communicator = self._core.Communicator.init(membership.world_size, membership.rank, unique_id)
                    with self._lock:
                        self._communicator = communicator
                        greeting = torch.zeros(1, dtype=torch.uint8, device=membership.device)
                        if not self._closing.is_set():
                            self._in_flight.append(self._begin(communicator, [greeting], self._queue.mark_current()))
                    if self._closing.is_set():  # it was given up meanwhile, when there was nothing to abort
                        self._abort()
            except Exception as exc:
                failures.append(exc)
            joined.set()

        threading.Thread(target=run, name=f"wt-join {self._name}", daemon=True).start()
        try:
            while not (joined.wait(JOIN_POLL_S) and (failures or self._in_flight[0].done())):
                time.sleep(_POLL_S)
                if membership.abandoned():
                    raise TransportError("nccl: the round failed while its members were joining")
                if time.monotonic() >= membership.deadline:
                    raise RoundTimeoutError(
                        f"nccl: rank {membership.rank} of {membership.world_size} could not join in time; thread "
                        f"'wt-join {self._name}' is left in it"
                    )
            if failures:
                raise TransportError(
                    f"nccl: rank {membership.rank} of {membership.world_size} cannot join ({type(failures[0]).__name__}: "
                    f"{failures[0]}); NCCL_DEBUG=WARN makes NCCL say why"
                ) from failures[0]
        except BaseException:
            self.close()
            raise

    def _meet(self, membership: Membership) -> Any:
        """The communicator's id, once all members are about to use it: one that is dead would leave the others in NCCL."""
        store, epoch, rank = membership.store, membership.epoch, membership.rank
        prefix = f"{membership.root}/nccl/"

        def get(key: str) -> bytes:
            return store.get(epoch, prefix + key, membership.deadline, membership.abandoned)

        if rank == 0:
            unique_id = self._core.get_unique_id()
            store.set(epoch, prefix + "id", bytes(unique_id))
            for other in range(1, membership.world_size):
                get(f"here/{other}")
            store.set(epoch, prefix + "all", b"1")
            return unique_id
        unique_id = self._core.UniqueId.from_bytes(get("id"))
        store.set(epoch, f"{prefix}here/{rank}", b"1")
        get("all")
        return unique_id

    def _abort(self) -> None:
        entered = self._lock.acquire(timeout=ENTER_S)
        try:
            communicator, self._communicator = self._communicator, None
            if communicator is not None:
                with self._queue.active():
                    communicator.abort()
        finally:
            if entered:
                self._lock.release()


_lost: list[object] = []


class _Transfer:
    """A broadcast that was begun."""

    def __init__(self, channel: NcclChannel, mark: Any, buffers: Sequence[torch.Tensor]) -> None:
        self.mark = mark
        self._channel = channel
        self._buffers = buffers

    def done(self) -> bool:
        """Whether its bytes are there. Raises TransportError if they will never be."""
        try:
            if self.mark.query():
                return True
        except RuntimeError as exc:  # CUDA's, of any kernel before
            raise TransportError(f"nccl: the device failed ({exc})") from exc
        self._channel.check()
        return False


def has_gpu() -> bool:
    """Whether torch can use one."""
    return torch.cuda.is_available()


class DeviceQueue:
    """A stream of a device, and points in its work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def active(self) -> AbstractContextManager[Any]:
        """Within it the device is the calling thread's own."""
        return torch.cuda.device(self._device)

    def wait(self, mark: Any) -> None:
        """What is queued from now on begins after `mark`."""
        self.stream.wait_event(mark)

    def mark(self) -> Any:
        """What is queued up to now."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event

    def mark_current(self) -> Any:
        """What is queued up to now on the calling thread's current stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def _core() -> Any:
    """nccl4py. It is imported here, since it takes 0.4 s, and nobody else needs it."""
    try:
        return importlib.import_module("nccl.core")
    except ImportError as exc:
        raise BackendUnavailableError(
            f"backend nccl: nccl4py cannot be imported ({exc}); install this package's extra [nccl], which brings it and "
            "cuda-bindings"
        ) from exc
