"""Sessions of TCPStore's clients: the state that outlives their connections, in bounded memory.

If a connection breaks before the response to a request that is not idempotent arrives, the client repeats the request
with the same number, and the server sends the kept response instead of running it twice. So the session of a client
that has disconnected stays for `SESSION_SECONDS` at least, unless the client cannot need it. Kept responses use at most
`KEPT_RESPONSE_BYTES`: beyond that the oldest are dropped, and their requests fail if they are repeated.

A `StoreClient` is any object that bytes can be sent to and that can be disconnected. Do not add sockets here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic

from torchdist_ref.stores.tcp.memory import KEY_OVERHEAD_BYTES, StoreMemory
from torchdist_ref.stores.tcp.operations import Condition
from torchdist_ref.stores.tcp.protocol import Piece, Request

MAX_SESSIONS = 4096
SESSION_SECONDS = 60.0
SESSION_OVERHEAD_BYTES = 600
"""Memory of a session besides its name."""
AWAITED_OVERHEAD_BYTES = 50
"""Memory of a key in a waiting request besides its bytes."""
KEPT_RESPONSE_BYTES = 32 * 2**20
RECONNECT_SECONDS = 0.03
"""Time that a client whose connection broke has to open another. One that waits for a key does so at once."""


class StoreClient(ABC):
    """Connection of a client, as the request handler sees it.

    Attributes:
        validated: whether the client has sent the magic number.
        session: session of a client that has sent its name.
        pending: request that has no response yet.
    """

    # Thousands of clients may connect at once: a dictionary for each of them is work for the garbage collector.
    __slots__ = ("pending", "session", "validated")

    def __init__(self) -> None:
        self.validated = False
        self.session: ClientSession | None = None
        self.pending: PendingRequest | None = None

    @abstractmethod
    def send(self, pieces: Sequence[Piece]) -> None:
        """Send the pieces, in order, without blocking."""

    @abstractmethod
    def disconnect(self, reason: str) -> None:
        """Close the connection."""


@dataclass(eq=False, slots=True)
class ClientSession:
    """State of a client that outlives its connections.

    Attributes:
        name: name that the client has sent.
        client: its connection, if there is one.
        number: highest request id.
        response: response to that request, if it was sent and the request is not idempotent.
        nbytes: its size in bytes; 0 if it is only an acknowledgement.
        lost: whether the response was dropped because others needed the memory.
        counted: request id of the last BARRIER whose caller was counted.
        release: RELEASE whose keys are being deleted.
        on_disconnect: key and value to set if the client disconnects and stays away.
    """

    name: bytes = b""
    client: StoreClient | None = None
    number: int = -1
    response: Sequence[Piece] | None = None
    nbytes: int = 0
    lost: bool = False
    counted: int = -1
    release: PendingRequest | None = None
    on_disconnect: tuple[bytes, bytes] | None = None

    def later_bytes(self) -> int:
        """Return the memory of the key and value to set later."""
        return sum(map(len, self.on_disconnect)) + KEY_OVERHEAD_BYTES if self.on_disconnect else 0

    def needed(self) -> bool:
        """Return whether the client may depend on it after a broken connection."""
        unanswered = self.counted == self.number >= 0 or self.release is not None
        return unanswered or self.lost or self.response is not None or self.on_disconnect is not None


@dataclass(eq=False, slots=True)
class PendingRequest:
    """Request that has no response yet.

    Attributes:
        client: connection that sent it.
        request: the request.
        nbytes: memory of the keys in the request.
        unmet: conditions that it is filed under, in order.
    """

    client: StoreClient
    request: Request
    nbytes: int
    unmet: dict[Condition, None] = field(default_factory=dict)


class SessionTable:
    """Sessions by name, and the memory that they use.

    Attributes:
        sessions: all sessions.
        disconnected: sessions without a client that asked for a key to be set then, and when it is.
    """

    def __init__(self, memory: StoreMemory) -> None:
        self.sessions: dict[bytes, ClientSession] = {}
        self.disconnected: dict[ClientSession, float] = {}
        self._memory = memory
        self._gone: dict[ClientSession, float] = {}
        self._kept: dict[ClientSession, None] = {}
        self._kept_bytes = self._session_bytes = 0

    def open(self, name: bytes, client: StoreClient) -> StoreClient | None:
        """Give a client its session. Return the connection that had the session before, if that is still open."""
        session = self.sessions.get(name)
        if session is None:
            session = self.sessions[name] = ClientSession(name)
            self._count_session(name, 1)
        self._gone.pop(session, None)
        self.disconnected.pop(session, None)
        previous, session.client, client.session = session.client, client, session
        return previous if previous is not client else None

    def leave(self, client: StoreClient) -> None:
        """Keep the session of a client that has disconnected, if it may be needed."""
        session = client.session
        if session is None or session.client is not client:
            return
        session.client = None
        if not session.needed():
            return self._drop(session)
        now = self._gone[session] = monotonic()
        if session.on_disconnect is not None:
            self.disconnected[session] = now + RECONNECT_SECONDS
        while self._gone:
            oldest, since = next(iter(self._gone.items()))
            crowded = len(self.sessions) > MAX_SESSIONS and now >= since + SESSION_SECONDS
            if not crowded and self._session_bytes <= self._memory.budget // 4:
                break
            self._drop(oldest)

    def due(self, now: float) -> list[tuple[bytes, bytes]]:
        """Return, and stop counting, the keys and values to set for clients that have not connected again."""
        pairs = []
        for session in [each for each, at in self.disconnected.items() if now >= at]:
            del self.disconnected[session]
            assert session.on_disconnect is not None
            pairs.append(session.on_disconnect)
            self.set_later(session, None)
        return pairs

    def set_later(self, session: ClientSession, pair: tuple[bytes, bytes] | None) -> None:
        """Keep the key and value to set when a client disconnects, and count them."""
        self._memory.used -= session.later_bytes()
        session.on_disconnect = pair
        self._memory.used += session.later_bytes()

    def keep(self, session: ClientSession, response: Sequence[Piece]) -> None:
        """Keep a response until the session's next request. A bare acknowledgement is not counted: it is small."""
        session.response = response
        if len(response) > 1:
            nbytes = session.nbytes = sum(map(len, response))
            self._kept[session] = None
            self._kept_bytes += nbytes
            self._memory.used += nbytes
            while self._kept_bytes > KEPT_RESPONSE_BYTES:
                oldest = next(iter(self._kept))
                self.forget_response(oldest)
                oldest.lost = True

    def forget_response(self, session: ClientSession) -> None:
        """Drop the kept response of a session."""
        nbytes = session.nbytes
        if nbytes:
            del self._kept[session]
            self._kept_bytes -= nbytes
            self._memory.used -= nbytes
        session.response, session.nbytes, session.lost = None, 0, False

    def _drop(self, session: ClientSession) -> None:
        del self.sessions[session.name]
        self._gone.pop(session, None)
        self._count_session(session.name, -1)
        self.forget_response(session)
        # Without its session, the pair is set all the same when its time comes.
        if session not in self.disconnected:
            self.set_later(session, None)

    def _count_session(self, name: bytes, sign: int) -> None:
        nbytes = sign * (len(name) + SESSION_OVERHEAD_BYTES)
        self._session_bytes += nbytes
        self._memory.used += nbytes
