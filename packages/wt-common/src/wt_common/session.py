"""The agreement channel's wire: frames, authentication and messages. No socket is opened here.

The sender listens; every worker rank and every other trainer rank connects. A frame is 4 bytes of big-endian length and
that many bytes of JSON, one object with a `type`.

Lifecycle of a connection, `L` the listening side and `C` the connecting one:

1. L: `Challenge`; C: `Auth`, with its own nonce and proof; L: `Welcome`, with its proof, or the connection is closed.
2. C: `Hello`; L: `Accepted` or `Refused`.
3. In a round C sends what it reached (`Placed`, `Ready`, `Credit`, `Installed`, `Sent`, `Finishing`), L what may happen next
   (`Metadata`, `Go`, `Enter`, `Committed`). `StoreSet` publishes a key of the rendezvous to everybody.
4. Whoever fails says so: C `Failed`, L `Abort`; every worker answers an `Abort` with `Ended`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import struct
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import pairwise
from types import MappingProxyType
from typing import Any, ClassVar

from wt_common.errors import TransportError

__all__ = [
    "FRAME_HEADER",
    "MAX_FRAME_BYTES",
    "MAX_UNAUTHENTICATED_FRAME_BYTES",
    "Abort",
    "Accepted",
    "AskState",
    "Auth",
    "Challenge",
    "Committed",
    "Credit",
    "DigestAgain",
    "DigestedAgain",
    "Ended",
    "Enter",
    "Failed",
    "Finishing",
    "FrameDecoder",
    "Go",
    "Held",
    "Hello",
    "Holding",
    "Installed",
    "Joined",
    "Leave",
    "Message",
    "Metadata",
    "Placed",
    "Position",
    "Ready",
    "Refused",
    "RoundOutcome",
    "Sent",
    "State",
    "StoreSet",
    "Welcome",
    "answer_challenge",
    "check_fields",
    "decode_message",
    "encode_message",
    "metadata_digest",
    "proof",
]

FRAME_HEADER = struct.Struct(">I")
MAX_UNAUTHENTICATED_FRAME_BYTES = 64 << 10
"""A handshake message is under 1 KiB; a stranger may not make us allocate more than this."""
MAX_FRAME_BYTES = 64 << 20
"""The metadata of 300,000 parameters is about 30 MiB of JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Base of all messages; `type` is the tag on the wire."""

    type: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_fields(self)


# --- 1. authentication -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge(Message):
    """L: prove that you know the secret of `session`, over this nonce (hex)."""

    type = "challenge"
    session: str
    nonce: str

    def __post_init__(self) -> None:
        check_fields(self)
        _check_hex(self, "nonce")


@dataclass(frozen=True, slots=True, kw_only=True)
class Auth(Message):
    """C: the proof, and a nonce for L to prove itself over."""

    type = "auth"
    nonce: str
    proof: str

    def __post_init__(self) -> None:
        check_fields(self)
        _check_hex(self, "nonce", "proof")


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(Message):
    """L: its proof."""

    type = "welcome"
    proof: str

    def __post_init__(self) -> None:
        check_fields(self)
        _check_hex(self, "proof")


def _check_hex(message: Message, *names: str) -> None:
    """Strangers send anything, and `hmac` takes ASCII only."""
    for name in names:
        value = getattr(message, name)
        if not value or not set(value) <= set("0123456789abcdef"):
            raise ValueError(f"{type(message).__name__}.{name}: expected hex, got {value!r:.80}")


def proof(secret: str, speaker: str, session: str, challenge: str, answer: str) -> str:
    """HMAC-SHA256, in hex, that `speaker` (`listener` or `connector`) sends over both nonces of a handshake.

    Both nonces and the speaker are in it, so a proof can be neither replayed nor reflected. The first field's order
    is the wire's: changing it is a new schema major.
    """
    text = f"wt-session-1\n{speaker}\n{session}\n{challenge}\n{answer}"
    return hmac.new(bytes.fromhex(secret), text.encode(), hashlib.sha256).hexdigest()


def answer_challenge(challenge: Challenge, *, secret: str, session: str | None) -> tuple[Auth, str]:
    """C's answer to `challenge`, and the proof that L's `Welcome` must then carry.

    `session` is None where C was told the secret but not the session (trainer ranks that share no process group).

    Raises:
        TransportError: the listener serves another session.
    """
    session = challenge.session if session is None else session
    if challenge.session != session:
        raise TransportError(f"session: expected {session}, the listener serves {challenge.session}")
    nonce = secrets.token_hex(16)
    auth = Auth(nonce=nonce, proof=proof(secret, "connector", session, challenge.nonce, nonce))
    return auth, proof(secret, "listener", session, challenge.nonce, nonce)


# --- 2. who is there -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """C: who it is and which state its model is in.

    A worker is (`engine`, `rank` of `size`); a trainer rank has engine `""`, its trainer rank, and size 0. `open` says that
    vLLM believes an update to be in progress on this rank; `poisoned` that an earlier round left the model half-written; `held`
    that an earlier sender has paused the server and not said that it resumed it; `can_sleep` that weights may leave its memory
    between rounds, as far as it knows. `settings` are what all members of a
    communicator must have alike, as far as the backend knows. `server` is that of the init info. `failure` (trainer ranks) says
    why it cannot take part: the init then fails on all ranks, with this error.

    `load_format` says how the server got its first weights, where that is known; with `dummy` they are random. Engines with
    the same `shares_model`, unless that is empty, hold one model together: each has some of its experts.
    """

    type = "hello"
    role: str
    engine: str
    rank: int
    size: int
    schema: list[int]
    device: str
    hostname: str
    pid: int
    versions: dict[str, str]
    open: bool = False
    poisoned: bool = False
    held: bool = False
    can_sleep: bool = True
    settings: dict[str, str] = field(default_factory=dict)
    load_format: str = ""
    shares_model: str = ""
    server: int | None = None
    failure: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted(Message):
    """L: the hello is taken; the connection stays."""

    type = "accepted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Message):
    """L: the hello cannot be taken, and why (see `error_to_wire`)."""

    type = "refused"
    error: dict[str, Any]


# --- 3. a round ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Held(Message):
    """L: it is about to pause the worker's server for round `round` (`held`), or has seen it run again.

    A worker remembers it for the next sender: this one may die in between, and nobody else knows that the server should run. It
    answers a `held` that is True with `Holding`; before that, L pauses nothing.
    """

    type = "held"
    round: int
    held: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding(Message):
    """C: the next sender will hear that L holds this server; not so (`held` is False), where one is connecting already."""

    type = "holding"
    round: int
    held: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined(Message):
    """C, a trainer rank: it takes part in the round, and its source's metadata have this digest.

    L answers with `Go` when they are its own, else with its `Metadata`, so that C can name the difference.
    """

    type = "joined"
    round: int
    metadata_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Message):
    """C: the update call has arrived on this worker. `knows_metadata` is False when the sender must send it.

    When it is True, the model has a place for everything, and `casts` names the dtype in which it holds a parameter whose
    declared dtype is another floating one. `limit` is that of a `Credit`, and holds if `Go` has these casts and no `received`.
    """

    type = "ready"
    round: int
    knows_metadata: bool
    casts: dict[str, str] = field(default_factory=dict)
    limit: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed(Message):
    """C, a worker, before its `Ready`: where this round's parameters go on this rank. Sent when new, else as before.

    `takes` has one character for each parameter of the metadata: what of it this rank's model takes.

    * `a`: all of it.
    * `p`: the parts that `parts` lists.
    * `n`: nothing.
    * `u`: unknown; the model's loader decides, in a way that was not followed.

    `digested` has one as well: what this rank's digests are over.

    * `r`: the bytes received.
    * `w`: the whole parameter, as installed.
    * `p`: the parts that `parts` lists, as installed, a digest for each.
    * `n`: nothing.

    `parts` has (place in the metadata, number of elements, key) of each part in order. Parts of one parameter with the same
    key are the same elements of it, on whichever rank.

    `tied` has pairs of places: this rank serves the first parameter, of which it takes nothing, from the memory of the second.

    `not_in_place` names the model's layers that are not written in place, by the reason. `not_synced` names the model's
    parameters and checkpoint buffers that the round does not write, as far as that is known before it, and `unset` those of
    them that still have the random values with which the server was started.
    """

    type = "placed"
    round: int
    takes: str
    digested: str
    parts: list[list[int]]
    not_in_place: dict[str, list[str]]
    tied: list[list[int]] = field(default_factory=list)
    not_synced: list[str] = field(default_factory=list)
    unset: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_fields(self)
        if not set(self.takes) <= set("apnu"):
            raise ValueError(f"Placed.takes: expected the characters a, p, n and u, got {self.takes!r:.80}")
        if not set(self.digested) <= set("rwpn"):
            raise ValueError(f"Placed.digested: expected the characters r, w, p and n, got {self.digested!r:.80}")
        if len(self.takes) != len(self.digested):
            raise ValueError(
                f"Placed.digested: expected as many characters as takes has, {len(self.takes)}, got {len(self.digested)}"
            )
        listed = [place for place, both in enumerate(zip(self.takes, self.digested, strict=True)) if "p" in both]
        if any(len(part) != 3 for part in self.parts) or sorted({part[0] for part in self.parts}) != listed:
            raise ValueError(
                "Placed.parts: expected triples, at least one for each parameter that is taken or digested in parts and none "
                "for others"
            )
        if any(one[0] > other[0] for one, other in pairwise(self.parts)):
            raise ValueError("Placed.parts: expected the order of the metadata")
        places = range(len(self.takes))
        if any(len(pair) != 2 or pair[0] not in places or pair[1] not in places for pair in self.tied):
            raise ValueError(f"Placed.tied: expected pairs of places below {len(places)}, got {self.tied!r:.80}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata(Message):
    """L: names, dtypes (`"bfloat16"`, as in `str(torch_dtype)` after the dot) and full shapes, in the order of sending.

    `aliases` has further names of parameters, each with the name under which the parameter is sent: the trainer's model has one
    tensor under both. `optional` has the places of the parameters that a model need not have.
    """

    type = "metadata"
    round: int
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    roots: list[int] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    optional: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_fields(self)
        lengths = {len(self.names), len(self.dtype_names), len(self.shapes)}
        if len(lengths) != 1 or len(self.roots) not in (0, len(self.names)):
            raise ValueError(
                f"metadata lists differ in length: names {len(self.names)}, dtype_names {len(self.dtype_names)}, "
                f"shapes {len(self.shapes)}, roots {len(self.roots)}"
            )
        if self.aliases:
            names = set(self.names)
            wrong = [alias for alias, name in self.aliases.items() if alias in names or name not in names]
            if wrong:
                raise ValueError(f"Metadata.aliases: expected new names of listed parameters, got {wrong[0]!r}")
        if any(not 0 <= place < len(self.names) for place in self.optional):
            raise ValueError(f"Metadata.optional: expected places below {len(self.names)}, got {self.optional!r:.80}")

    @property
    def digest(self) -> str:
        """What names these metadata; the round's number is not in it."""
        roots = self.roots or [0] * len(self.names)
        rows = zip(self.names, self.dtype_names, map(tuple, self.shapes), roots, strict=True)
        return metadata_digest(rows, self.aliases, self.optional)


