"""The narrow waist: a backend takes a call and tensors, and gives back a Work. Nothing else.

Everything that differs between `ref`, `gloo`, `nccl` and `mpi` is below `submit`; everything that they
share (ranks, argument errors, default groups) is above it. Wrappers that record, check or disturb calls
have the same one method. Backends are found by name in a registry and loaded when first asked for, so
that a backend's package is needed only by those who use it. Don't add a method per operation here.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, overload

import torch
import torch.distributed as c10d
from torch import Tensor

from torchdist_ref.calls import Call
from torchdist_ref.errors import UsageError, explain
from torchdist_ref.stores import Store
from torchdist_ref.trace import Recorder
from torchdist_ref.transports import all_on_one_host, refuse_to_connect
from torchdist_ref.work import Work


@dataclass(frozen=True, slots=True)
class Membership:
    """Who is in a group, as a backend needs to know it.

    Attributes:
        store: Keys of this group only, shared by its members.
        rank: This rank in the group.
        members: The global rank of every member, in group order.
        name: The group's name, the same on all members.
        timeout: Seconds that any wait in this group takes at most.
        options: What the caller gave as `pg_options`, for backends that take any.
        device: What the caller gave as `device_id`, for backends that bind a device.
    """

    store: Store
    rank: int
    members: tuple[int, ...]
    name: str
    timeout: float
    options: Any = None
    device: Any = None

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self.members)


class Rows(Sequence[Tensor]):
    """One tensor as equal blocks, one for each rank: inputs or outputs of a call.

    A backend that finds its way in one tensor takes `tensor` as it is; to any other this is a list of views, which are
    made when they are first asked for. To make them takes as long as all that the front door does besides.

    Args:
        tensor: Contiguous, or with a first dimension that divides by the count; its elements divide by it in any case.
        count: How many blocks.

    >>> [block.tolist() for block in Rows(torch.arange(6), 3)]
    [[0, 1], [2, 3], [4, 5]]
    """

    __slots__ = ("_count", "_made", "tensor")

    def __init__(self, tensor: Tensor, count: int) -> None:
        self.tensor, self._count = tensor, count
        self._made: Sequence[Tensor] = ()

    @property
    def _blocks(self) -> Sequence[Tensor]:
        if not self._made:
            tensor, count = self.tensor, self._count
            by_rows = tensor.dim() and not tensor.shape[0] % count
            self._made = tensor.chunk(count) if by_rows else tensor.view(count, -1).unbind()
        return self._made

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        return self._blocks[index]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._blocks)


def uncut(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors of a list, or the one tensor that has them all as its rows."""
    return (tensors.tensor,) if type(tensors) is Rows else tensors


