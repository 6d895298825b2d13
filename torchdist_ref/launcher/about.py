"""Versions of this package, of Python and of torch, without importing torch."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version


def versions() -> str:
    """Return a line with the versions of this package, of Python and of torch.

    >>> versions().split(",")[0].split()[0]
    'torchdist_ref'
    """
    own = sys.modules["torchdist_ref"].__version__
    try:
        torch = f"torch {version('torch')}"
    except PackageNotFoundError:
        torch = "torch is not installed"
    return f"torchdist_ref {own}, Python {platform.python_version()}, {torch}"
