"""Backends: the implementations of the calls, found by name in `registry` and imported when a group asks for one.

This file registers ``ref`` with torch, which runs while torch starts. When torch is imported, it loads the entry point
``torch.backends`` of the installed package, and fails if that raises. The entry point is
``torchdist_ref._register_with_torch``, which logs what goes wrong with this file. Nothing else is imported before a
program makes a group on ``ref``. Only the package's own ``__init__`` can still keep torch from starting, if Python
cannot read it; ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` helps then. torch 2.14 and later also load an entry point
``torch.distributed.backends`` of the same function, when a program names the backend.

Do not import anything of ours or torch at the top of this file, and do not add work here: torch's start waits for it.
"""

from __future__ import annotations

import sys
from typing import Any


def register_with_torch() -> None:
    """Make ``torch.distributed.init_process_group("ref")`` known to torch if torch is imported; log what fails."""
    try:
        if "torch" in sys.modules:
            _register()
    except Exception as error:
        import logging

        logging.getLogger("torchdist_ref").warning("backend 'ref' cannot be registered with torch: %r", error)


def _register() -> None:
    import torch
    import torch.distributed as c10d

    if not c10d.is_available():
        return
    # torch keeps its own default for the devices that have one; for others, such as simulated ones, `ref` is it. A
    # package may register its device later, and then calls this again.
    accelerator = torch.accelerator.current_accelerator()
    devices = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    if not hasattr(c10d.Backend, "REF") or c10d.Backend.backend_capability.get("ref") != devices:
        c10d.Backend.register_backend("ref", _create, extended_api=True, devices=devices)


def _create(options: Any, _: Any) -> Any:
    """Make a process group on ``ref``; torch calls it for each new group."""
    try:
        from torchdist_ref.backends.ref_in_torch.creation import create
        from torchdist_ref.backends.ref_in_torch.objects import limit_objects
    except Exception as error:
        raise ImportError(
            f"init_process_group: backend 'ref' is registered, but torchdist_ref can't be loaded ({error!r}). "
            f"Install it anew, or use backend 'gloo'."
        ) from error
    limit_objects()
    return create(options)


register_with_torch()
