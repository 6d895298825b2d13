"""Authentication of a job's ranks to one another: how they agree on a session key that nobody else knows.

The store through which ranks find each other can be written by anybody who reaches it. So ranks agree on a key first,
and everything that they believe afterward is sealed with it (`stores.sealed`) or follows a challenge that only its
owners can answer (`Challenge`). There are three ways, in this order:

*Token.* ``TORCHDIST_REF_TOKEN_FILE`` names a file with a secret, the same on all hosts. Each rank publishes a random
number, and the key is an HMAC of all of them with the token. So a recorded job cannot be replayed to any rank: its own
number is new. Our launcher passes its ranks a new token for each attempt, in ``TORCHDIST_REF_TOKEN``.

*User.* On one host, rank 0 gives the key to processes of its own user. It listens on an abstract Unix socket, whose
name it publishes. The kernel reports the user at the other end to both sides (SO_PEERCRED), before either has sent a
byte. There is no file, and another user who takes the name is recognized.

*None.* Ranks on several hosts without a token, or ``TORCHDIST_REF_TRUST_NETWORK=1``: the key is known to everybody.

A wrong value in the store can make ranks fail here, or disagree about the way; none of them then accepts the others.
Do not add transports or groups here.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import os
import re
import secrets
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torchdist_ref.errors import AuthenticationError, RankStalledError, StoreTimeoutError
from torchdist_ref.job_environment import ranks_on_this_host
from torchdist_ref.stores import HashStore, Store
from torchdist_ref.stores.prefix import WatchedStore
from torchdist_ref.stores.sealed import KEY_BYTES, SealedStore, innermost
from torchdist_ref.stores.sockets import TRUST_NETWORK, is_loopback, trusts_network
from torchdist_ref.timeouts import Deadline

SECRET, SECRET_FILE = "TORCHDIST_REF_TOKEN", "TORCHDIST_REF_TOKEN_FILE"
MIN_SECRET_BYTES = 16
_PUBLIC_KEY = bytes(KEY_BYTES)
_SOCKET_NAME = re.compile(r"torchdist_ref/[0-9a-f]{32}")
_BACKLOG = 4096
_RETRY_SECONDS = 0.05
_CREDENTIALS = struct.Struct("3i")
CURES = (
    f"Put the same secret of at least {MIN_SECRET_BYTES} bytes into a file on every host and name it in {SECRET_FILE}, "
    f"or set {TRUST_NETWORK}=1 on all ranks if everybody who reaches this network may run code in them."
)
log = logging.getLogger("torchdist_ref.authentication")


def authenticate(store: Store, rank: int, size: int, timeout: float, on_close: list[Callable[[], None]]) -> SealedStore:
    """Agree with the other ranks on a session key, and return the store with sealed values.

    Args:
        store: Store that all ranks share, and that anybody may write.
        rank: This rank.
        size: Number of ranks.
        timeout: Longest duration of a wait in seconds.
        on_close: List to which a function is added that ends this rank's part, which the others may need until all
            of them have the key.

    Raises:
        AuthenticationError: The other side does not belong to this job, or the ranks are configured differently.
        RankStalledError: A rank did not publish in time what the others need.
    """
    if trusts_network():
        if rank == 0:
            store.set(_entry(0), _Entry.NONE)
        return SealedStore(store, _PUBLIC_KEY, authenticated=False)
    if secret := job_secret():
        return SealedStore(store, _key_from_secret(store, secret, rank, size, timeout))
    if size == 1:
        return SealedStore(store, secrets.token_bytes(KEY_BYTES))
    if isinstance(inner := innermost(store), HashStore):
        # Its users share the memory of this process.
        return SealedStore(store, inner.session_key)
    return _authenticate_by_user(store, rank, size, timeout, on_close)


# Entries: what each rank publishes in the store before there is a key. None of them is believed.


class _Entry:
    """First words of the entries."""

    NONE = b"none"
    SECRET = b"token"
    USER = b"user"


def _entry(rank: int) -> str:
    return f"authentication/{rank}"


def _read_entries(store: Store, ranks: range, size: int, rank: int, timeout: float) -> list[list[bytes]]:
    keys = [_entry(each) for each in ranks]
    try:
        values = store.wait_get(keys, timedelta(seconds=timeout))
    except StoreTimeoutError as error:
        absent = ", ".join(str(each) for each in ranks if not store.check([_entry(each)]))
        raise RankStalledError(
            f"init_process_group or new_group on rank {rank}: group ranks {absent} of {size} did not join in time. "
            f"Every member has to create the group."
        ) from error
    return [bytes(value).split() or [b""] for value in values]


def _require(entries: list[list[bytes]], kind: bytes, rank: int) -> None:
    """Raise unless the entries are of this rank's own kind."""
    other = next((entry[0] for entry in entries if entry[0] != kind), kind)
    if other == kind:
        return
    ways = {_Entry.SECRET: f"has {SECRET_FILE}", _Entry.NONE: f"has {TRUST_NETWORK}=1, or is on another host"}
    own = {_Entry.SECRET: "has a job token", _Entry.USER: "has neither a token nor leave to trust the network"}
    raise AuthenticationError(
        f"init_process_group: the ranks disagree about how to authenticate: rank {rank} {own.get(kind, 'differs')}, "
        f"another rank {ways.get(other, 'has no token')}. {CURES}"
    )


