"""Drives one or several vLLM HTTP servers (or the embedded server) through a weight update."""

from __future__ import annotations

import base64
import logging
import pickle
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from wt_common import MAX_TIMEOUT_S, ConfigurationError, RoundTimeoutError, TransportError, WeightTransferError
from wt_trainer.client.connections import Connections
from wt_trainer.client.hiding import Hidden
from wt_trainer.client.protocol import PauseMode, UpdatePayload
from wt_trainer.threads import run_in_thread, run_into

if TYPE_CHECKING:
    import requests

__all__ = ["HTTPVLLMWeightSyncClient"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

_DEV_MODE_HINT = "start the server with VLLM_SERVER_DEV_MODE=1, which is what enables its RL routes"
_READ_GRACE_S = 0.2  # past a call's time, for its threads to raise their own error, which says more than ours
_LATE_RESUME_S = 0.3  # of a round that failed: it must raise within a second of its deadline
_SETTLE_S = 2.0  # for a server to end a call that another one has failed; one that was lost there ends with its timeout
_SLEEPING_GAUGE = re.compile(r'vllm:engine_sleep_state\{.*sleep_state="(weights_offloaded|discard_all)".*\} 1(\.0)?$')
_MAX_ERROR_CHARS = 2000  # of a server's reply in our error; a worker's traceback fits


class HTTPVLLMWeightSyncClient:
    """The four calls, and serving control, over HTTP to every server of `base_url` at once.

    Credentials appear in no error and no repr: those given here, those of the environment's proxies, and the session's secret.

    Args:
        base_url: `http://host:port` of a server, or several; with `user:password@` before the host, that is sent as HTTP's basic
            authentication instead of `api_key`.
        timeout: seconds that one call may take on every server.
        pause: what a round does to running requests while it holds a server that was not paused: `keep` (default), `wait`,
            `abort`, or None to refuse the round instead.
        api_key: sent as a bearer token.
        headers: sent with every request.
        verify: TLS verification as in `requests`: True, False, or the path of a CA bundle.
        cert: TLS client certificate as in `requests`: a path, or (certificate, key).

    Raises:
        ConfigurationError: no URL, a URL without http(s) scheme or host, a header that HTTP cannot carry, a timeout that is not
            positive.
    """

    def __init__(
        self,
        base_url: str | Sequence[str],
        timeout: float = 300,
        *,
        pause: PauseMode | None = "keep",
        api_key: str | None = None,
        headers: dict[str, str] | None = None,
        verify: bool | str = True,
        cert: str | tuple[str, str] | None = None,
    ) -> None:
        urls = [base_url] if isinstance(base_url, str) else list(base_url)
        if not urls:
            raise ConfigurationError("base_url: expected at least one server, got none")
        credentials = dict(map(_without_credentials, urls))
        if not 0 < timeout <= MAX_TIMEOUT_S:
            raise ConfigurationError(f"timeout: expected seconds above 0, at most {MAX_TIMEOUT_S}, got {timeout}")
        if pause not in ("abort", "wait", "keep", None):
            raise ConfigurationError(f"pause: expected 'abort', 'wait', 'keep' or None, got {pause!r}")
        self.base_urls = tuple(credentials)
        self.timeout = float(timeout)
        self.pause_mode = pause
        headers = dict(headers or {})
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        _check_headers(headers)
        self._hidden = Hidden()
        self._hidden.add(api_key, *headers.values())
        for login in filter(None, credentials.values()):
            self._hidden.add_login(*login)
        self._connections = {
            url: Connections(url, headers, verify, cert, auth=auth, hidden=self._hidden)
            for url, auth in credentials.items()
        }
        self.is_draft = False
        self._deadline: float | None = None
        self._under_way: list[Future[Any]] = []  # of the last of the four calls

    def __repr__(self) -> str:
        return f"HTTPVLLMWeightSyncClient({list(self.base_urls)!r}, timeout={self.timeout:g})"

    # --- the four calls ------------------------------------------------------------------------------------

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Hand `init_info` to every worker of every server; where it has a `server`, that says which one."""
        self._hidden.add_init_info(init_info)

        def init(url: str) -> None:
            number = {"server": self.base_urls.index(url)} if "server" in init_info else {}
            self._request("POST", url, "/init_weight_transfer_engine", json={"init_info": {**init_info, **number}})

        self._in_order(init)

    def start_weight_update(self) -> None:
        """Open an update on every server, of the draft model within `draft()`."""
        self._call_all("/start_draft_weight_update" if self.is_draft else "/start_weight_update")

    @contextmanager
    def draft(self) -> Iterator[None]:
        """Within it, updates go to the servers' speculative draft model; the version they publish stays."""
        self.is_draft = True
        try:
            yield
        finally:
            self.is_draft = False

    def update_weights(self, update_info: UpdatePayload) -> None:
        """Have every server's workers receive; returns when all have received."""
        self._call_all("/update_weights", json={"update_info": _without_raw_handles(update_info)})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Close the update on every server and publish `weight_version`."""
        self._call_all(
            "/finish_weight_update", json=None if weight_version is None else {"weight_version": weight_version}
        )

    def shutdown_weight_transfer_engine(self) -> None:
        """Have every server's workers release their transfer resources; they go on serving."""
        self._post_all("/shutdown_weight_transfer_engine")

    # --- serving control -----------------------------------------------------------------------------------

    @contextmanager
    def bounded(self, seconds: float) -> Iterator[None]:
        """Within it, no call lasts longer than what is then left of `seconds` (nor than `timeout`)."""
        before, self._deadline = self._deadline, time.monotonic() + seconds
        try:
            yield
        finally:
            self._deadline = before

    def hosts(self) -> list[str]:
        """Host part of every URL."""
        return [urlsplit(url).hostname or "" for url in self.base_urls]

    def world_size(self) -> int | None:
        """Worker ranks over all servers, data parallelism included."""
        sizes = self._optional_all("/get_world_size", "world_size")
        return None if None in sizes else sum(sizes)

    def weight_version(self) -> str | None:
        """The label that all servers publish; None where they differ, or one is too old to tell (before vLLM 0.28)."""
        versions = self._optional_all("/weight_info", "weight_version")
        same = all(version == versions[0] for version in versions)
        return str(versions[0]) if same and versions[0] is not None else None

    def set_weight_version(self, version: str) -> None:
        """Publish `version` on every server without a round."""
        self._post_all("/update_weight_version", json={"new_version": version})

    def pause(self, mode: PauseMode = "keep") -> None:
        """Stop generation on every server; see `PauseMode` for what happens to running requests."""
        self._post_all("/pause", params={"mode": mode})

    def resume(self) -> None:
        """Let every server generate again."""
        self._resume(self.base_urls, self._left_s())

    def is_paused(self) -> list[bool]:
        """Whether each server is paused, in the order of `base_urls`."""
        return self._each(self._is_paused)

    @contextmanager
    def paused(self, mode: PauseMode | None = None) -> Iterator[None]:
        """Within it, no server generates; those that were running are resumed after it, whatever happened inside.

        Args:
            mode: as in `pause`; None is the client's own `pause` setting.

        Raises:
            ConfigurationError: a server is asleep; or one is running and neither `mode` nor the client's setting allows a pause.
        """
        mode = self.pause_mode if mode is None else mode
        running = [self.base_urls[server] for server in self._running(mode, may_sleep=True)]
        pauses: list[Future[Any]] = []
        try:
            self._each(lambda url: self._request("POST", url, "/pause", params={"mode": mode}), running, futures=pauses)
            yield
        except BaseException as exc:
            # Even where the pause failed: another server may have taken it. A server that does not answer must not hide
            # `exc`, nor hold it up: the resume goes on in the background.
            problem = self._resume_in_background(running, pauses)
            if problem:
                logger.error("not resumed: %s", problem)  # noqa: TRY400  # it is a note of `exc`
                exc.add_note(f"{', '.join(running)} may still be paused: {problem}")
            raise
        self._resume(running, max(self._left_s(), _LATE_RESUME_S))

    def _running(self, mode: PauseMode | None, *, may_sleep: bool) -> list[int]:
        paused = self._refuse_sleeping() if may_sleep else self.is_paused()
        running = [server for server, is_paused in enumerate(paused) if not is_paused]
        if running and mode is None:
            raise ConfigurationError(
                f"{', '.join(self.base_urls[server] for server in running)}: running, and this client was made with pause=None; "
                "pause the server first (client.paused('keep')), or let the client do it (pause='keep')"
            )
        return running

    # --- one server, as `ServingControl` has it ------------------------------------------------------------

    def servers(self) -> list[str]:
        """The URL of each."""
        return list(self.base_urls)

    def running(self, *, may_sleep: bool = True) -> list[int]:
        """The servers that could generate now; raises where one is asleep, or may not be paused. See `ServingControl`."""
        return self._running(self.pause_mode, may_sleep=may_sleep)

    def pause_server(self, server: int) -> None:
        """One server does not generate, in the client's own mode."""
        self._request("POST", self.base_urls[server], "/pause", params={"mode": self.pause_mode})

    def resume_server(self, server: int, *, within: float) -> None:
        """One server generates; the call takes `within` seconds at most, also past a bound."""
        self._request("POST", self.base_urls[server], "/resume", within=within)

    def label(self, server: int, *, within: float) -> str | None:
        """The version that one server publishes; None where it has no route for it (before vLLM 0.28)."""
        url = self.base_urls[server]
        reply = _none_if_missing(lambda: self._request("GET", url, "/weight_info", within=within))
        return None if reply is None else str(self._object_of(reply, "weight_version")["weight_version"])

    def set_label(self, server: int, label: str, *, within: float) -> None:
        """One server publishes `label`."""
        url = self.base_urls[server]
        self._request("POST", url, "/update_weight_version", json={"new_version": label}, within=within)

    def _resume(self, urls: Sequence[str], within: float) -> None:
        """Resume `urls`, also when the deadline has passed."""
        self._each(
            lambda url: self._request("POST", url, "/resume", within=within), urls, within=within, tries_all=True
        )

    def _resume_in_background(self, urls: Sequence[str], pauses: Sequence[Future[Any]]) -> str:
        """Resume `urls`, and return why that is not known to have happened within `_LATE_RESUME_S`; empty if it has.

        `pauses` are the calls that paused them. One that was interrupted may still be on its way: a resume waits for it.
        """
        future: Future[None] = Future()

        def resume() -> None:
            wait(pauses, timeout=self.timeout)
            self._resume(urls, self.timeout)

        run_in_thread("wt-http resume", partial(run_into, future, resume))
        try:
            future.result(timeout=_LATE_RESUME_S)
        except WeightTransferError as exc:
            return str(exc)
        except TimeoutError:
            return f"no reply to /resume within {_LATE_RESUME_S:g} s; it is still being waited for"
        return ""

    def reset_caches(self) -> list[str]:
        """Drop prefix, connector, multimodal and encoder caches on every server.

        Requests that a pause froze (`keep`) are computed anew from their tokens: their keys and values are of the old weights.

        Returns:
            A note for each cache that a server has no route for, or whose connector did not reset.

        Raises:
            TransportError: a prefix cache was not reset. Requests would continue from keys and values of the old weights.
        """
        calls = {(url, "/reset_prefix_cache"): partial(self._reset_prefix_cache, url) for url in self.base_urls}
        for path in ("/reset_mm_cache", "/reset_encoder_cache"):
            calls |= {(url, path): partial(self._reset_optional_cache, url, path) for url in self.base_urls}
        return [note for note in self._at_once(calls).values() if note]

    def _reset_prefix_cache(self, url: str) -> str | None:
        """Reset it with the connector's cache, if there is a connector; without, and say so, where that fails."""
        params = {"reset_running_requests": "true"}
        if _succeeded(self._request("POST", url, "/reset_prefix_cache", params={**params, "reset_external": "true"})):
            return None
        if _succeeded(self._request("POST", url, "/reset_prefix_cache", params=params)):
            return f"{url}: the external (connector's) cache was not reset"
        raise TransportError(
            f"{url}: the prefix cache was not reset, so that what the server generates may go on from keys and values of older "
            "weights, unless it is paused; call client.reset_caches() again, and drop what was generated before that",
            side="trainer",
        )

    def _reset_optional_cache(self, url: str, path: str) -> str | None:
        reply = _none_if_missing(lambda: self._request("POST", url, path))
        return f"{url} has no {path}: that cache was not reset" if reply is None else None

    def _refuse_sleeping(self) -> list[bool]:
        """Whether each server is paused; raises if one is asleep."""
        calls: dict[tuple[str, str], Callable[[], bool]] = {}
        for url in self.base_urls:
            calls[url, "paused"] = partial(self._is_paused, url)
            calls[url, "asleep"] = partial(self._says_asleep, url)
        said = self._at_once(calls)
        urls = [url for url in self.base_urls if said[url, "asleep"] and self._is_asleep(url, said[url, "paused"])]
        if urls:
            raise ConfigurationError(
                f"{', '.join(urls)}: asleep, so there is no memory to write weights to; wake it up first "
                "(POST /wake_up?tags=weights)"
            )
        return [said[url, "paused"] for url in self.base_urls]

    def _is_paused(self, url: str) -> bool:
        return bool(self._object_of(self._request("GET", url, "/is_paused"), "is_paused")["is_paused"])

    def _says_asleep(self, url: str) -> bool:
        reply = _none_if_missing(lambda: self._request("GET", url, "/is_sleeping"))
        return reply is not None and bool(self._object_of(reply).get("is_sleeping"))

    def _is_asleep(self, url: str, is_paused: bool) -> bool:
        """Whether the weights of a server that says it sleeps are out of memory.

        vLLM's /is_sleeping is also true of a server that is merely paused; then the gauge of its metrics tells the two apart.
        """
        if not is_paused:
            return True
        metrics = _none_if_missing(lambda: self._request("GET", url, "/metrics"))
        return metrics is not None and any(_SLEEPING_GAUGE.match(line) for line in metrics.text.splitlines())

    # --- requests ------------------------------------------------------------------------------------------

    def _call_all(self, path: str, **kwargs: Any) -> None:
        self._in_order(lambda url: self._request("POST", url, path, **kwargs))

    def _in_order(self, call: Callable[[str], Any]) -> None:
        """`call(url)`, one of the four calls, for every server, after the one before.

        That may have raised for one server while others were still at it. It has a moment to end there, so that a server that is
        only slow gets its calls in their order.
        """
        wait(self._under_way, timeout=min(_SETTLE_S, self._left_s()))
        self._under_way = []
        self._each(call, futures=self._under_way)

    def _post_all(self, path: str, **kwargs: Any) -> None:
        self._each(lambda url: self._request("POST", url, path, **kwargs))

    def _optional_all(self, path: str, key: str) -> list[Any]:
        """`key` of each server's reply to GET `path`; None where the server has no such route."""

        def ask(url: str) -> Any:
            reply = _none_if_missing(lambda: self._request("GET", url, path))
            return None if reply is None else self._object_of(reply).get(key)

        return self._each(ask)

    def _each(
        self,
        call: Callable[[str], T],
        urls: Sequence[str] | None = None,
        *,
        within: float | None = None,
        futures: list[Future[Any]] | None = None,
        tries_all: bool = False,
    ) -> list[T]:
        """`call(url)` for all `urls` at once; see `_at_once`."""
        calls = {(url, ""): partial(call, url) for url in (self.base_urls if urls is None else urls)}
        return list(self._at_once(calls, within=within, futures=futures, tries_all=tries_all).values())

    def _at_once(
        self,
        calls: Mapping[tuple[str, str], Callable[[], T]],
        *,
        within: float | None = None,
        futures: list[Future[Any]] | None = None,
        tries_all: bool = False,
    ) -> dict[tuple[str, str], T]:
        """The results of `calls`, whose keys begin with the server's URL and which run all at once.

        Raises as soon as one has failed: another may be in the middle of a round that can only end when its sender hears of that.
        The others go on, on their threads. With `tries_all` it returns or raises only when all have ended.

        `futures` gets one for each call before it begins.

        The wait for them bounds a call: `requests` bounds each read only (not a trickled reply), and no name lookup.
        """
        deadline = time.monotonic() + (self._left_s() if within is None else within) + _READ_GRACE_S
        of_calls: dict[tuple[str, str], Future[T]] = {key: Future() for key in calls}
        if futures is not None:
            futures += of_calls.values()
        for key, future in of_calls.items():
            run_in_thread(f"wt-http {key[0]}", partial(run_into, future, calls[key]))
        wait(
            of_calls.values(),
            timeout=deadline - time.monotonic(),
            return_when=ALL_COMPLETED if tries_all else FIRST_EXCEPTION,
        )
        for future in of_calls.values():
            if future.done():
                future.result()  # raises, if it has failed
        for key, future in of_calls.items():
            if not future.done():
                raise RoundTimeoutError(f"{key[0]}: no complete reply in time", side="trainer")
        return {key: future.result() for key, future in of_calls.items()}

    def _left_s(self) -> float:
        """Seconds that a call may take now."""
        if self._deadline is None:
            return self.timeout
        return max(0.0, min(self.timeout, self._deadline - time.monotonic()))

    def _request(
        self, method: str, base_url: str, path: str, *, within: float | None = None, **kwargs: Any
    ) -> requests.Response:
        """The reply, if its status is one of success. Every call to a server goes this way: errors are without credentials."""
        import requests

        with self._hidden.from_errors():
            left = self._left_s() if within is None else within
            if left == 0:
                raise RoundTimeoutError(f"{method} {base_url}{path}: not sent, the deadline has passed", side="trainer")
            ends = time.monotonic() + left
            try:
                reply = self._connections[base_url].request(method, path, timeout=left, **kwargs)
            except (
                requests.RequestException,
                ValueError,
            ) as exc:  # a ValueError: of an address or a proxy that cannot be read
                if isinstance(exc, requests.Timeout) or time.monotonic() >= ends:  # a body's is no Timeout
                    raise RoundTimeoutError(
                        f"{method} {base_url}{path}: no reply within {left:.1f} s", side="trainer"
                    ) from exc
                raise TransportError(f"{method} {base_url}{path}: {exc}", side="trainer") from exc
            if 200 <= reply.status_code < 300:
                return reply
            raise _HTTPStatusError(
                f"{reply.status_code} on {method} {base_url}{path}: {_explain(reply)}", reply.status_code
            )

    def _object_of(self, reply: requests.Response, *keys: str) -> dict[str, Any]:
        """The JSON object of a reply, with at least `keys`; anything else comes from another kind of server."""
        try:
            payload = reply.json()
        except ValueError:
            payload = None
        if not isinstance(payload, dict) or not payload.keys() >= set(keys):
            raise self._hidden.error(
                TransportError(
                    f"{reply.url}: expected a JSON object with {list(keys)}, got {reply.text[:200]!r}; is this a vLLM server?",
                    side="trainer",
                )
            )
        return payload


def _without_credentials(url: str) -> tuple[str, tuple[str, str] | None]:
    """`url` without a slash at its end and without `user:password@`, and these two where it has them.

    Raises:
        ConfigurationError: it is no `http(s)://host`.
    """
    try:
        parts = urlsplit(url)
        is_http = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port  # a ValueError where it is none
    except ValueError:
        is_http = False
    if not is_http:
        shown = url if "@" not in url else "...@" + url.rpartition("@")[2]
        raise ConfigurationError(f"base_url: expected http(s)://host:port, got {shown!r}") from None
    auth = None
    if "@" in parts.netloc:
        auth = unquote(parts.username or ""), unquote(parts.password or "")
        url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    return url.rstrip("/"), auth


def _check_headers(headers: Mapping[str, Any]) -> None:
    """Raise for one that HTTP cannot carry: `requests` would do so later, with its value in the text."""
    for name, value in headers.items():
        if not isinstance(value, str) or value != value.strip() or not value.isprintable() or not value.isascii():
            where = "api_key" if name == "Authorization" else f"headers[{name!r}]"
            raise ConfigurationError(
                f"{where}: expected printable ASCII text without spaces around it, got something else (not shown here); a key "
                "that was read from a file may end in a newline",
                side="trainer",
            )


class _HTTPStatusError(TransportError):
    """The server answered with an error status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message, side="trainer")
        self.status = status


def _none_if_missing(call: Callable[[], requests.Response]) -> requests.Response | None:
    try:
        return call()
    except _HTTPStatusError as exc:
        if exc.status in (404, 405):
            return None
        raise


def _succeeded(reply: requests.Response) -> bool:
    """What a cache reset reports in its body; servers before vLLM 0.28 report nothing and answer with an error status."""
    try:
        return bool(reply.json().get("success", True))
    except (ValueError, AttributeError):
        return True


def _explain(reply: requests.Response) -> str:
    """What the server said, or for a missing route, what to do."""
    if reply.status_code == 404:
        return _DEV_MODE_HINT
    if reply.status_code in (401, 403):
        return "the server refused the credentials; pass api_key=... or headers=..."
    try:
        payload = reply.json()
    except ValueError:
        return reply.text[:_MAX_ERROR_CHARS]
    error = payload.get("error", payload) if isinstance(payload, dict) else payload
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:_MAX_ERROR_CHARS]


def _without_raw_handles(update_info: UpdatePayload) -> UpdatePayload:
    """`update_info` with `ipc_handles`, which JSON cannot carry, as vLLM's HTTP API takes them (`ipc_handles_pickled`)."""
    if isinstance(update_info, list):
        return [_with_pickled_handles(each) for each in update_info]
    return _with_pickled_handles(update_info)


def _with_pickled_handles(update_info: dict[str, Any]) -> dict[str, Any]:
    if update_info.get("ipc_handles") is None:
        return update_info
    rest = {name: value for name, value in update_info.items() if name != "ipc_handles"}
    pickled = pickle.dumps(update_info["ipc_handles"])
    return {**rest, "ipc_handles_pickled": base64.b64encode(pickled).decode()}
