"""Authentication of a job's ranks to one another: how they agree on a session key that nobody else knows.

The store through which ranks find each other can be written by anybody who reaches it. So ranks agree on a key first,
and everything that they believe afterward is sealed with it (`stores.sealed`) or follows a challenge that only its
owners can answer (`transports.acceptor`). There are three ways, in this order:

*Token.* ``TORCHDIST_REF_TOKEN_FILE`` names a file with a secret, the same on all hosts. Each rank publishes a random
number, and the key is an HMAC of all of them with the token. So a recorded job cannot be replayed to any rank: its own
number is new. Our launcher passes its ranks a new token for each attempt, in ``TORCHDIST_REF_TOKEN``.

*User.* On one host, rank 0 gives the key to processes of its own user. It listens on an abstract Unix socket, whose
name it publishes. The kernel reports the user at the other end to both sides (SO_PEERCRED), before either has sent a
byte. There is no file, and another user who takes the name is recognized. Connections of other users are closed, and
where they fill the queue, ranks try again.

*None.* Ranks on several hosts without a token, or ``TORCHDIST_REF_TRUST_NETWORK=1``: the key is known to everybody.

Each rank chooses the token's way by its own environment. On Linux, a rank that knows all ranks to be on its host, since
the store's address is a loopback address or a launcher reports it (`ranks_on_this_host`), never takes the way *none*
unless it trusts the network. For ranks with a token or that knowledge, a wrong value in the store has one effect: they
fail here. Without both, the store's content tells ranks on one host from ranks on several. A process that writes it can
then have them take the way *none*, or join in their place: rank 0 logs a warning, and they exchange no pickles.
Do not add transports or groups here.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import select
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

from torchdist_ref.errors import AuthenticationError, RankStalledError, StoreTimeoutError, rank_names
from torchdist_ref.processes.forks import close_copies_in_child
from torchdist_ref.processes.identity import simulated_place
from torchdist_ref.processes.job_environment import ranks_on_this_host
from torchdist_ref.stores import HashStore, Store
from torchdist_ref.stores.addresses import is_loopback
from torchdist_ref.stores.prefix import WatchedStore
from torchdist_ref.stores.sealed import KEY_BYTES, SealedStore, innermost, message_code
from torchdist_ref.stores.sockets import TRUST_NETWORK, trusts_network
from torchdist_ref.timeouts import CHECK_SECONDS, Deadline

SECRET, SECRET_FILE = "TORCHDIST_REF_TOKEN", "TORCHDIST_REF_TOKEN_FILE"
MIN_SECRET_BYTES = 16
_PUBLIC_KEY = bytes(KEY_BYTES)
_SOCKET_NAME = re.compile(r"torchdist_ref/[0-9a-f]{32}")
_SPARE_BACKLOG, _MAX_BACKLOG = 16, 4096
_RETRY_SECONDS, _CONNECT_RETRY_SECONDS = 0.05, 0.001
_SERVE_SECONDS = 0.01
"""Time that rank 0 serves the session key before it goes on; ranks that come later get the key from a thread."""
_CREDENTIALS = struct.Struct("3i")
CURES = (
    f"Put the same secret of at least {MIN_SECRET_BYTES} bytes into a file on every host and name it in {SECRET_FILE}, "
    f"or set {TRUST_NETWORK}=1 on all ranks if everybody who reaches this network may run code in them."
)
log = logging.getLogger("torchdist_ref.membership.trust")


class KeyAgreement:
    """One rank's part in the agreement on a session key.

    Ranks that meet set and read the entries with the requests of that. An error waits for `complete`, by which the
    other ranks can learn of it.

    Args:
        store: Store that all ranks share, and that anybody may write.
        rank: This rank.
        size: Number of ranks.
        on_close: List to which a function is added that ends this rank's part, which the others may need until all of
            them have the key.
        world_size: Number of ranks of the job, if these are some of them; 0 for `size`.
        nonce: Random number of 32 hexadecimal digits, from which rank 0 makes the name of its socket. By default, it
            makes one here.

    Attributes:
        nonce: The random number.
        own: Keys and values that this rank has to set before `complete`.
        awaited: Keys of the entries that `complete` needs.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        on_close: list[Callable[[], None]],
        world_size: int = 0,
        nonce: str = "",
    ) -> None:
        self._rank, self._size, self._world_size = rank, size, world_size or size
        self.nonce = nonce or os.urandom(16).hex()
        self._early: tuple[str, socket.socket] | None = None
        self._needs_key = False
        self.own: dict[str, bytes] = {}
        self.awaited: list[str] = []
        self._complete: Callable[[Store, float, Sequence[bytes] | None], SealedStore]
        try:
            self._prepare(store, on_close)
        except AuthenticationError as error:
            self._complete = partial(_fail, error)

    def complete(self, store: Store, timeout: float, entries: Sequence[bytes] | None = None) -> SealedStore:
        """Return the store with sealed values.

        Args:
            store: Store with the entries, which may be a part of the one that was given.
            timeout: Longest duration of a wait in seconds.
            entries: Values of the awaited keys if all ranks have met; None if some may come later.

        Raises:
            AuthenticationError: The other side does not belong to this job, or the ranks are configured differently.
            RankStalledError: A rank did not publish in time what the others need.
        """
        return self._complete(store, timeout, entries)

    def connect(self, nonce: str) -> None:
        """Connect to rank 0, which has opened a round with this nonce, so that it finds this rank in its queue.

        Rank 0 need not wait for a rank that connects before it greets. Without that, `complete` connects.
        """
        self.close()
        name = _socket_name(nonce)
        if self._needs_key and _SOCKET_NAME.fullmatch(name):
            # Without a descriptor, or with a full queue, `complete` tries again and says so.
            with contextlib.suppress(OSError):
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._early = name, sock
                sock.setblocking(False)
                sock.connect(f"\0{name}")
                return
            self.close()

    def close(self) -> None:
        """Close a connection to rank 0 that is not used."""
        if self._early is not None:
            self._early[1].close()
            self._early = None

    def _prepare(self, store: Store, on_close: list[Callable[[], None]]) -> None:
        rank, size = self._rank, self._size
        if trusts_network():
            self.own = {_entry(0): _Entry.NONE} if rank == 0 else {}
            self._complete = lambda store, *_: SealedStore(store, _PUBLIC_KEY, authenticated=False)
        elif secret := job_secret():
            self._prepare_secret(secret)
        elif size == 1:
            self._complete = lambda store, *_: SealedStore(store, os.urandom(KEY_BYTES))
        elif isinstance(inner := innermost(store), HashStore):
            # Its users share the memory of this process.
            self._complete = lambda store, *_: SealedStore(store, inner.session_key)
        elif simulated_place.get():
            # So do simulated ranks, whatever their store.
            self._complete = lambda store, *_: SealedStore(store, _PUBLIC_KEY)
        else:
            self._prepare_user(store, on_close)

    def _read(
        self, store: Store, timeout: float, kind: bytes, entries: Sequence[bytes] | None = None
    ) -> list[list[bytes]]:
        """Return the words of the awaited entries, which have to be of one kind."""
        if entries is None:
            entries = _read_entries(store, self.awaited, self._size, self._rank, timeout)
        found = [bytes(entry).split() or [b""] for entry in entries]
        _require(found, kind, self._rank)
        return found

    # Token

    def _prepare_secret(self, secret: bytes) -> None:
        if not os.environ.get(SECRET_FILE):
            # The launcher's token is new for each attempt, so the key is too.
            key = message_code(secret, b"session")
            self._complete = lambda store, *_: SealedStore(store, key)
            return
        self.own = {_entry(self._rank): b"%b %b" % (_Entry.SECRET, os.urandom(KEY_BYTES).hex().encode())}
        self.awaited = [_entry(each) for each in range(self._size)]
        self._complete = partial(self._complete_secret, secret)

    def _complete_secret(
        self, secret: bytes, store: Store, timeout: float, entries: Sequence[bytes] | None
    ) -> SealedStore:
        found = self._read(store, timeout, _Entry.SECRET, entries)
        text = b"session " + b" ".join(b"/".join(entry) for entry in found)
        return SealedStore(store, message_code(secret, text))

    # User

    def _prepare_user(self, store: Store, on_close: list[Callable[[], None]]) -> None:
        rank, server = self._rank, None
        known = _all_on_this_host(store, self._world_size)
        network = _network().encode() if rank == 0 or not known else b""
        own = [_Entry.USER, network]
        if rank == 0 and _has_credentials():
            server = KeyServer(self._size - 1, self.nonce)
            on_close.append(server.close)
            own.append(server.name.encode())
        elif _has_credentials():
            self._needs_key = True
            on_close.append(self.close)
        if network:
            self.own = {_entry(rank): b" ".join(own)}
        self.awaited = [_entry(each) for each in range(self._size if not known else min(rank, 1))]
        self._complete = partial(self._complete_user, server, None if known else network, on_close)

    def _complete_user(
        self,
        server: KeyServer | None,
        network: bytes | None,
        on_close: list[Callable[[], None]],
        store: Store,
        timeout: float,
        entries: Sequence[bytes] | None,
    ) -> SealedStore:
        """Serve the key or receive it; `network` is None if all ranks are known to be on this host.

        A rank whose part is over has nothing to close any more.
        """
        deadline, have_met = Deadline(timeout), entries is not None
        while True:
            found = self._read(store, deadline.remaining(), _Entry.USER, entries)
            elsewhere = network is not None and any(entry[1:2] != [network] for entry in found)
            if elsewhere or not _has_credentials():
                return _open_session(store, self._rank)
            if server is not None:
                if server.serve(_SERVE_SECONDS if have_met else 0.0):
                    on_close.remove(server.close)
                return SealedStore(store, server.key)
            try:
                key = self._receive(found[0][-1].decode(), store, deadline)
                on_close.remove(self.close)
                return SealedStore(store, key)
            except (ConnectionRefusedError, ConnectionResetError, BlockingIOError) as error:
                # Rank 0 died, or the entry is that of an earlier run or of another attempt; rank 0 then replaces it. Or
                # another user fills the queue.
                if isinstance(store, WatchedStore):
                    store.raise_failure()
                if deadline.passed():
                    raise AuthenticationError(
                        f"init_process_group: rank 0 does not serve the session key on this host ({error}). Another "
                        f"program may write to the store, or the ranks are on several hosts. {CURES}"
                    ) from error
                time.sleep(_RETRY_SECONDS)
                entries = None

    def _receive(self, name: str, store: Store, deadline: Deadline) -> bytes:
        check = store.raise_failure if isinstance(store, WatchedStore) else _no_check
        if self._early is None or self._early[0] != name:
            self.close()
        (_, sock), self._early = self._early or ("", None), None
        try:
            return receive_key(name, deadline.remaining(), check, sock)
        except TimeoutError as error:
            # In a group of some ranks, group rank 0 may be another global rank.
            ranks = (0,) if self._size == self._world_size else ()
            raise RankStalledError(
                f"init_process_group or new_group on rank {self._rank}: rank 0 of the group listens for this rank, but "
                f"did not send the session key within {deadline.seconds:g} s: {error.strerror}. It may be stopped, or "
                f"blocked by other code of its process. Find out what it does, and end or continue it."
            ).naming(ranks) from error


