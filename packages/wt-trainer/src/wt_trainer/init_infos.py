"""What a training script fills in for each built-in backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from wt_common import MAX_TIMEOUT_S, ConfigurationError
from wt_common.digest import VERIFY
from wt_trainer.engine import TrainerInitInfo

__all__ = ["DenseBroadcastFields", "GlooTrainerInitInfo", "NCCLTrainerInitInfo", "SessionFields"]


@dataclass
class SessionFields:
    """What every built-in backend takes, beside its own fields.

    Attributes:
        master_address: local address to listen on, as the workers reach it; None finds the one towards the client's hosts, and
            is refused where there are several.
        master_port: port to listen on; None takes a free one.
        world_size: 1 + all worker ranks, which is then checked; None takes as many as the servers say they have.
        timeout_s: seconds for a whole round, and for the init; the client's own timeout, if shorter, wins.
        check_cover: refuse a round that would leave a layer of a model partly loaded, or random values in a server that was
            started with `--load-format dummy`.
        ignore: patterns, as of `fnmatch`, of the parameters that an inference model may lack, such as `("visual.*",)` for a
            server without its vision tower. Any other parameter of which no worker takes a byte is a PlanError. The same on
            every trainer rank.
        verify: which bytes must have the digests of those that were sent before a round commits; the same on every trainer rank.
            `"full"`: those in the model's own memory, of every parameter that the worker writes in place, and those received of
            all others, which a loader then changes in ways of its own. It proves that the model has what was sent, and costs each
            worker one pass over its own weights.
            `"received"`: those received, of all. It proves the way to the worker, not what became of them there, and costs each
            worker one pass over all that it receives, also what it keeps only a part of.
            `"off"`: none. It proves nothing beyond what the transport does.
            With the first two a data sender makes one pass over what it sends, ahead of the sending.
        process_group: group of the trainer ranks, in their order, over which the sender tells the others where it
            listens; None is the default group, if there is one.
        session_secret: hex key for trainer ranks that share no group: with it, and the same `master_address` and
            `master_port`, all of them find the sender.
        num_trainer_ranks: how many trainer ranks call; None is the group's size, and 1 without a group. Set it to 1 where a
            default group is there for another purpose.

    Without a group or a secret only rank 0 can take part. Other ranks of such a trainer do not call; they cannot know how a round
    ended.
    """

    master_address: str | None = None
    master_port: int | None = None
    world_size: int | None = None
    timeout_s: float = field(default=300.0, kw_only=True)
    check_cover: bool = field(default=True, kw_only=True)
    ignore: tuple[str, ...] = field(default=(), kw_only=True)
    verify: str = field(default="full", kw_only=True)
    process_group: Any = field(default=None, kw_only=True, repr=False)
    session_secret: str | None = field(default=None, kw_only=True, repr=False)
    num_trainer_ranks: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s <= MAX_TIMEOUT_S:
            raise ConfigurationError(
                f"timeout_s: expected seconds above 0, at most {MAX_TIMEOUT_S}, got {self.timeout_s}", side="trainer"
            )
        if self.world_size is not None and self.world_size < 2:
            raise ConfigurationError(
                f"world_size: expected 1 (the sender) plus at least one worker, got {self.world_size}", side="trainer"
            )
        if self.master_port is not None and not 0 < self.master_port < 65536:
            raise ConfigurationError(f"master_port: expected 1 to 65535, got {self.master_port}", side="trainer")
        if self.verify not in VERIFY:
            raise ConfigurationError(
                f"verify: expected one of {', '.join(map(repr, VERIFY))}, got {self.verify!r}", side="trainer"
            )
        patterns: Any = self.ignore
        if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
            raise ConfigurationError(
                f"ignore: expected patterns, such as ('visual.*',), got {self.ignore!r}", side="trainer"
            )
        self.ignore = tuple(self.ignore)
        if self.num_trainer_ranks is not None and self.num_trainer_ranks < 1:
            raise ConfigurationError(
                f"num_trainer_ranks: expected at least 1, got {self.num_trainer_ranks}", side="trainer"
            )
        if self.session_secret is not None:
            if self.master_address is None or self.master_port is None or self.num_trainer_ranks is None:
                raise ConfigurationError(
                    "session_secret: needs master_address, master_port and num_trainer_ranks, the same on every trainer rank",
                    side="trainer",
                )
            try:
                key = bytes.fromhex(self.session_secret)
            except ValueError:
                key = b""
            if not key:
                raise ConfigurationError(
                    "session_secret: expected hex digits, such as secrets.token_hex(32)", side="trainer"
                )


@dataclass
class DenseBroadcastFields(SessionFields):
    """What the dense broadcast backends take.

    Attributes:
        packed: small parameters share a group; False sends each parameter on its own.
        packed_buffer_size_bytes: most bytes in one group, and so the size of one staging buffer on each side.
        packed_num_buffers: groups in flight, and so the staging buffers on each side.
    """

    packed: bool = True
    packed_buffer_size_bytes: int = 1 << 30
    packed_num_buffers: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("packed_buffer_size_bytes", "packed_num_buffers"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name}: expected at least 1, got {getattr(self, name)}", side="trainer")


@dataclass
class GlooTrainerInitInfo(DenseBroadcastFields, TrainerInitInfo):
    """Dense broadcast over gloo, between CPUs: the CPU twin of `nccl`.

    `packed_buffer_size_bytes` is at most 64 MiB here, the largest message that the gloo channel puts under one timeout.
    """

    backend: ClassVar[str] = "gloo"

    packed_buffer_size_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packed_buffer_size_bytes > 64 << 20:
            raise ConfigurationError(
                f"packed_buffer_size_bytes: backend gloo takes at most {64 << 20}, got {self.packed_buffer_size_bytes}",
                side="trainer",
                backend=self.backend,
            )


@dataclass
class NCCLTrainerInitInfo(DenseBroadcastFields, TrainerInitInfo):
    """Dense broadcast over NCCL, between GPUs; needs the extra `[nccl]`.

    The largest part of a model is sent from where it lies, and received where it serves; `packed_buffer_size_bytes` and
    `packed_num_buffers` bound what else is held on either side: gathered or cast parameters on their way out, small ones that
    share a message, and on a worker what it has to cut, cast or give to a loader.
    """

    backend: ClassVar[str] = "nccl"
