"""The HTTP client, against real servers on this host."""

import base64
import json
import pickle
import socket
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

import pytest

from wt_common import ConfigurationError, RoundTimeoutError, TransportError
from wt_trainer import HTTPVLLMWeightSyncClient, VLLMWeightSyncClient
from wt_trainer.client import ServingControl
from wt_trainer.client.http import _without_raw_handles

WAIT_S = 10  # for what must come; a test that reaches it fails


@dataclass(frozen=True)
class Request:
    """What a server received."""

    method: str
    path: str
    query: dict[str, str]
    body: bytes
    headers: dict[str, str] = field(compare=False, repr=False)

    @property
    def json(self):
        return json.loads(self.body)


class Server:
    """A real HTTP server that records requests and answers by script: path -> (status, payload), or a function of them.

    A payload that is not bytes is sent as JSON. What is not in the script is 200 and {}. Like vLLM, it is running until
    it is paused.
    """

    def __init__(self):
        self.requests = []
        self.paused = False
        self.script = {
            "/is_paused": lambda _: (200, {"is_paused": self.paused}),
            "/is_sleeping": (200, {"is_sleeping": False}),
            "/pause": lambda _: self._set_paused(True),
            "/resume": lambda _: self._set_paused(False),
        }
        self.ending = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def _serve(self):
                url = urlsplit(self.path)
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                request = Request(self.command, url.path, dict(parse_qsl(url.query)), body, dict(self.headers))
                server.requests.append(request)
                reply = server.script.get(url.path, (200, {}))
                reply = reply(request) if callable(reply) else reply
                if reply is not None:
                    self._send(*reply)

            def _send(self, status, payload):
                body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = _serve  # noqa: N815  # the names that http.server calls

            def log_message(self, *args):
                pass

        class HTTPServer(ThreadingHTTPServer):
            def handle_error(self, request, client_address):
                """A client that gave up is no error of the server's."""

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def _set_paused(self, paused):
        self.paused = paused
        return 200, {"status": "ok"}

    def freeze(self, path):
        """Have `path` take requests and answer none until the test ends."""

        def wait(_):
            self.ending.wait(WAIT_S)

        self.script[path] = wait

    @property
    def calls(self):
        """`METHOD path` of every request so far."""
        return [f"{request.method} {request.path}" for request in self.requests]

    def posts(self):
        """The paths of every POST so far."""
        return [request.path for request in self.requests if request.method == "POST"]

    def close(self):
        self.ending.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(WAIT_S)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    """A proxy of the environment is not asked for this host."""
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def servers():
    """Makes servers; they end with the test."""
    with ExitStack() as stack:

        def make(count):
            made = [Server() for _ in range(count)]
            for server in made:
                stack.callback(server.close)
            return made

        yield make


@pytest.fixture
def server(servers):
    (server,) = servers(1)
    return server


def client_of(*servers, timeout=WAIT_S, **options):
    return HTTPVLLMWeightSyncClient([server.url for server in servers], timeout, **options)


@pytest.fixture
def refusing_url():
    """A URL whose port is taken and listens to nobody."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"


# --- construction ----------------------------------------------------------------------------------------------


def test_client_is_a_weight_sync_client_with_serving_control():
    """The HTTP client has the four calls and serving control; an object with the four calls alone is a client too."""

    class Four:
        def init_weight_transfer_engine(self, init_info): ...

        def start_weight_update(self): ...

        def update_weights(self, update_info): ...

        def finish_weight_update(self): ...

    client = HTTPVLLMWeightSyncClient("http://h:1")
    assert isinstance(client, VLLMWeightSyncClient)
    assert isinstance(client, ServingControl)
    assert isinstance(Four(), VLLMWeightSyncClient)
    assert not isinstance(Four(), ServingControl)
    assert not isinstance(object(), VLLMWeightSyncClient)


def test_client_takes_the_documented_arguments():
    """One URL or several, then the timeout, positionally as documented; a slash at a URL's end does not matter."""
    assert HTTPVLLMWeightSyncClient("http://h:1/").base_urls == ("http://h:1",)
    client = HTTPVLLMWeightSyncClient(["http://a:1", "https://b:2/vllm/"], 7)
    assert client.base_urls == ("http://a:1", "https://b:2/vllm")
    assert client.timeout == 7
    assert client.hosts() == ["a", "b"]
    assert HTTPVLLMWeightSyncClient("http://h:1").timeout == 300


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"base_url": []}, "base_url: expected at least one server, got none"),
        ({"base_url": "localhost:8000"}, r"base_url: expected http\(s\)://host:port, got 'localhost:8000'"),
        ({"base_url": ["http://a:1", "ftp://b"]}, "got 'ftp://b'"),
        ({"base_url": "http://"}, "got 'http://'"),
        ({"base_url": "http://a:1", "timeout": 0}, "timeout: expected seconds above 0, at most 1000000.0, got 0"),
        ({"base_url": "http://a:1", "pause": "later"}, "pause: expected 'abort', 'wait', 'keep' or None, got 'later'"),
    ],
    ids=str,
)
def test_impossible_arguments_are_refused(arguments, text):
    """An argument that cannot work is a ConfigurationError, a ValueError, that names it and what came."""
    with pytest.raises(ConfigurationError, match=text) as caught:
        HTTPVLLMWeightSyncClient(**arguments)
    assert isinstance(caught.value, ValueError)


