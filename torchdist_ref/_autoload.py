"""What `import torch` runs of this package: it tells torch of the backend ``ref``, and nothing more.

torch's start loads the entry point ``torch.backends`` of the installed package, and fails if that raises. It leads to
``torchdist_ref._tell_torch``, which does without this file if it can't be loaded; nothing here raises, and nothing else
is loaded before somebody asks for a group on ``ref``. One file is left that can keep torch from starting, if Python
can't read it: the package's own ``__init__``. ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` helps then.
Don't import anything at the top of this file, and don't add anything that torch's start would have to wait for.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Make ``torch.distributed.init_process_group("ref")`` known to torch. Called often, acts once, never raises."""
    try:
        _register()
    except Exception as error:
        import logging

        logging.getLogger("torchdist_ref").warning("backend 'ref' could not be registered with torch: %r", error)


def _register() -> None:
    import torch.distributed as c10d

    if c10d.is_available() and not hasattr(c10d.Backend, "REF"):
        # The devices are named so that torch's own default for them stays what it is.
        c10d.Backend.register_backend("ref", _create, extended_api=True, devices=["cpu"])


def _create(options: Any, _: Any) -> Any:
    """Create the process group for each new torch group on ``ref``."""
    try:
        from torchdist_ref.backends.into_torch import create
    except Exception as error:
        raise ImportError(
            f"init_process_group: backend 'ref' is registered, but torchdist_ref can't be loaded ({error!r}). "
            f"Install it anew, or use backend 'gloo'."
        ) from error
    return create(options)
