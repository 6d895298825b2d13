"""Mounts of one process: a hosts file of its own, or no /proc. Needs Linux and root; `missing` says what is absent."""

from __future__ import annotations

import ctypes
import os
import tempfile

_NEW_MOUNTS, _NEW_NAMES = 0x20000, 0x4000000
_PRIVATE_ALL, _BIND = 0x44000, 0x1000


def missing() -> str:
    """Return the reason why a process cannot have mounts of its own here, or an empty string."""
    pid = os.fork()
    if pid == 0:
        try:
            hide_proc()
            os._exit(0)
        finally:
            os._exit(1)
    return "" if os.waitpid(pid, 0)[1] == 0 else "this process cannot have mounts of its own"


def use_hosts_file(text: str) -> None:
    """Give this process another /etc/hosts. Call it while the process has one thread."""
    _own_mounts()
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(text)
        file.flush()
        _mount(file.name, "/etc/hosts", "", _BIND)


def hide_proc() -> None:
    """Take /proc away from this process and those that it starts, as some sandboxes do."""
    _own_mounts()
    _mount("none", "/proc", "tmpfs", 0)


def use_host_name(name: str) -> None:
    """Give this process, and those that it starts, another host name."""
    _check(_libc().unshare(_NEW_NAMES))
    _check(_libc().sethostname(name.encode(), len(name)))


def _own_mounts() -> None:
    _check(_libc().unshare(_NEW_MOUNTS))
    # Otherwise the host would see what is mounted here.
    _mount("none", "/", "", _PRIVATE_ALL)


def _mount(source: str, target: str, kind: str, flags: int) -> None:
    _check(_libc().mount(source.encode(), target.encode(), kind.encode(), flags, None))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