def test_repr_shows_servers_and_not_the_key():
    """What is printed of a client says where it goes and gives no secret away."""
    client = HTTPVLLMWeightSyncClient("http://a:1", api_key="hush", headers={"X-Token": "hush"})
    assert repr(client) == "HTTPVLLMWeightSyncClient(['http://a:1'], timeout=300)"


# --- each call -------------------------------------------------------------------------------------------------

CALLS = [
    ("init_weight_transfer_engine", ({"port": 1},), "/init_weight_transfer_engine", {}, {"init_info": {"port": 1}}),
    ("start_weight_update", (), "/start_weight_update", {}, None),
    ("update_weights", ({"round": 1},), "/update_weights", {}, {"update_info": {"round": 1}}),
    ("update_weights", ([{"r": 0}, {"r": 1}],), "/update_weights", {}, {"update_info": [{"r": 0}, {"r": 1}]}),
    ("finish_weight_update", (), "/finish_weight_update", {}, None),
    ("finish_weight_update", ("v7",), "/finish_weight_update", {}, {"weight_version": "v7"}),
    ("finish_weight_update", ("",), "/finish_weight_update", {}, {"weight_version": ""}),
    ("shutdown_weight_transfer_engine", (), "/shutdown_weight_transfer_engine", {}, None),
    ("set_weight_version", ("v7",), "/update_weight_version", {}, {"new_version": "v7"}),
    ("pause", (), "/pause", {"mode": "keep"}, None),
    ("pause", ("abort",), "/pause", {"mode": "abort"}, None),
    ("resume", (), "/resume", {}, None),
]
CALL_IDS = [f"{name}{arguments}" for name, arguments, _, _, _ in CALLS]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("call", CALLS, ids=CALL_IDS)
def test_call_is_one_post_to_every_server(servers, call, count):
    """A call is one POST of the documented path and body to each server, and returns nothing."""
    name, arguments, path, query, body = call
    made = servers(count)
    assert getattr(client_of(*made), name)(*arguments) is None
    for server in made:
        (request,) = server.requests
        assert (request.method, request.path, request.query) == ("POST", path, query)
        assert (json.loads(request.body) if request.body else None) == body
        assert request.headers.get("Content-Type") == ("application/json" if body else None)


def test_init_says_which_server_gets_it(servers):
    """An init info with a `server` gets the server's place in the list; another one is handed on as it is."""
    made = servers(3)
    client_of(*made).init_weight_transfer_engine({"port": 1, "server": None})
    assert [server.requests[0].json for server in made] == [
        {"init_info": {"port": 1, "server": place}} for place in range(3)
    ]


def test_one_server_can_be_paused_labelled_and_resumed(servers):
    """Calls that name a server reach that one alone."""
    made = servers(2)
    made[1].script["/weight_info"] = (200, {"weight_version": "v1"})
    client = client_of(*made, pause="wait")
    assert client.servers() == [server.url for server in made]
    assert client.running() == [0, 1]
    client.pause_server(1)
    assert client.running() == [0]
    assert client.label(1, within=1) == "v1"
    client.set_label(1, "v2", within=1)
    client.resume_server(1, within=1)
    assert made[1].posts() == ["/pause", "/update_weight_version", "/resume"]
    assert made[1].requests[2].query == {"mode": "wait"}
    assert made[1].requests[-2].json == {"new_version": "v2"}
    assert made[0].posts() == []


def test_server_before_labels_has_none(server):
    """A server that lacks the route publishes no version; any other failure is one."""
    server.script["/weight_info"] = (404, {})
    assert client_of(server).label(0, within=1) is None
    server.script["/weight_info"] = (500, {})
    with pytest.raises(TransportError):
        client_of(server).label(0, within=1)


