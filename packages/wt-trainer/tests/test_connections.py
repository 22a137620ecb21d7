"""HTTP connections that are kept from one request to the next, and whose they are."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from wt_trainer import HTTPVLLMWeightSyncClient

WAIT_S = 10


class Keeping(BaseHTTPRequestHandler):
    """Keeps connections open; answers with the port of the other end, which tells connections apart."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):  # the name that http.server calls
        body = json.dumps({"world_size": self.client_address[1]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def client(monkeypatch):
    """A client of a server that keeps connections; its `world_size()` is the number of the connection."""
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("no_proxy", "*")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Keeping)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield HTTPVLLMWeightSyncClient(f"http://127.0.0.1:{server.server_address[1]}", WAIT_S)
    server.shutdown()
    server.server_close()
    thread.join(WAIT_S)


def test_connection_is_used_again(client):
    """One request after another goes over the same connection."""
    assert client.world_size() == client.world_size()


def test_forked_child_has_connections_of_its_own(client, forked):
    """A child never sends over a connection of its parent's, also not when a thread held the lock at the fork."""
    (connections,) = client._connections.values()
    ours = client.world_size()

    def child(report, go_on, rest):
        report([client.world_size(), client.world_size()])
        rest()

    with connections._lock:
        process = forked(child)
    first, second = process.told()
    assert first == second != ours
    assert client.world_size() == ours