# Token


def job_secret() -> bytes:
    """Return the token of this job; empty if there is none.

    Raises:
        AuthenticationError: The file cannot be read, is too short, or can be read by other users.
    """
    path = os.environ.get(SECRET_FILE)
    if not path:
        return os.environ.get(SECRET, "").encode()
    try:
        with open(path, "rb") as file:
            mode, secret = os.fstat(file.fileno()).st_mode, file.read().strip()
    except OSError as error:
        raise AuthenticationError(f"{SECRET_FILE}={path}: {error.strerror}.") from error
    if mode & 0o077:
        raise AuthenticationError(f"{SECRET_FILE}={path}: other users may read or write it. Run: chmod 600 {path}")
    if len(secret) < MIN_SECRET_BYTES:
        raise AuthenticationError(
            f"{SECRET_FILE}={path}: the token has {len(secret)} bytes; it needs {MIN_SECRET_BYTES}. Make one with: "
            f"python -c 'import secrets; print(secrets.token_hex())'"
        )
    return secret


def new_secret() -> str:
    """Return a token for the environment of the ranks of one attempt."""
    return secrets.token_hex(KEY_BYTES)


def _key_from_secret(store: Store, secret: bytes, rank: int, size: int, timeout: float) -> bytes:
    if not os.environ.get(SECRET_FILE):
        # The launcher's token is new for each attempt, so the key is too.
        return hmac.digest(secret, b"session", "sha256")
    store.set(_entry(rank), b"%b %b" % (_Entry.SECRET, secrets.token_hex(KEY_BYTES).encode()))
    entries = _read_entries(store, range(size), size, rank, timeout)
    _require(entries, _Entry.SECRET, rank)
    return hmac.digest(secret, b"session " + b" ".join(b"/".join(entry) for entry in entries), "sha256")


# User


def _authenticate_by_user(
    store: Store, rank: int, size: int, timeout: float, on_close: list[Callable[[], None]]
) -> SealedStore:
    known, network = _all_on_this_host(store, size), _network().encode()
    own = [_Entry.USER, network]
    if rank == 0 and _has_credentials():
        server = KeyServer(size - 1)
        on_close.append(server.close)
        own.append(server.name.encode())
    if rank == 0 or not known:
        store.set(_entry(rank), b" ".join(own))
    if rank == 0 and known:
        return SealedStore(store, server.key) if _has_credentials() else _open_session(store, rank)
    deadline = Deadline(timeout)
    while True:
        entries = _read_entries(store, range(1 if known else size), size, rank, deadline.remaining())
        _require(entries, _Entry.USER, rank)
        if not _has_credentials() or (not known and any(entry[1:2] != [network] for entry in entries)):
            return _open_session(store, rank)
        if rank == 0:
            return SealedStore(store, server.key)
        try:
            return SealedStore(store, receive_key(entries[0][-1].decode(), deadline.remaining()))
        except (ConnectionRefusedError, ConnectionResetError) as error:
            # Rank 0 died, or the entry is that of an earlier run or of another attempt; rank 0 then replaces it.
            if isinstance(store, WatchedStore):
                store.raise_failure()
            if deadline.passed():
                raise AuthenticationError(
                    f"init_process_group: rank 0 does not serve the session key on this host ({error}). Another "
                    f"program may write to the store, or the ranks are on several hosts. {CURES}"
                ) from error
            time.sleep(_RETRY_SECONDS)


