"""Ranks of a benchmark on hosts of their own: each half of them in one network namespace, a cable between the two.

Every backend then talks over TCP between the halves, and our ranks share memory within each, as on two machines.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torchdist_ref.benchmark.crew import Place
from torchdist_ref.errors import UnsupportedError
from torchdist_ref.testing import namespaces

HOSTS = 2
Program = Callable[[Place], None]


@contextmanager
def on_hosts(program: Program, wanted: bool) -> Iterator[Program]:
    """The same program for ranks of two hosts, if that is wanted; the hosts are there while the block lasts.

    Raises:
        UnsupportedError: This machine has no network namespaces, or this process may not make them.
    """
    if not wanted:
        yield program
        return
    if reason := namespaces.missing():
        raise UnsupportedError(f"benchmark: ranks can't be put on two hosts: {reason}.")
    with namespaces.hosts(HOSTS) as pair:

        def there(place: Place) -> None:
            host = pair[place.rank * HOSTS // place.world]
            host.enter()
            # Both Gloo and we read this one.
            os.environ["GLOO_SOCKET_IFNAME"] = host.interface
            program(place)

        yield there
