"""ProcessGroup: some ranks, a backend that connects them, and the translation between rank numbers.

Users count ranks globally (`src=3`) or in the group (`group_src=1`); backends only know group ranks. The
translation is here and is done at the front door, once. Don't add communication: that is `submit`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed

from torchdist_ref.backends.base import Backend, mirrored
from torchdist_ref.errors import ArgumentError, explain
from torchdist_ref.stores import Store
from torchdist_ref.trace import Recorder


def whole_number(value: Any) -> int | None:
    """The number that a value means which may stand for one, as NumPy's and a tensor of one number may; None if not."""
    try:
        return operator.index(value)
    except TypeError:
        return None


class ProcessGroup:
    """A handle on the ranks that communicate. Made by `init_process_group` and `new_group` only.

    Attributes:
        members: The global rank of every member, in group order.
        backend: The backend.
        name: The group's name, the same on all members.
        timeout: Seconds that a wait in this group takes at most.
        store: Keys of this group only.
    """

    def __init__(
        self, members: Sequence[int], rank: int, backend: Backend, name: str, timeout: float, store: Store
    ) -> None:
        self.members = tuple(members)
        self.backend = backend
        self.name = name
        self.timeout = timeout
        self.store = store
        self._rank = rank
        self._position = {member: position for position, member in enumerate(self.members)}

    def rank(self) -> int:
        """This rank's number in the group."""
        return self._rank

    def size(self) -> int:
        """How many ranks the group has."""
        return len(self.members)

    @property
    def recorder(self) -> Recorder:
        """The last calls of this rank on this group."""
        return self.backend.recorder

    def position(self, rank: int, operation: str, argument: str) -> int:
        """The group rank of a global rank.

        Raises:
            ArgumentError: That rank is not in the group.
        """
        found = self._position.get(rank)
        if found is None and (number := whole_number(rank)) is not None:
            found = self._position.get(number)
        if found is None:
            expected = f"a global rank in the group, one of {list(self.members)}"
            raise ArgumentError(explain(operation, argument, expected, rank, rank=self.members[self._rank]))
        return found

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """torch's functions may be given this group, and then call its methods under torch's names."""
            if name.startswith("__") or not hasattr(torch.distributed.ProcessGroup, name):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return getattr(mirrored(lambda: self), name)

    def __repr__(self) -> str:
        return f"<ProcessGroup {self.name!r} on {self.backend.name}: rank {self._rank} of {self.size()}>"


class HasWorld(type):
    """Gives a class the attribute `WORLD`, whose value changes with init and destroy."""

    @property
    def WORLD(cls) -> ProcessGroup | None:
        # The world knows groups, so it can't be imported where groups are defined.
        from torchdist_ref.groups.world import current

        return current().default


class GroupMember(metaclass=HasWorld):
    """Names for two handles that users pass and compare.

    Attributes:
        WORLD: The group of all ranks; None before `init_process_group`.
        NON_GROUP_MEMBER: What `new_group` returns on ranks that are not in the new group.
    """

    NON_GROUP_MEMBER = -100
