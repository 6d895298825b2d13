"""Descriptors in forked children: a child closes its copies at once, so that a peer sees when the parent ends.

A connection ends when all processes have closed it. A child that lives longer than its parent, such as a worker of a
``DataLoader``, would keep it open, and hide the parent's death from its peers. Do not add what a child may do with its
parent's groups (`backends.base`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet


class DescriptorOwner(Protocol):
    """Object with descriptors that are of no use in a forked child."""

    def close_copies(self) -> None:
        """Close a forked child's copies of the descriptors, without effect on the parent."""


_owners: WeakSet[DescriptorOwner] = WeakSet()


close_copies_in_child: Callable[[DescriptorOwner], None] = _owners.add
"""Call `close_copies` of an object in each forked child, for as long as the object lives."""


def _close_all_copies() -> None:
    for owner in list(_owners):
        owner.close_copies()
    _owners.clear()


os.register_at_fork(after_in_child=_close_all_copies)
