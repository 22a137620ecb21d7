"""HTTP connections to one server, each kept open from one request to the next as long as that is safe."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import requests

__all__ = ["Connections"]

_KEPT_S = 2.0
"""How long an idle connection is used again. uvicorn, vLLM's HTTP server, closes one after 5 s; a request that meets that moment
fails, and none of ours may be repeated blindly."""


class Connections:
    """Requests to `base_url`, from any number of threads at once.

    A new connection and `requests`' look at the environment cost as much as the server's answer: within a round both are paid
    once. Proxies, a CA bundle and netrc are taken from the environment as `requests` does, when a connection is made.

    Args:
        base_url: `http(s)://host:port`, without a slash at its end.
        headers: sent with every request.
        verify: as in `requests`.
        cert: as in `requests`.
    """

    def __init__(
        self, base_url: str, headers: dict[str, str], verify: bool | str, cert: str | tuple[str, str] | None
    ) -> None:
        self.base_url = base_url
        self._headers = headers
        self._verify = verify
        self._cert = cert
        self._lock = threading.Lock()
        self._idle: list[tuple[float, requests.Session]] = []  # since when, the longest first

    def request(self, method: str, path: str, *, timeout: float, **kwargs: Any) -> requests.Response:
        """The complete reply. Raises what `requests` raises; the connection is not used again then."""
        session = self._take()
        try:
            reply = session.request(method, self.base_url + path, timeout=timeout, **kwargs)
        except BaseException:
            session.close()
            raise
        with self._lock:
            self._idle.append((time.monotonic(), session))
        return reply

    def _take(self) -> requests.Session:
        """The session that was used last, if it is fresh, else a new one."""
        oldest = time.monotonic() - _KEPT_S
        with self._lock:
            fresh = [entry for entry in self._idle if entry[0] >= oldest]
            stale = self._idle[: len(self._idle) - len(fresh)]
            session = fresh.pop()[1] if fresh else None
            self._idle = fresh
        for _, each in stale:
            each.close()
        return session or self._new_session()

    def _new_session(self) -> requests.Session:
        import requests

        session = requests.Session()
        found = session.merge_environment_settings(self.base_url, {}, None, self._verify, self._cert)
        session.proxies, session.verify, session.cert = found["proxies"], found["verify"], found["cert"]
        if "Authorization" not in self._headers:
            session.auth = requests.utils.get_netrc_auth(self.base_url)
        session.headers.update(self._headers)
        session.trust_env = False  # all that it would look up for each request is known now
        return session
