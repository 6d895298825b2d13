"""Sessions of the mesh, from the handshake to the last frame, against their second implementation (`second_parser`).

In each session one end is the library's, in memory. The other end plays an honest rank, or one that breaks off, has
another key, claims another rank, replays an earlier session, reflects the acceptor's own proof, or whose bytes were
changed. Only a rank that knows the key may get in, and only as itself; what it sends then is compared as in `parser`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from time import monotonic

from tests.soak import second_parser as second
from tests.soak.parser import Mesh, small_buffers
from tests.soak.proofs import Limits, Outcome, mutated, pieces
from torchdist_ref.errors import AuthenticationError
from torchdist_ref.transports import acceptor as acceptor_module

BATCH = 1000
KEY = bytes(range(100, 132))
PLANS = ("honest", "broken off", "wrong key", "wrong rank", "replayed", "reflected", "changed", "silent")


class Client:
    """Socket of the acceptor: the bytes of a connector arrive in pieces; its response decides the rest of them.

    Args:
        hello: Bytes that arrive before the response.
        rest: Function from the response to the bytes that arrive after it.
        cut: Function that cuts bytes into pieces.
    """

    def __init__(self, hello: bytes, rest: Callable[[bytes], bytes], cut: Callable[[bytes], list[bytes]]) -> None:
        self._left = cut(hello)[::-1]
        self._rest, self._cut = rest, cut
        self.response = b""

    def setblocking(self, _: bool) -> None:
        """Do nothing: it never blocks."""

    def sendall(self, data: bytes) -> None:
        """Receive the response."""
        self.response += data
        self._left = self._cut(b"".join(reversed(self._left)) + self._rest(data))[::-1]

    def recv(self, size: int) -> bytes:
        """Return the next bytes; none at the end of the stream."""
        while self._left:
            piece = self._left.pop()
            if not piece:
                raise BlockingIOError
            if len(piece) > size:
                self._left.append(piece[size:])
            return piece[:size]
        return b""

    @property
    def left(self) -> bytes:
        return b"".join(reversed(self._left))


def accepted(client: Client, acceptor: int) -> int | str:
    """Return the rank that the library's acceptor accepts, or "refused"."""
    handshake = acceptor_module._PendingHandshake(client, KEY, acceptor)  # type: ignore[arg-type]
    try:
        while not handshake.done:
            handshake.advance()
    except OSError:
        return "refused"
    return handshake.rank


class Attempt:
    """Connector of one session, which follows a plan.

    Attributes:
        sent: All bytes that it has sent.
    """

    def __init__(self, plan: str, rank: int, acceptor: int, earlier: bytes, rng: random.Random) -> None:
        self.plan, self.rank, self.acceptor, self.rng, self.earlier = plan, rank, acceptor, rng, earlier
        self.nonce = rng.randbytes(16)
        self.claimed = rank if plan != "wrong rank" else rank + 1 + int(rng.random() * 3)
        self.hello = rank.to_bytes(4, "little") + self.nonce
        if plan == "replayed" and earlier:
            self.hello = earlier[:20]
        if plan == "silent":
            self.hello = self.hello[: int(rng.random() * 20)]
        self.sent = self.hello

    def rest(self, response: bytes) -> bytes:
        """Return the proof, or what the plan sends in its place."""
        key = KEY if self.plan != "wrong key" else self.rng.randbytes(32)
        proof = second.proof(key, b"connector", self.acceptor, self.claimed, self.nonce + response[:16])
        if self.plan == "replayed":
            proof = self.earlier[20:52]
        elif self.plan == "reflected":
            proof = response[16:48]
        elif self.plan == "broken off":
            proof = proof[: int(self.rng.random() * 32)]
        elif self.plan == "changed":
            proof = mutated(proof, self.rng)
        self.sent += proof
        return proof


def check_acceptor(plan: str, mesh: Mesh, earlier: list[bytes], rng: random.Random) -> str:
    """Run a session with the library's acceptor, and return a difference."""
    attempt = Attempt(plan, mesh.PEER, mesh.RANK, earlier[0], rng)
    # Bytes of a frame could complete a proof that was broken off.
    stream, sizes = mesh.stream(rng) if plan != "broken off" else (b"", [])
    client = Client(attempt.hello, lambda response: attempt.rest(response) + stream, lambda data: pieces(data, rng))
    found = accepted(client, mesh.RANK)
    nonce, proof = client.response[:16], client.response[16:]
    expected = second.handshake(KEY, mesh.RANK, attempt.sent + stream * bool(client.response), nonce)
    if expected == "open":
        expected = "refused"
    if found != expected:
        return f"{plan}: accepted as {found}, expected {expected}"
    hello = attempt.hello
    if client.response and proof != second.proof(KEY, b"acceptor", mesh.RANK, mesh.PEER, hello[4:] + nonce):
        return f"{plan}: the acceptor's proof is wrong"
    if plan == "honest":
        earlier[0] = attempt.sent
        if found != mesh.PEER or client.left != stream:
            return f"{plan}: accepted as {found} with {len(client.left)} bytes left, expected {len(stream)}"
        if found := mesh.check(stream, sizes, pieces(stream, rng)):
            return f"{plan}: {found}"
    elif found != "refused" and attempt.sent != earlier[0] and plan != "changed":
        return f"{plan}: got in as {found}"
    return ""


