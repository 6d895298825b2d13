"""Registry of backends: from a name, or a name for each kind of device, to the backend of a group.

A backend is imported when a group first asks for it, so that its package is needed only by those who use it.
`ByDevice` holds one backend for each kind of device, and sends each call to the one for its tensors.

Do not add a backend here but by a row of the table: each has a module of its own.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as c10d
from torch import Tensor

from torchdist_ref.backends.base import Backend, Membership
from torchdist_ref.calls import Call
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, UnsupportedError, UsageError, explain, on_rank
from torchdist_ref.membership.blame import Wait
from torchdist_ref.stores import PrefixStore, Store
from torchdist_ref.torch_internals import accelerators, torch_private
from torchdist_ref.transports import all_on_one_host
from torchdist_ref.work import Work

Tensors = Sequence[Tensor]
Factory = Callable[[Membership], Backend]

_NCCL = "torchdist_ref.backends.torch_native.nccl"
# The package's registry: the name of a backend, and its class or a factory.
registered: dict[str, Factory | str] = {
    "ref": "torchdist_ref.backends.ref.backend:Ref",
    "gloo": "torchdist_ref.backends.torch_native.gloo:Gloo",
    "nccl": f"{_NCCL}:Nccl",
    "mpi": "torchdist_ref.backends.mpi.backend:Mpi",
    "fake": "torchdist_ref.backends.fake:Fake",
}


BUILT_IN = frozenset(registered)
NCCL_NAMES = frozenset({"nccl", "nccl2", "nccl-lazy", "nccl-legacy"})
"""Names of torch's backends on NCCL; the last three are those of torch 2.15."""


def register(name: str, factory: Factory) -> None:
    """Register a backend under a name, in lower case; a name of this library's own backends causes a warning."""
    if name.lower() in BUILT_IN:
        hint = "Register it under another name, unless all groups of this process are to use it"
        warnings.warn(f"register_backend: this replaces the library's backend {name.lower()!r}. {hint}.", stacklevel=3)
    registered[name.lower()] = factory


def names() -> list[str]:
    """Return the names of all backends: ours, those registered here, and those that others registered with torch."""
    return sorted({*registered, *(name.lower() for name in _torch_plugins())})


def has(name: str) -> bool:
    """Return whether a backend has this name, in lower case; a package's entry point may register it with torch now.

    Raises:
        UnsupportedError: Its entry point fails.
    """
    if name in registered or name in names():
        return True
    try:
        # torch 2.14 and later register backends of entry points when they are asked for, their own too.
        return bool(name) and c10d.is_backend_available(name) and name in names()
    except RuntimeError as error:
        raise UnsupportedError(f"backend {name!r} cannot be loaded: {error} ({error.__cause__!r}).") from error


def names_by_device(name: str, operation: str = "init_process_group") -> dict[str, str]:
    """Return the backend's name for each kind of device; one name for all kinds has the empty text as its key.

    Args:
        name: ``"gloo"``, or pairs such as ``"cpu:gloo,cuda:nccl"``, in any case.
        operation: The public function, for messages.

    Raises:
        UsageError: No backend has such a name, a device is given twice, or there is no such kind of device.

    >>> names_by_device("GLOO"), names_by_device("cpu:ref,cuda:nccl")
    ({'': 'gloo'}, {'cpu': 'ref', 'cuda': 'nccl'})
    """
    if name in registered:
        # The common case, fast.
        return {"": name}
    pairs = [part.strip().rpartition(":") for part in name.lower().split(",")]
    found = {device: backend for device, _, backend in pairs}
    unknown = [backend for backend in found.values() if not has(backend)]
    if unknown:
        hint = f"No backend is called {unknown[0]!r}; see register_backend."
        raise UsageError(explain(operation, "backend", f"one of {', '.join(names())}", name, hint=hint))
    if len(found) < len(pairs) or (len(found) > 1 and "" in found) or not all(map(is_device, found)):
        expected = "one name, or one for each kind of device, as in 'cpu:gloo,cuda:nccl'"
        raise UsageError(explain(operation, "backend", expected, name))
    return found


def check_options(name: str, options: Any, device: Any, operation: str) -> None:
    """Raise unless the caller's `pg_options` and `device_id` have types that a backend accepts.

    `ref`, `gloo`, `mpi` and `fake` ignore those of others, so that one program can name them for `nccl`. `nccl` and
    backends from outside check their own.

    Raises:
        ArgumentTypeError: They have not.
    """
    # A registered backend, also under the name of one of these, is a function.
    if not all(
        each != "nccl" and isinstance(registered.get(each), str) for each in names_by_device(name, operation).values()
    ):
        return
    if options is not None and not isinstance(options, torch_private.BACKEND_OPTIONS.get()):
        expected = f"None for backend {name!r}, which has no options, or options of one of torch's backends"
        raise ArgumentTypeError(explain(operation, "pg_options", expected, options))
    if device is not None and (isinstance(device, bool) or not isinstance(device, int | torch.device)):
        expected = "None, a torch.device or the number of a device"
        raise ArgumentTypeError(explain(operation, "device_id", expected, device))


