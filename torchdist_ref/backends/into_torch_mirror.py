"""A group of ours, seen through torch's eyes: for torch's functions, called from hooks that were written for torch.

torch's functions call methods of the group that they are given, under torch's names; a `Mirrored` has those methods
and passes each call to the backend of a group of ours. Which one is asked at every call: so one mirror can stand for
"the default group of whoever calls" where ranks are threads. Don't add state: the mirrored group has all.
"""

# torch's stubs leave out some of its names, and give each collective several signatures.
# mypy: disable-error-code="attr-defined, override, assignment"

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as c10d

from torchdist_ref.backends.base import Backend
from torchdist_ref.backends.into_torch import RefProcessGroup


class Group(Protocol):
    """What a mirror asks of a group of ours."""

    members: tuple[int, ...]
    backend: Backend
    name: str

    def rank(self) -> int: ...

    def size(self) -> int: ...


class Mirrored(RefProcessGroup):
    """A group of torch's whose calls are carried out by a group of ours.

    Args:
        find: Says which group of ours is meant now; asked at every call.
    """

    def __init__(self, find: Callable[[], Group]) -> None:
        group = find()
        c10d.ProcessGroup.__init__(self, group.rank(), group.size())  # type: ignore[call-arg]
        self._find = find
        self._name = self._description = group.name
        self.shown_in: list[Any] = []

    # Hosted keeps these two; here they are those of the mirrored group.
    backend = property(lambda self: self._find().backend)
    members = property(lambda self: self._find().members)

    def rank(self) -> int:
        return self._find().rank()

    def size(self) -> int:
        return self._find().size()

    def getBackendName(self) -> str:
        return str(self.backend.name)

    name = _get_backend_name = getBackendName

    def shutdown(self) -> None:
        """Nothing: the group is ours, and ends with `destroy_process_group`."""

    abort = shutdown