def test_one_servers_calls_are_made_after_a_bound(server):
    """A round that has used up its time still labels and resumes its servers."""
    client = client_of(server)
    with client.bounded(0):
        client.resume_server(0, within=1)
    assert server.posts() == ["/resume"]


def test_draft_updates_start_on_another_route(server):
    """Within `draft()` an update is opened on the draft model; the other calls are the same, and it ends with an error too."""
    client = client_of(server)

    def update_draft():
        with client.draft():
            client.start_weight_update()
            client.update_weights({})
            client.finish_weight_update()
            raise KeyError

    with pytest.raises(KeyError):
        update_draft()
    client.start_weight_update()
    assert server.posts() == [
        "/start_draft_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/start_weight_update",
    ]


def test_path_of_the_url_is_kept(server):
    """A server behind a path prefix is called under it."""
    HTTPVLLMWeightSyncClient(f"{server.url}/a/b/").start_weight_update()
    assert server.calls == ["POST /a/b/start_weight_update"]


def test_api_key_and_headers_go_with_every_request(server):
    """The key is sent as a bearer token, and the user's headers as they are, with POST and GET alike."""
    server.script["/get_world_size"] = (200, {"world_size": 1})
    client = client_of(server, api_key="k1", headers={"X-Team": "rl"})
    client.start_weight_update()
    client.world_size()
    assert [request.headers["Authorization"] for request in server.requests] == ["Bearer k1"] * 2
    assert [request.headers["X-Team"] for request in server.requests] == ["rl"] * 2


def test_without_api_key_no_authorization_is_sent(server):
    """A client without a key sends none."""
    client_of(server).start_weight_update()
    assert "Authorization" not in server.requests[0].headers


# --- several servers -------------------------------------------------------------------------------------------


def test_servers_are_called_concurrently(servers):
    """A call reaches all servers at once: each handler waits for the others, so one after the other would time out."""
    made = servers(3)
    barrier = threading.Barrier(3, timeout=WAIT_S)

    def meet(_):
        try:
            barrier.wait()
        except threading.BrokenBarrierError:
            return 500, {"error": {"message": "the servers were not called at once"}}
        return 200, {"world_size": 2, "is_paused": True}

    paths = ["/update_weights", "/finish_weight_update", "/get_world_size", "/is_paused", "/pause"]
    for server in made:
        server.script.update(dict.fromkeys(paths, meet))
    client = client_of(*made)
    client.update_weights({})
    client.finish_weight_update()
    assert client.world_size() == 6
    assert client.is_paused() == [True] * 3
    client.pause()


def test_one_failing_server_fails_the_call_at_once(servers, until):
    """One server's error is raised with its message, address and status, while the others' calls go on by themselves."""
    made = servers(3)
    go_on, answered = threading.Event(), threading.Event()

    def late(_):
        assert go_on.wait(WAIT_S)
        answered.set()
        return 200, {}

    made[0].script["/update_weights"] = late
    made[1].script["/update_weights"] = (500, {"error": {"message": "no room for layers.0.w", "code": 500}})
    with pytest.raises(TransportError) as caught:
        client_of(*made).update_weights({})
    assert not answered.is_set()
    assert caught.value.message == f"500 on POST {made[1].url}/update_weights: no room for layers.0.w"
    assert caught.value.side == "trainer"
    go_on.set()
    assert answered.wait(WAIT_S)
    until(lambda: [server.calls for server in made] == [["POST /update_weights"]] * 3, "a call to every server")


def test_next_call_waits_for_a_slow_server(servers):
    """A server that is still at a call that another one has failed gets the next call when it has ended."""
    made = servers(2)
    go_on = threading.Event()

    def late(_):
        assert go_on.wait(WAIT_S)
        time.sleep(0.1)  # so that a call that overtakes it would show
        made[0].script["ended"] = True
        return 200, {}

    made[0].script["/start_weight_update"] = late
    made[0].script["/finish_weight_update"] = lambda _: (200 if made[0].script.get("ended") else 500, {})
    made[1].script["/start_weight_update"] = (500, {})
    client = client_of(*made)
    with pytest.raises(TransportError):
        client.start_weight_update()
    go_on.set()
    client.finish_weight_update()


def test_next_call_does_not_wait_long_for_a_lost_one(servers, monkeypatch):
    """A call whose reply never comes holds up the next one for a moment only."""
    monkeypatch.setattr("wt_trainer.client.http._SETTLE_S", 0.2)
    made = servers(2)
    made[0].freeze("/start_weight_update")
    made[1].script["/start_weight_update"] = (500, {})
    client = client_of(*made)
    with pytest.raises(TransportError):
        client.start_weight_update()
    started = time.monotonic()
    client.finish_weight_update()
    assert 0.15 < time.monotonic() - started < WAIT_S / 2


