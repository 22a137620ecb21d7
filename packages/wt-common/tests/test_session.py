"""Frames, authentication and messages of the agreement channel."""

import dataclasses
import hashlib
import hmac
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wt_common import SCHEMA, TransportError
from wt_common import session as wire
from wt_common.session import (
    FRAME_HEADER,
    MAX_FRAME_BYTES,
    MAX_UNAUTHENTICATED_FRAME_BYTES,
    Challenge,
    FrameDecoder,
    Message,
    answer_challenge,
    check_fields,
    decode_message,
    encode_message,
    metadata_digest,
    proof,
)

GOLDEN = Path(__file__).parent / "golden"
SECRET = "0f" * 32
SESSION = "0123456789abcdef"
ERROR = {"code": "plan", "message": "no room", "side": "worker", "rank": 1, "param": "layers.0.w", "elapsed_s": 0.25}
ROWS = [("embed.weight", "bfloat16", (320, 64), 0), ("layers.0.bias", "float32", (7,), 1), ("scale", "int8", (), 0)]

# One of each message, with no field at its default.
INSTANCES: list[Message] = [
    wire.Abort(round=3, error=ERROR),
    wire.Accepted(),
    wire.AskState(round=3, repairs=True),
    wire.Auth(nonce="ab" * 16, proof="cd" * 32),
    wire.Challenge(session=SESSION, nonce="12" * 16),
    wire.Committed(round=3),
    wire.Credit(round=3, limit=4),
    wire.DigestAgain(round=3, place=17),
    wire.DigestedAgain(round=3, digests=[1 << 63]),
    wire.Ended(round=3, touched=True),
    wire.Enter(round=3, group=2),
    wire.Failed(round=3, error=ERROR, second_hand=True),
    wire.Finishing(round=3, digests=[0, 1, (1 << 64) - 1]),
    wire.Go(
        round=3,
        epoch=2,
        rank=1,
        world_size=5,
        remaining_s=12.5,
        casts={"layers.0.bias": "bfloat16"},
        received=[0, 2],
        entered=1,
    ),
    wire.Held(round=3, held=True),
    wire.Hello(
        role="worker",
        engine="engine-é",
        rank=1,
        size=2,
        schema=[1, 0],
        device="cpu",
        hostname="host-1",
        pid=4711,
        versions={"torch": "2.13.0", "wt-worker": "0.1.0"},
        open=True,
        poisoned=True,
        held=True,
        can_sleep=False,
        settings={"NCCL": "2.28.9", "NCCL_PROTO": "Simple"},
        load_format="dummy",
        shares_model="engine-é",
        server=1,
        failure=ERROR,
    ),
    wire.Holding(round=3, held=True),
    wire.Installed(
        round=3,
        num_bytes=1 << 40,
        seconds={"receive": 0.5, "install": 1},
        not_synced=["lm_head.weight"],
        buffer_bytes=1 << 31,
        poisoned=True,
    ),
    wire.Joined(round=3, metadata_digest="ab" * 32),
    wire.Leave(error=ERROR, replaced=True),
    wire.Metadata(
        round=3,
        names=[name for name, _, _, _ in ROWS],
        dtype_names=[dtype_name for _, dtype_name, _, _ in ROWS],
        shapes=[list(shape) for _, _, shape, _ in ROWS],
        roots=[root for _, _, _, root in ROWS],
        aliases={"lm_head.weight": ROWS[0][0]},
        optional=[1],
    ),
    wire.Placed(
        round=3,
        takes="uapnpp",
        digested="rwpnpr",
        parts=[[2, 6, 0], [2, 7, 1 << 63], [4, 1, 0], [5, 1, 0]],
        not_in_place={"quantized by fp8": ["model.layers.0.mlp", "model.layers.1.mlp"]},
        tied=[[3, 1]],
        not_synced=["model.norm.weight"],
        unset=["model.norm.weight"],
    ),
    wire.Position(round=3, index=17, stopped=True),
    wire.Ready(round=3, knows_metadata=False, casts={"layers.0.bias": "bfloat16"}, limit=4),
    wire.Refused(error=ERROR),
    wire.RoundOutcome(round=3, report={"round": 3, "notes": []}, error=ERROR, run_to=17, number=4),
    wire.Sent(round=3, digests=[1 << 63, 7]),
    wire.State(round=3, open=True, poisoned=True),
    wire.StoreSet(epoch=2, key="0/1", value="AAECAw=="),
    wire.Welcome(proof="ef" * 32),
]

