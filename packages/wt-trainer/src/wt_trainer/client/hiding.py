"""Credentials, kept out of what people read."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from wt_common import WeightTransferError

__all__ = ["Hidden"]

E = TypeVar("E", bound=WeightTransferError)

_MIN_CHARS = 4  # a shorter one would be found in many a word


class Hidden:
    """Credentials that a client has. A server, a proxy or a library may repeat them in an error; ours must not."""

    def __init__(self) -> None:
        self._values: set[str] = set()

    def __repr__(self) -> str:
        return f"<{len(self._values)} hidden values>"

    def add(self, *values: object) -> None:
        """Hide those of `values` that are text of some length."""
        self._values |= {value for value in values if isinstance(value, str) and len(value) >= _MIN_CHARS}

    def add_login(self, user: str, password: str) -> None:
        """Hide a password, also in the form in which HTTP's basic authentication sends it."""
        if password:
            self.add(password, base64.b64encode(f"{user}:{password}".encode("latin1", "replace")).decode())

    def add_init_info(self, init_info: object) -> None:
        """Hide the session's secret, which travels in an init call: a server may answer with what it was sent."""
        if isinstance(init_info, Mapping):
            self.add(init_info.get("session_secret"))

    def text(self, text: str) -> str:
        """`text` with stars in the place of each."""
        for value in sorted(self._values, key=len, reverse=True):
            text = text.replace(value, "***")
        return text

    @contextmanager
    def from_errors(self) -> Iterator[None]:
        """Within it, errors of ours are raised without them."""
        try:
            yield
        except WeightTransferError as exc:
            self.error(exc)
            raise

    def error(self, exc: E) -> E:
        """`exc` itself, from now on without them; also without its cause, where that has one."""
        exc.message = self.text(exc.message)
        exc.args = (exc.message,)
        cause = exc.__cause__
        if cause is not None and self.text(text := f"{cause} {cause!r}") != text:
            exc.__cause__, exc.__suppress_context__ = None, True
        return exc