@dataclass(frozen=True, slots=True, kw_only=True)
class Go(Message):
    """L: transfer now. `rank` of `world_size` is this peer's place in communicator `epoch`, made anew when the epoch is new.

    A trainer rank that sends is rank 0 of a communicator of its own with all workers, one per root named in the metadata.
    `casts` names the dtype on the wire of each parameter that is not sent in its declared one. `received` has the places in the
    metadata of parameters whose digest must be over the bytes received, whatever the worker's placement says.

    `remaining_s` is what is left of the round's deadline when L sends this. Groups below `entered` may be entered at once: it
    stands for their `Enter`.
    """

    type = "go"
    round: int
    epoch: int
    rank: int
    world_size: int
    remaining_s: float
    casts: dict[str, str] = field(default_factory=dict)
    received: list[int] = field(default_factory=list)
    entered: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent(Message):
    """C, a trainer rank: it has sent all that it is the root of; `digests` of those parameters' bytes, in metadata order.

    None at all where the session verifies nothing.
    """

    type = "sent"
    round: int
    digests: list[int]

    def __post_init__(self) -> None:
        check_fields(self)
        _check_digests(self, self.digests)


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestAgain(Message):
    """L, to another trainer rank, before it says how the round ended: a worker has other bytes of the parameter at `place`.

    The rank answers with `DigestedAgain`.
    """

    type = "digest_again"
    round: int
    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestedAgain(Message):
    """C, that trainer rank: the digest of the memory that it sent the parameter from; none if it was a copy, or is freed."""

    type = "digested_again"
    round: int
    digests: list[int]

    def __post_init__(self) -> None:
        check_fields(self)
        _check_digests(self, self.digests)