def _fail(error: AuthenticationError, *_: Any) -> SealedStore:
    raise error


# Entries: what each rank publishes in the store before there is a key. None of them is believed.


class _Entry:
    """First words of the entries."""

    NONE = b"none"
    SECRET = b"token"
    USER = b"user"


def _entry(rank: int) -> str:
    return f"authentication/{rank}"


def _read_entries(store: Store, keys: list[str], size: int, rank: int, timeout: float) -> list[bytes]:
    if not keys:
        return []
    try:
        return store.wait_get(keys, timedelta(seconds=timeout))
    except StoreTimeoutError as error:
        absent = [int(key.rpartition("/")[2]) for key in keys if not store.check([key])]
        if not absent:
            # They have joined meanwhile, or the server was late.
            return store.multi_get(keys)
        raise RankStalledError(
            f"init_process_group or new_group on rank {rank}: {rank_names(absent)} of {size} did not join in time. "
            f"Every member has to create the group."
        ) from error


def _require(entries: list[list[bytes]], kind: bytes, rank: int) -> None:
    """Raise unless the entries are of this rank's own kind."""
    other = next((entry[0] for entry in entries if entry[0] != kind), kind)
    if other == kind:
        return
    ways = {_Entry.SECRET: f"has {SECRET_FILE}", _Entry.NONE: f"has {TRUST_NETWORK}=1, or is on another host"}
    own = {_Entry.SECRET: "has a job token", _Entry.USER: "has neither a token nor permission to trust the network"}
    raise AuthenticationError(
        f"init_process_group: the ranks disagree about how to authenticate: rank {rank} {own.get(kind, 'differs')}, "
        f"another rank {ways.get(other, 'has no token')}. {CURES}"
    )