# What must not pass for a type; None, where the field takes it, is left out.
WRONG: dict[str, list[Any]] = {
    "str": [None, 1, True, ["a"], {"a": 1}],
    "int": [None, "1", 1.5, True, [1]],
    "int | None": ["1", 1.5, True, [1]],
    "bool": [None, 0, 1, "true"],
    "float": [None, "1", True, [1.0]],
    "list[int]": [None, 1, "1", [1.5], ["1"], [True], [None], {"a": 1}],
    "list[str]": [None, "a", [1], [["a"]], {"a": "a"}],
    "list[list[int]]": [None, [1], [["1"]], [[True]], [None]],
    "dict[str, str]": [None, "a", [], {"a": 1}, {"a": None}],
    "dict[str, list[str]]": [None, [], {"a": "a"}, {"a": [1]}, {"a": None}],
    "dict[str, float]": [None, [], {"a": "1"}, {"a": True}],
    "dict[str, Any]": [None, "a", [], 1],
    "dict[str, Any] | None": ["a", [], 1, False],
}


def each(*, fields=False):
    """Parameters: every instance, or every field of every instance."""
    if not fields:
        return pytest.mark.parametrize("message", INSTANCES, ids=lambda message: message.type)
    pairs = [(message, field) for message in INSTANCES for field in dataclasses.fields(message)]
    ids = [f"{message.type}.{field.name}" for message, field in pairs]
    return pytest.mark.parametrize(("message", "field"), pairs, ids=ids)


def body_of(message):
    return encode_message(message)[FRAME_HEADER.size :]


def frame(body):
    return FRAME_HEADER.pack(len(body)) + body


def padded(num_bytes):
    """A message whose body has exactly `num_bytes`."""
    empty = len(body_of(wire.StoreSet(epoch=1, key="", value="")))
    return wire.StoreSet(epoch=1, key="k" * (num_bytes - empty), value="")


def drain(decoder):
    messages = []
    while (message := decoder.next()) is not None:
        messages.append(message)
    return messages


# --- messages --------------------------------------------------------------------------------------------------


def test_every_message_class_has_an_instance_here():
    """This file's list has each public message class once, so that every law below holds for all of them."""
    public = [getattr(wire, name) for name in wire.__all__]
    classes = {cls for cls in public if isinstance(cls, type) and issubclass(cls, Message) and cls is not Message}
    assert {type(message) for message in INSTANCES} == classes
    assert len({message.type for message in INSTANCES}) == len(INSTANCES) == len(classes)
    for message in INSTANCES:
        for field in dataclasses.fields(message):
            default = field.default_factory() if callable(field.default_factory) else field.default
            assert getattr(message, field.name) != default, f"{message.type}.{field.name}"


@each()
def test_message_survives_the_wire(message):
    """A message arrives as an equal instance of the same class."""
    assert decode_message(body_of(message)) == message


@each()
def test_message_is_one_length_prefixed_json_object(message):
    """A frame is four bytes of big-endian length and as many bytes of one JSON object, `type` being the class's tag."""
    data = encode_message(message)
    assert int.from_bytes(data[:4], "big") == len(data) - 4
    assert json.loads(data[4:]) == {"type": message.type, **dataclasses.asdict(message)}


@each()
def test_message_cannot_be_changed(message):
    """A message is frozen and has no room for other attributes."""
    with pytest.raises((AttributeError, TypeError)):
        message.extra = 1
    for field in dataclasses.fields(message):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(message, field.name, 1)


@each()
def test_fields_of_a_newer_minor_are_ignored(message):
    """A field that this side does not know changes nothing."""
    payload = {**json.loads(body_of(message)), "of_tomorrow": {"a": [1]}}
    assert decode_message(json.dumps(payload).encode()) == message


@each(fields=True)
def test_wrong_type_is_refused_where_it_is_made(message, field):
    """No field takes a value of another type: the TypeError names class and field."""
    for value in WRONG[field.type]:
        with pytest.raises(TypeError, match=rf"^{type(message).__name__}\.{field.name}: expected .*, got "):
            dataclasses.replace(message, **{field.name: value})


@each(fields=True)
def test_wrong_type_is_refused_where_it_arrives(message, field):
    """A message with a value of another type is a TransportError at its receiver, never an instance."""
    for value in WRONG[field.type]:
        payload = {**json.loads(body_of(message)), field.name: value}
        with pytest.raises(TransportError, match=field.name):
            decode_message(json.dumps(payload).encode())