def is_device(kind: str) -> bool:
    """Return whether a text is a kind of device, or empty."""
    try:
        return not kind or torch.device(kind).index is None
    except RuntimeError:
        return False


class BackendChoice(NamedTuple):
    """Backend that a group is to use: all that its creation needs to know of the name, which is parsed once.

    Attributes:
        name: The name, as the program wrote it.
        on_cpu: Name of the backend for CPU tensors, which ranks compare: ranks without GPUs may have none for CUDA
            tensors.
        make: Function that makes the backend of a group.
        config: The backends in torch's notation of one for each device type; see `config_text`.
    """

    name: str
    on_cpu: str
    make: Factory
    config: str


def choice(name: str) -> BackendChoice:
    """Return the backend of a name.

    Raises:
        UsageError: No backend has this name; see `names_by_device`.
    """
    by_device = names_by_device(name)
    make = factory_of(by_device[""]) if "" in by_device else partial(ByDevice, by_device)
    return BackendChoice(name, by_device.get("cpu", by_device.get("", name)), make, config_text(name))


def factory_of(name: str) -> Factory:
    """Return the function that makes the backend of a group, for a name that exists."""
    found = registered.get(name)
    if found is None and name in NCCL_NAMES:
        return partial(_load(f"{_NCCL}:Nccl"), name=name)
    if found is None:
        return partial(_load("torchdist_ref.backends.torch_native.third_party:ThirdParty"), name)
    made: Factory = _load(found) if isinstance(found, str) else found
    return made


def create(name: str, membership: Membership) -> Backend:
    """Create the backend of this name for a group.

    Raises:
        UsageError: No backend has this name; see `names_by_device`.
    """
    return choice(name).make(membership)


def of_process_group(name: str, membership: Membership, group: Any) -> Backend:
    """Return a backend that calls the methods of a process group in Python, one of torch's type."""
    made: Backend = _load("torchdist_ref.backends.torch_native.third_party:ThirdParty")(name, membership, group)
    return made


def is_of_torch(group: Any) -> bool:
    """Return whether torch has a group in its tables: one that torch made and has not destroyed."""
    return group in torch_private.TABLES.get().pg_map


def _torch_plugins() -> Mapping[str, Any]:
    """Return the backends that were registered with torch, by name in upper case."""
    return torch_private.PLUGINS.get() if torch_private.PLUGINS.exists() else {}


def default_name(store: Store, rank: int, size: int) -> str:
    """Return the backend for groups made without a name. For CPU tensors all ranks choose alike.

    Ranks that have devices of NCCL's add `nccl` for tensors there; their CPU tensors use the same backend as others'.
    """
    cpu = "ref" if all_on_one_host(store, rank, size) else "gloo"
    if not c10d.is_nccl_available() or not _load(f"{_NCCL}:is_usable")():
        return cpu
    return f"cpu:{cpu},{_load(f'{_NCCL}:DEVICE')}:nccl"


def store_for_torch(store: Store) -> Any:
    """Return one of our stores as a store of torch's; see `StoreForTorch`."""
    return _load("torchdist_ref.backends.torch_native.stores:StoreForTorch")(store)


def share_servers() -> None:
    """Have torch's rendezvous use our store's server; see `stores.share_servers`."""
    _load("torchdist_ref.backends.torch_native.stores:share_servers")()


def by_device_type(name: str) -> dict[str, str]:
    """Return a group's backend for each device type that torch is to use it for; on an accelerator, `ref` for it too.

    >>> by_device_type("gloo"), by_device_type("nccl"), by_device_type("cpu:ref,cuda:nccl")
    ({'cpu': 'gloo'}, {'cuda': 'nccl'}, {'cpu': 'ref', 'cuda': 'nccl'})
    """
    found = names_by_device(name)
    only = found.pop("", None)
    if only is None:
        return found
    if only in NCCL_NAMES:
        return {_load(f"{_NCCL}:DEVICE"): only}
    return dict.fromkeys(accelerators.usable_types() if only == "ref" else ("cpu",), only)


def config_text(name: str) -> str:
    """Return a group's backends in torch's notation of one for each device type.

    >>> config_text("gloo")
    'cpu:gloo'
    """
    return ",".join(f"{device}:{backend}" for device, backend in by_device_type(name).items())


