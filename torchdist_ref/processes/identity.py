"""Identity of a process and of its host, by which ranks find out whether they share memory and see each other end.

Do not add ways to learn of an end here (`membership.peer_processes`).
"""

from __future__ import annotations

import errno
import os
from contextvars import ContextVar
from functools import cache

from torchdist_ref.processes.witness import own_witness

HOST_VARIABLE = "TORCHDIST_REF_HOST_ID"
_NO_PROC = "no-proc"
simulated_place: ContextVar[tuple[str, int] | None] = ContextVar("place of a simulated rank", default=None)
"""Host and process of the calling rank where ranks are simulated; None elsewhere."""


def own_place() -> tuple[str, int]:
    """Return the name of this host and the number of this process, as errors name them."""
    return simulated_place.get() or (os.uname().nodename, os.getpid())


def process_identity() -> str:
    """Return a text that names this process among those of all hosts."""
    return f"{host_identity()}|{_own_process()}"


def _own_process() -> str:
    """Return the number and the witness of this process, as `parse_process` reads them."""
    return f"{os.getpid()}:{own_witness()}"


def parse_process(text: str) -> tuple[int, int]:
    """Return the number and the witness of a process, as `process_identity` ends with them."""
    pid, _, witness = text.partition(":")
    return int(pid), int(witness or 0)


def host_identity() -> str:
    """Return a text that is equal for two ranks if and only if they can share memory: same host, same namespaces.

    Processes find each other's memory under /proc. One that has no /proc, or that of another pid namespace, shares
    memory with no other: its text is its own (see `has_no_proc`). ``TORCHDIST_REF_HOST_ID`` overrides the text, which
    lets one machine play several hosts.
    """
    place = simulated_place.get()
    override = os.environ.get(HOST_VARIABLE) if place is None else place[0]
    if override is not None:
        return override
    try:
        if os.readlink("/proc/self") == str(os.getpid()):
            return "/".join([_boot_id(), *(os.readlink(f"/proc/self/ns/{space}") for space in ("pid", "ipc", "user"))])
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EACCES):
            raise
    return f"{os.uname().nodename}/{_NO_PROC}/{_random_identity(os.getpid())}"


def has_no_proc(identity: str) -> bool:
    """Return whether a text of `host_identity` is that of a process without a /proc of its pid namespace."""
    return f"/{_NO_PROC}/" in identity


@cache
def _random_identity(pid: int) -> str:
    """Return a text of this process alone; a forked child has another one."""
    return os.urandom(16).hex()


@cache
def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
