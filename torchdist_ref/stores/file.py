"""FileStore: a store in a file, for hosts that share a disk but cannot reach each other's ports.

The file is an append-only log. A record is a key and a value, each with a 32-bit length in front; a record with a "-"
before its key removes the key. A writer holds the file's exclusive lock (flock), replays the records that others have
appended since, and appends its own. A reader holds the shared lock. The format is torch's, so both libraries can use
one file. Two counters without a slash are the store's own: "refcount/" (objects that have the file open) and "cleanup/"
(objects that have closed it). The last of `world_size` objects removes the file.

It differs from torch's store in three ways. A file that is not a store's raises an error at once, `delete_key` returns
whether the key existed, and a lock is awaited no longer than the time-out.

Each process that can open the file can hold its lock, and so stall the job. So the file is created for its owner
only, and those of other users, or which other users can write, are refused. torch creates its files readable by all:
such a file of this user is used, with a warning, so that ranks of both libraries can share it.

A rank that fails because it has no free descriptor tells the others through its store. So each object holds one in
reserve, which it gives up while it has the file open. Do not add the meaning of operations here: it belongs to `Table`.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

from torchdist_ref.errors import ArgumentError, ArgumentTypeError, DistStoreError, StoreTimeoutError, explain
from torchdist_ref.processes.forks import close_copies_in_child
from torchdist_ref.stores.base import (
    POLL_SECONDS,
    Store,
    Text,
    integer,
    key_bytes,
    key_list,
    pair_list,
    request_limit,
    timeout_seconds,
    value_bytes,
)
from torchdist_ref.stores.hash import Table
from torchdist_ref.stores.sockets import TRUST_NETWORK, trusts_network
from torchdist_ref.timeouts import Deadline

logger = logging.getLogger("torchdist_ref.stores")
T = TypeVar("T")
OPEN_COUNT, CLOSED_COUNT = b"refcount/", b"cleanup/"


class FileLog:
    """File of a store, and the table of the records read so far.

    Attributes:
        path: path of the file.
        table: keys and values as of the last read.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.table = Table(slash=b"/")
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self._warned = False
        self._lock = threading.Lock()
        self._closed = False
        self._reserve: int | None = None
        self._locked_file: int | None = None
        close_copies_in_child(self)

    @contextmanager
    def reading(self, deadline: Deadline) -> Iterator[Table]:
        """Hold the shared lock and yield the table as the file has it now."""
        with self._opened(os.O_RDONLY, fcntl.LOCK_SH, deadline) as descriptor:
            self._replay(descriptor)
            yield self.table

    def change(self, keys: Sequence[bytes], action: Callable[[Table], T], deadline: Deadline) -> T:
        """Hold the exclusive lock, run an action that may change the values of `keys`, and append the changes."""
        with self._opened(os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX, deadline) as descriptor:
            self._replay(descriptor)
            before = [key in self.table.values for key in keys]
            result = action(self.table)
            records = [self._record(key, was) for key, was in zip(keys, before, strict=True)]
            self._append(descriptor, b"".join(records))
        return result

    def close_copies(self) -> None:
        """Close a forked child's copies of the reserve, and of the file that another thread of the parent has open.

        A lock of the file lasts until all copies of the descriptor that has it are closed.
        """
        self._lock = threading.Lock()
        self._close_reserve()
        if self._locked_file is not None:
            os.close(self._locked_file)
            self._locked_file = None

    def _close_reserve(self) -> None:
        reserve, self._reserve = self._reserve, None
        if reserve is not None:
            os.close(reserve)

    def release(self) -> None:
        """Give up the reserve for good."""
        self._closed = True
        self._close_reserve()

    def close(self, world: int, deadline: Deadline) -> None:
        """Count one more object that has closed the file; the last of `world` objects removes it.

        All of it happens under the lock: an object that opens the file meanwhile is counted, or finds the file gone.
        """
        with self._opened(os.O_RDWR, fcntl.LOCK_EX, deadline) as descriptor:
            self._replay(descriptor)
            users, closed = self.table.add(OPEN_COUNT, -1), self.table.add(CLOSED_COUNT, 1)
            if users == 0 and 0 <= world <= closed:
                os.unlink(self.path)
            else:
                self._append(descriptor, self._record(OPEN_COUNT, True) + self._record(CLOSED_COUNT, True))

    def _record(self, key: bytes, existed: bool) -> bytes:
        value = self.table.values.get(key)
        if value is None and not existed:
            return b""
        name = b"-" + key if value is None else key
        return struct.pack(f"<I{len(name)}sI", len(name), name, len(value or b"")) + (value or b"")

    def _append(self, descriptor: int, data: bytes) -> None:
        rest = memoryview(data)
        try:
            os.lseek(descriptor, self._offset, os.SEEK_SET)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError as error:
            # Half a record would damage the file for all, and the table has values that were not written.
            os.ftruncate(descriptor, self._offset)
            self._forget()
            raise DistStoreError(f"FileStore: cannot write to {self.path!r}: {error.strerror}.") from error
        self._offset += len(data)

    def _forget(self) -> None:
        self.table, self._offset = Table(slash=b"/"), 0

    def _replay(self, descriptor: int) -> None:
        state = os.fstat(descriptor)
        file = (state.st_dev, state.st_ino)
        if file != self._file or state.st_size < self._offset:
            self._file = file
            self._forget()
        data = os.pread(descriptor, state.st_size - self._offset, self._offset) if state.st_size > self._offset else b""
        offset = 0
        while offset < len(data):
            key, offset = self._field(data, offset)
            value, offset = self._field(data, offset)
            self._apply(key, value)
        self._offset += offset

    def _field(self, data: bytes, offset: int) -> tuple[bytes, int]:
        start = offset + 4
        end = start + int.from_bytes(data[offset:start], "little")
        if len(data) < start or len(data) < end:
            self._forget()
            raise self._damaged("a record in it reaches beyond its end")
        return data[start:end], end

    def _apply(self, key: bytes, value: bytes) -> None:
        if key.startswith(b"-"):
            self.table.delete(key[1:])
        elif key.startswith(b"/") or key in (OPEN_COUNT, CLOSED_COUNT):
            self.table.set(key, value)
        else:
            self._forget()
            raise self._damaged(f"it has a record {key[:40]!r}")

    def _damaged(self, reason: str) -> DistStoreError:
        return DistStoreError(
            f"FileStore: {self.path!r} is not the file of a store, or is damaged: {reason}. Remove it, or use another."
        )

    @contextmanager
    def _opened(self, flags: int, lock: int, deadline: Deadline) -> Iterator[int]:
        # A thread that waits for the file's lock has this one.
        if not self._lock.acquire(timeout=min(deadline.remaining(), threading.TIMEOUT_MAX)):
            raise self._locked(deadline)
        try:
            descriptor = self._open_locked(flags, lock, deadline)
            try:
                yield descriptor
            finally:
                self._locked_file = None
                os.close(descriptor)
                if self._reserve is None and not self._closed:
                    self._reserve = _reserved_descriptor()
        finally:
            self._lock.release()

    def _open_locked(self, flags: int, lock: int, deadline: Deadline) -> int:
        while True:
            try:
                descriptor = self._open(flags)
            except OSError as error:
                raise self._cannot_open(error) from error
            self._locked_file = descriptor
            try:
                self._check_kind(os.fstat(descriptor))
                self._check_owner(os.fstat(descriptor))
                self._acquire_lock(descriptor, lock, deadline)
                if os.fstat(descriptor).st_nlink:
                    return descriptor
            except BaseException:
                self._locked_file = None
                os.close(descriptor)
                raise
            # The last user removed the file while this one waited for the lock.
            self._locked_file = None
            os.close(descriptor)

    def _open(self, flags: int) -> int:
        try:
            return os.open(self.path, flags | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or self._reserve is None:
                raise
        self._close_reserve()
        return self._open(flags)

    def _acquire_lock(self, descriptor: int, lock: int, deadline: Deadline) -> None:
        pause = 0.0002
        while True:
            try:
                return fcntl.flock(descriptor, lock | fcntl.LOCK_NB)
            except BlockingIOError:
                if deadline.passed():
                    raise self._locked(deadline) from None
            time.sleep(min(pause, deadline.remaining()))
            pause = min(2 * pause, POLL_SECONDS)

    def _check_kind(self, state: os.stat_result) -> None:
        if not stat.S_ISREG(state.st_mode):
            raise DistStoreError(
                f"FileStore: {self.path!r} is not a regular file but a pipe or a device. Pass the path of a new file."
            )

    def _check_owner(self, state: os.stat_result) -> None:
        """Raise if other users have the file, or can write it; warn if they can read it."""
        if state.st_uid == os.geteuid() and not state.st_mode & 0o077:
            return
        if trusts_network():
            return
        if state.st_uid == os.geteuid() and not state.st_mode & 0o022:
            if not self._warned:
                logger.warning(
                    "FileStore: other users can read %r, as any file that torch creates, and so can stall its users. "
                    "Let this library create it, or run: chmod 600 %s",
                    self.path,
                    self.path,
                )
            self._warned = True
            return
        problem = f"belongs to user {state.st_uid}, and this process to user {os.geteuid()}"
        cure = "Use another path, in a directory that only this user can write"
        if state.st_uid == os.geteuid():
            problem, cure = "can be written by other users", f"Run: chmod 600 {self.path}"
        raise DistStoreError(
            f"FileStore: {self.path!r} {problem}: they could damage the store. {cure}; or set {TRUST_NETWORK}=1 on all "
            f"ranks if everybody with access may run code in them."
        )

    def _locked(self, deadline: Deadline) -> StoreTimeoutError:
        return StoreTimeoutError(
            f"FileStore: the lock of {self.path!r} was not free within {deadline.seconds:g} s. A process that uses the "
            f"file may be stopped: find it with `fuser {self.path}`."
        )

    def _cannot_open(self, error: OSError) -> DistStoreError:
        if error.errno == errno.ENOENT:
            self._forget()
            folder = os.path.dirname(os.path.abspath(self.path))
            problem = "the file is gone" if os.path.isdir(folder) else f"the directory {folder!r} does not exist"
            return DistStoreError(f"FileStore: cannot open {self.path!r}: {problem}. All ranks must use the same path.")
        return DistStoreError(
            f"FileStore: cannot open {self.path!r}: {error.strerror}. Pass the path of a file, in a directory that all "
            f"ranks can write."
        )


class FileStore(Store):
    """Store in a file that several processes share.

    Args:
        file_name: path of the file. The file is created if it does not exist; its directory must exist.
        world_size: number of stores that will use the file. The last one to close removes it; with -1 none does.

    Raises:
        DistStoreError: the file cannot be opened, is not the file of a store, or belongs to another user.
        StoreTimeoutError: another process holds the file's lock.

    >>> import os, tempfile
    >>> from torchdist_ref.stores import FileStore
    >>> path = os.path.join(tempfile.mkdtemp(), "store")
    >>> store = FileStore(path, 1)
    >>> store.set("k", "v")
    >>> store.get("k")
    b'v'
    >>> store.close()
    >>> os.path.exists(path)
    False

    Elsewhere:
        None in MPI, NCCL and JAX, whose processes meet at a network address or through a launcher.
    """

    def __init__(self, file_name: str, world_size: int = -1) -> None:
        self._world = integer("FileStore", "world_size", world_size)
        self._log = FileLog(_checked_path(file_name))
        try:
            self._log.change([OPEN_COUNT], lambda table: table.add(OPEN_COUNT, 1), self._deadline("FileStore", None))
        except BaseException:
            self._log.release()
            raise
        self._finalizer = weakref.finalize(self, _close_log, self._log, self._world, os.getpid())

    @property
    def path(self) -> str:
        """Path of the file."""
        return self._log.path

    def close(self) -> None:
        """Close this store; the last of `world_size` removes the file.

        A store that is no longer referenced closes itself.
        """
        self._finalizer()

    def set(self, key: Text, value: Text) -> None:
        name, data = _key("set", key), value_bytes("set", value)
        self._change("set", [name], lambda table: table.set(name, data))

    def get(self, key: Text) -> bytes:
        return self._get_all("get", [_key("get", key)])[0]

    def add(self, key: Text, value: int) -> int:
        name, delta = _key("add", key), integer("add", "value", value)
        return self._change("add", [name], lambda table: table.add(name, delta))

    def check(self, keys: Sequence[Text]) -> bool:
        names = _keys("check", keys)
        with self._log.reading(self._deadline("check", None)) as table:
            return not table.missing(names)

    def wait(self, keys: Sequence[Text], timeout: timedelta | None = None) -> None:
        self._wait_for("wait", _keys("wait", keys), self._deadline("wait", timeout), lambda table: None)

    def compare_set(self, key: Text, expected_value: Text, desired_value: Text) -> bytes:
        name = _key("compare_set", key)
        expected = value_bytes("compare_set", expected_value, "expected_value")
        desired = value_bytes("compare_set", desired_value, "desired_value")
        return self._change("compare_set", [name], lambda table: table.compare_set(name, expected, desired))

    def delete_key(self, key: Text) -> bool:
        name = _key("delete_key", key)
        return self._change("delete_key", [name], lambda table: table.delete(name))

    def num_keys(self) -> int:
        with self._log.reading(self._deadline("num_keys", None)) as table:
            return len(table.values)

    def list_keys(self) -> list[str]:
        with self._log.reading(self._deadline("list_keys", None)) as table:
            return [key[1:].decode("utf-8", "surrogateescape") for key in table.values if key.startswith(b"/")]

    def append(self, key: Text, value: Text) -> None:
        name, data = _key("append", key), value_bytes("append", value)
        self._change("append", [name], lambda table: table.append(name, data))

    def multi_get(self, keys: Sequence[Text]) -> list[bytes]:
        return self._get_all("multi_get", _keys("multi_get", keys))

    def multi_set(self, keys: Sequence[Text], values: Sequence[Text]) -> None:
        pairs = [(b"/" + key, value) for key, value in pair_list("multi_set", keys, values)]
        names = list(dict(pairs))
        self._change("multi_set", names, lambda table: table.set_all(pairs))

    def clone(self) -> FileStore:
        other = FileStore(self.path, self._world)
        other.set_timeout(self._timeout)
        return other

    def __repr__(self) -> str:
        return f"FileStore({self.path!r})"

    def _deadline(self, operation: str, timeout: timedelta | float | None) -> Deadline:
        seconds = timeout_seconds(operation, self.timeout if timeout is None else timeout)
        limit = request_limit()
        return Deadline(seconds if limit is None else limit.within(seconds))

    def _change(self, operation: str, keys: Sequence[bytes], action: Callable[[Table], T]) -> T:
        return self._log.change(keys, action, self._deadline(operation, None))

    def _get_all(self, operation: str, names: list[bytes]) -> list[bytes]:
        deadline = self._deadline(operation, None)
        return self._wait_for(operation, names, deadline, lambda table: [table.values[name] for name in names])

    def _wait_for(self, operation: str, names: list[bytes], deadline: Deadline, action: Callable[[Table], T]) -> T:
        pause = 0.0005
        while True:
            with self._log.reading(deadline) as table:
                missing = table.missing(names)
                if not missing:
                    return action(table)
            if deadline.passed():
                raise self._timed_out(operation, [name[1:] for name in missing], deadline)
            time.sleep(min(pause, deadline.remaining()))
            pause = min(1.5 * pause, POLL_SECONDS)


def _checked_path(path: str | bytes | os.PathLike[str]) -> str:
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise ArgumentTypeError(explain("FileStore", "file_name", "a path", path))
    text = os.fsdecode(path)
    try:
        valid = text != "" and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        valid = False
    if not valid:
        hint = "Pass the path of a new file in a directory that all ranks can write."
        raise ArgumentError(explain("FileStore", "file_name", "a path that names a file", path, hint=hint))
    return text


def _close_log(log: FileLog, world: int, owner: int) -> None:
    # A forked child's copy was never counted. Without effect if the file is gone or unusable for all.
    if os.getpid() == owner:
        with suppress(DistStoreError, OSError):
            log.close(world, Deadline(1.0))
    log.release()


def _reserved_descriptor() -> int | None:
    """Return a descriptor to give up when this process needs one and has none; None if none is free now."""
    with suppress(OSError):
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    return None


def _key(operation: str, key: Text) -> bytes:
    return b"/" + key_bytes(operation, key)


def _keys(operation: str, keys: Sequence[Text]) -> list[bytes]:
    return [b"/" + key for key in key_list(operation, keys)]