class Server:
    """Socket of the connector: an acceptor that follows a plan."""

    def __init__(self, plan: str, rank: int, acceptor: int, rng: random.Random) -> None:
        self._plan, self._rank, self._acceptor, self._rng = plan, rank, acceptor, rng
        self.hello = self.proof = self._response = self._data = b""

    def settimeout(self, _: float) -> None:
        """Do nothing: it never waits."""

    def getpeername(self) -> tuple[str, int]:
        return "127.0.0.1", 0

    def sendall(self, data: bytes) -> None:
        """Receive the hello, and respond as planned; or receive the proof."""
        if self.hello:
            self.proof = data
            return
        self.hello = data
        key = KEY if self._plan != "wrong key" else self._rng.randbytes(32)
        acceptor = self._acceptor + (self._plan == "wrong rank")
        nonce = self._rng.randbytes(16)
        side = b"connector" if self._plan == "reflected" else b"acceptor"
        nonces = (bytes(16) if self._plan == "replayed" else data[4:]) + nonce
        self._response = nonce + second.proof(key, side, acceptor, self._rank, nonces)
        if self._plan == "broken off":
            self._response = self._response[: int(self._rng.random() * 48)]
        elif self._plan == "changed":
            self._response = mutated(self._response, self._rng)
        elif self._plan == "silent":
            self._response = b""
        self._data = self._response

    def recv(self, size: int) -> bytes:
        """Return some of the response."""
        count = 1 + int(self._rng.random() * size)
        part, self._data = self._data[:count], self._data[count:]
        return part

    @property
    def expected(self) -> str:
        """Outcome at a connector that knows the key."""
        if len(self._response) < 48:
            return "closed"
        nonces = self.hello[4:] + self._response[:16]
        good = second.proof(KEY, b"acceptor", self._acceptor, self._rank, nonces) == self._response[16:48]
        return "accepted" if good else "refused"


def check_connector(plan: str, rank: int, acceptor: int, rng: random.Random) -> str:
    """Run a session with the library's connector, and return a difference."""
    server = Server(plan, rank, acceptor, rng)
    try:
        acceptor_module.authenticate_to(server, KEY, rank, acceptor, monotonic() + 60)  # type: ignore[arg-type]
        found = "accepted"
    except AuthenticationError:
        found = "refused"
    except ConnectionError:
        found = "closed"
    if found != server.expected:
        return f"connector, {plan}: {found}, expected {server.expected}"
    nonces = server.hello[4:] + server._response[:16]
    proof = second.proof(KEY, b"connector", acceptor, rank, nonces) if found == "accepted" else b""
    if server.proof != proof or len(server.hello) != 20 or server.hello[:4] != rank.to_bytes(4, "little"):
        return f"connector, {plan}: its bytes are wrong"
    return "" if (found == "accepted") == (plan == "honest") or plan == "changed" else f"connector, {plan}: {found}"


def batch(seed: int, count: int, outcome: Outcome) -> None:
    """Run `count` sessions."""
    rng, mesh, earlier = random.Random(seed), Mesh(), [b""]
    for index in range(count):
        plan = rng.choice(PLANS) if index else "honest"
        if index % 4 == 3:
            found = check_connector(plan, int(rng.random() * 9), 9 + int(rng.random() * 9), rng)
        else:
            found = check_acceptor(plan, mesh, earlier, rng)
        outcome.counts[plan] += 1
        if found:
            outcome.fail(f"seed {seed}, session {index}: {found}")
            mesh = Mesh()
    if found := mesh.check_memory():
        outcome.fail(f"seed {seed}: {found}")


def prove(limits: Limits) -> Outcome:
    """Run random sessions."""
    outcome = Outcome()
    with small_buffers():
        for seed, count in limits.seeds(BATCH):
            batch(seed, count, outcome)
            outcome.done += count
    return outcome