def _check_digests(message: Message, digests: list[int]) -> None:
    if digests and not (min(digests) >= 0 and max(digests) < 1 << 64):
        wrong = next(digest for digest in digests if not 0 <= digest < 1 << 64)
        raise ValueError(f"{type(message).__name__}.digests: expected numbers from 0 to 2^64 - 1, got {wrong}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSet(Message):
    """Both ways: `key` of the rendezvous of communicator `epoch` has `value` (base64). L passes it on to all others."""

    type = "store_set"
    epoch: int
    key: str
    value: str

    def __post_init__(self) -> None:
        check_fields(self)
        base64.b64decode(self.value, validate=True)  # a ValueError here is an unreadable message there


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit(Message):
    """C: groups below `limit` may be entered, as far as this peer goes: a worker has buffers for them, a root their bytes."""

    type = "credit"
    round: int
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Enter(Message):
    """L, to workers and the group's root: the workers have room, the root has the bytes: enter the collective of `group`."""

    type = "enter"
    round: int
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed(Message):
    """C: the model holds the round's weights and could serve them.

    `num_bytes` is what this rank received, `buffer_bytes` what it took for that, beside the model's own memory. `poisoned` says
    that an earlier round has left something half-written on this rank, in this model or in another, and that this one does not
    write it. `not_synced` names what of the model was not written, now that it is known.
    """

    type = "installed"
    round: int
    num_bytes: int
    seconds: dict[str, float]
    not_synced: list[str]
    buffer_bytes: int = 0
    poisoned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Finishing(Message):
    """C: the finish call has arrived; this worker waits for the verdict and fails the call unless it is `Committed`.

    `digests` are those that its `Placed` announced, in the order of the metadata and of the parts; none at all where the session
    verifies nothing. A parameter that `Go.received` lists has one, over the bytes received.
    """

    type = "finishing"
    round: int
    digests: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_fields(self)
        _check_digests(self, self.digests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(Message):
    """L, the verdict: every worker has installed the round; nobody may fail it any more. The other verdict is `Abort`."""

    type = "committed"
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOutcome(Message):
    """L, to the other trainer ranks: the round is over for everybody. `report` when committed, else `error`.

    `run_to` is the last parameter (its place in the metadata) that any rank has begun to take from its source: every rank
    takes its own up to it, unsent, so that no rank is left alone in a collective of the source. -1 asks for nothing.

    The ranks number their rounds alike by counting calls. `number` is the one to go on from, where their counts differed.
    """

    type = "round_outcome"
    round: int
    report: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    run_to: int = -1
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Position(Message):
    """C, another trainer rank, at once, to an abort: the last parameter that it has begun to take (-1: none).

    It takes no further one by itself. `stopped`: it could not, since its source's iterator raised or ended at that one.
    """

    type = "position"
    round: int
    index: int
    stopped: bool = False


# --- 4. failure ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Message):
    """C: this rank cannot go on with `round`. `second_hand`: it only noticed that somebody else does not (a collective broke)."""

    type = "failed"
    round: int
    error: dict[str, Any]
    second_hand: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort(Message):
    """L: `round` is over, because of `error`. A worker answers with `Ended`, another trainer rank with `Position`."""

    type = "abort"
    round: int
    error: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Message):
    """C: this worker is out of `round`. `touched`: a byte of its model may have changed."""

    type = "ended"
    round: int
    touched: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AskState(Message):
    """L, after a failed round: say in which state you are. Answered at once, also while a call runs.

    `repairs` announces that L's next finish call belongs to no round: it closes an update that was left open. Without that, a
    worker takes a finish call without a round for somebody else's, and fails it.
    """

    type = "ask_state"
    round: int
    repairs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class State(Message):
    """C: the answer; `open` and `poisoned` as in `Hello`."""

    type = "state"
    round: int
    open: bool
    poisoned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave(Message):
    """C: it closes this connection on purpose, because of `error`: a later init (`replaced`), or a shutdown."""

    type = "leave"
    error: dict[str, Any]
    replaced: bool = False


_MESSAGES: dict[str, type[Message]] = {
    cls.type: cls
    for cls in (
        Abort,
        Accepted,
        AskState,
        Auth,
        Challenge,
        Committed,
        Credit,
        DigestAgain,
        DigestedAgain,
        Ended,
        Enter,
        Failed,
        Finishing,
        Go,
        Hello,
        Installed,
        Leave,
        Metadata,
        Placed,
        Position,
        Held,
        Holding,
        Joined,
        Ready,
        Refused,
        RoundOutcome,
        Sent,
        State,
        StoreSet,
        Welcome,
    )
}


def encode_message(message: Message) -> bytes:
    """`message` as one frame.

    Raises:
        TransportError: it is larger than `MAX_FRAME_BYTES`.
    """
    values = {
        each.name: getattr(message, each.name) for each in fields(message)
    }  # `asdict` would copy long lists first
    body = json.dumps({"type": message.type, **values}, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise TransportError(f"session message {message.type!r}: at most {MAX_FRAME_BYTES} bytes, got {len(body)}")
    return FRAME_HEADER.pack(len(body)) + body


def decode_message(body: bytes) -> Message:
    """The message in a frame's body. Fields that this side does not know (a newer minor's) are ignored.

    Raises:
        TransportError: not JSON, not an object, an unknown type, or a field that is missing or of the wrong type.
    """
    try:
        payload = json.loads(body)
        cls = _MESSAGES[payload["type"]]
        names = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in payload.items() if name in names})
    except (ValueError, TypeError, KeyError, RecursionError) as exc:
        raise TransportError(f"session: unreadable message ({type(exc).__name__}: {exc})") from exc