def test_server_that_drops_the_call_fails_it_at_once(servers):
    """A server that closes the connection without a reply fails the call, whatever another one is busy with."""
    made = servers(1)
    made[0].freeze("/update_weights")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drop():
            sock, _ = listener.accept()
            sock.recv(65536)
            sock.close()

        threading.Thread(target=drop, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        client = HTTPVLLMWeightSyncClient([made[0].url, url], timeout=WAIT_S)
        seconds, error = elapsed_of(lambda: client.update_weights({}), TransportError)
    assert seconds < 2
    assert error.message.startswith(f"POST {url}/update_weights: ")


def test_resume_of_every_server_is_tried(servers):
    """A server that fails to resume does not keep the others from running when the call raises."""
    made = servers(2)
    made[0].script["/resume"] = (500, {"error": {"message": "no"}})

    def late(_):
        time.sleep(0.2)  # so that returning early would show
        made[1].script["resumed"] = True
        return 200, {}

    made[1].script["/resume"] = late
    with pytest.raises(TransportError, match="no"):
        client_of(*made).resume()
    assert made[1].script.get("resumed")


# --- what a server answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        ({"error": {"message": "m1", "type": "x"}}, "m1"),
        ({"error": "m2"}, "m2"),
        ({"message": "m3"}, "m3"),
        ({"detail": "m4"}, "m4"),
        (["m5"], "m5"),
        (b"Internal Server Error", "Internal Server Error"),
        (b"\xff\xfe", ""),
    ],
    ids=str,
)
def test_error_has_the_servers_message(server, payload, text):
    """Whatever form a server's error has, its message is in ours."""
    server.script["/start_weight_update"] = (500, payload)
    with pytest.raises(TransportError, match=f"^500 on POST {server.url}/start_weight_update: .*{text}"):
        client_of(server).start_weight_update()


@pytest.mark.parametrize("payload", [b"x" * 100_000, {"error": {"message": "x" * 100_000}}], ids=["text", "json"])
def test_long_error_is_cut(server, payload):
    """A page of HTML or a long traceback does not flood the log."""
    server.script["/start_weight_update"] = (500, payload)
    with pytest.raises(TransportError) as caught:
        client_of(server).start_weight_update()
    assert 1000 < len(str(caught.value)) < 3000


def test_missing_route_names_the_switch(server):
    """404 says how to start the server so that the route is there."""
    server.script["/init_weight_transfer_engine"] = (404, {"detail": "Not Found"})
    with pytest.raises(TransportError, match=r"^404 on POST .*/init_weight_transfer_engine: .*VLLM_SERVER_DEV_MODE=1"):
        client_of(server).init_weight_transfer_engine({})


@pytest.mark.parametrize("status", [401, 403])
def test_refused_credentials_name_the_argument(server, status):
    """401 and 403 say which arguments carry the credentials."""
    server.script["/start_weight_update"] = (status, {"error": "Unauthorized"})
    with pytest.raises(TransportError, match=f"^{status} on POST .*: the server refused the credentials; pass api_key"):
        client_of(server, api_key="wrong").start_weight_update()


@pytest.mark.parametrize("payload", [b"<html>hello</html>", b"", [], {}, None, {"else": True}], ids=str)
def test_reply_that_is_no_answer_is_a_transport_error(server, payload):
    """A server that says 200 and something else than what was asked (another service, a login page) is named."""
    server.script["/is_paused"] = (200, payload)
    with pytest.raises(TransportError, match=f"{server.url}/is_paused"):
        client_of(server).is_paused()


@pytest.mark.parametrize("payload", [b"<html>hello</html>", b"", [], None], ids=str)
@pytest.mark.parametrize(
    ("path", "ask"),
    [
        ("/get_world_size", lambda client: client.world_size()),
        ("/weight_info", lambda client: client.weight_version()),
        ("/is_sleeping", lambda client: client.paused().__enter__()),
    ],
)
def test_reply_that_is_no_object_is_a_transport_error(server, path, ask, payload):
    """The same holds for what a server may have no route for: no route is an answer, a page of HTML is not."""
    server.script[path] = (200, payload)
    with pytest.raises(TransportError, match=f"{server.url}{path}"):
        ask(client_of(server))


# --- time ------------------------------------------------------------------------------------------------------


def elapsed_of(call, kind=RoundTimeoutError):
    """Seconds that `call` took until it raised RoundTimeoutError, and the error."""
    started = time.monotonic()
    with pytest.raises(kind) as caught:
        call()
    return time.monotonic() - started, caught.value


