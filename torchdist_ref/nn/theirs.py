"""Names of torch's own that stand here too, so that programs find them; torch's module is loaded when one is used.

What is here needs torch's RPC, which is a transport, a thread pool and a script compiler in C++: nothing that reading
this library would explain.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from typing import Any

from torchdist_ref.errors import UnsupportedError


def torchs(module: str, name: str, known: Sequence[str]) -> Any:
    """Return something of torch's.

    Args:
        module: The module below ``torch.distributed.nn``.
        name: What is asked for.
        known: What may be asked for.

    Returns:
        torch's object of that name.

    Raises:
        AttributeError: Something else is asked for.
        UnsupportedError: This torch was built without RPC.
    """
    if name not in known:
        raise AttributeError(f"module 'torchdist_ref.nn.{module}' has no attribute {name!r}")
    from torch.distributed import rpc

    if not rpc.is_available():
        raise UnsupportedError(f"{name}: it is torch's own and needs RPC, which this torch was built without.")
    with warnings.catch_warnings():
        # Importing it compiles something with torch.jit, which torch itself warns of.
        warnings.simplefilter("ignore")
        return getattr(importlib.import_module(f"torch.distributed.nn.{module}"), name)
