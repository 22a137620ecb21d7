"""Drives inference engines that live in Ray actors through a weight update. Needs the extra `[ray]`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from wt_common import MAX_TIMEOUT_S, ConfigurationError, RoundTimeoutError, TransportError
from wt_trainer.client.hiding import Hidden
from wt_trainer.client.protocol import UpdatePayload

__all__ = ["RayVLLMWeightSyncClient"]


class RayVLLMWeightSyncClient:
    """The four calls, as actor calls to every handle at once.

    Each actor has vLLM's methods: `init_weight_transfer_engine(request)`, `start_weight_update()`, `update_weights(request)`,
    `finish_weight_update()`, and `update_weight_version(version)` where it publishes one. Requests travel as
    `types.SimpleNamespace` with vLLM's field names, since a stock inference image has none of our classes. The actors' engines
    are not asked whether they generate: pause them around a round.

    Args:
        handle: an actor handle, or several.
        timeout: seconds that one call may take on every actor.

    Raises:
        ConfigurationError: no handle, or a timeout that is not positive.
    """

    def __init__(self, handle: Any, timeout: float = 300) -> None:
        self.handles = list(handle) if isinstance(handle, Sequence) else [handle]
        if not self.handles:
            raise ConfigurationError("handle: expected at least one actor, got none")
        if not 0 < timeout <= MAX_TIMEOUT_S:
            raise ConfigurationError(f"timeout: expected seconds above 0, at most {MAX_TIMEOUT_S}, got {timeout}")
        self.timeout = float(timeout)
        self.is_draft = False
        self._hidden = Hidden()

    def __repr__(self) -> str:
        return f"RayVLLMWeightSyncClient({len(self.handles)} actors, timeout={self.timeout:g})"

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Hand `init_info` to every worker of every actor."""
        self._hidden.add_init_info(init_info)
        self._call("init_weight_transfer_engine", SimpleNamespace(init_info=init_info))

    @contextmanager
    def draft(self) -> Iterator[None]:
        """Within it, updates go to the engines' speculative draft model."""
        self.is_draft = True
        try:
            yield
        finally:
            self.is_draft = False

    def start_weight_update(self) -> None:
        """Open an update on every actor, of the draft model within `draft()`."""
        self._call("start_draft_weight_update" if self.is_draft else "start_weight_update")

    def update_weights(self, update_info: UpdatePayload) -> None:
        """Have every actor's workers receive; returns when all have received."""
        self._call("update_weights", SimpleNamespace(update_info=update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Close the update on every actor, then publish `weight_version` on those that have `update_weight_version`.

        Two calls: the label follows the weights.
        """
        self._call("finish_weight_update")
        if weight_version is not None:
            self._call("update_weight_version", weight_version, handles=self._publishing())

    def shutdown_weight_transfer_engine(self) -> None:
        """Have every actor's workers release their transfer resources; they go on serving."""
        self._call("shutdown_weight_transfer_engine")

    @property
    def publishes_version(self) -> bool:
        """Whether an actor publishes the version that `finish_weight_update` is given."""
        return bool(self._publishing())

    def _publishing(self) -> list[Any]:
        return [handle for handle in self.handles if getattr(handle, "update_weight_version", None) is not None]

    def _call(self, name: str, *args: Any, handles: Sequence[Any] | None = None) -> None:
        import ray  # type: ignore[import-not-found, unused-ignore]  # an extra

        methods = [getattr(handle, name, None) for handle in (self.handles if handles is None else handles)]
        if None in methods:
            raise ConfigurationError(f"actor {self.handles[methods.index(None)]!r} has no method {name}")
        try:
            # Raises as soon as one has failed; the others go on.
            ray.get([method.remote(*args) for method in methods], timeout=self.timeout)  # type: ignore[union-attr]
        except ray.exceptions.GetTimeoutError as exc:
            raise RoundTimeoutError(
                f"{name}: no reply from every actor within {self.timeout:g} s", side="trainer"
            ) from exc
        except ray.exceptions.RayTaskError as exc:
            raise self._error(f"{name} failed in an actor: {exc.cause!r}", exc)  # noqa: B904  # it has its cause
        except ray.exceptions.RayError as exc:
            raise self._error(f"{name}: {type(exc).__name__}: {exc}", exc)  # noqa: B904  # it has its cause

    def _error(self, text: str, cause: Exception) -> TransportError:
        error = TransportError(text, side="trainer")
        error.__cause__ = cause
        return self._hidden.error(error)
