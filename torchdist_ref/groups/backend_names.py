"""Backend: names of backends as users write them, and the door through which backends of others come in.

What a backend is, and the table of them, is `backends.base`; here names are only spelled and passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

from torchdist_ref.backends import base
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, explain


class Backend(str):
    """The name of a backend, in lower case. It is a ``str``, so plain text does as well everywhere.

    Args:
        name: A name in any case. Whether there is such a backend is asked by `init_process_group`.

    Attributes:
        REF: This library's own backend.
        GLOO: torch's backend for CPU tensors.
        NCCL: NVIDIA's, for CUDA tensors.
        MPI: An MPI library, through mpi4py.
        UCC: Accepted as a name; no backend comes with it.
        XCCL: Accepted as a name; no backend comes with it.
        FAKE: One process that plays one rank of many and records the calls.
        TCP: Accepted as a name; torch removed that backend long ago.
        UNDEFINED: What stands for no backend.
        default_device_backend_map: Which backend `get_default_backend_for_device` answers for a device.

    Raises:
        ArgumentError: Not a text.

    Example:
        >>> import torchdist_ref as dist
        >>> dist.Backend("GLOO") == dist.Backend.GLOO == "gloo"
        True
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

    def __new__(cls, name: str) -> Backend:
        if not isinstance(name, str):
            raise ArgumentError(explain("Backend", "name", "a text", name))
        return super().__new__(cls, name.lower())

    @classmethod
    def register_backend(
        cls,
        name: str,
        func: Callable[..., base.Backend],
        extended_api: bool = False,
        devices: str | Sequence[str] | None = None,
    ) -> None:
        """Make a backend of your own known under a name, in this process.

        Args:
            name: The name, kept in lower case; ``Backend.<NAME>`` is it from then on. A known name is replaced.
            func: Makes the backend of one group on one rank, a `torchdist_ref.backends.base.Backend`. Called as
                ``func(store, rank, size, timeout)``: a store of this group only, group rank and size, a timedelta.
            extended_api: Call it as ``func(membership, options)`` instead: a
                `torchdist_ref.backends.base.Membership`, which has the members' global ranks and the group's name
                besides, and the caller's `pg_options`.
            devices: Devices whose default backend this becomes if they have none.

        Raises:
            ArgumentTypeError: The name is no text, or `func` can't be called.

        Example:
            >>> import torchdist_ref as dist
            >>> from torchdist_ref.backends.ref import Ref
            >>> dist.Backend.register_backend("mine", lambda membership, _: Ref(membership), extended_api=True)
            >>> dist.init_process_group("mine", store=dist.HashStore(), rank=0, world_size=1)
            >>> dist.destroy_process_group()
        """
        if not isinstance(name, str):
            raise ArgumentTypeError(explain("register_backend", "name", "a text", name))
        if not callable(func):
            raise ArgumentTypeError(explain("register_backend", "func", "callable", func))
        if not hasattr(cls, name.upper()):
            setattr(cls, name.upper(), name.lower())
        for device in [devices] if isinstance(devices, str) else devices or ():
            cls.default_device_backend_map.setdefault(device, name.lower())
        base.register(name, _factory(name.lower(), func, extended_api))


def _factory(name: str, func: Callable[..., Any], extended_api: bool) -> base.Factory:
    def make(membership: base.Membership) -> base.Backend:
        m = membership
        arguments = (m, m.options) if extended_api else (m.store, m.rank, m.size, timedelta(seconds=m.timeout))
        made = func(*arguments)
        if not isinstance(made, base.Backend):
            expected = "a function that returns a torchdist_ref.backends.base.Backend"
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
        return made

    return make
