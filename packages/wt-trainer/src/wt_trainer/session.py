"""The sender's end of the agreement channel: who is connected, what each said, and the round in progress."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import resource
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from wt_common import AgreementError, ConfigurationError, PeerLostError, Side, StaleSessionError, WeightTransferError
from wt_common.errors import error_from_wire, error_to_wire
from wt_common.schema import check_schema
from wt_common.session import (
    Abort,
    Accepted,
    Auth,
    Challenge,
    Credit,
    DigestedAgain,
    Ended,
    Failed,
    Hello,
    Holding,
    Joined,
    Leave,
    Message,
    Placed,
    Position,
    Ready,
    Refused,
    RoundOutcome,
    Sent,
    State,
    StoreSet,
    Welcome,
    proof,
)
from wt_trainer.connection import SEND_S, Connection, close_in_child
from wt_trainer.round import Cause, Round
from wt_trainer.store import RendezvousStore

__all__ = ["Peer", "Session", "local_address_towards"]

logger = logging.getLogger(__name__)

_HANDSHAKE_S = 2.0  # for a stranger to prove itself; a peer of ours needs one round trip
_MAX_PENDING_HANDSHAKES = 64  # threads and descriptors that strangers may occupy at once
_SHARE_OF_FILES = 8  # and no more than one in so many of the descriptors that this process may have
_ACCEPT_RETRY_S = 0.1  # for files to be closed, or a thread to end, meanwhile
_MAX_LATE_ROUNDS = 8  # a worker that is this far behind is lost before
_MAX_PLACED = 32  # parameters of which a worker's placement is known: more than a worker knows itself
_LATE_S = 0.1  # past the deadline, for the sender's own thread to notice it
_NOTIFY_S = 0.5  # for a message to a peer that may be frozen, where the round has failed already
MAX_RANKS = 1 << 16
"""Ranks of one engine, or of the trainer: more than any cluster has, and few enough to be listed in an error."""


@dataclass(eq=False)
class Peer:
    """One connected process: a worker rank, or another trainer rank.

    `placed` has what a worker said last of parameters; they are named by their metadata's digest, and whether they are a draft's.
    `replaced` says that it has left for another trainer.
    `joined` is the last round that another trainer rank has joined, or failed in; `strayed` whether that is not the sender's.
    """

    hello: Hello
    connection: Connection
    lost: Exception | None = None
    placed: dict[tuple[str, bool], Placed] = field(default_factory=dict)
    replaced: bool = False
    joined: int = -1
    strayed: bool = False

    def keep(self, key: tuple[str, bool], placed: Placed) -> None:
        """The worker is ready for `key` now, with `placed`; what it has not used for long is forgotten.

        It forgets sooner itself, by the same order, and then says it again.
        """
        self.placed.pop(key, None)
        self.placed[key] = placed
        while len(self.placed) > _MAX_PLACED:
            del self.placed[next(iter(self.placed))]

    @property
    def is_worker(self) -> bool:
        """Whether it is a rank of an inference engine."""
        return self.hello.role == Side.WORKER

    @property
    def key(self) -> tuple[str, str, int]:
        """(role, engine, rank): what it is known by, and how peers are ordered."""
        return self.hello.role, self.hello.engine, self.hello.rank

    def __str__(self) -> str:
        if self.is_worker:
            return f"worker rank {self.hello.rank} of engine {self.hello.engine} ({self.hello.hostname})"
        return f"trainer rank {self.hello.rank} ({self.hello.hostname})"


class Session:
    """The one listening socket of a transfer, and the peers on it.

    1. The sender opens it, and ships `address`, `port`, `secret` and `id` in the init info.
    2. Every worker rank and every other trainer rank connects, proves that it knows the secret, and says hello. Who has not
       is a stranger until then. There is room for a few; where it is taken, the oldest of the address that has most is
       closed. So idle strangers keep nobody out, and those of one address push out none of another.
    3. The sender seals the list: it listens no more and no one joins; workers are numbered by (engine, rank).
    4. Rounds run one after the other. A message of another round is answered with an abort.

    A failure of a peer in a round fails the round (which one counts, `Round` says). All state is guarded by `changed`.

    Trainer ranks number their rounds by counting their calls of `send_weights`, those included that failed at once. A rank that
    joins late, or a round ahead, is waited for. One that cannot be in step (it joins a round that it had joined before, or a
    later one while this one waits for it) fails the call at once on all ranks; all go on from the highest number (`in_step`).

    Args:
        address: local address to listen on; it must be the one the peers reach.
        port: port to listen on; None takes a free one.
        secret: hex key of the handshake; None makes a random one.
        num_trainer_ranks: how many trainer ranks there are, the sender included.

    Raises:
        ConfigurationError: the address is not this host's, or the port is taken.
    """

    def __init__(
        self, address: str, port: int | None = None, *, secret: str | None = None, num_trainer_ranks: int = MAX_RANKS
    ) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self._listener = socket.create_server((address, port or 0), family=family, backlog=128)
        except OSError as exc:
            raise ConfigurationError(
                f"session: cannot listen on {address} port {port or 'any'} ({exc.strerror}); master_address must be an "
                "address of this host that the workers reach, master_port free or None",
                side=Side.TRAINER,
                phase="init",
            ) from exc
        close_in_child(self._listener)
        self._pid = os.getpid()
        self.address = address
        self.port = int(self._listener.getsockname()[1])
        self.secret = secret or secrets.token_hex(32)
        self.id = secrets.token_hex(8)
        self.changed = threading.Condition()
        self.store = RendezvousStore(self.changed, self._publish)
        self.round: Round | None = None
        self.refusal: WeightTransferError | None = None
        self._last_round = self._go_on_from = -1
        self._placing: dict[int, tuple[str, bool]] = {}  # by round, the key in `Peer.placed` of what it sends
        self._early: list[
            tuple[Peer, Message]
        ] = []  # of a round that another trainer rank has begun and this one has not
        self._num_trainer_ranks = num_trainer_ranks
        self._peers: dict[tuple[str, str, int], Peer] = {}
        self._sealed = False
        self._closed = False
        self._places = threading.BoundedSemaphore(_num_places())
        self._pending: dict[
            Connection, str
        ] = {}  # who has proved nothing yet, and from which address; the oldest first
        self._strangers = 0
        threading.Thread(target=self._accept, name=f"wt-session-accept {self.id}", daemon=True).start()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "sealed" if self._sealed else "open"
        return f"<Session {self.id} on {self.address}:{self.port}, {state}, {len(self._peers)} peers>"

    # --- who is there --------------------------------------------------------------------------------------

    @property
    def workers(self) -> list[Peer]:
        """The worker ranks in the order of their numbers: by (engine, rank in engine)."""
        with self.changed:
            return sorted((peer for peer in self._peers.values() if peer.is_worker), key=lambda peer: peer.key)

    @property
    def followers(self) -> list[Peer]:
        """The other trainer ranks, by rank."""
        with self.changed:
            return sorted((peer for peer in self._peers.values() if not peer.is_worker), key=lambda peer: peer.key)

    def wait_followers(self, round_: Round, count: int) -> None:
        """Return once `count` other trainer ranks are connected. Raises as `Round.wait` does."""
        round_.wait(
            lambda: len(self.followers) >= count,
            lambda: (
                "trainer ranks "
                + ", ".join(
                    str(rank)
                    for rank in range(1, count + 1)
                    if rank not in {peer.hello.rank for peer in self.followers}
                )
            ),
        )

    def seal(self, expected_workers: int | None) -> None:
        """Close the list of peers and the port, after checking that every engine is whole.

        Args:
            expected_workers: how many worker ranks there must be in all; None accepts what came.

        Raises:
            AgreementError: nobody came, an engine lacks ranks, or the number differs; the text says who came.
        """
        with self.changed:
            self._sealed = True
            workers = self.workers
        self._stop_listening()
        engines: dict[str, list[Peer]] = {}
        for peer in workers:
            engines.setdefault(peer.hello.engine, []).append(peer)
        problems = []
        for engine, ranks in engines.items():
            sizes = sorted({peer.hello.size for peer in ranks})
            came = {peer.hello.rank for peer in ranks}
            missing = sorted(set(range(sizes[-1])) - came)
            if missing:
                problems.append(f"engine {engine} has {sizes[-1]} ranks, of which {missing} did not connect")
            if len(sizes) > 1 or came - set(range(sizes[-1])):
                problems.append(
                    f"engine {engine}: expected ranks of one size, got ranks {sorted(came)} and sizes {sizes}"
                )
        if not workers:
            problems.append("no worker connected; does the server run with the wt-worker plugin and backend wt_<name>?")
        if expected_workers is not None and len(workers) != expected_workers:
            problems.append(f"expected {expected_workers} worker ranks, got {len(workers)}")
        if problems:
            connected = ", ".join(map(str, workers)) or "nobody"
            text = f"session: {'; '.join(problems)}. Connected: {connected}"
            raise AgreementError(text, side=Side.TRAINER, phase="init")

    # --- talking -------------------------------------------------------------------------------------------

    def send(self, peers: Iterable[Peer], message: Message) -> None:
        """Send `message` to each of `peers`; one that cannot take it is lost, which fails the round."""
        for peer in peers:
            round_ = self.round
            left = SEND_S if round_ is None else min(SEND_S, max(round_.remaining_s, _NOTIFY_S))
            try:
                peer.connection.send(message, timeout_s=left)
            except WeightTransferError as exc:
                self._on_lost(peer, exc)

    def notify(self, peers: Iterable[Peer], message: Message) -> None:
        """Send `message` to each of `peers` that takes it at once; for a round that has failed already."""
        for peer in peers:
            if peer.lost is None:
                with suppress(WeightTransferError):
                    peer.connection.send(message, timeout_s=_NOTIFY_S)

    def expect_placed(self, number: int, metadata_digest: str, *, is_draft: bool) -> None:
        """Round `number`, in which no worker has been called so far, sends the parameters that `metadata_digest` names."""
        with self.changed:
            self._placing = {old: key for old, key in self._placing.items() if old > number - _MAX_LATE_ROUNDS}
            self._placing[number] = metadata_digest, is_draft

    @contextmanager
    def running(self, number: int, timeout_s: float) -> Iterator[Round]:
        """Within it, round `number` is in progress. A round that finds a peer gone has failed already.

        Raises:
            StaleSessionError: the session is closed.
        """
        with self.changed:
            if self._closed:
                raise StaleSessionError("session: closed; call trainer_init again", side=Side.TRAINER, round=number)
            self.round = round_ = Round(number, timeout_s, self.changed)
            self._last_round = number
            for peer in self._peers.values():
                if peer.lost is not None:
                    round_.fail(_lost_error(peer, peer.lost))
            have_called = {peer.key for peer, message in self._early if message.round == number}  # type: ignore[attr-defined]
            for peer, message in self._early:
                if message.round == number:  # type: ignore[attr-defined]  # only messages of a round are kept
                    self._file(round_, peer, message)
                elif isinstance(message, Joined) and message.round > number and peer.key not in have_called:
                    peer.strayed = True
            for peer in self._peers.values():
                if peer.strayed:
                    self._fail_out_of_step(peer, peer.joined)
            self._early = [early for early in self._early if early[1].round > number]  # type: ignore[attr-defined]
        try:
            yield round_
        finally:
            with self.changed:
                self.round = None
                self.changed.notify_all()

    def end_at_deadline(self, round_: Round) -> None:
        """Fail `round_` at its deadline, if the sender's own thread is in its source then, and so cannot.

        It does that a moment late: the sender's own words, if it is elsewhere, say more. Blocks until the round is over.
        """
        with self.changed:
            if self.changed.wait_for(
                lambda: self.round is not round_ or round_.failure is not None, round_.remaining_s + _LATE_S
            ):
                return
            if round_.phase == "update":
                round_.suspect(round_.timeout_error(lambda: "the sender's source"))

    def in_step(self) -> int:
        """The number from which all trainer ranks go on: that of the last round, or a higher one where their counts differed."""
        return max(self._last_round, self._go_on_from)

    def tell_outcome(self, outcome: RoundOutcome) -> None:
        """Every other trainer rank knows how the round ended; one that is in another round by mistake, as the end of that."""
        for peer in self.followers:
            with self.changed:
                number, peer.strayed = peer.joined if peer.strayed else outcome.round, False
            self.notify([peer], replace(outcome, round=number))

    def close(self) -> None:
        """Close the listener and every connection; peers see end of file. Idempotent. A forked child has nothing to close."""
        if os.getpid() != self._pid:
            return
        with self.changed:
            self._closed = True
            peers = list(self._peers.values())
            if self.round is not None:
                self.round.fail(StaleSessionError("session: shut down in mid-round", side=Side.TRAINER))
        self._stop_listening()
        for peer in peers:
            peer.connection.close()

    def _stop_listening(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # frees the accepting thread
        self._listener.close()

    # --- threads: accepting, handshakes, readers -----------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as exc:
                if self._closed or self._sealed:
                    return
                self._log_stranger(exc)  # whoever came is gone already, or this process has too many open files
                time.sleep(_ACCEPT_RETRY_S)
                continue
            if not self._places.acquire(blocking=False):
                self._drop_stranger()
                if not self._places.acquire(timeout=_ACCEPT_RETRY_S):
                    sock.close()
                    continue
            try:
                connection = Connection(sock)
            except OSError as exc:  # gone already
                self._log_stranger(exc)
                sock.close()
                self._places.release()
                continue
            with self.changed:
                self._pending[connection] = connection.peer.rpartition(":")[0]
            threading.Thread(
                target=self._handshake, args=(connection,), name=f"wt-session-handshake {self.id}", daemon=True
            ).start()

    def _drop_stranger(self) -> None:
        """Make room for another stranger: close the oldest of the address from which most have come."""
        with self.changed:
            addresses = Counter(self._pending.values())
            if not addresses:
                return
            busiest = max(addresses, key=addresses.__getitem__)
            oldest = next(connection for connection, address in self._pending.items() if address == busiest)
            del self._pending[oldest]
        oldest.close()

    def _handshake(self, connection: Connection) -> None:
        try:
            hello = self._authenticate(connection)
            self._admit(connection, hello)
        except (WeightTransferError, OSError) as exc:
            self._log_stranger(exc)
            connection.close()
        finally:
            with self.changed:
                self._pending.pop(connection, None)
            self._places.release()

    def _authenticate(self, connection: Connection) -> Hello:
        """The hello of a peer that proved to know the secret; raises for anybody else."""
        deadline = time.monotonic() + _HANDSHAKE_S
        nonce = secrets.token_hex(16)
        connection.send(Challenge(session=self.id, nonce=nonce), timeout_s=_HANDSHAKE_S)
        auth = connection.receive(deadline)
        if not isinstance(auth, Auth):
            raise AgreementError(f"session: {connection.peer} sent {auth.type!r} before it proved itself")
        if not hmac.compare_digest(auth.proof, proof(self.secret, "connector", self.id, nonce, auth.nonce)):
            raise AgreementError(f"session: {connection.peer} does not know the secret")
        with self.changed:
            self._pending.pop(connection, None)
        connection.trust()
        connection.send(Welcome(proof=proof(self.secret, "listener", self.id, nonce, auth.nonce)))
        hello = connection.receive(deadline)
        if not isinstance(hello, Hello):
            raise AgreementError(f"session: {connection.peer} sent {hello.type!r} instead of a hello")
        return hello

    def _admit(self, connection: Connection, hello: Hello) -> None:
        peer = Peer(hello, connection)
        try:
            check_schema(hello.schema)
            with self.changed:
                self._check_new(peer)
                connection.send(Accepted())  # before anybody else finds the peer and sends to it; too short to block
                self._peers[peer.key] = peer
                if hello.failure is not None and not peer.is_worker:  # before anybody takes it for one that is well
                    self._on_message(peer, Failed(round=0, error=hello.failure))
        except AgreementError as exc:
            exc.fill(side=Side.TRAINER, phase="init", engine=hello.engine or None, rank=hello.rank)
            with self.changed:
                self.refusal = self.refusal or exc
                self.changed.notify_all()
            self.notify([peer], Refused(error=error_to_wire(exc)))
            connection.close()
            return
        connection.start_reader(
            lambda message: self._on_message(peer, message),
            lambda exc: self._on_lost(peer, exc),
            name=f"wt-session-reader {peer.hello.role} {peer.hello.rank}",
        )
        with self.changed:
            self.changed.notify_all()

    def _check_new(self, peer: Peer) -> None:
        if self._closed:
            raise AgreementError("session: the trainer has closed it")
        if peer.hello.role not in list(Side):
            raise AgreementError(f"session: expected role 'worker' or 'trainer', got {peer.hello.role!r}")
        first, size = (0, peer.hello.size) if peer.is_worker else (1, self._num_trainer_ranks)
        if not first <= peer.hello.rank < size <= MAX_RANKS:
            raise AgreementError(
                f"session: expected ranks {first} to {min(size, MAX_RANKS) - 1}, got {peer}, of {peer.hello.size}"
            )
        if self._sealed:
            raise AgreementError(f"session: {peer} came after the list was sealed; the trainer must init again")
        if peer.key in self._peers and self._peers[peer.key].lost is None:
            raise AgreementError(f"session: two live connections say they are {peer}")

    def _on_message(self, peer: Peer, message: Message) -> None:
        if isinstance(message, StoreSet):
            self.store.receive(message, origin=peer)
            return
        if isinstance(message, Leave):
            peer.replaced = message.replaced
            self._on_lost(peer, error_from_wire(message.error))
            return
        number = getattr(message, "round", None)
        with self.changed:
            if isinstance(message, (Placed, Ready)) and (key := self._placing.get(message.round)) is not None:
                # Also of a round that is over: the worker does not say it again.
                placed = message if isinstance(message, Placed) else peer.placed.get(key)
                if placed is not None:
                    peer.keep(key, placed)
            if isinstance(message, Placed):
                return
            if isinstance(message, Joined) and not peer.is_worker and not self._is_in_step(peer, message.round):
                self._fail_out_of_step(peer, message.round)
                return
            if isinstance(message, Failed):
                peer.joined = max(peer.joined, message.round)
            if self.round is not None and number == self.round.number:
                self._file(self.round, peer, message)
                return
            if number is not None and number > self._last_round and not peer.is_worker:
                self._early.append((peer, message))
                return
        if isinstance(message, Failed) and not peer.is_worker:
            logger.warning("%s failed when round %d was over: %s", peer, message.round, message.error.get("message"))
        if not isinstance(
            message, (Credit, DigestedAgain, Ended, Failed, Holding, Position, Sent, State)
        ):  # those need no answer: their sender waits for nothing
            stale = StaleSessionError(f"round {number} is over (session {self.id})", side=Side.TRAINER, round=number)
            self.notify([peer], Abort(round=int(number or 0), error=error_to_wire(stale)))

    def _is_in_step(self, peer: Peer, number: int) -> bool:
        """Whether trainer rank `peer`, which joins round `number`, may have made as many calls as the sender."""
        before, peer.joined = peer.joined, number
        if number <= before:
            return False
        round_ = self.round
        return round_ is None or round_.failure is not None or before == round_.number or number <= round_.number

    def _fail_out_of_step(self, peer: Peer, number: int) -> None:
        """`peer` is in round `number`, and the sender can be in no such round: both calls fail, the sender's perhaps the next."""
        peer.strayed = True
        if self.round is None:
            return
        current = self.round.number
        error = AgreementError(
            f"trainer rank {peer.hello.rank} is in its call {number} of send_weights, the sender in its call {current}: one has "
            "left out a call, or made one more. All trainer ranks must make each call; from the next one they are in step again",
            side=Side.TRAINER,
            rank=peer.hello.rank,
        )
        self._go_on_from = max(self._go_on_from, current, number)
        self.round.fail(error)

    def _file(self, round_: Round, peer: Peer, message: Message) -> None:
        """Take a message of `round_`."""
        if isinstance(message, Failed):
            error = error_from_wire(message.error)
            error.fill(side=peer.hello.role, engine=peer.hello.engine or None, rank=peer.hello.rank)
            # It is the word of a process that lives; in an init there is no collective of which it may be a consequence.
            cause = max(Cause.FINDING, Cause.of(error)) if round_.number else Cause.FINDING
            round_.suspect(error, Cause.SECOND_HAND if message.second_hand else cause)
        elif isinstance(message, Credit):
            round_.credits[peer.key] = message.limit
        round_.posts.setdefault(type(message), {})[peer.key] = message
        self.changed.notify_all()

    def _on_lost(self, peer: Peer, exc: Exception) -> None:
        peer.connection.close()
        with self.changed:
            if peer.lost is None:
                peer.lost = exc
            if self.round is not None and not self._closed:
                self.round.fail(_lost_error(peer, exc))
            self.changed.notify_all()

    def _publish(self, message: StoreSet, origin: object) -> None:
        self.send((peer for peer in [*self.workers, *self.followers] if peer is not origin and not peer.lost), message)

    def _log_stranger(self, exc: Exception) -> None:
        with self.changed:  # several handshakes may fail at once
            self._strangers += 1
            first = self._strangers == 1
        logger.log(
            logging.WARNING if first else logging.DEBUG,
            "refused a connection to the session's port %d: %s (further ones are logged at DEBUG)",
            self.port,
            exc,
        )