# Token


def job_secret() -> bytes:
    """Return the token of this job; empty if there is none.

    Raises:
        AuthenticationError: The token is too short. Or its file cannot be read, is not a file, belongs to another user,
            or can be read by other users.
    """
    path = os.environ.get(SECRET_FILE)
    if path:
        source, secret = f"{SECRET_FILE}={path}", _read_secret(path)
    else:
        source, secret = SECRET, os.fsencode(os.environ.get(SECRET, ""))
    if len(secret) < MIN_SECRET_BYTES and (path or secret):
        raise AuthenticationError(
            f"{source}: the token has {len(secret)} bytes; it needs {MIN_SECRET_BYTES}. Make one with: "
            f"python -c 'import secrets; print(secrets.token_hex())'"
        )
    return secret


def _read_secret(path: str) -> bytes:
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            secret = file.read().strip() if stat.S_ISREG(status.st_mode) else b""
    except OSError as error:
        raise AuthenticationError(f"{SECRET_FILE}={path}: {error.strerror}.") from error
    user = os.geteuid()
    if not stat.S_ISREG(status.st_mode):
        raise AuthenticationError(f"{SECRET_FILE}={path}: it is not a regular file. Put the token into a file.")
    if status.st_uid not in (user, 0):
        raise AuthenticationError(
            f"{SECRET_FILE}={path}: it belongs to user {status.st_uid}, who knows the token, and this rank to user "
            f"{user}. Make a token in a file of user {user}, or run: chown {user} {path}"
        )
    if status.st_mode & 0o077:
        raise AuthenticationError(f"{SECRET_FILE}={path}: other users may read or write it. Run: chmod 600 {path}")
    return secret


