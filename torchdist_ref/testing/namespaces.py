"""Several hosts on one machine: network namespaces connected by virtual Ethernet devices of a chosen rate.

A namespace has its own interfaces, addresses, ports and routes. Ranks in two namespaces therefore communicate as on two
hosts: through a real TCP stack, with separate loopback devices. Two hosts are connected by one pair of ``veth``
devices, more hosts by a bridge. Nothing has a name in the file system: a namespace and its devices end with the last
process in it, so even a killed test leaves nothing behind. Do not add fault injection here: kill the ranks instead.

Needs Linux, root, and the programs ``ip`` and ``tc`` (package iproute2). `missing` reports what is not available.
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
# The same on every host, as in a cluster.
INTERFACE = "veth0"
# Bytes that an idle device may send at once. With more, the rate would not limit small messages at all.
BURST = 16_384
_IPV4, _IPV6 = "10.77.0.{}", "fd77::{:x}"


@dataclass(frozen=True)
class Host:
    """Host that `hosts` has created.

    Attributes:
        name: Unique name.
        interface: Name of its network interface.
        ipv4: IPv4 address of the interface.
        ipv6: IPv6 address of the interface.
        namespace: Descriptor of the network namespace.
    """

    name: str
    interface: str
    ipv4: str
    ipv6: str
    namespace: int

    def enter(self) -> None:
        """Move this process to the host: its network, and its name in ``TORCHDIST_REF_HOST_ID``.

        Call it while the process has one thread; later threads inherit the network. The process cannot return: use a
        process rank.
        """
        _enter_namespace(self.namespace)
        os.environ["TORCHDIST_REF_HOST_ID"] = self.name


def missing() -> str:
    """Return the reason why namespaces cannot be created here, or an empty string.

    >>> from torchdist_ref.testing.namespaces import missing
    >>> isinstance(missing(), str)
    True
    """
    if sys.platform != "linux":
        return f"network namespaces need Linux, and this is {sys.platform}"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"the program {program!r} is not installed (package iproute2)"
    try:
        with hosts(2):
            return ""
    except (OSError, UnsupportedError) as error:
        return f"network namespaces cannot be created: {error}"


@contextmanager
def hosts(count: int, bits_per_second: float | None = None) -> Iterator[Sequence[Host]]:
    """Create hosts that reach each other, and nothing else, over a network.

    Args:
        count: Number of hosts, 2 to 250.
        bits_per_second: Send rate of each host, in bits per second. Default None: not limited.

    Yields:
        The hosts. They end when the block has ended and no process runs on them.

    Raises:
        ArgumentError: The number of hosts is wrong, or the rate is not positive.
        OSError: This process cannot create namespaces: it is not root, or the kernel has none.
        UnsupportedError: ``ip`` or ``tc`` failed; the message contains its output.

    Example::

        from torchdist_ref.testing import namespaces, run

        with namespaces.hosts(2, bits_per_second=1e9) as pair:
            run(lambda rank: pair[rank].enter(), 2, ranks="processes", init=False)
    """
    _check(count, bits_per_second)
    with ExitStack() as stack:
        namespaces = [stack.enter_context(_namespace()) for _ in range(count)]
        made = [
            Host(f"host {i}", INTERFACE, _IPV4.format(i + 1), _IPV6.format(i + 1), s) for i, s in enumerate(namespaces)
        ]
        if count == 2:
            _in_namespace(namespaces[0], lambda: _connect(INTERFACE, namespaces[1]))
        else:
            _in_namespace(stack.enter_context(_namespace()), lambda: _bridge(namespaces))
        for host in made:
            _in_namespace(host.namespace, lambda host=host: _configure(host, bits_per_second))  # type: ignore[misc]
        yield made


def _check(count: int, bits_per_second: float | None) -> None:
    if not 2 <= count <= 250:
        raise ArgumentError(explain("hosts", "count", "from 2 to 250", count))
    if bits_per_second is not None and not bits_per_second > 0:
        raise ArgumentError(explain("hosts", "bits_per_second", "a positive rate, or None", bits_per_second))


# Namespaces: each thread is in one, and an open descriptor keeps one alive.


@contextmanager
def _namespace() -> Iterator[int]:
    namespace = _on_new_thread(_new_namespace)
    try:
        yield namespace
    finally:
        os.close(namespace)


def _new_namespace() -> int:
    _check_call(_libc().unshare(_NEW_NET))
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _enter_namespace(namespace: int) -> None:
    _check_call(_libc().setns(namespace, _NEW_NET))


def _in_namespace(namespace: int, action: Callable[[], T]) -> T:
    def there() -> T:
        _enter_namespace(namespace)
        return action()

    return _on_new_thread(there)


def _on_new_thread(action: Callable[[], T]) -> T:
    """Call a function on a new thread, which may leave this process's network permanently."""
    found: list[T] = []
    errors: list[BaseException] = []

    def attempt() -> None:
        try:
            found.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=attempt, name="network namespace")
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


# Devices


def _connect(ours: str, theirs: int) -> None:
    _execute(f"ip link add {ours} type veth peer name {INTERFACE} netns /proc/{os.getpid()}/fd/{theirs}")


def _bridge(namespaces: Sequence[int]) -> None:
    _execute("ip link add bridge type bridge")
    _execute("ip link set bridge up")
    for number, namespace in enumerate(namespaces):
        _connect(f"port{number}", namespace)
        _execute(f"ip link set port{number} master bridge up")


def _configure(host: Host, bits_per_second: float | None) -> None:
    _execute("ip link set lo up")
    _execute(f"ip addr add {host.ipv4}/24 dev {host.interface}")
    # Without `nodad` the kernel first searches for duplicates of the address, for a second or two.
    _execute(f"ip addr add {host.ipv6}/64 dev {host.interface} nodad")
    _execute(f"ip link set {host.interface} up")
    if bits_per_second is not None:
        rate = int(bits_per_second)
        _execute(f"tc qdisc add dev {host.interface} root tbf rate {rate}bit burst {BURST} latency 50ms")


def _execute(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise UnsupportedError(f"`{command}` failed: {done.stderr.strip() or done.stdout.strip()}")
