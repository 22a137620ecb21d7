"""Credentials are in nothing that people read: no error, no cause of one, no log, no repr."""

import base64
import json
import logging
import socket
import threading
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from wt_common import ConfigurationError, WeightTransferError, WeightTransferInitRequest
from wt_common.broadcast import SessionInitInfo
from wt_trainer import GlooTrainerInitInfo, HTTPVLLMWeightSyncClient
from wt_trainer.client.hiding import Hidden
from wt_trainer.session import Session

KEY, PASSWORD, TOKEN, PROXY, SECRET = "sk-kkkkkkkk", "p w/ß:@ord", "t-tttttttt", "proxypass", "5ec2e7" * 10
CREDENTIALS = (KEY, PASSWORD, "p%20w", TOKEN, PROXY, SECRET)
WAIT_S = 10


def assert_hidden(*texts):
    for text in texts:
        for credential in CREDENTIALS:
            assert credential not in text, f"{credential!r} is shown: {text}"


def all_of(error):
    """What may be printed of an error, its causes included."""
    return "".join(traceback.format_exception(error)), str(error), repr(error), repr(error.args)


class Echo(BaseHTTPRequestHandler):
    """Answers every request with what came, as a server does that says which field it could not read."""

    status = 422
    last = None

    def _answer(self):
        Echo.last = dict(self.headers)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        text = json.dumps({"error": {"message": f"cannot read {body} {dict(self.headers)}"}}).encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = _answer  # noqa: N815  # the names that http.server calls

    def log_message(self, *args):
        pass


@pytest.fixture
def echo():
    """The port of a server that answers with what it was sent, as an error."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join(WAIT_S)


@pytest.fixture
def refusing():
    """A port that is taken and listens to nobody."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


def client_at(port, **options):
    url = f"http://user:p%20w%2F%C3%9F%3A%40ord@127.0.0.1:{port}"
    return HTTPVLLMWeightSyncClient(url, WAIT_S, headers={"X-Token": TOKEN}, api_key=KEY, **options)


def fail(client):
    """The errors of calls that all fail."""
    calls = [
        lambda: client.init_weight_transfer_engine({"session_secret": SECRET, "session_port": 1}),
        client.start_weight_update,
        client.world_size,
        client.weight_version,
        client.is_paused,
        client.reset_caches,
        client.pause,
        lambda: client.label(0, within=1),
        lambda: client.set_label(0, "x", within=1),
        lambda: client.pause_server(0),
        lambda: client.resume_server(0, within=1),
        lambda: client.paused().__enter__(),
    ]
    for call in calls:
        with pytest.raises(WeightTransferError) as caught:
            call()
        yield caught.value


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level(logging.DEBUG)
    return caplog


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("no_proxy", "*")


def test_servers_that_repeat_what_they_were_sent_give_nothing_away(echo, log):
    """A server's error may have a request's headers and body in it, and ours does not."""
    client = client_at(echo)
    errors = list(fail(client))
    assert "cannot read" in str(errors[0])
    assert "***" in str(errors[0])
    for error in errors:
        assert_hidden(*all_of(error))
    assert_hidden(log.text, repr(client), repr(vars(client)["base_urls"]))


def test_replies_that_are_none_give_nothing_away(echo, log, monkeypatch):
    """So with a reply of the wrong kind, whose address and text are in the error."""
    monkeypatch.setattr(Echo, "status", 200)
    with pytest.raises(WeightTransferError, match="is this a vLLM server") as caught:
        client_at(echo).is_paused()
    assert_hidden(*all_of(caught.value), log.text)


def test_sleeping_server_whose_metrics_fail_gives_nothing_away(echo, log, monkeypatch):
    """So with a call that is made after the others, on the caller's own thread."""
    answer = Echo._answer

    def say_asleep(self):
        if self.path == "/metrics":
            return answer(self)
        text = b'{"is_paused": true, "is_sleeping": true}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        return self.wfile.write(text)

    monkeypatch.setattr(Echo, "do_GET", say_asleep)
    with pytest.raises(WeightTransferError, match="/metrics: cannot read") as caught:
        client_at(echo).running()
    assert "***" in str(caught.value)
    assert_hidden(*all_of(caught.value), log.text)


def test_servers_that_cannot_be_reached_give_nothing_away(refusing, log):
    """An error of the connection names host and port alone."""
    for error in fail(client_at(refusing)):
        assert_hidden(*all_of(error))
        assert f"127.0.0.1:{refusing}" in str(error)
    assert_hidden(log.text, *(thread.name for thread in threading.enumerate()))


