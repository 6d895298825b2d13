"""Queries without communication: ranks, group sizes, backends, reduction properties; and a group's time-out.

Calls translate global ranks to group ranks by `world.ProcessGroup.group_rank`; the public queries are here. `Backend`
spells backend names and registers third-party backends; the table of backends is `backends.registry`. A backend is
available if this library has it and the software that it drives is installed. A backend that needs further software
gets a check here.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as c10d
from torch.distributed import ReduceOp

from torchdist_ref.backends import base, registry
from torchdist_ref.backends.reductions import check
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, BackendArgumentError, DistError, explain, on_rank
from torchdist_ref.groups.arguments import reduction_name
from torchdist_ref.groups.world import ProcessGroup, as_integer, current, refuse_destroyed, resolve, resolve_member
from torchdist_ref.processes import job_environment
from torchdist_ref.recorder import Recorder


def get_rank(group: ProcessGroup | int | None = None) -> int:
    """Return this rank's rank in a group, from 0, or -1 if it is not in the group.

    Args:
        group: Process group. Default: all ranks.

    Raises:
        ArgumentError: The group was destroyed.
        NotInitializedError: `init_process_group` was not called.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> run(lambda rank: dist.get_rank(), 4)
        [0, 1, 2, 3]

    Elsewhere:
        ``MPI_Comm_rank`` in MPI, ``ncclCommUserRank`` in NCCL, ``jax.process_index`` in JAX.
    """
    found = resolve(group, "get_rank")
    if found is None:
        return -1
    refuse_destroyed(found, "get_rank")
    return found.rank()


def get_world_size(group: ProcessGroup | int | None = None) -> int:
    """Return the number of ranks in a group, or -1 if this rank is not in the group.

    Args:
        group: Process group. Default: all ranks.

    Raises:
        NotInitializedError: `init_process_group` was not called.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> run(lambda rank: dist.get_world_size(), 4)
        [4, 4, 4, 4]

    Elsewhere:
        ``MPI_Comm_size`` in MPI, ``ncclCommCount`` in NCCL, ``jax.process_count`` in JAX.
    """
    found = resolve(group, "get_world_size")
    return -1 if found is None else found.size()


def get_backend(group: ProcessGroup | int | None = None) -> str:
    """Return the name of a group's backend.

    Args:
        group: Process group. Default: all ranks.

    Raises:
        ArgumentError: This rank is not in the group, or the group was destroyed.
        NotInitializedError: `init_process_group` was not called.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> run(lambda rank: dist.get_backend(), 2)
        ['ref', 'ref']

    Elsewhere:
        Nothing in MPI and NCCL; ``jax.default_backend`` in JAX names the kind of device.
    """
    return resolve_member(group, "get_backend").backend.name


def get_backend_config(group: ProcessGroup | int | None = None) -> str:
    """Return the name of a group's backend for each device type, in torch's notation.

    Args:
        group: Process group. Default: all ranks.

    Raises:
        ArgumentError: This rank is not in the group, or the group was destroyed.
        NotInitializedError: `init_process_group` was not called.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> run(lambda rank: dist.get_backend_config(), 2)
        ['cpu:ref', 'cpu:ref']

    Elsewhere:
        None in MPI, NCCL and JAX.
    """
    return registry.config_text(resolve_member(group, "get_backend_config").backend.name)


def get_backend_impl(group: str | ProcessGroup | int | None = None, device: torch.device | None = None) -> Any:
    """Return the object that runs a group's calls, with the methods that only its backend has. Since torch 2.14.

    Its own methods are not part of this library's interface: they may change in any release.

    Args:
        group: Process group, or its `group_name`. Default: all ranks.
        device: Device whose backend to return. Needed if the group has different ones, as with
            ``"cpu:ref,cuda:nccl"``.

    Returns:
        For ``gloo``, ``nccl`` and backends registered with torch their object, such as
        ``torch.distributed.ProcessGroupGloo``; else a `torchdist_ref.backends.base.Backend`.

    Raises:
        ArgumentError: This rank is not in the group, the group was destroyed, or it has several backends and no
            device is given.
        ArgumentTypeError: Not a device.
        DistError: No group has the name.
        UnsupportedError: The group has no backend for the device.
        NotInitializedError: `init_process_group` was not called.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> run(lambda rank: type(dist.get_backend_impl()).__name__, 2)
        ['Ref', 'Ref']

    Elsewhere:
        None in MPI and JAX; in NCCL a program has the ``ncclComm_t`` itself.
    """
    operation = "get_backend_impl"
    found = _named(group) if isinstance(group, str) else resolve_member(group, operation)
    if device is None:
        return found.backend.implementation(None)
    if not isinstance(device, torch.device):
        raise ArgumentTypeError(explain(operation, "device", "a torch.device or None", device))
    found.get_backend(device)
    return found.backend.implementation(device.type)


def _named(name: str) -> ProcessGroup:
    for group in current().groups:
        if group.group_name == name:
            return group
    raise DistError(
        f"get_backend_impl: Could not resolve the process group registered under the name {name!r}{on_rank()}: this "
        f"rank is in the groups {[group.group_name for group in current().groups]}."
    )


def set_timeout(timeout: timedelta, group: ProcessGroup | int | None = None) -> None:
    """Set the time-out of a group for all calls that begin from now on. Since torch 2.14.

    It replaces the time-out that `init_process_group` or `new_group` was given, on every backend of the group. Each
    rank sets its own: the ranks do not communicate. Calls in progress keep theirs, except for waits inside a call of
    ``ref``. Backends that cannot change theirs (some of other packages) warn.

    Args:
        timeout: The time-out, more than zero.
        group: Process group. Default: all ranks.

    Raises:
        ArgumentError: Not positive, this rank is not in the group, or the group was destroyed.
        ArgumentTypeError: Not a timedelta.
        NotInitializedError: `init_process_group` was not called.

    Example:
        >>> from datetime import timedelta
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     dist.set_timeout(timedelta(seconds=30))
        ...     return dist.group.WORLD.timeout
        >>> run(program, 2)
        [30.0, 30.0]

    Elsewhere:
        None in MPI, whose calls wait without limit; none in NCCL, whose user calls ``ncclCommAbort`` after a time of
        its choice; none in JAX after ``jax.distributed.initialize``.
    """
    resolve_member(group, "set_timeout").set_timeout(timeout)


def get_process_group_ranks(group: ProcessGroup | int | None) -> list[int]:
    """Return the global ranks of a group's members, in group order.

    Args:
        group: Process group. None: all ranks.

    Raises:
        ArgumentError: This rank is not in the group, or the group was destroyed.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> run(lambda rank: dist.get_process_group_ranks(None), 2)
        [[0, 1], [0, 1]]

    Elsewhere:
        ``MPI_Group_translate_ranks`` in MPI; none in NCCL and JAX.
    """
    return list(resolve_member(group, "get_process_group_ranks").members)


def get_global_rank(group: ProcessGroup, group_rank: int) -> int:
    """Return the global rank of a group rank.

    Args:
        group: Process group.
        group_rank: Rank in the group, from 0.

    Raises:
        ArgumentError: The group has no such rank, this rank is not in it, or it was destroyed.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def last_of_odd_ranks(rank):
        ...     group = dist.new_group([1, 3])
        ...     return dist.get_global_rank(group, 1) if rank in (1, 3) else None
        >>> run(last_of_odd_ranks, 4)
        [None, 3, None, 3]

    Elsewhere:
        ``MPI_Group_translate_ranks`` in MPI; none in NCCL and JAX.
    """
    found = resolve_member(group, "get_global_rank")
    _check_integer("get_global_rank", "group_rank", group_rank)
    if not 0 <= group_rank < found.size():
        raise ArgumentError(
            f"get_global_rank: Group rank {group_rank} is not part of group {found.group_desc!r}{on_rank()}."
        )
    return found.members[group_rank]


def get_group_rank(group: ProcessGroup, global_rank: int) -> int:
    """Return the group rank of a global rank.

    Args:
        group: Process group.
        global_rank: Rank in the default group.

    Raises:
        ArgumentError: The given rank or this rank is not in the group, or the group was destroyed.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def of_rank_3(rank):
        ...     group = dist.new_group([1, 3])
        ...     return dist.get_group_rank(group, 3) if rank in (1, 3) else None
        >>> run(of_rank_3, 4)
        [None, 1, None, 1]

    Elsewhere:
        ``MPI_Group_translate_ranks`` in MPI; none in NCCL and JAX.
    """
    found = resolve_member(group, "get_group_rank")
    _check_integer("get_group_rank", "global_rank", global_rank)
    if global_rank not in found.members:
        words = f"Global rank {global_rank} is not part of group {found.group_desc!r}"
        raise ArgumentError(f"get_group_rank: {words}{on_rank()}.")
    return found.members.index(global_rank)


def _check_integer(operation: str, argument: str, rank: Any) -> None:
    if as_integer(rank) is None:
        raise ArgumentError(explain(operation, argument, "an int", rank))


def is_available() -> bool:
    """Return whether ranks can communicate with this build of torch.

    Returns:
        True if torch was built with its distributed package.

    Example:
        >>> import torchdist_ref as dist
        >>> dist.is_available()
        True

    Elsewhere:
        None in MPI, NCCL and JAX: a program that links or imports one of them has it.
    """
    return c10d.is_available()


def is_gloo_available() -> bool:
    """Return whether the ``gloo`` backend can be used: torch was built with Gloo.

    Example:
        >>> import torchdist_ref as dist
        >>> dist.is_gloo_available()
        True

    Elsewhere:
        None in MPI, NCCL and JAX.
    """
    return _has("gloo", c10d.is_gloo_available)


def is_nccl_available() -> bool:
    """Return whether the ``nccl`` backend can be used: torch was built with NCCL.

    Example:
        >>> import torchdist_ref as dist
        >>> dist.is_nccl_available() in (True, False)
        True

    Elsewhere:
        ``ncclGetVersion`` in NCCL returns the version of the linked library; none in MPI; ``jax.devices("gpu")`` in JAX
        raises an error without a GPU.
    """
    return _has("nccl", c10d.is_nccl_available)


def is_mpi_available() -> bool:
    """Return whether the ``mpi`` backend can be used: ``mpi4py`` is installed.

    Example:
        >>> import torchdist_ref as dist
        >>> dist.is_mpi_available() in (True, False)
        True

    Elsewhere:
        ``MPI_Get_library_version`` in MPI names the linked implementation; none in NCCL and JAX.
    """
    return _has("mpi", lambda: importlib.util.find_spec("mpi4py") is not None)


def is_ucc_available() -> bool:
    """Return whether a backend named ``ucc`` was registered; this library has none.

    Example:
        >>> import torchdist_ref as dist
        >>> dist.is_ucc_available()
        False

    Elsewhere:
        None in MPI, NCCL and JAX.
    """
    return _has("ucc")


def is_xccl_available() -> bool:
    """Return whether a backend named ``xccl`` was registered; this library has none.

    Example:
        >>> import torchdist_ref as dist
        >>> dist.is_xccl_available()
        False

    Elsewhere:
        None in MPI, NCCL and JAX.
    """
    return _has("xccl")


def _has(name: str, installed: Callable[[], bool] = lambda: True) -> bool:
    return registry.has(name) and installed()


_CHECKS = {"gloo": is_gloo_available, "nccl": is_nccl_available, "mpi": is_mpi_available}


def is_backend_available(backend: str) -> bool:
    """Return whether `init_process_group` can use a backend.

    Args:
        backend: A name in any case, or one name per device type, as in ``"cpu:gloo,cuda:nccl"``. Then all of them
            must be available.

    Raises:
        ArgumentTypeError: Not a str.

    Example:
        >>> import torchdist_ref as dist
        >>> dist.is_backend_available("REF"), dist.is_backend_available("smoke-signals")
        (True, False)

    Elsewhere:
        None in MPI and NCCL; ``jax.devices(name)`` in JAX raises an error for an unknown platform.
    """
    if not isinstance(backend, str):
        raise ArgumentTypeError(explain("is_backend_available", "backend", "a name", backend))
    asked = [part.rpartition(":")[2].strip() for part in backend.lower().split(",")]
    return all(_CHECKS.get(name, lambda name=name: _has(name))() for name in asked)


def get_default_backend_for_device(device: str | torch.device) -> str:
    """Return the default backend for tensors of a device type, for ranks on any hosts.

    Args:
        device: A device or its name, with or without an index.

    Returns:
        ``"gloo"`` for the CPU and ``"nccl"`` for CUDA, as in torch; for other devices the backend registered with
        `Backend.register_backend`. If all ranks share a host, ``"ref"`` works on CPU tensors too.

    Raises:
        ArgumentError: No backend is known for the device, or torch knows no such device.
        ArgumentTypeError: Neither a device nor a str.

    Example:
        >>> import torchdist_ref as dist
        >>> dist.get_default_backend_for_device("cpu")
        'gloo'

    Elsewhere:
        None in MPI and NCCL; ``jax_cpu_collectives_implementation`` in JAX names the library for CPUs.
    """
    try:
        kind = (device if isinstance(device, torch.device) else torch.device(device)).type
    except (RuntimeError, TypeError) as error:
        expected = "a torch.device or its name, such as 'cuda'"
        wrong = ArgumentError if isinstance(device, str) else ArgumentTypeError
        raise wrong(explain("get_default_backend_for_device", "device", expected, device)) from error
    found = Backend.default_device_backend_map.get(kind)
    if found is None:
        known = ", ".join(sorted(Backend.default_device_backend_map))
        expected = f"a device with a default backend, one of {known}"
        hint = "Default backend not registered for device; see register_backend."
        raise ArgumentError(explain("get_default_backend_for_device", "device", expected, str(device), hint=hint))
    return found


def is_torchelastic_launched() -> bool:
    """Return whether an elastic launcher started this process: it sets ``TORCHELASTIC_RUN_ID``.

    Example:
        >>> import torchdist_ref as dist
        >>> dist.is_torchelastic_launched()
        False

    Elsewhere:
        None in MPI, NCCL and JAX. Launchers of MPI set variables of their own, such as ``OMPI_COMM_WORLD_SIZE`` and
        ``PMI_RANK``.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return this process's rank among those of its host, as the launcher set it in ``LOCAL_RANK``.

    Without that variable and without a fallback, it is derived from the variables of mpiexec or Slurm.

    Args:
        fallback_rank: Value to return if ``LOCAL_RANK`` is not set. Default: none.

    Raises:
        DistError: ``LOCAL_RANK`` is not set, there is no fallback, and neither mpiexec nor Slurm started this process.
        ArgumentError: The variable or the fallback is not an integer.

    Example:
        >>> import torchdist_ref as dist
        >>> dist.get_node_local_rank(fallback_rank=0)
        0

    Elsewhere:
        ``MPI_Comm_split_type`` with ``MPI_COMM_TYPE_SHARED`` in MPI, then ``MPI_Comm_rank``; none in NCCL;
        ``local_device_ids`` of ``jax.distributed.initialize`` in JAX.
    """
    text: Any = os.environ.get("LOCAL_RANK", fallback_rank)
    text = job_environment.local_rank(os.environ) if text is None else text
    if text is None:
        raise DistError(
            "get_node_local_rank: LOCAL_RANK is not in the environment. Start the program with a launcher, "
            "mpiexec or srun, or pass fallback_rank."
        )
    try:
        return int(text)
    except (TypeError, ValueError):
        source = "LOCAL_RANK" if "LOCAL_RANK" in os.environ else "fallback_rank"
        wrong = ArgumentError if isinstance(text, str) else ArgumentTypeError
        raise wrong(explain("get_node_local_rank", source, "an integer", text)) from None


def get_pg_count() -> int:
    """Return the number of groups created since `init_process_group`, including the default group.

    Groups that this rank is not in count too, so that all ranks get the same number. Groups that only their members
    created (`use_local_synchronization`) count on their members. Destroyed groups still count.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     dist.new_group([0])
        ...     return dist.get_pg_count()
        >>> run(program, 2)
        [2, 2]

    Elsewhere:
        None in MPI, NCCL and JAX.
    """
    world = current()
    return world.created + world.member_only.total()


class Backend(str):
    """Name of a backend, in lower case. It is a ``str``: wherever a `Backend` is accepted, a ``str`` is too.

    Args:
        name: A name in any case. `init_process_group` checks that there is such a backend.

    Attributes:
        REF: This library's own backend.
        GLOO: torch's Gloo backend, for CPU tensors.
        NCCL: torch's NCCL backend, for CUDA tensors.
        MPI: An MPI library, through mpi4py.
        UCC: Name of a backend that this library does not have; one may be registered.
        XCCL: Name of a backend that this library does not have; one may be registered.
        FAKE: Backend of a single process that acts as one rank of many and records the calls.
        TCP: Name of a backend that torch has removed.
        UNDEFINED: Name for no backend.
        default_device_backend_map: Default backend of each device type.
        backend_capability: Device types of the tensors that each backend supports, by its name. It also has the
            backends that `register_backend` has added.

    Raises:
        ArgumentError: Not a str.

    Example:
        >>> import torchdist_ref as dist
        >>> dist.Backend("GLOO") == dist.Backend.GLOO == "gloo"
        True

    Elsewhere:
        None in MPI, whose implementation is chosen when a program is linked; none in NCCL;
        ``jax_cpu_collectives_implementation`` in JAX selects ``gloo`` or ``mpi`` on CPUs.
    """

    REF = "ref"
    GLOO = "gloo"
    NCCL = "nccl"
    MPI = "mpi"
    UCC = "ucc"
    XCCL = "xccl"
    FAKE = "fake"
    TCP = "tcp"
    UNDEFINED = "undefined"
    default_device_backend_map: ClassVar[dict[str, str]] = {"cpu": GLOO, "cuda": NCCL, "xpu": XCCL, "mps": GLOO}
    backend_capability: ClassVar[dict[str, list[str]]] = {
        REF: ["cpu", "cuda"],
        GLOO: ["cpu", "cuda"],
        NCCL: ["cuda"],
        XCCL: ["xpu"],
        UCC: ["cpu", "cuda"],
        MPI: ["cpu"],
        FAKE: ["cpu", "cuda", "hpu", "xpu"],
    }

    def __new__(cls, name: str) -> Backend:
        """Return the name in lower case."""
        if not isinstance(name, str):
            raise ArgumentError(explain("Backend", "name", "a str", name))
        return super().__new__(cls, name.lower())

    @classmethod
    def register_backend(
        cls,
        name: str,
        func: Callable[..., base.Backend],
        extended_api: bool = False,
        devices: str | Sequence[str] | None = None,
    ) -> None:
        """Register a third-party backend under a name, in this process.

        Args:
            name: The name, stored in lower case; it becomes the attribute ``Backend.<NAME>``. A backend registered
                earlier under the name is replaced; for one of the library's own this warns.
            func: Factory of the backend of one group on one rank: a `torchdist_ref.backends.base.Backend`, or a
                subclass of `ProcessGroup` with torch's methods. Called as ``func(store, rank, size, timeout)``, with a
                store of this group only, the group rank and size, and a timedelta.
            extended_api: Call it as ``func(membership, options)`` instead: with a
                `torchdist_ref.backends.base.Membership`, which also has the members' global ranks and the group's
                name, and with the caller's `pg_options`. Default: False.
            devices: Device types of the tensors that it supports, as `backend_capability` lists them. It becomes the
                default backend of those that have none. Default: ``["cpu", "cuda"]``, and the default of none.

        Raises:
            ArgumentTypeError: The name is not a str, `func` is not callable, or a new group cannot use its backend.
            ArgumentError: The name is empty or has a separator in it, or torch knows no such device.

        Example:
            >>> import torchdist_ref as dist
            >>> from torchdist_ref.backends.ref import Ref
            >>> dist.Backend.register_backend("mine", lambda membership, _: Ref(membership), extended_api=True)
            >>> dist.init_process_group("mine", store=dist.HashStore(), rank=0, world_size=1)
            >>> dist.destroy_process_group()

        Elsewhere:
            Components of the ``coll`` framework in Open MPI; the plugins of ``NCCL_NET_PLUGIN`` in NCCL; the entry
            points ``jax_plugins`` in JAX.
        """
        if not isinstance(name, str):
            raise ArgumentTypeError(explain("register_backend", "name", "a str", name))
        if not callable(func):
            raise ArgumentTypeError(explain("register_backend", "func", "callable", func))
        if not name or any(sign in name for sign in ":, "):
            expected = "a name without colons, commas and spaces, which separate the backends of several devices"
            raise ArgumentError(explain("register_backend", "name", expected, name))
        kinds = [devices] if isinstance(devices, str) else [] if devices is None else devices
        if not isinstance(kinds, Iterable) or not all(
            isinstance(kind, str) and registry.is_device(kind) for kind in kinds
        ):
            expected = "names of device types, such as ['cuda']"
            raise ArgumentError(explain("register_backend", "devices", expected, devices))
        if not hasattr(cls, name.upper()):
            setattr(cls, name.upper(), name.lower())
        for device in kinds:
            cls.default_device_backend_map.setdefault(device, name.lower())
        cls.backend_capability[name.lower()] = ["cpu", "cuda"] if devices is None else list(kinds)
        registry.register(name, _factory(name.lower(), func, extended_api))


def _factory(name: str, func: Callable[..., Any], extended_api: bool) -> registry.Factory:
    def make(membership: base.Membership) -> base.Backend:
        m = membership
        arguments = (m, m.options) if extended_api else (m.store, m.rank, m.size, timedelta(seconds=m.timeout))
        _check_arguments(name, func, arguments, extended_api)
        made = func(*arguments)
        if isinstance(made, torch.distributed.ProcessGroup):
            return registry.of_process_group(name, m, made)
        if not isinstance(made, base.Backend):
            expected = "a function that returns a ProcessGroup or a torchdist_ref.backends.base.Backend"
            raise ArgumentTypeError(
                explain(
                    "register_backend",
                    "func",
                    expected,
                    made,
                    rank=m.rank,
                    hint=f"It is the backend {name!r}. Register one of torch's own kind "
                    "with torch.distributed.Backend.register_backend.",
                )
            )
        _check_attributes(name, made)
        return made

    return make


def _check_arguments(name: str, func: Callable[..., Any], arguments: tuple[Any, ...], extended_api: bool) -> None:
    """Raise if a factory cannot be called with these arguments; those in C++ have no signature to see."""
    try:
        signature = inspect.signature(func)
    except (TypeError, ValueError):
        return
    forms = "func(store, rank, size, timeout)", "func(membership, options) with extended_api=True"
    try:
        signature.bind(*arguments)
    except TypeError as error:
        expected = f"callable as {forms[extended_api]}; {forms[not extended_api]} is the other form"
        hint = f"It is the backend {name!r}: {error}."
        raise ArgumentTypeError(explain("register_backend", "func", expected, func, hint=hint)) from error


def _check_attributes(name: str, made: base.Backend) -> None:
    """Raise if a backend lacks an attribute, or calls itself by a name under which none is registered."""
    for attribute, kind in (("name", str), ("recorder", Recorder)):
        if not isinstance(getattr(made, attribute, None), kind):
            hint = "Set it in __init__: name to the registered name, recorder to membership.recorder."
            got = getattr(made, attribute, None)
            expected = f"a {kind.__name__}"
            where = f"backend {name!r}, {type(made).__name__}"
            raise ArgumentTypeError(explain(where, attribute, expected, got, hint=hint))
    if ":" not in made.name and made.name.lower() not in registry.names():
        expected = f"{name!r}, under which it is registered"
        raise ArgumentError(explain(f"backend {name!r}, {type(made).__name__}", "name", expected, made.name))


def supports_complex(reduceOp: ReduceOp.RedOpType | ReduceOp) -> bool:
    """Return whether a reduction supports complex dtypes.

    Args:
        reduceOp: A member of `ReduceOp`, or a ``ReduceOp.PREMUL_SUM`` with its factor.

    Returns:
        True for SUM, AVG and PREMUL_SUM. Complex numbers have no order and no bits to combine, and torch's backends
        multiply real numbers only.

    Raises:
        ArgumentTypeError: Not a ReduceOp.

    Example:
        >>> import torchdist_ref as dist
        >>> dist.supports_complex(dist.ReduceOp.SUM), dist.supports_complex(dist.ReduceOp.MAX)
        (True, False)

    Elsewhere:
        None in MPI, whose standard lists the operators of each datatype; none in NCCL, which has no complex dtypes;
        none in JAX.
    """
    if reduceOp is ReduceOp.PREMUL_SUM:
        return True
    try:
        check(reduction_name(reduceOp, "supports_complex"), torch.complex64, "supports_complex")
    except BackendArgumentError:
        return False
    return True


class _DeprecatedReduceOp:
    """Namespace of the members of `ReduceOp` under torch's name from before 1.0; each use warns."""

    def __getattr__(self, name: str) -> Any:
        members = ReduceOp.RedOpType.__members__
        if name == "__members__":
            return members
        if name not in members:
            raise AttributeError(f"reduce_op has no member {name!r}; there are {', '.join(members)}.")
        warnings.warn("reduce_op is deprecated, please use ReduceOp instead.", FutureWarning, stacklevel=2)
        return members[name]


reduce_op = _DeprecatedReduceOp()
