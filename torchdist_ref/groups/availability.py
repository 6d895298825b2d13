"""What can be used here: backends, launchers, numbers from the environment. Nothing in this file communicates.

A backend counts as available if this library has it and what it drives is installed. Add a check here when an
backend needs something installed; backends themselves are in `backends`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import torch
import torch.distributed as c10d

from torchdist_ref.backends.base import names
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, DistError, explain
from torchdist_ref.groups.backend_names import Backend
from torchdist_ref.groups.world import current


def is_available() -> bool:
    """Whether ranks can communicate at all here.

    Returns:
        True wherever this library can be imported with a torch that was built with its distributed package.

    Example:
        >>> import torchdist_ref as dist
        >>> dist.is_available()
        True
    """
    return c10d.is_available()


def is_gloo_available() -> bool:
    """Whether the ``gloo`` backend can be used: torch was built with Gloo."""
    return _has("gloo", c10d.is_gloo_available)


def is_nccl_available() -> bool:
    """Whether the ``nccl`` backend can be used: this library has it, and torch was built with NCCL."""
    return _has("nccl", c10d.is_nccl_available)


def is_mpi_available() -> bool:
    """Whether the ``mpi`` backend can be used: this library has it, and ``mpi4py`` is installed."""
    return _has("mpi", lambda: importlib.util.find_spec("mpi4py") is not None)


def is_ucc_available() -> bool:
    """Whether a backend named ``ucc`` can be used. This library has none; one may be registered."""
    return _has("ucc")


def is_xccl_available() -> bool:
    """Whether a backend named ``xccl`` can be used. This library has none; one may be registered."""
    return _has("xccl")


def _has(name: str, installed: Callable[[], bool] = lambda: True) -> bool:
    return name in names() and installed()


_CHECKS = {"gloo": is_gloo_available, "nccl": is_nccl_available, "mpi": is_mpi_available}


def is_backend_available(backend: str) -> bool:
    """Whether `init_process_group` can use a backend.

    Args:
        backend: A name in any case, or names by device such as ``"cpu:gloo,cuda:nccl"``: then all must be there.

    Raises:
        ArgumentTypeError: Not a text.

    Example:
        >>> import torchdist_ref as dist
        >>> dist.is_backend_available("REF"), dist.is_backend_available("smoke-signals")
        (True, False)
    """
    if not isinstance(backend, str):
        raise ArgumentTypeError(explain("is_backend_available", "backend", "a name", backend))
    asked = [part.rpartition(":")[2].strip() for part in backend.lower().split(",")]
    return all(_CHECKS.get(name, lambda name=name: _has(name))() for name in asked)


def get_default_backend_for_device(device: str | torch.device) -> str:
    """The backend that works for tensors of a device wherever the ranks are.

    Args:
        device: A device or its name, with or without a number.

    Returns:
        ``"gloo"`` for the CPU and ``"nccl"`` for CUDA, as in torch; for other devices, what was registered with
        `Backend.register_backend`. Where all ranks share a host, ``"ref"`` works on CPU tensors too.

    Raises:
        ArgumentError: No backend is known for the device.

    Example:
        >>> import torchdist_ref as dist
        >>> dist.get_default_backend_for_device("cpu")
        'gloo'
    """
    kind = torch.device(device).type
    found = Backend.default_device_backend_map.get(kind)
    if found is None:
        known = ", ".join(sorted(Backend.default_device_backend_map))
        expected = f"a device with a default backend, one of {known}"
        hint = "Default backend not registered for device; see register_backend."
        raise ArgumentError(explain("get_default_backend_for_device", "device", expected, str(device), hint=hint))
    return found


def is_torchelastic_launched() -> bool:
    """Whether a launcher with restarts started this process: the environment has ``TORCHELASTIC_RUN_ID``."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """This process's number among those of its host, as the launcher set it in ``LOCAL_RANK``.

    Args:
        fallback_rank: The answer where no launcher set it. Default: none, which makes that an error.

    Raises:
        DistError: ``LOCAL_RANK`` is not set and there is no fallback.
        ArgumentError: It is set to something that is no number.

    Example:
        >>> import torchdist_ref as dist
        >>> dist.get_node_local_rank(fallback_rank=0)
        0
    """
    said = os.environ.get("LOCAL_RANK", fallback_rank)
    if said is None:
        raise DistError(
            "get_node_local_rank: LOCAL_RANK is not in the environment. Start the program with a launcher, "
            "or give fallback_rank."
        )
    try:
        return int(said)
    except ValueError:
        raise ArgumentError(explain("get_node_local_rank", "LOCAL_RANK", "a whole number", said)) from None


def get_pg_count() -> int:
    """How many groups were made since `init_process_group`, the group of all ranks included.

    Groups that this rank is not in count too, so that all ranks get one number, but for groups that their members made
    alone (`use_local_synchronization`); destroyed groups still count.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     dist.new_group([0])
        ...     return dist.get_pg_count()
        >>> run(program, 2)
        [2, 2]
    """
    world = current()
    return world.made + world.by_members.total()