@pytest.mark.parametrize(
    "proxy", [f"http://user:{PROXY}@127.0.0.1:{{port}}", f"http://user:{PROXY}@[bad", f"http://u:{PROXY}@h:port"]
)
def test_proxies_give_nothing_away(refusing, log, monkeypatch, proxy):
    """A proxy of the environment, also one that is malformed, fails the call without its password."""
    monkeypatch.delenv("NO_PROXY")
    monkeypatch.delenv("no_proxy")
    monkeypatch.setenv("http_proxy", proxy.format(port=refusing))
    client = HTTPVLLMWeightSyncClient("http://10.255.255.1:1", 2, headers={"X-Token": TOKEN})
    with pytest.raises(WeightTransferError) as caught:
        client.start_weight_update()
    assert_hidden(*all_of(caught.value), log.text)


@pytest.mark.parametrize(
    "url", [f"user:{PROXY}@h:1", f"ftp://u:{PROXY}@h", f"http://u:{PROXY}@", f"http://u:{PROXY}@h:port"]
)
def test_url_that_is_refused_is_shown_without_credentials(url):
    """The error of a URL that cannot be used shows what is behind `user:password@`."""
    with pytest.raises(ConfigurationError, match="base_url: expected") as caught:
        HTTPVLLMWeightSyncClient(url)
    assert_hidden(*all_of(caught.value))


@pytest.mark.parametrize(
    ("place", "options"),
    [
        ("api_key", {"api_key": f"{KEY}\n"}),
        ("api_key", {"api_key": f"{KEY}\N{RIGHT SINGLE QUOTATION MARK}"}),
        ("headers", {"headers": {"X-Token": f" {KEY}"}}),
        ("headers", {"headers": {"X-Token": f"a\r\n{KEY}"}}),
        ("headers", {"headers": {"X-Token": [KEY]}}),
    ],
    ids=ascii,
)
def test_header_that_http_cannot_carry_is_refused_unshown(place, options):
    """A key with a newline of its file, say, is refused when the client is made, by name and without its value."""
    with pytest.raises(ConfigurationError, match=place) as caught:
        HTTPVLLMWeightSyncClient("http://h:1", **options)
    assert_hidden(*all_of(caught.value))


def test_user_and_password_of_a_url_are_sent(echo):
    """They go out as basic authentication, and are in no URL of the client's."""
    client = HTTPVLLMWeightSyncClient(f"http://user:p%40ss@127.0.0.1:{echo}/a/", WAIT_S)
    assert client.base_urls == (f"http://127.0.0.1:{echo}/a",)
    sent = base64.b64encode(b"user:p@ss").decode()
    with pytest.raises(WeightTransferError) as caught:
        client.start_weight_update()
    assert Echo.last["Authorization"] == f"Basic {sent}"
    assert sent not in str(caught.value)


def test_reprs_are_without_the_secret():
    """Of an init info on either side, of a request, and of a session."""
    fields = {"session_address": "h", "session_port": 1, "session": "s", "schema": (1, 0), "timeout_s": 1.0}
    ours = GlooTrainerInitInfo("h", 1, rank=0, num_trainer_ranks=2, session_secret=SECRET)
    session = Session("127.0.0.1", secret=SECRET)
    session.close()
    assert_hidden(
        repr(ours),
        repr(SessionInitInfo(**fields, session_secret=SECRET)),
        repr(WeightTransferInitRequest({"session_secret": SECRET})),
        repr(session),
    )


@pytest.mark.parametrize("wrong", [[SECRET], {"a": SECRET}, f"{SECRET}g", f"x{SECRET}", SECRET[1:]], ids=str)
def test_wrong_secret_is_refused_unshown(wrong):
    """A secret of the wrong type, or that is not hex, is refused by name and without its value, on either side."""
    fields = {"session_address": "h", "session_port": 1, "session": "s", "schema": (1, 0), "timeout_s": 1.0}
    with pytest.raises((TypeError, ValueError), match="session_secret") as caught:
        SessionInitInfo(**fields, session_secret=wrong)
    assert_hidden(*all_of(caught.value))
    if isinstance(wrong, str):
        with pytest.raises(ConfigurationError, match="session_secret") as refused:
            GlooTrainerInitInfo("h", 1, rank=0, num_trainer_ranks=2, session_secret=wrong)
        assert_hidden(*all_of(refused.value))


def test_short_values_stay():
    """What is too short to be a secret is left, or every text would be full of stars; longer values go before their parts."""
    hidden = Hidden()
    hidden.add("rl", None, 7, "longer", "longer-key")
    assert hidden.text("a url, longer-key, longer") == "a url, ***, ***"
    assert repr(hidden) == "<2 hidden values>"
