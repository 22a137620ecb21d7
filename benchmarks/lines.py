"""One-line JSON calls over one connection: what the trainers of `nccl_dense` reach their workers with, ours and stock alike.

What tests use (`hosting.serve`, `HostClient`) makes a connection for each call, which would be part of what is measured.
"""

from __future__ import annotations

import json
import socket
from typing import Any

from hosting import listen


def serve_lines(host: Any, port_file: str) -> None:
    """Answer calls with the methods of `host`, from one client at a time, for ever. The port appears in `port_file`."""
    listener = listen(port_file)
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection, connection.makefile("rwb") as stream:
            for line in stream:
                name, args = json.loads(line)
                try:
                    reply = {"result": getattr(host, name)(*args)}
                except Exception as exc:
                    reply = {"error": f"{type(exc).__name__}: {exc}"}
                stream.write(json.dumps(reply).encode() + b"\n")
                stream.flush()


class LineClient:
    """A weight-sync client of the four documented calls, to one worker process."""

    def __init__(self, port: int) -> None:
        self._connection = socket.create_connection(("127.0.0.1", port), timeout=300)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream = self._connection.makefile("rwb")

    def call(self, name: str, *args: Any) -> Any:
        """The result of one call; raises what was raised there."""
        self._stream.write(json.dumps([name, args]).encode() + b"\n")
        self._stream.flush()
        reply = json.loads(self._stream.readline())
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply["result"]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish_weight_update", weight_version)