def test_timeout_ends_a_call_to_a_frozen_server(server):
    """A server that answers nothing costs the timeout and not much more; the error names it, and is a TimeoutError."""
    server.freeze("/update_weights")
    seconds, error = elapsed_of(lambda: client_of(server, timeout=0.3).update_weights({}))
    assert 0.25 < seconds < 1.5
    assert f"{server.url}/update_weights" in str(error)
    assert isinstance(error, TimeoutError)


def test_timeout_is_for_all_servers_together(servers):
    """Several frozen servers cost one timeout, not one each."""
    made = servers(3)
    for server in made:
        server.freeze("/update_weights")
    seconds, _ = elapsed_of(lambda: client_of(*made, timeout=0.5).update_weights({}))
    assert 0.4 < seconds < 1.4


@pytest.mark.parametrize("stalls", ["in its headers", "in its body", "never, a byte at a time"])
def test_timeout_is_for_the_whole_reply(server, stalls):
    """A server that begins its reply and does not end it, or trickles it for ever, is no way around the timeout."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        sock, _ = listener.accept()
        with sock:
            sock.recv(65536)
            sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n" + (b"" if "headers" in stalls else b"\r\n{"))
            while not server.ending.wait(0.05):
                try:
                    sock.sendall(b"x" if "byte" in stalls else b"")
                except OSError:
                    return  # the client gave up, as it should

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with listener:
        client = HTTPVLLMWeightSyncClient(f"http://127.0.0.1:{listener.getsockname()[1]}", 0.4)
        seconds, _ = elapsed_of(client.start_weight_update)
        assert 0.3 < seconds < 1.5
    server.ending.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_bounded_shortens_the_timeout(server):
    """Within `bounded` a call has what is left of the seconds, and after it the client's own timeout again."""
    server.freeze("/update_weights")
    client = client_of(server)
    with client.bounded(0.3):
        client.start_weight_update()
        seconds, _ = elapsed_of(lambda: client.update_weights({}))
    assert 0.2 < seconds < 1.5
    client.start_weight_update()
    assert server.calls == ["POST /start_weight_update", "POST /update_weights", "POST /start_weight_update"]


def test_bounded_never_lengthens_the_timeout(server):
    """The client's timeout holds within a longer bound."""
    server.freeze("/update_weights")
    client = client_of(server, timeout=0.3)
    with client.bounded(60):
        seconds, _ = elapsed_of(lambda: client.update_weights({}))
    assert seconds < 1.5


def test_bounded_sends_nothing_after_its_end(servers):
    """Once the bound has passed a call fails without a request, and says so."""
    made = servers(2)
    client = client_of(*made)
    with client.bounded(0):
        _, error = elapsed_of(client.start_weight_update)
    assert "not sent" in str(error)
    assert [server.calls for server in made] == [[], []]


def test_bounded_ends_with_an_exception(server):
    """A bound is taken back whatever happened in it."""
    client = client_of(server)
    with pytest.raises(KeyError), client.bounded(0):
        raise KeyError
    client.start_weight_update()


def test_refused_connection_is_a_transport_error(refusing_url):
    """A port where nobody listens is a TransportError that names the URL, at once."""
    started = time.monotonic()
    with pytest.raises(TransportError, match=f"^POST {refusing_url}/start_weight_update: "):
        HTTPVLLMWeightSyncClient(refusing_url).start_weight_update()
    assert time.monotonic() - started < 5


def test_connection_closed_without_a_reply_is_a_transport_error(server):
    """A server that dies with the request in its hands is a TransportError."""
    server.script["/start_weight_update"] = lambda _: None
    with pytest.raises(TransportError, match=f"^POST {server.url}/start_weight_update: "):
        client_of(server).start_weight_update()


# --- pausing ---------------------------------------------------------------------------------------------------


def test_paused_holds_a_running_server(server):
    """A running server is paused with the client's mode, and runs again afterwards."""
    with client_of(server).paused():
        assert server.paused
    assert not server.paused
    assert server.posts() == ["/pause", "/resume"]
    assert next(request.query for request in server.requests if request.path == "/pause") == {"mode": "keep"}


@pytest.mark.parametrize(
    ("setting", "argument", "mode"),
    [
        ("keep", None, "keep"),
        ("wait", None, "wait"),
        ("abort", None, "abort"),
        (None, "wait", "wait"),
        ("keep", "abort", "abort"),
    ],
)
def test_paused_takes_the_mode_of_the_call_before_the_clients(server, setting, argument, mode):
    """The mode is that of the call, else the client's setting."""
    with client_of(server, pause=setting).paused(argument):
        pass
    assert next(request.query for request in server.requests if request.path == "/pause") == {"mode": mode}


