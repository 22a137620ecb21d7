"""What a weight-sync client must be able to do, and what it may also be able to do."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

__all__ = ["PauseMode", "ServingControl", "UpdatePayload", "VLLMWeightSyncClient"]

UpdatePayload: TypeAlias = dict[str, Any] | list[dict[str, Any]]

PauseMode: TypeAlias = Literal["abort", "wait", "keep"]
"""What happens to running requests: `abort` ends them, `wait` lets them finish, `keep` freezes them until the resume."""


@runtime_checkable
class VLLMWeightSyncClient(Protocol):
    """The four calls that drive an inference engine through a weight update. Any object that has them is a client.

    Each call must reach every replica concurrently, and return when all of them are done. It must raise as soon as one has
    failed, with that replica's message, and not wait for the others: they may be waiting for the round to end, which it does when
    the sender hears of the failure. Let the other calls go on on threads of their own, and drop their results
    (`concurrent.futures.wait` with `return_when=FIRST_EXCEPTION`). Before the next call, give them a moment to end. A client that
    waits for all ends such a round at its deadline, and with another replica's message.

    Calls of one round come in the order below; `update_weights` and `finish_weight_update` run on a side thread of ours.
    """

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Hand `init_info` to every worker's engine."""

    def start_weight_update(self) -> None:
        """Open an update on every worker."""

    def update_weights(self, update_info: UpdatePayload) -> None:
        """Have every worker receive the weights that the trainer is sending meanwhile."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Close the update and publish `weight_version`. An implementation may leave out the argument."""


@runtime_checkable
class ServingControl(Protocol):
    """What our own clients can do beside the four calls. A client that has all of it gets its servers paused for a round.

    A client without it cannot be asked whether its server is generating: pausing is then the caller's task.
    """

    @property
    def timeout(self) -> float:
        """Seconds that one call may take; a round never lasts longer."""

    def bounded(self, seconds: float) -> AbstractContextManager[None]:
        """Within it, no call lasts longer than what is then left of `seconds` (nor than `timeout`)."""

    def hosts(self) -> list[str]:
        """Host names or addresses of the servers, so that the trainer can tell under which address they reach it."""

    def world_size(self) -> int | None:
        """Worker ranks behind this client, over all servers; None where a server cannot tell."""

    def servers(self) -> list[str]:
        """What to call each server in errors. Elsewhere a server is its place in this list.

        A client that has several hands each worker, with the init info, the place of its server as `server`.
        """

    def running(self, *, may_sleep: bool = True) -> list[int]:
        """The servers that could generate now, so that they must be paused.

        `may_sleep` is False where it is known that no server can put its weights to sleep, so that none need be asked.

        Raises:
            ConfigurationError: a server is asleep, or it is running and the client was told not to pause.
        """

    def pause_server(self, server: int) -> None:
        """One server does not generate from now on."""

    def resume_server(self, server: int, *, within: float) -> None:
        """One server generates, whoever paused it. The call takes `within` seconds at most, also past a bound."""

    def label(self, server: int, *, within: float) -> str | None:
        """The version that one server publishes; None if it publishes none. `within` as above."""

    def set_label(self, server: int, label: str, *, within: float) -> None:
        """Have one server publish `label`, without a round. `within` as above."""

    def reset_caches(self) -> list[str]:
        """Drop what the servers have computed with older weights; the notes name caches that a server could not reset."""