@cache
def _load(path: str) -> Any:
    """Import what a text such as ``"package.module:Class"`` names."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


class ByDevice(Backend):
    """One group with a backend for each kind of device, chosen at each call by the device of its tensors.

    Programs that keep data on a GPU and bookkeeping on the CPU name ``"cpu:gloo,cuda:nccl"``. A call without tensors
    goes to the first named backend. A call on a device without a backend is an error: tensors are never moved.

    Args:
        backends: The name of a backend for each kind of device.
        membership: The group.

    >>> import torch, torchdist_ref as dist
    >>> dist.init_process_group("cpu:ref,meta:fake", store=dist.HashStore(), rank=0, world_size=1)
    >>> dist.all_reduce(torch.ones(2)), dist.all_reduce(torch.ones(2, device="meta")), dist.get_backend()
    (None, None, 'cpu:ref,meta:fake')
    >>> dist.destroy_process_group()
    """

    def __init__(self, backends: Mapping[str, str], membership: Membership) -> None:
        self.name = ",".join(f"{device}:{backend}" for device, backend in backends.items())
        self.recorder = membership.recorder
        self.backends: dict[str, Backend] = {}
        for device, backend in backends.items():
            self.backends[device] = factory_of(backend)(_membership_for(membership, device))
            self.backends[device].recorder = self.recorder
        self._first = next(iter(self.backends.values()))

    @property
    def group(self) -> ref[Any] | None:
        """See `Backend.group`."""
        return self._first.group

    @group.setter
    def group(self, group: ref[Any] | None) -> None:
        for backend in self.backends.values():
            backend.group = group

    def submit(self, call: Call, inputs: Tensors, outputs: Tensors, wait: bool) -> Work:
        """See `Backend.submit`."""
        return self._backend(call, inputs or outputs).submit(call, inputs, outputs, wait)

    def _backend(self, call: Call, tensors: Tensors) -> Backend:
        if not tensors:
            return self._first
        device = tensors[0].device
        return self._for_device(call.op, device.type, f"this tensor is on {device}")

    def _for_device(self, operation: str, kind: str, why: str) -> Backend:
        found = self.backends.get(kind)
        if found is None:
            raise UnsupportedError(
                f"{operation}: No backend type associated with device type {kind}: {why}, and the group's backends are "
                f"{self.name!r}. Name one for it in init_process_group, or move the tensor."
            )
        return found

    def implementation(self, device_type: str | None) -> Any:
        """See `Backend.implementation`.

        Raises:
            UnsupportedError: The group has no backend for the device type.
            ArgumentError: There are several backends, and no device type.
        """
        if device_type is not None:
            why = f"the device is {device_type}"
            return self._for_device("get_backend_impl", device_type, why).implementation(device_type)
        found = [backend.implementation(device) for device, backend in self.backends.items()]
        if any(each is not found[0] for each in found):
            raise ArgumentError(
                f"get_backend_impl: Process group has multiple backend implementations, {self.name!r}; pass the device "
                f"argument to select one{on_rank()}."
            )
        return found[0]

    def set_timeout(self, seconds: float) -> None:
        """See `Backend.set_timeout`."""
        for backend in self.backends.values():
            backend.set_timeout(seconds)

    @property
    def shares_memory(self) -> bool:
        """See `Backend.shares_memory`."""
        return self.backends.get("cpu", self._first).shares_memory

    def empty(self, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """See `Backend.empty`."""
        return self.backends.get("cpu", self._first).empty(size, dtype)

    def failure(self, ranks: Sequence[int], description: str, wait: Wait) -> BaseException | None:
        """See `Backend.failure`."""
        found = (backend.failure(ranks, description, wait) for backend in self.backends.values())
        return next(filter(None, found), None)

    def successor_store(self, store: Store, remaining: Sequence[int], timeout: float) -> PrefixStore | None:
        """See `Backend.successor_store`."""
        made = (backend.successor_store(store, remaining, timeout) for backend in self.backends.values())
        return next(filter(None, made), None)

    @contextmanager
    def coalescing(self) -> Iterator[None]:
        """See `Backend.coalescing`."""
        with ExitStack() as stack:
            for backend in self.backends.values():
                stack.enter_context(backend.coalescing())
            yield

    @property
    def broken(self) -> BaseException | None:
        """See `Backend.broken`."""
        return next(filter(None, (backend.broken for backend in self.backends.values())), None)

    def explain_leave(self, reason: str) -> None:
        """See `Backend.explain_leave`."""
        for backend in self.backends.values():
            backend.explain_leave(reason)

    def announce_exit(self) -> None:
        """See `Backend.announce_exit`."""
        for backend in self.backends.values():
            backend.announce_exit()

    def leave(self) -> bool:
        """See `Backend.leave`."""
        have_left = [backend.leave() for backend in self.backends.values()]
        return all(have_left)

    def close(self) -> None:
        """See `Backend.close`."""
        for backend in self.backends.values():
            backend.close()

    def abort(self, reason: str) -> None:
        """See `Backend.abort`."""
        for backend in self.backends.values():
            backend.abort(reason)

    def end_calls(self, reason: str) -> None:
        """See `Backend.end_calls`."""
        for backend in self.backends.values():
            backend.end_calls(reason)


def _membership_for(membership: Membership, device: str) -> Membership:
    """Return the group as one of its backends sees it.

    The CPU backend uses the store as it would alone, so that ranks without GPUs find it; see `default_name`.
    """
    if device == "cpu":
        return replace(membership, options=None, device=None)
    return replace(membership, store=PrefixStore(device, membership.store))
