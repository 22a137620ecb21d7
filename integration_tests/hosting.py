"""One-line JSON calls on a local port: what both kinds of test process serve. Standard library only.

One call is one connection: a line `{"call": name, "args": {...}}` in, a line `{"result": ...}` or `{"error": {...}}` out. Calls
run one at a time on the main thread, as in an inference worker or a training loop.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import threading
import time
import traceback
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any


def serve(host: Any, port_file: str) -> None:
    """Answer calls with the methods of `host`, until one is `exit`. The port appears in `port_file` when this begins."""
    listener = listen(port_file)
    while True:
        connection, _ = listener.accept()
        with connection, connection.makefile("rwb") as stream:
            line = stream.readline()
            if not line:
                continue
            request = json.loads(line)
            reply = {"result": None} if request["call"] == "exit" else answer(host, request)
            with suppress(OSError):  # the caller gave up waiting
                stream.write(json.dumps(reply).encode() + b"\n")
                stream.flush()
            if request["call"] == "exit":
                return


def listen(port_file: str) -> socket.socket:
    """A listener on a free local port, which appears in `port_file` as a whole."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    part = Path(port_file + ".part")
    part.write_text(str(listener.getsockname()[1]))
    part.replace(port_file)
    return listener


def answer(host: Any, request: dict[str, Any]) -> dict[str, Any]:
    """The reply to one call. An error carries its class, message, the attributes that are set, and the call's seconds."""
    started = time.monotonic()
    try:
        return {"result": getattr(host, request["call"])(**request["args"])}
    except Exception as exc:
        traceback.print_exc()
        attributes = exc.attributes() if hasattr(exc, "attributes") else {}
        seconds = time.monotonic() - started
        message = getattr(exc, "message", str(exc))
        return {"error": {"type": type(exc).__name__, "message": message, "call_s": seconds, **attributes}}


def process_stats() -> dict[str, Any]:
    """What must stay flat over many rounds, and what must not be left behind by a failed one."""
    gc.collect()  # a failed round's traceback may keep the sockets of an engine that was dropped
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "resident_bytes": resident,
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text().split(),
    }


def device_bytes() -> int:
    """What torch has allocated on this process's GPU; 0 without one."""
    import torch

    gc.collect()
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def checksums(tensors: dict[str, Any]) -> dict[str, int]:
    """The CRC-32 of each tensor's bytes."""
    import torch

    return {
        name: zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        for name, tensor in tensors.items()
    }
