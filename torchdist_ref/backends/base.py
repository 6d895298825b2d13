"""The narrow waist: an engine takes a call and tensors, and gives back a Work. Nothing else.

Everything that differs between `ref`, `gloo`, `nccl` and `mpi` is below `submit`; everything that they
share (ranks, argument errors, default groups) is above it. Wrappers that record, check or disturb calls
have the same one method. Engines are found by name in a registry and loaded when first asked for, so
that an engine's package is needed only by those who use it. Don't add a method per operation here.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from functools import partial
from typing import Any
from torch import Tensor

from torchdist_ref import _autoload
from torchdist_ref.calls import Call
from torchdist_ref.errors import ArgumentError
from torchdist_ref.stores import Store
from torchdist_ref.trace import Recorder
from torchdist_ref.transports import refuse_to_meet, share_a_host
from torchdist_ref.work import Work


@dataclass(frozen=True, slots=True)
class Membership:
    """Who is in a group, as an engine needs to know it.

    Attributes:
        store: Keys of this group only, shared by its members.
        rank: This rank in the group.
        members: The global rank of every member, in group order.
        name: The group's name, the same on all members.
        timeout: Seconds that any wait in this group takes at most.
    """

    store: Store
    rank: int
    members: tuple[int, ...]
    name: str
    timeout: float

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self.members)


class Backend(ABC):
    """An engine, for one group on one rank.

    Attributes:
        name: What `get_backend` answers.
        recorder: The last calls of this group on this rank.
    """

    name: str
    recorder: Recorder

    @abstractmethod
    def submit(self, call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor], wait: bool) -> Work:
        """Start a call.

        Args:
            call: What to do; its ranks are group ranks.
            inputs: Tensors that are read, as the call's contract counts them.
            outputs: Tensors that are written. For in-place calls the same tensors as `inputs`.
            wait: Come back only when the call is done: the caller has no use for the Work but its error.

        Returns:
            The call's Work; a finished one if `wait`.

        Raises:
            DistBackendError: With `wait`, what the call failed with.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the group in good order."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Leave the group now; members that wait for this rank get an error with the reason."""


Factory = Callable[[Membership], Backend]

# The one table that is module state: names of engines, and where each is found.
_engines: dict[str, Factory | str] = {
    "ref": "torchdist_ref.backends.ref:Ref",
    "gloo": "torchdist_ref.backends.torch_engines:Gloo",
    "mpi": "torchdist_ref.backends.mpi:Mpi",
    "fake": "torchdist_ref.backends.fake:Fake",
}


def register(name: str, factory: Factory) -> None:
    """Make an engine known under a name of lower-case letters."""
    _engines[name.lower()] = factory


def names() -> list[str]:
    """The engines that can be asked for."""
    return sorted(_engines)


def create(name: str, membership: Membership) -> Backend:
    """Make the engine of this name for a group.

    Raises:
        ArgumentError: No engine has this name.
    """
    engines = by_device(name)
    if "" not in engines:
        made: Backend = _load("torchdist_ref.backends.by_device:ByDevice")(engines, membership)
        return made
    found = _engines.get(engines[""])
    if found is None:
        found = partial(_load("torchdist_ref.backends.third_party:ThirdParty"), engines[""])
    return (_load(found) if isinstance(found, str) else found)(membership)


def default_name(store: Store, rank: int, size: int) -> str:
    """The engine where nobody named one: a fact about all ranks, so that all choose alike."""
    return "ref" if share_a_host(store, rank, size) else "gloo"


def decline(store: Store, rank: int, reason: str) -> None:
    """Tell the ranks that make a group of this store, and count on this one, that it will not come."""
    refuse_to_meet(store, rank, reason)


def mirrored(find: Callable[[], Any]) -> Any:
    """A ProcessGroup of torch's that passes its calls to the group that ``find`` gives; see `into_torch_mirror`."""
    return _load("torchdist_ref.backends.into_torch_mirror:Mirrored")(find)


def _load(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


# Whoever comes here has torch by now, and may use `ref` through torch as well.
_autoload.register()