@each(fields=True)
def test_missing_field_is_refused_unless_it_has_a_default(message, field):
    """A message without a required field is a TransportError that names it; an optional one gets its default."""
    payload = {name: value for name, value in json.loads(body_of(message)).items() if name != field.name}
    body = json.dumps(payload).encode()
    if field.default is not dataclasses.MISSING:
        assert getattr(decode_message(body), field.name) == field.default
    elif field.default_factory is not dataclasses.MISSING:
        assert getattr(decode_message(body), field.name) == field.default_factory()
    else:
        with pytest.raises(TransportError, match=field.name):
            decode_message(body)


def test_an_int_passes_for_a_float():
    """JSON writes 2.0 as 2 in some languages, so an int is a float, and a bool is neither."""
    go = wire.Go(round=1, epoch=1, rank=1, world_size=2, remaining_s=2)
    assert decode_message(body_of(go)).remaining_s == 2


def test_metadata_lists_must_be_of_one_length():
    """Names, dtypes and shapes are parallel; roots may be left out altogether; a difference names the lengths."""
    parts = {"names": ["a", "b"], "dtype_names": ["int8", "int8"], "shapes": [[1], []], "roots": [0, 1]}
    assert wire.Metadata(round=1, **{**parts, "roots": []}).roots == []
    for name in parts:
        cut = {**parts, name: parts[name][:1]}
        with pytest.raises(ValueError, match=f"{name} 1"):
            wire.Metadata(round=1, **cut)
        with pytest.raises(TransportError, match=f"{name} 1"):
            decode_message(json.dumps({"type": "metadata", "round": 1, **cut}).encode())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"takes": "uaxnpp"}, "Placed.takes: expected the characters a, p, n and u"),
        ({"digested": "rwxnpr"}, "Placed.digested: expected the characters r, w, p and n"),
        ({"digested": "rwpnp"}, "Placed.digested: expected as many characters as takes has, 6, got 5"),
        (
            {"takes": "uapnpa"},
            "Placed.parts: expected triples, at least one for each parameter that is taken or digested in",
        ),
        ({"takes": "pappap"}, "in parts and none for others"),
        ({"digested": "pppppp"}, "in parts and none for others"),
        ({"takes": "", "digested": ""}, "none for others"),
        ({"parts": []}, "at least one for each"),
        ({"parts": [[2, 6], [4, 1, 0], [5, 1, 0]]}, "expected triples"),
        ({"parts": [[2, 6, 0, 0], [4, 1, 0], [5, 1, 0]]}, "expected triples"),
        ({"parts": [[], [4, 1, 0], [5, 1, 0]]}, "expected triples"),
        ({"parts": [[2, 6, 0], [4, 1, 0], [5, 1, 0], [6, 1, 0]]}, "none for others"),
        ({"parts": [[2, 6, 0], [4, 1, 0], [5, 1, 0], [-1, 1, 0]]}, "none for others"),
        ({"parts": [[4, 1, 0], [2, 6, 0], [5, 1, 0]]}, "Placed.parts: expected the order of the metadata"),
        ({"parts": [[2, 6, 0], [4, 1, 0], [5, 1, 0], [2, 7, 1]]}, "expected the order of the metadata"),
        ({"tied": [[3]]}, "Placed.tied: expected pairs of places below 6"),
        ({"tied": [[3, 6]]}, "Placed.tied: expected pairs of places below 6"),
        ({"tied": [[-1, 3]]}, "Placed.tied: expected pairs of places below 6"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_placement_must_fit_itself(change, text):
    """Characters are those that there are, parts are listed for exactly the parameters that have any, and places exist."""
    (placed,) = (message for message in INSTANCES if isinstance(message, wire.Placed))
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(placed, **change)
    with pytest.raises(TransportError, match=text):
        decode_message(json.dumps({**json.loads(body_of(placed)), **change}).encode())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"aliases": {"a": "b"}}, "Metadata.aliases: expected new names of listed parameters, got 'a'"),
        ({"aliases": {"c": "d"}}, "Metadata.aliases: expected new names of listed parameters, got 'c'"),
        ({"optional": [2]}, "Metadata.optional: expected places below 2"),
        ({"optional": [-1]}, "Metadata.optional: expected places below 2"),
    ],
)
def test_metadata_must_fit_themselves(change, text):
    """An alias is a further name of a listed parameter, and what is optional is listed."""
    parts = {"names": ["a", "b"], "dtype_names": ["int8", "int8"], "shapes": [[1], []]}
    with pytest.raises(ValueError, match=text):
        wire.Metadata(round=1, **parts, **change)