class FrameDecoder:
    """Turns received bytes into messages; it holds at most one frame of `max_bytes` plus what came behind it.

    `max_bytes` starts at `MAX_UNAUTHENTICATED_FRAME_BYTES`; set it to `MAX_FRAME_BYTES` once the peer has proved itself.
    """

    def __init__(self) -> None:
        self.max_bytes = MAX_UNAUTHENTICATED_FRAME_BYTES
        self._buffer = bytearray()

    @property
    def partial(self) -> bool:
        """Whether a frame has begun and not ended (then the rest of it is due)."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> None:
        """Take received bytes."""
        self._buffer += data

    def next(self) -> Message | None:
        """The next complete message, or None until more bytes come.

        Raises:
            TransportError: a frame is longer than `max_bytes`, or its body is unreadable. The stream is then lost.
        """
        if len(self._buffer) < FRAME_HEADER.size:
            return None
        (length,) = FRAME_HEADER.unpack_from(self._buffer)
        if length > self.max_bytes:
            raise TransportError(f"session: a frame may have {self.max_bytes} bytes, got one of {length}")
        end = FRAME_HEADER.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[FRAME_HEADER.size : end])
        del self._buffer[:end]
        return decode_message(body)


def metadata_digest(
    rows: Iterable[tuple[str, str, tuple[int, ...], int]],
    aliases: Mapping[str, str] = MappingProxyType({}),
    optional: Iterable[int] = (),
) -> str:
    """SHA-256, in hex, over (name, dtype name, shape, root) of every parameter in order, aliases, and places of optional ones."""
    digest = hashlib.sha256()
    for row in (*rows, sorted(aliases.items()), sorted(optional)):
        digest.update(json.dumps(row, separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()


@cache
def _hints(cls: type) -> dict[str, Any]:
    return {name: hint for name, hint in typing.get_type_hints(cls).items() if not _is_classvar(hint)}


def _is_classvar(hint: Any) -> bool:
    return typing.get_origin(hint) is ClassVar


def check_fields(instance: Any) -> None:
    """Every field of the dataclass `instance` has the type it declares (an int passes as float, a bool never as int).

    Lists are checked to the element, since JSON lets anything in; `dict` values are left to who reads them.

    Raises:
        TypeError: the text names class, field, expected and got; not the value of a field that is kept out of the repr.
    """
    hints = _hints(instance.__class__)
    for each in fields(instance):
        value = getattr(instance, each.name)
        if not _matches(value, hints[each.name]):
            shown = f" {value!r:.80}" if each.repr else ""
            raise TypeError(
                f"{type(instance).__name__}.{each.name}: expected {each.type}, got {type(value).__name__}{shown}"
            )


def _matches(value: Any, hint: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, arg) for arg in args)
    if origin is list and args[0] in (int, str):  # metadata and digests have an element for each parameter
        return type(value) is list and set(map(type, value)) <= {args[0]}
    if origin is list:
        return type(value) is list and all(_matches(item, args[0]) for item in value)
    if origin is tuple:
        return (
            type(value) is tuple
            and len(value) == len(args)
            and all(_matches(item, arg) for item, arg in zip(value, args, strict=True))
        )
    if origin is dict:
        return type(value) is dict and all(
            _matches(key, args[0]) and _matches(item, args[1]) for key, item in value.items()
        )
    if hint is float:
        return type(value) in (int, float)
    if hint is type(None):
        return value is None
    return type(value) is hint