def test_paused_leaves_a_paused_server_as_it_is(server):
    """A server that the user paused is neither paused again nor resumed."""
    server.paused = True
    with client_of(server).paused():
        pass
    assert server.paused
    assert server.posts() == []


def test_paused_resumes_only_those_that_ran(servers):
    """Of several servers only those that were running are paused and resumed."""
    made = servers(3)
    made[1].paused = True
    with client_of(*made).paused():
        assert all(server.paused for server in made)
    assert [server.paused for server in made] == [False, True, False]
    assert made[1].posts() == []


def test_paused_brackets_nest(server):
    """An inner bracket finds the server paused by the outer one, and leaves it so; it pauses one that was resumed meanwhile."""
    client = client_of(server)
    with client.paused():
        with client.paused():
            pass
        assert server.paused
    assert server.posts() == ["/pause", "/resume"]
    with client.paused():
        server.paused = False
        with client.paused():
            assert server.paused


def test_server_that_is_known_to_be_awake_is_not_asked(server):
    """Where nobody's weights can sleep, one question does."""
    server.paused = True
    assert client_of(server).running(may_sleep=False) == []
    assert [request.path for request in server.requests] == ["/is_paused"]


@pytest.mark.parametrize("error", [ValueError("body"), KeyboardInterrupt()], ids=repr)
def test_paused_resumes_after_an_exception(server, error):
    """Whatever the body raises, an interrupt included, the server runs again, and that is what is raised."""
    with pytest.raises(type(error)) as caught, client_of(server).paused():
        raise error
    assert caught.value is error
    assert not server.paused


def test_paused_resumes_all_after_a_failed_pause(servers):
    """When one server cannot be paused, the body does not run, and those that were are resumed."""
    made = servers(2)
    made[1].script["/pause"] = (500, {"error": {"message": "busy"}})
    entered = []
    with pytest.raises(TransportError, match="busy"), client_of(*made).paused():
        entered.append(True)
    assert entered == []
    assert [server.posts() for server in made] == [["/pause", "/resume"]] * 2
    assert not made[0].paused


def test_pause_none_refuses_a_running_server_before_anything(servers):
    """A client that may not pause refuses, names the running server and says what to do; nothing was posted."""
    made = servers(2)
    made[0].paused = True
    with pytest.raises(ConfigurationError, match=f"^{made[1].url}: running, .*pause='keep'"):
        client_of(*made, pause=None).paused().__enter__()
    assert [server.posts() for server in made] == [[], []]


def test_pause_none_takes_servers_that_are_paused(server):
    """A client that may not pause needs not to, where the user has."""
    server.paused = True
    with client_of(server, pause=None).paused():
        assert server.paused
    assert server.posts() == []


def test_sleeping_server_is_refused_before_anything(servers):
    """Weights that sleep cannot be written: the server is named, and not paused."""
    made = servers(2)
    made[1].script["/is_sleeping"] = (200, {"is_sleeping": True})
    with pytest.raises(ConfigurationError, match=f"^{made[1].url}: asleep.*wake"):
        client_of(*made).paused().__enter__()
    assert [server.posts() for server in made] == [[], []]


METRICS = (
    "# HELP vllm:engine_sleep_state Engine sleep state\n"
    'vllm:engine_sleep_state{{engine="0",sleep_state="awake"}} {awake}.0\n'
    'vllm:engine_sleep_state{{engine="0",sleep_state="weights_offloaded"}} {asleep}.0\n'
    'vllm:engine_sleep_state{{engine="0",sleep_state="discard_all"}} 0.0\n'
)


@pytest.mark.parametrize("asleep", [0, 1])
def test_paused_server_that_says_it_sleeps_is_asked_for_its_memory(server, asleep):
    """A paused vLLM calls itself sleeping: only where its metrics say that the weights are gone is it refused."""
    server.paused = True
    server.script["/is_sleeping"] = (200, {"is_sleeping": True})
    server.script["/metrics"] = (200, METRICS.format(awake=1 - asleep, asleep=asleep).encode())
    bracket = client_of(server).paused()
    if asleep:
        with pytest.raises(ConfigurationError, match="asleep"):
            bracket.__enter__()
    else:
        with bracket:
            assert server.paused
    assert server.posts() == []


def test_paused_server_without_metrics_is_taken_to_be_awake(server):
    """Where nothing tells a paused server from a sleeping one, it is taken to be paused, as the user left it."""
    server.paused = True
    server.script["/is_sleeping"] = (200, {"is_sleeping": True})
    server.script["/metrics"] = (404, {})
    with client_of(server).paused():
        assert server.paused