def test_metadata_digest_covers_all_but_the_round():
    """Metadata that differ in anything that decides how they are installed have other digests."""
    (metadata,) = (message for message in INSTANCES if isinstance(message, wire.Metadata))
    others = [
        dataclasses.replace(metadata, names=[*metadata.names[:-1], "other"]),
        dataclasses.replace(metadata, roots=[1 - root for root in metadata.roots]),
        dataclasses.replace(metadata, aliases={}),
        dataclasses.replace(metadata, optional=[]),
    ]
    assert len({each.digest for each in (metadata, *others)}) == 5
    assert dataclasses.replace(metadata, round=9).digest == metadata.digest
    assert dataclasses.replace(metadata, roots=[]).digest == dataclasses.replace(metadata, roots=[0] * 3).digest


@pytest.mark.parametrize("digest", [-1, 1 << 64, -(1 << 63), 1 << 200])
@pytest.mark.parametrize("type_", ["finishing", "sent", "digested_again"])
def test_digests_are_unsigned_64_bit_numbers(type_, digest):
    """What is no digest is refused with its message, at both ends; the error has the number."""
    (message,) = (message for message in INSTANCES if message.type == type_)
    with pytest.raises(ValueError, match=rf"digests: expected numbers from 0 to 2\^64 - 1, got {digest}$"):
        dataclasses.replace(message, digests=[1, digest, 2])
    body = json.dumps({"type": type_, "round": 3, "digests": [1, digest, 2]}).encode()
    with pytest.raises(TransportError, match=rf"got {digest}\)"):
        decode_message(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"7",
        b'"abort"',
        b"[]",
        b"{}",
        b'{"type":null}',
        b'{"type":[]}',
        b'{"type":"gravity"}',
        b'{"type":"abort"} {"type":"abort"}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"type":' + b"9" * 10_000 + b"}",
    ],
    ids=lambda body: repr(body[:20]),
)
def test_garbage_is_a_transport_error(body):
    """A body that is no message of ours is a TransportError, whatever it is instead."""
    with pytest.raises(TransportError, match=r"^session: unreadable message"):
        decode_message(body)


@given(st.binary(max_size=40))
def test_any_bytes_are_a_transport_error(body):
    """No sequence of bytes makes the decoder raise anything but TransportError."""
    with pytest.raises(TransportError):
        decode_message(body)


def test_message_larger_than_a_frame_is_refused_by_its_sender():
    """What no receiver would take is not sent: the error names the message, the limit and the size."""
    with pytest.raises(
        TransportError, match=f"'store_set': at most {MAX_FRAME_BYTES} bytes, got {MAX_FRAME_BYTES + 1}"
    ):
        encode_message(padded(MAX_FRAME_BYTES + 1))


@pytest.mark.parametrize("value", ["not base64", "AAA", "é", "AA=A"])
def test_store_value_must_be_base64(value):
    """A rendezvous value that cannot be read is refused with its message, not by whoever waits for it."""
    with pytest.raises(TransportError, match="unreadable message"):
        decode_message(json.dumps({"type": "store_set", "epoch": 1, "key": "k", "value": value}).encode())


def test_check_fields_checks_tuples_too():
    """A tuple field has the declared number of elements, each of its type (init infos have one)."""

    @dataclasses.dataclass
    class Pair:
        value: tuple[int, str]

    check_fields(Pair((1, "a")))
    for wrong in ([1, "a"], (1,), (1, "a", "a"), ("a", 1), (True, "a")):
        with pytest.raises(TypeError, match=r"Pair\.value"):
            check_fields(Pair(wrong))


# --- frames ----------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(INSTANCES), max_size=6), st.data())
def test_frames_do_not_depend_on_how_the_stream_is_cut(messages, data):
    """However the network cuts the bytes, the same messages come out, each as soon as its last byte is there."""
    frames = [encode_message(message) for message in messages]
    stream = b"".join(frames)
    ends = [sum(map(len, frames[: index + 1])) for index in range(len(frames))]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=20)))
    decoder, got = FrameDecoder(), []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        decoder.feed(stream[start:stop])
        got += drain(decoder)
        complete = [end for end in ends if end <= stop]
        assert len(got) == len(complete)
        assert decoder.partial == (stop > (complete[-1] if complete else 0))
    assert got == messages


def test_frames_byte_by_byte():
    """A stream that arrives one byte at a time is read like any other."""
    decoder, got = FrameDecoder(), []
    for byte in b"".join(map(encode_message, INSTANCES)):
        decoder.feed(bytes([byte]))
        got += drain(decoder)
    assert got == INSTANCES