def _num_places() -> int:
    """How many strangers there is room for, threads and descriptors."""
    num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if num_files == resource.RLIM_INFINITY:
        return _MAX_PENDING_HANDSHAKES
    return min(_MAX_PENDING_HANDSHAKES, max(1, num_files // _SHARE_OF_FILES))


def _lost_error(peer: Peer, exc: Exception) -> WeightTransferError:
    if isinstance(exc, StaleSessionError):  # the peer said so itself: a later init replaced this session
        return error_from_wire(error_to_wire(exc))  # a copy, since each round fills in its own number
    return PeerLostError(
        f"{peer} is gone ({exc}); restart it if it died, then call trainer_init again",
        side=peer.hello.role,
        engine=peer.hello.engine or None,
        rank=peer.hello.rank,
    )


def local_address_towards(hosts: Iterable[str]) -> str:
    """This host's address as all of `hosts` reach it; those that cannot be resolved are left out.

    A host that is this one reaches each of its addresses, so the others decide. Without any, it is that of this host's name,
    or loopback.

    Raises:
        ConfigurationError: they would reach it under several.
    """
    distant: dict[str, str] = {}  # by our address, a host that it is for
    own = []
    for host in hosts:
        with suppress(OSError):
            address, is_own = _address_used_for(host)
            if is_own:
                own.append(address)
            else:
                distant.setdefault(address, host)
    if len(distant) > 1:
        raise ConfigurationError(
            "session: expected one address of this host for all servers, got "
            + ", ".join(f"{address} towards {host}" for address, host in distant.items())
            + "; set master_address to one that all of them reach",
            side=Side.TRAINER,
            phase="init",
        )
    if distant or own:
        return [*distant, *own][0]
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"


def _address_used_for(host: str) -> tuple[str, bool]:
    """This host's address on the way to `host`, and whether that is this host itself."""
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing: the kernel only picks the route, and with it our address
        address = str(probe.getsockname()[0])
    is_loopback = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return address, is_loopback or address == target[0]
