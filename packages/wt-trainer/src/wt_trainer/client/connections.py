"""HTTP connections to one server, each kept open from one request to the next as long as that is safe."""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from wt_trainer.client.hiding import Hidden

if TYPE_CHECKING:
    import requests

__all__ = ["Connections"]

_KEPT_S = 2.0
"""How long an idle connection is used again. uvicorn, vLLM's HTTP server, closes one after 5 s; a request that meets that moment
fails, and none of ours may be repeated blindly."""


class Connections:
    """Requests to `base_url`, from any number of threads at once.

    Each goes through a transport adapter of `requests`, which holds one connection. A new connection, and what `requests.Session`
    does around an adapter (cookies, redirects, a look at the environment), would cost twice the server's answer; there are ten
    requests in a round. Proxies, a CA bundle and netrc are taken from the environment once, as `requests` does. A redirect is not
    followed: a call to change weights must not turn into a GET elsewhere.

    Connections belong to a process. One that is forked from it begins with none: two processes that read from one connection get
    each other's replies.

    Args:
        base_url: `http(s)://host:port`, without a slash at its end.
        headers: sent with every request.
        verify: as in `requests`.
        cert: as in `requests`.
        auth: user and password, instead of an `Authorization` in `headers`, or of netrc's.
        hidden: gets the passwords that the environment has for proxies.
    """

    def __init__(
        self,
        base_url: str,
        headers: dict[str, str],
        verify: bool | str,
        cert: str | tuple[str, str] | None,
        *,
        auth: tuple[str, str] | None,
        hidden: Hidden,
    ) -> None:
        self.base_url = base_url
        self._headers = headers
        self._given: dict[str, Any] = {"verify": verify, "cert": cert}
        self._settings: dict[str, Any] = {}
        self._auth: Any = auth
        self._hidden = hidden
        self._prepared: dict[tuple[str, str], requests.PreparedRequest] = {}  # those without parameters or a body
        self._lock = threading.Lock()
        self._idle: list[tuple[float, requests.adapters.HTTPAdapter]] = []  # since when, the longest first
        _all.add(self)

    def request(self, method: str, path: str, *, timeout: float, **kwargs: Any) -> requests.Response:
        """The complete reply. Raises what `requests` raises; the connection is not used again then.

        Args:
            method: of HTTP.
            path: begins with a slash.
            timeout: seconds for connecting, and for each read.
            kwargs: `params` and `json`, as in `requests`.
        """
        import requests

        if not self._settings:
            self._look_around()
        request = self._prepared.get((method, path)) if not kwargs else None
        if request is None:
            given = {"headers": self._headers, "auth": self._auth, **kwargs}
            request = requests.Request(method, self.base_url + path, **given).prepare()
            if not kwargs:
                self._prepared[method, path] = request
        adapter = self._take() or requests.adapters.HTTPAdapter(pool_connections=1, pool_maxsize=1)
        try:
            reply = adapter.send(request, timeout=timeout, **self._settings)
            _ = reply.content  # read it all, so that the connection is free
        except BaseException:
            adapter.close()
            raise
        if reply.ok:
            with self._lock:
                self._idle.append((time.monotonic(), adapter))
        else:
            adapter.close()  # uvicorn closes a connection on which it has reported a failure; the next request could meet that
        return reply

    def _look_around(self) -> None:
        import requests

        with requests.Session() as session:
            found = session.merge_environment_settings(self.base_url, {}, None, **self._given)
        if "Authorization" not in self._headers and self._auth is None:
            self._auth = requests.utils.get_netrc_auth(self.base_url)
        for proxy in found["proxies"].values():
            user, _, password = proxy.rpartition("@")[0].rpartition("//")[2].partition(":")
            for decode in (str, unquote):
                self._hidden.add_login(decode(user), decode(password))
        self._settings = {name: found[name] for name in ("proxies", "verify", "cert")}

    def _take(self) -> requests.adapters.HTTPAdapter | None:
        """The adapter that was used last, if it is fresh."""
        oldest = time.monotonic() - _KEPT_S
        with self._lock:
            fresh = [entry for entry in self._idle if entry[0] >= oldest]
            stale = self._idle[: len(self._idle) - len(fresh)]
            adapter = fresh.pop()[1] if fresh else None
            self._idle = fresh
        for _, each in stale:
            each.close()
        return adapter

    def forget(self) -> None:
        """Keep no connection, in a process that has just been forked: they are its parent's."""
        self._lock = threading.Lock()  # a thread that is not here may hold the other
        idle, self._idle = self._idle, []
        for _, adapter in idle:
            adapter.close()  # this process's copy


_all: weakref.WeakSet[Connections] = weakref.WeakSet()


def _forget_all() -> None:
    for connections in list(_all):
        connections.forget()


os.register_at_fork(after_in_child=_forget_all)