@pytest.mark.parametrize("max_bytes", [MAX_UNAUTHENTICATED_FRAME_BYTES, MAX_FRAME_BYTES])
def test_frame_may_have_max_bytes_and_not_one_more(max_bytes):
    """The largest frame passes; one byte more is refused from its header alone, before its body has come."""
    decoder = FrameDecoder()
    decoder.max_bytes = max_bytes
    message = padded(max_bytes)
    decoder.feed(encode_message(message))
    assert decoder.next() == message
    decoder.feed(FRAME_HEADER.pack(max_bytes + 1))
    with pytest.raises(TransportError, match=f"may have {max_bytes} bytes, got one of {max_bytes + 1}"):
        decoder.next()


def test_limit_is_the_small_one_until_it_is_raised():
    """A stranger's frame may have 64 KiB; once `max_bytes` is raised the same bytes are a message."""
    data = encode_message(padded(MAX_UNAUTHENTICATED_FRAME_BYTES + 1))
    decoder = FrameDecoder()
    decoder.feed(data)
    with pytest.raises(TransportError, match="a frame may have 65536 bytes"):
        decoder.next()
    decoder.max_bytes = MAX_FRAME_BYTES
    assert decoder.next() == padded(MAX_UNAUTHENTICATED_FRAME_BYTES + 1)