def new_secret() -> str:
    """Return a token for the environment of the ranks of one attempt."""
    return os.urandom(KEY_BYTES).hex()


# User


def _open_session(store: Store, rank: int) -> SealedStore:
    if rank == 0:
        log.warning(
            "the ranks are on several hosts and have no job token, so they cannot authenticate each other: whoever "
            "reaches the network can join. Objects are limited to plain data. If all ranks are on this host, set "
            "MASTER_ADDR=127.0.0.1, since another program may have written to the store. %s",
            CURES,
        )
    return SealedStore(store, _PUBLIC_KEY, authenticated=False)


def _all_on_this_host(store: Store, world_size: int) -> bool:
    """Return whether all ranks of the job are known to be on this host, without asking anybody."""
    host = getattr(innermost(store), "host", None)
    if isinstance(host, str) and is_loopback(host):
        return True
    return ranks_on_this_host(os.environ) == world_size == _world_size()


def _world_size() -> int:
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdecimal() else ranks_on_this_host(os.environ)


def _has_credentials() -> bool:
    return sys.platform == "linux"


def _network() -> str:
    """Return a text that is equal for two ranks if they share abstract Unix sockets."""
    try:
        return f"{_boot_id()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return os.uname().nodename


@cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _peer_user(sock: socket.socket) -> tuple[int, int]:
    """Return process id and user id of the process that listened or connected at the other end."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(data)
    return pid, user


class KeyServer:
    """Server of a new session key to processes of this user. A forked child has no part in it.

    It ends when closed, or when that many processes have the key. Nothing is read from clients, so none of them can
    delay it. Nearly always all ranks come at once, and `serve` needs no thread.

    Args:
        count: Number of processes that need the key.
        nonce: Random number for the name; a new one by default.

    Attributes:
        key: The session key.
        name: Name of its abstract socket, without the zero byte in front.
        thread: Its thread; None if it has none.
    """

    def __init__(self, count: int, nonce: str = "") -> None:
        self.key = os.urandom(KEY_BYTES)
        self.name = _socket_name(nonce or os.urandom(16).hex())
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.name}")
        # A rank waits for all that are before it in the queue, which another user can fill, so it is short.
        self._socket.listen(min(count + _SPARE_BACKLOG, _MAX_BACKLOG))
        self._closed = threading.Event()
        self._count, self._served, self._refused = count, set[int](), set[int]()
        self.thread: threading.Thread | None = None
        close_copies_in_child(self)

    def serve(self, seconds: float = 0.0) -> bool:
        """Serve on this thread for a time, and then on another one; return whether all have the key already."""
        self._serve_within(Deadline(seconds))
        if self._complete:
            self._socket.close()
            return True
        self._socket.settimeout(None)
        self.thread = threading.Thread(target=self._serve, name="torchdist_ref key server", daemon=True)
        self.thread.start()
        return False

    @property
    def _complete(self) -> bool:
        return len(self._served) >= self._count

    def _serve_within(self, deadline: Deadline) -> None:
        # No client in time, or no descriptor is free: the thread tries again.
        with contextlib.suppress(OSError):
            while not self._complete and not deadline.passed():
                self._socket.settimeout(deadline.remaining())
                self._answer_next()

    def _serve(self) -> None:
        while not self._closed.is_set() and not self._complete:
            try:
                self._answer_next()
            except OSError:
                # No descriptor is free, or the socket is closed.
                self._closed.wait(_RETRY_SECONDS)
        self._socket.close()

    def _answer_next(self) -> None:
        client, _ = self._socket.accept()
        with client, contextlib.suppress(OSError):
            self._answer(client)

    def _answer(self, client: socket.socket) -> None:
        pid, user = _peer_user(client)
        if user != os.geteuid():
            if user not in self._refused:
                self._refused.add(user)
                log.warning("refused the session key to process %d of user %d; this is logged once a user", pid, user)
            return
        client.setblocking(False)
        client.sendall(self.key)
        if pid:
            # The kernel reports 0 for processes of other pid namespaces.
            self._served.add(pid)

    def close(self) -> None:
        """End the server."""
        self._closed.set()
        with contextlib.suppress(OSError):
            # Wakes the thread; closing alone would not.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def close_copies(self) -> None:
        """See `DescriptorOwner.close_copies`."""
        self._socket.close()


def _no_check() -> None:
    return None


def _socket_name(nonce: str) -> str:
    return f"torchdist_ref/{nonce}"


def receive_key(
    name: str, timeout: float, check: Callable[[], None] = _no_check, connected: socket.socket | None = None
) -> bytes:
    """Return the session key from the `KeyServer` of this name.

    Args:
        name: Name of its socket.
        timeout: Longest duration of the wait in seconds.
        check: Function that raises an error if the wait is in vain; called every `CHECK_SECONDS`.
        connected: Socket that is connected to it already, which this closes; by default, it connects.

    Raises:
        ConnectionRefusedError: There is none.
        BlockingIOError: Its queue stayed full.
        TimeoutError: It sent no key in time.
        AuthenticationError: It belongs to another user.
    """
    if not _SOCKET_NAME.fullmatch(name):
        raise AuthenticationError(f"init_process_group: rank 0 published no socket for the session key. {CURES}")
    deadline = Deadline(max(timeout, _RETRY_SECONDS))
    with connected or socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        if connected is None:
            sock.setblocking(False)
            _connect(sock, name, deadline, check)
        pid, user = _peer_user(sock)
        if user == os.geteuid():
            _await_key(sock, pid, deadline, check)
        key = sock.recv(KEY_BYTES, socket.MSG_WAITALL) if user == os.geteuid() else b""
    if user != os.geteuid():
        raise AuthenticationError(
            f"init_process_group: process {pid}, which offers the session key, belongs to user {user}, and this rank "
            f"to user {os.geteuid()}. Ranks of several users need a token. {CURES}"
        )
    if len(key) < KEY_BYTES:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "rank 0 ended before it had sent the session key")
    return key


def _connect(sock: socket.socket, name: str, deadline: Deadline, check: Callable[[], None]) -> None:
    """Connect to a server; its queue may be full, of ranks or of connections of another user."""
    checked = time.monotonic()
    while True:
        try:
            return sock.connect(f"\0{name}")
        except BlockingIOError:
            if deadline.passed():
                raise
            time.sleep(_CONNECT_RETRY_SECONDS)
        if time.monotonic() > checked + CHECK_SECONDS:
            check()
            checked = time.monotonic()


def _await_key(sock: socket.socket, pid: int, deadline: Deadline, check: Callable[[], None]) -> None:
    """Wait until the server has sent or ended; it may be stopped, and then the kernel keeps the connection."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    while not poll.poll(min(CHECK_SECONDS, deadline.remaining()) * 1000):
        check()
        if deadline.passed():
            process = f"process {pid} of this host" if pid else "its process"
            raise TimeoutError(errno.ETIMEDOUT, f"{process} does not respond")
