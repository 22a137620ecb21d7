"""An HTTP proxy in front of one server that loses, delays, repeats or refuses the calls it is told to. Standard library only."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

CALLS = {
    "init": "/init_weight_transfer_engine",
    "start": "/start_weight_update",
    "update": "/update_weights",
    "finish": "/finish_weight_update",
    "pause": "/pause",
    "resume": "/resume",
    "is_paused": "/is_paused",
    "weight_info": "/weight_info",
    "label": "/update_weight_version",
    "reset": "/reset_prefix_cache",
}
"""The routes by a short name."""

ACTIONS = ("refuse", "lose_reply", "fail", "fail_after", "delay", "delay_reply", "hang", "repeat")
"""What can happen to a call.

refuse: the connection closes, the server hears nothing. lose_reply: the server has done it, the connection closes. fail: a 500,
the server hears nothing. fail_after: a 500 after the server has done it. delay, delay_reply: the call or its reply is late. hang:
no reply until the rule is lifted; the server hears nothing. repeat: the server gets it twice, at the same time.
"""

_GATEWAY_S = 90.0  # that a server may take for its reply


@dataclass
class Rule:
    """What happens to the next `count` requests of one call."""

    call: str
    action: str
    count: int = 1
    seconds: float = 0.0
    hits: int = 0
    lifted: threading.Event = field(default_factory=threading.Event)


class Proxy:
    """Listens on a port of its own, and passes on what comes; `rule` says what else happens."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.rule: Rule | None = None
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                proxy._handle(self)

            def do_POST(self) -> None:
                proxy._handle(self)

            def log_message(self, *args: Any) -> None:
                """Say nothing."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, *args: Any) -> None:
                """A peer that has gone away is no error here."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.base_url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def set(self, rule: Rule) -> None:
        """From now on `rule` holds."""
        self.lift()
        self.rule = rule

    def lift(self) -> None:
        """Everything is passed on again, also what hangs."""
        rule, self.rule = self.rule, None
        if rule is not None:
            rule.lifted.set()

    def close(self) -> None:
        """Listen no more."""
        self.lift()
        self._server.shutdown()
        self._server.server_close()

    def _applies(self, path: str) -> Rule | None:
        with self._lock:
            rule = self.rule
            if rule is None or urlsplit(path).path != CALLS[rule.call] or rule.hits >= rule.count:
                return None
            rule.hits += 1
            return rule

    def _handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        rule = self._applies(handler.path)
        action = rule.action if rule else "pass"
        if rule is not None and action == "delay":
            rule.lifted.wait(rule.seconds)
        if rule is not None and action == "hang":
            rule.lifted.wait()
        if action in ("refuse", "hang"):
            self._hang_up(handler)
            return
        if action == "fail":
            self._answer(handler, 500, _failure())
            return
        if action == "repeat":
            threading.Thread(target=self._forward, args=(handler.command, handler.path, body), daemon=True).start()
        reply = self._forward(handler.command, handler.path, body)
        if rule is not None and action == "delay_reply":
            rule.lifted.wait(rule.seconds)
        if reply is None or action == "lose_reply":
            self._hang_up(handler)
        elif action == "fail_after":
            self._answer(handler, 500, _failure())
        else:
            self._answer(handler, *reply)

    def _forward(self, method: str, path: str, body: bytes) -> tuple[int, bytes] | None:
        """Status and body of the server's reply; None where it gave none."""
        connection = http.client.HTTPConnection("127.0.0.1", self.target_port, timeout=_GATEWAY_S)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            reply = connection.getresponse()
            return reply.status, reply.read()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    @staticmethod
    def _hang_up(handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True
        with suppress(OSError):
            handler.connection.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _answer(handler: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
        with suppress(OSError):
            handler.send_response(status)
            handler.send_header("Content-Type", "application/json")
            handler.send_header("Content-Length", str(len(body)))
            handler.end_headers()
            handler.wfile.write(body)


def _failure() -> bytes:
    return json.dumps({"error": {"message": "failed by the proxy", "type": "Proxy", "code": 500}}).encode()