@pytest.mark.parametrize("status", [404, 405])
def test_server_that_cannot_sleep_is_awake(server, status):
    """A server without the sleep route is taken to be awake."""
    server.script["/is_sleeping"] = (status, {})
    with client_of(server).paused():
        assert server.paused


def test_server_that_cannot_be_paused_is_refused(server):
    """A server without the pause routes is an error that names the switch: it may be generating."""
    server.script["/is_paused"] = (404, {})
    with pytest.raises(TransportError, match="VLLM_SERVER_DEV_MODE=1"):
        client_of(server).paused().__enter__()


def test_frozen_server_at_resume_does_not_hide_the_first_error(servers):
    """When the body failed and a server cannot be resumed, the body's error is raised in time, and notes the server."""
    made = servers(2)
    made[0].freeze("/resume")
    client = client_of(*made, timeout=0.5)
    started = time.monotonic()
    with pytest.raises(ValueError, match="first") as caught, client.paused():
        raise ValueError("first")
    assert time.monotonic() - started < 2
    assert made[0].url in "".join(caught.value.__notes__)
    assert not made[1].paused


def test_slow_resume_goes_on_after_the_first_error(server):
    """An error is not held up by a server that is slow to resume: it is raised, and the server still resumes."""
    client, go_on, resumed = client_of(server), threading.Event(), threading.Event()

    def resume(_):
        assert go_on.wait(WAIT_S)
        server.paused = False
        resumed.set()
        return 200, {}

    server.script["/resume"] = resume
    started = time.monotonic()
    with client.bounded(0.2), pytest.raises(ValueError, match="first"), client.paused():
        raise ValueError("first")
    assert time.monotonic() - started < 5
    assert server.paused
    go_on.set()
    assert resumed.wait(WAIT_S)


def test_server_that_cannot_be_resumed_is_an_error_after_a_good_body(server):
    """When the body went well and the resume did not, that is raised: the server may still be paused."""
    server.script["/resume"] = (500, {"error": {"message": "stuck"}})
    with pytest.raises(TransportError, match="stuck"), client_of(server).paused():
        pass


def test_resume_is_tried_after_the_deadline(server):
    """A round that used up its time still resumes the servers, and is not long in doing so."""
    client = client_of(server)
    with client.bounded(WAIT_S):
        bracket = client.paused()
        bracket.__enter__()
    with client.bounded(0):
        bracket.__exit__(None, None, None)
    assert not server.paused
    server.freeze("/resume")
    with client.bounded(WAIT_S):
        bracket = client.paused()
        bracket.__enter__()
    with client.bounded(0):
        seconds, _ = elapsed_of(lambda: bracket.__exit__(None, None, None))
    assert seconds < 1.5


# --- questions -------------------------------------------------------------------------------------------------


def test_world_size_is_summed(servers):
    """The worker ranks of all servers are added up."""
    made = servers(3)
    for server, size in zip(made, (1, 2, 4), strict=True):
        server.script["/get_world_size"] = (200, {"world_size": size})
    assert client_of(*made).world_size() == 7
    assert [server.calls for server in made] == [["GET /get_world_size"]] * 3


def test_world_size_is_unknown_where_one_server_cannot_tell(servers):
    """One server without the route makes the sum unknown."""
    made = servers(2)
    made[0].script["/get_world_size"] = (200, {"world_size": 1})
    made[1].script["/get_world_size"] = (404, {})
    assert client_of(*made).world_size() is None


@pytest.mark.parametrize(
    ("replies", "version"),
    [
        ([(200, {"weight_version": "v1"})] * 2, "v1"),
        ([(200, {"weight_version": "v1"}), (200, {"weight_version": "v2"})], None),
        ([(200, {"weight_version": "v1"}), (404, {})], None),
        ([(404, {})] * 2, None),
        ([(200, {})] * 2, None),
    ],
    ids=["equal", "different", "one cannot tell", "none can tell", "none says"],
)
def test_weight_version_is_that_on_which_all_agree(servers, replies, version):
    """The version is what every server publishes, and None where they differ or one cannot tell."""
    made = servers(2)
    for server, reply in zip(made, replies, strict=True):
        server.script["/weight_info"] = reply
    assert client_of(*made).weight_version() == version


def test_question_that_fails_is_an_error(server):
    """Only a missing route is an answer: a server's error is raised."""
    server.script["/get_world_size"] = (500, {"error": {"message": "engine dead"}})
    with pytest.raises(TransportError, match="engine dead"):
        client_of(server).world_size()


# --- caches ----------------------------------------------------------------------------------------------------