@pytest.mark.parametrize(
    "data", [frame(b""), frame(b"x"), b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x16\x03\x01\x02\x00\x01"]
)
def test_stream_of_another_protocol_is_refused(data):
    """An empty frame, and the first bytes of HTTP, TLS or noise, are TransportErrors and not awaited."""
    decoder = FrameDecoder()
    decoder.feed(data)
    with pytest.raises(TransportError):
        decoder.next()


def test_decoder_waits_for_the_rest():
    """Less than a header, or less than a frame, is no message yet, and `partial` says that more is due."""
    data = encode_message(wire.Accepted())
    decoder = FrameDecoder()
    assert not decoder.partial
    for byte in data[:-1]:
        decoder.feed(bytes([byte]))
        assert decoder.next() is None
        assert decoder.partial
    decoder.feed(data[-1:])
    assert decoder.next() == wire.Accepted()
    assert not decoder.partial


# --- authentication --------------------------------------------------------------------------------------------


def test_both_sides_prove_themselves():
    """With the same secret and session each side's proof is what the other computes."""
    challenge = Challenge(session=SESSION, nonce="12" * 16)
    auth, expected = answer_challenge(challenge, secret=SECRET, session=SESSION)
    assert auth.proof == proof(SECRET, "connector", SESSION, challenge.nonce, auth.nonce)
    assert expected == proof(SECRET, "listener", SESSION, challenge.nonce, auth.nonce)


def test_proof_is_hmac_over_speaker_session_and_both_nonces():
    """The proof is HMAC-SHA256 with the secret's bytes over lines that the wire defines: others can implement it."""
    lines = b"wt-session-1\nlistener\nS\nchallenge\nanswer"
    assert (
        proof(SECRET, "listener", "S", "challenge", "answer")
        == hmac.digest(bytes.fromhex(SECRET), lines, hashlib.sha256).hex()
    )


@pytest.mark.parametrize("place", range(5))
def test_proof_changes_with_each_thing_in_it(place):
    """Secret, speaker, session and both nonces all matter: a change of any one is another proof."""
    arguments = [SECRET, "connector", SESSION, "aa", "bb"]
    other = list(arguments)
    other[place] = "cc"
    assert proof(*other) != proof(*arguments)


def test_wrong_secret_convinces_nobody():
    """Who has another secret neither convinces the listener nor takes its proof."""
    challenge = Challenge(session=SESSION, nonce="12" * 16)
    auth, expected = answer_challenge(challenge, secret="0e" * 32, session=SESSION)
    assert auth.proof != proof(SECRET, "connector", SESSION, challenge.nonce, auth.nonce)
    assert expected != proof(SECRET, "listener", SESSION, challenge.nonce, auth.nonce)


def test_listener_of_another_session_is_refused_before_anything_is_proved():
    """A connector gives no proof to who serves another session; the error names both."""
    with pytest.raises(TransportError, match=f"expected {SESSION}, the listener serves ffff"):
        answer_challenge(Challenge(session="ffff", nonce="12" * 16), secret=SECRET, session=SESSION)


def test_reflection_is_impossible():
    """What one side sends is never what it must receive, even when the other chooses its nonces to match."""
    challenge = Challenge(session=SESSION, nonce="12" * 16)
    auth, expected = answer_challenge(challenge, secret=SECRET, session=SESSION)
    swapped = proof(SECRET, "connector", SESSION, auth.nonce, challenge.nonce)
    same = [proof(SECRET, speaker, SESSION, "12" * 16, "12" * 16) for speaker in ("connector", "listener")]
    assert len({auth.proof, expected, swapped, *same}) == 5


def test_answers_are_never_repeated():
    """The same challenge gets another nonce and proof each time, so an old answer opens nothing."""
    challenge = Challenge(session=SESSION, nonce="12" * 16)
    answers = [answer_challenge(challenge, secret=SECRET, session=SESSION)[0] for _ in range(50)]
    assert len({answer.nonce for answer in answers}) == len({answer.proof for answer in answers}) == 50


@pytest.mark.parametrize("text", ["", "é", "\ud800", "xyz", "ab\ncd", "AB "], ids=ascii)
@pytest.mark.parametrize(
    ("cls", "name"), [(wire.Challenge, "nonce"), (wire.Auth, "nonce"), (wire.Auth, "proof"), (wire.Welcome, "proof")]
)
def test_nonces_and_proofs_are_hex(cls, name, text):
    """A stranger's nonce or proof that is not hex is refused as a message: comparing it would raise something else."""
    (message,) = (each for each in INSTANCES if type(each) is cls)
    payload = {**json.loads(body_of(message)), name: text}
    with pytest.raises(TransportError, match=f"{name}: expected hex"):
        decode_message(json.dumps(payload).encode())


# --- the digest of metadata ------------------------------------------------------------------------------------


def test_metadata_digest_sees_every_field_and_the_order():
    """Another name, dtype, shape, root, number or order of parameters is another digest; the same rows are the same."""
    (name, dtype_name, shape, root), *rest = ROWS
    others = [
        [("embed.weigh", dtype_name, shape, root), *rest],
        [(name, "float16", shape, root), *rest],
        [(name, dtype_name, shape[::-1], root), *rest],
        [(name, dtype_name, shape, root + 1), *rest],
        ROWS[::-1],
        ROWS[:-1],
        [],
    ]
    assert len({metadata_digest(rows) for rows in [ROWS, *others]}) == 1 + len(others)
    assert metadata_digest(iter(ROWS)) == metadata_digest(ROWS)


def test_metadata_digest_cannot_be_moved_across_fields():
    """Where one field ends and the next begins is part of the digest."""
    assert metadata_digest([("a", "b,c", (), 0)]) != metadata_digest([("a,b", "c", (), 0)])
    assert metadata_digest([('a"', "b", (), 0)]) != metadata_digest([("a", '"b', (), 0)])


# --- golden ----------------------------------------------------------------------------------------------------


ABOUT = (
    "The wire of one schema, written once. Never edit this file: what differs from it is another wire, which is a new "
    "schema with a file of its own."
)


def wire_of_today():
    """What a golden file holds, as this code has it."""
    return {
        "about": ABOUT,
        "frame_of_committed": encode_message(wire.Committed(round=3)).hex(),
        "messages": {message.type: body_of(message).decode() for message in INSTANCES},
        "proof": {
            speaker: proof(SECRET, speaker, SESSION, "12" * 16, "ab" * 16) for speaker in ("connector", "listener")
        },
        "metadata_digest": metadata_digest(ROWS),
    }


def test_wire_is_the_golden_wire():
    """Every message, the proof and the digest are, byte for byte, those written down for this schema.

    A schema that has no file yet gets one, and this fails once: look at it and commit it.
    """
    file = GOLDEN / f"wire_{SCHEMA[0]}_{SCHEMA[1]}.json"
    if not file.exists():
        file.write_text(json.dumps(wire_of_today(), indent=2) + "\n", encoding="utf-8")
        pytest.fail(f"{file.name} was missing and has been written: commit it, and never edit it")
    assert wire_of_today() == json.loads(file.read_text(encoding="utf-8")), f"{file.name} is another wire: see there"


def test_older_minors_can_still_be_read():
    """Every message of each golden file of this major is still readable."""
    files = sorted(GOLDEN.glob(f"wire_{SCHEMA[0]}_*.json"))
    assert files
    for file in files:
        for type_, body in json.loads(file.read_text(encoding="utf-8"))["messages"].items():
            assert decode_message(body.encode()).type == type_