def _open_session(store: Store, rank: int) -> SealedStore:
    if rank == 0:
        log.warning(
            "the ranks are on several hosts and have no job token, so they cannot authenticate each other: whoever "
            "reaches the network can join. Objects are limited to plain data. %s",
            CURES,
        )
    return SealedStore(store, _PUBLIC_KEY, authenticated=False)


def _all_on_this_host(store: Store, size: int) -> bool:
    """Return whether all ranks are known to be on this host, without asking anybody."""
    host = getattr(innermost(store), "host", None)
    if isinstance(host, str) and is_loopback(host):
        return True
    return ranks_on_this_host(os.environ) == size == _world_size()


def _world_size() -> int:
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdecimal() else ranks_on_this_host(os.environ)


def _has_credentials() -> bool:
    return sys.platform == "linux"


def _network() -> str:
    """Return a text that is equal for two ranks if they share abstract Unix sockets."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return os.uname().nodename


def _peer_user(sock: socket.socket) -> tuple[int, int]:
    """Return process id and user id of the process that listened or connected at the other end."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(data)
    return pid, user


class KeyServer:
    """Server of a new session key to processes of this user. A forked child has no part in it.

    It ends when closed, or when that many processes have the key. Nothing is read from clients, so none of them can
    delay it.

    Args:
        count: Number of processes that need the key.

    Attributes:
        key: The session key.
        name: Name of its abstract socket, without the zero byte in front.
        thread: Its thread.
    """

    def __init__(self, count: int) -> None:
        self.key = secrets.token_bytes(KEY_BYTES)
        self.name = f"torchdist_ref/{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(_BACKLOG)
        self._process = os.getpid()
        self._closed = threading.Event()
        self._count, self._served = count, set[int]()
        _servers.add(self)
        self.thread = threading.Thread(target=self._serve, name="torchdist_ref key server", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        while not self._closed.is_set() and len(self._served) < self._count:
            try:
                client, _ = self._socket.accept()
            except OSError:
                # No descriptor is free, or the socket is closed.
                self._closed.wait(_RETRY_SECONDS)
                continue
            with client, contextlib.suppress(OSError):
                self._answer(client)
        self._socket.close()

    def _answer(self, client: socket.socket) -> None:
        pid, user = _peer_user(client)
        if user != os.geteuid():
            log.warning("refused the session key to process %d of user %d", pid, user)
            return
        client.setblocking(False)
        client.sendall(self.key)
        if pid:
            # The kernel reports 0 for processes of other pid namespaces.
            self._served.add(pid)

    def close(self) -> None:
        """End the server."""
        if os.getpid() == self._process:
            self._closed.set()
            with contextlib.suppress(OSError):
                # Wakes the thread; closing alone would not.
                self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def receive_key(name: str, timeout: float) -> bytes:
    """Return the session key from the `KeyServer` of this name.

    Raises:
        ConnectionRefusedError: There is none.
        AuthenticationError: It belongs to another user.
    """
    if not _SOCKET_NAME.fullmatch(name):
        raise AuthenticationError(f"init_process_group: rank 0 published no socket for the session key. {CURES}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(max(timeout, _RETRY_SECONDS))
        sock.connect(f"\0{name}")
        pid, user = _peer_user(sock)
        key = sock.recv(KEY_BYTES, socket.MSG_WAITALL) if user == os.geteuid() else b""
    if user != os.geteuid():
        raise AuthenticationError(
            f"init_process_group: process {pid}, which offers the session key, belongs to user {user}, and this rank "
            f"to user {os.geteuid()}. Ranks of several users need a token. {CURES}"
        )
    if len(key) < KEY_BYTES:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "rank 0 ended before it had sent the session key")
    return key


_servers: weakref.WeakSet[KeyServer] = weakref.WeakSet()


def _close_copies() -> None:
    for server in list(_servers):
        server.close()
    _servers.clear()


os.register_at_fork(after_in_child=_close_copies)