def test_reset_caches_resets_each_cache_once(servers):
    """Prefix (with frozen requests and the connector's), multimodal and encoder cache are reset, without a note."""
    made = servers(2)
    assert client_of(*made).reset_caches() == []
    for server in made:
        assert sorted(server.calls) == ["POST /reset_encoder_cache", "POST /reset_mm_cache", "POST /reset_prefix_cache"]
        (prefix,) = (request for request in server.requests if request.path == "/reset_prefix_cache")
        assert prefix.query == {"reset_running_requests": "true", "reset_external": "true"}


def test_reset_caches_notes_what_a_server_cannot_reset(servers):
    """A cache without a route is not an error: a note names server and cache."""
    made = servers(2)
    made[1].script["/reset_mm_cache"] = (404, {})
    made[0].script["/reset_encoder_cache"] = (405, {})
    assert client_of(*made).reset_caches() == [
        f"{made[1].url} has no /reset_mm_cache: that cache was not reset",
        f"{made[0].url} has no /reset_encoder_cache: that cache was not reset",
    ]


def test_reset_caches_without_a_connector_is_tried_again_and_noted(server):
    """Where the connector's cache does not reset, the prefix cache is reset without it, and a note says so."""
    server.script["/reset_prefix_cache"] = lambda request: (200, {"success": "reset_external" not in request.query})
    (note,) = client_of(server).reset_caches()
    assert note == f"{server.url}: the external (connector's) cache was not reset"
    prefix = [request for request in server.requests if request.path == "/reset_prefix_cache"]
    assert [request.query for request in prefix] == [
        {"reset_running_requests": "true", "reset_external": "true"},
        {"reset_running_requests": "true"},
    ]


@pytest.mark.parametrize(
    "reply",
    [(200, {"success": False}), (404, {}), (500, {"error": {"message": "no"}})],
    ids=lambda reply: str(reply[0]),
)
def test_prefix_cache_that_was_not_reset_is_an_error(server, reply):
    """A prefix cache of the old weights would be served, so a reset that did not happen is raised."""
    server.script["/reset_prefix_cache"] = reply
    with pytest.raises(TransportError, match=server.url) as caught:
        client_of(server).reset_caches()
    if reply[0] == 200:
        assert "call client.reset_caches() again" in caught.value.message
        assert "before the server generates" not in caught.value.message, "a round's end resumes it"


@pytest.mark.parametrize("payload", [b"", b"null", {}, {"success": True}], ids=str)
def test_prefix_cache_reset_is_taken_at_its_status(server, payload):
    """Older servers say nothing in the body of a reset that succeeded."""
    server.script["/reset_prefix_cache"] = (200, payload)
    assert client_of(server).reset_caches() == []


# --- handles ---------------------------------------------------------------------------------------------------

HANDLES = [{"gpu-0": ("rebuild", (1, b"\x00\xff"))}]


def unpickled(update_info):
    """`update_info` with the handles that it carries, as a worker reads them."""
    rest = {name: value for name, value in update_info.items() if name != "ipc_handles_pickled"}
    return {**rest, "ipc_handles": pickle.loads(base64.b64decode(update_info["ipc_handles_pickled"], validate=True))}


def test_handles_are_pickled_for_http(server):
    """`ipc_handles`, which JSON cannot carry, goes as `ipc_handles_pickled`; the caller's dict is not changed."""
    update_info = {"names": ["w"], "ipc_handles": HANDLES}
    client_of(server).update_weights(update_info)
    sent = server.requests[0].json["update_info"]
    assert sorted(sent) == ["ipc_handles_pickled", "names"]
    assert unpickled(sent) == {"names": ["w"], "ipc_handles": HANDLES}
    assert update_info == {"names": ["w"], "ipc_handles": HANDLES}


def test_handles_are_pickled_for_each_rank(server):
    """In a payload of one dict per rank, each one's handles are pickled, and one without stays as it is."""
    client_of(server).update_weights([{"ipc_handles": HANDLES}, {"names": []}, {"ipc_handles": []}])
    first, second, third = server.requests[0].json["update_info"]
    assert unpickled(first) == {"ipc_handles": HANDLES}
    assert second == {"names": []}
    assert unpickled(third) == {"ipc_handles": []}


@pytest.mark.parametrize(
    "update_info", [{}, {"round": 1}, {"ipc_handles": None, "ipc_handles_pickled": "gASV"}], ids=str
)
def test_payload_without_handles_is_the_same_object(update_info):
    """A payload without handles is passed on as it is, not copied."""
    assert _without_raw_handles(update_info) is update_info
    assert _without_raw_handles([update_info])[0] is update_info
