"""What the dense broadcast backends (`nccl`, `gloo`) put into the init and the update call."""

from __future__ import annotations

from dataclasses import dataclass, field

from wt_common.digest import VERIFY
from wt_common.info import WeightTransferInitInfo, WeightTransferUpdateInfo
from wt_common.session import check_fields

__all__ = ["DenseBroadcastInitInfo", "SessionInitInfo", "SessionUpdateInfo"]


@dataclass(kw_only=True)
class SessionInitInfo(WeightTransferInitInfo):
    """How a worker finds and trusts the sender's session: what every built-in backend ships.

    `session_address` and `session_port` are where the sender listens, as the workers reach it; `session_secret` is the
    hex key of the handshake; `session` names this session; `schema` is the wire schema; `timeout_s` bounds the whole
    round in seconds; `check_cover` refuses a round that loads only part of a layer; `verify` says what is digested (one of
    `VERIFY`); `probe` asks whether a live session is there, without replacing it; `server` is the client's number of the server
    that gets this info, which the worker's hello repeats; None where the client does not number its servers.
    """

    session_address: str
    session_port: int
    session_secret: str = field(repr=False)
    session: str
    schema: tuple[int, int]
    timeout_s: float
    check_cover: bool = True
    verify: str = "full"
    probe: bool = False
    server: int | None = None

    def __post_init__(self) -> None:
        self.schema = tuple(self.schema)  # type: ignore[assignment]  # JSON has lists only
        check_fields(self)
        if not 0 < self.session_port < 65536:
            raise ValueError(f"session_port must be in [1, 65535], got {self.session_port}")
        try:
            bytes.fromhex(self.session_secret)
        except ValueError:
            raise ValueError("session_secret must be hex digits, two for each byte") from None
        if self.verify not in VERIFY:
            raise ValueError(f"verify must be one of {', '.join(VERIFY)}, got {self.verify!r}")
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {self.timeout_s}")


@dataclass(kw_only=True)
class DenseBroadcastInitInfo(SessionInitInfo):
    """The session, and what both sides compute the groups from.

    `max_group_bytes` bounds a group and so the staging buffer; `max_group_pieces` the pieces in it (1 when the user
    asked for `packed=False`); `num_buffers` the groups in flight.
    """

    max_group_bytes: int
    max_group_pieces: int
    num_buffers: int

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_group_bytes", "max_group_pieces", "num_buffers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(kw_only=True)
class SessionUpdateInfo(WeightTransferUpdateInfo):
    """Which round this call belongs to, and the digest that names the round's metadata."""

    session: str
    round: int
    metadata_digest: str

    def __post_init__(self) -> None:
        check_fields(self)
