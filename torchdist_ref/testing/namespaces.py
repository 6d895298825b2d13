"""Several hosts on one machine: network namespaces with a cable between them, as slow as you like.

A namespace has interfaces, addresses, ports and routes of its own, so ranks in two of them meet as ranks of two hosts
do: through a real TCP stack, with a loopback that leads nowhere else. Two hosts are joined by one pair of ``veth``
devices, more by a bridge. Nothing has a name in the file system: a namespace ends with the last process in it, and its
cable with it, so that even a killed test leaves nothing. A host that ranks may crash on belongs to no test: no code for
faults here, kill the ranks instead.

Needs Linux, root, and the programs ``ip`` and ``tc`` (package iproute2). `missing` says what there is not.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from torchdist_ref.errors import ArgumentError, UnsupportedError, explain

T = TypeVar("T")
_NEW_NET = 0x40000000
# Every host has the same, as machines of one cluster have.
INTERFACE = "cable"
# What a cable saves up while it is idle passes at once; with more, small messages would not feel the rate at all.
BURST = 16_384
_IPV4, _IPV6 = "10.77.0.{}", "fd77::{:x}"


@dataclass(frozen=True)
class Host:
    """One of the hosts that `hosts` makes.

    Attributes:
        name: Differs from host to host.
        interface: The name of its network interface.
        ipv4: That interface's address.
        ipv6: Its other address.
    """

    name: str
    interface: str
    ipv4: str
    ipv6: str
    _space: int

    def enter(self) -> None:
        """Move this process onto the host: its network, and its name in ``TORCHDIST_REF_HOST_ID``.

        Call it in a process that has one thread as yet; threads that it starts afterwards are there too. There is no
        way back: use a process rank, which ends.
        """
        _to_space(self._space)
        os.environ["TORCHDIST_REF_HOST_ID"] = self.name


def missing() -> str:
    """Why there can be no namespaces here; empty where there can.

    >>> isinstance(missing(), str)
    True
    """
    if sys.platform != "linux":
        return f"network namespaces are Linux's, and this is {sys.platform}"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"the program {program!r} is not installed (package iproute2)"
    try:
        with hosts(2):
            return ""
    except (OSError, UnsupportedError) as error:
        return f"no network namespace can be made: {error}"


@contextmanager
def hosts(count: int, bits_per_second: float | None = None) -> Iterator[Sequence[Host]]:
    """Make hosts that reach each other, and nothing else, over a network.

    Args:
        count: How many, 2 to 250.
        bits_per_second: What each host can send at most; by default as much as the machine can.

    Yields:
        The hosts. They end when the block has ended and no process is on them any more.

    Raises:
        ArgumentError: A wrong number of hosts, or a rate that is not positive.
        OSError: This process may not make namespaces: it is not root, or the kernel has none.
        UnsupportedError: The machine refused to set them up; the error says what it answered.

    Example::

        from torchdist_ref.testing import namespaces, run

        with namespaces.hosts(2, bits_per_second=1e9) as pair:
            run(lambda rank: pair[rank].enter(), 2, ranks="processes", init=False)
    """
    _check(count, bits_per_second)
    with ExitStack() as stack:
        spaces = [stack.enter_context(_space()) for _ in range(count)]
        made = [Host(f"host {i}", INTERFACE, _IPV4.format(i + 1), _IPV6.format(i + 1), s) for i, s in enumerate(spaces)]
        if count == 2:
            _in_space(spaces[0], lambda: _cable(INTERFACE, spaces[1]))
        else:
            _in_space(stack.enter_context(_space()), lambda: _bridge(spaces))
        for host in made:
            _in_space(host._space, lambda host=host: _switch_on(host, bits_per_second))  # type: ignore[misc]
        yield made


def _check(count: int, bits_per_second: float | None) -> None:
    if not 2 <= count <= 250:
        raise ArgumentError(explain("hosts", "count", "from 2 to 250", count))
    if bits_per_second is not None and not bits_per_second > 0:
        raise ArgumentError(explain("hosts", "bits_per_second", "a positive rate, or None", bits_per_second))


# Namespaces: each thread is in one, and a descriptor keeps one.


@contextmanager
def _space() -> Iterator[int]:
    space = _aside(_new_space)
    try:
        yield space
    finally:
        os.close(space)


def _new_space() -> int:
    _check_call(_libc().unshare(_NEW_NET))
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _to_space(space: int) -> None:
    _check_call(_libc().setns(space, _NEW_NET))


def _in_space(space: int, action: Callable[[], T]) -> T:
    def there() -> T:
        _to_space(space)
        return action()

    return _aside(there)


def _aside(action: Callable[[], T]) -> T:
    """Act on a thread of its own, which may leave this process's network for good."""
    found: list[T] = []
    errors: list[BaseException] = []

    def attempt() -> None:
        try:
            found.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=attempt, name="in another network")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check_call(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


# Cables


def _cable(ours: str, theirs: int) -> None:
    _say(f"ip link add {ours} type veth peer name {INTERFACE} netns /proc/{os.getpid()}/fd/{theirs}")


def _bridge(spaces: Sequence[int]) -> None:
    _say("ip link add bridge type bridge")
    _say("ip link set bridge up")
    for number, space in enumerate(spaces):
        _cable(f"port{number}", space)
        _say(f"ip link set port{number} master bridge up")


def _switch_on(host: Host, bits_per_second: float | None) -> None:
    _say("ip link set lo up")
    _say(f"ip addr add {host.ipv4}/24 dev {host.interface}")
    # Without `nodad` the address is of no use for a second or two, while the kernel looks for its double.
    _say(f"ip addr add {host.ipv6}/64 dev {host.interface} nodad")
    _say(f"ip link set {host.interface} up")
    if bits_per_second is not None:
        rate = int(bits_per_second)
        _say(f"tc qdisc add dev {host.interface} root tbf rate {rate}bit burst {BURST} latency 50ms")


def _say(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise UnsupportedError(f"`{command}` failed: {done.stderr.strip() or done.stdout.strip()}")