def nbytes_of(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """Bytes of a call's largest operand on this rank, as recorders note it: what it reads or what it writes.

    >>> nbytes_of([torch.zeros(2)], [torch.zeros(2), torch.zeros(2)])
    16
    """
    return max(sum(tensor.nbytes for tensor in uncut(side)) for side in (inputs, outputs))


class Backend(ABC):
    """A backend, for one group on one rank.

    Attributes:
        name: What `get_backend` answers.
        recorder: The last calls of this group on this rank.
    """

    name: str
    recorder: Recorder

    @property
    def shares_memory(self) -> bool:
        """Whether ranks get at each other's CPU tensors without a network: several, on one host."""
        return False

    @abstractmethod
    def submit(self, call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor], wait: bool) -> Work:
        """Start a call.

        Args:
            call: What to do; its ranks are group ranks.
            inputs: Tensors that are read, as the call's contract counts them: a list, or `Rows`.
            outputs: Tensors that are written. For in-place calls the same tensors as `inputs`.
            wait: Come back only when the call is done: the caller has no use for the Work but its error.

        Returns:
            The call's Work, whose outputs are those, `uncut`; a finished one if `wait`.

        Raises:
            DistBackendError: With `wait`, what the call failed with.
        """

    def empty(self, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """A new CPU tensor in the memory that this backend's calls are fastest on, if that is not just any."""
        return torch.empty(size, dtype=dtype)

    def trouble(self, ranks: Sequence[int], doing: str) -> BaseException | None:
        """Why one of these group ranks will not come any more, if this backend knows of a reason; else None.

        Args:
            ranks: Whom the caller waits for, by other means than this backend's calls.
            doing: What for, in words.
        """
        return None

    def together(self) -> AbstractContextManager[None]:
        """While this is open, sends and receives may be held back, to be started as one when it closes.

        Nothing, but for backends that start messages one after the other, where two ranks that send to each other
        before they receive would wait for ever. Their Works can be waited for once it is closed.
        """
        return nullcontext()

    @abstractmethod
    def close(self) -> None:
        """Leave the group in good order."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Leave the group now; members that wait for this rank get an error with the reason."""


Factory = Callable[[Membership], Backend]

# The one table that is module state: names of backends, and where each is found.
_backends: dict[str, Factory | str] = {
    "ref": "torchdist_ref.backends.ref.backend:Ref",
    "gloo": "torchdist_ref.backends.gloo:Gloo",
    "nccl": "torchdist_ref.backends.nccl:Nccl",
    "mpi": "torchdist_ref.backends.mpi:Mpi",
    "fake": "torchdist_ref.backends.fake:Fake",
}


def register(name: str, factory: Factory) -> None:
    """Make a backend known under a name of lower-case letters."""
    _backends[name.lower()] = factory


def names() -> list[str]:
    """The backends that can be asked for: ours, those registered here, and those that others registered with torch."""
    return sorted({*_backends, *(name.lower() for name in _of_torch())})


def by_device(name: str, operation: str = "init_process_group") -> dict[str, str]:
    """The backend that a name means for each kind of device; with one name for all, its key is the empty text.

    Args:
        name: ``"gloo"``, or pairs such as ``"cpu:gloo,cuda:nccl"``, in any case.
        operation: What was called, for messages.

    Raises:
        UsageError: No backend has such a name, a device is given twice, or there is no such kind of device.

    >>> by_device("GLOO"), by_device("cpu:ref,cuda:nccl")
    ({'': 'gloo'}, {'cpu': 'ref', 'cuda': 'nccl'})
    """
    pairs = [part.strip().rpartition(":") for part in name.lower().split(",")]
    found = {device: backend for device, _, backend in pairs}
    unknown = [backend for backend in found.values() if backend not in names()]
    if unknown:
        hint = f"No backend is called {unknown[0]!r}; see register_backend."
        raise UsageError(explain(operation, "backend", f"one of {', '.join(names())}", name, hint=hint))
    if len(found) < len(pairs) or (len(found) > 1 and "" in found) or not all(map(_is_device, found)):
        expected = "one name, or one for each kind of device, as in 'cpu:gloo,cuda:nccl'"
        raise UsageError(explain(operation, "backend", expected, name))
    return found


def _is_device(kind: str) -> bool:
    try:
        return not kind or torch.device(kind).index is None
    except RuntimeError:
        return False


def create(name: str, membership: Membership) -> Backend:
    """Make the backend of this name for a group.

    Raises:
        UsageError: No backend has this name; see `by_device`.
    """
    backends = by_device(name)
    if "" not in backends:
        made: Backend = _load("torchdist_ref.backends.by_device:ByDevice")(backends, membership)
        return made
    found = _backends.get(backends[""])
    if found is None:
        found = partial(_load("torchdist_ref.backends.third_party:ThirdParty"), backends[""])
    return (_load(found) if isinstance(found, str) else found)(membership)


def _of_torch() -> Mapping[str, Any]:
    """What was registered with torch, by name in upper case."""
    return getattr(c10d.Backend, "_plugins", {})


def default_name(store: Store, rank: int, size: int) -> str:
    """The backend where nobody named one: for CPU tensors a fact about all ranks, so that all choose alike.

    Ranks that have CUDA devices add `nccl` for the tensors there; for CPU tensors they are one with ranks that don't.
    """
    cpu = "ref" if all_on_one_host(store, rank, size) else "gloo"
    return f"cpu:{cpu},cuda:nccl" if c10d.is_nccl_available() and torch.cuda.is_available() else cpu


def decline(store: Store, rank: int, reason: str) -> None:
    """Tell the ranks that make a group of this store, and count on this one, that it will not come."""
    refuse_to_connect(store, rank, reason)


def mirrored(find: Callable[[], Any]) -> Any:
    """A ProcessGroup of torch's that passes its calls to the group that ``find`` gives; see `into_torch_mirror`."""
    return _load("torchdist_ref.backends.into_torch_mirror:Mirrored")(find)


def _load(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)
