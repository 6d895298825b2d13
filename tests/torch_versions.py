"""Marks for tests that compare with the installed torch, where an older torch lacks the feature to compare with.

Do not add marks of tests that check this library alone: they run with every supported torch.
"""

from __future__ import annotations

import pytest
import torch

# Release of the installed torch, as far as features depend on it: (2, 13) for 2.13.0+cpu.
INSTALLED = tuple(int(part) for part in torch.__version__.split(".")[:2])


def torch_has(version: str) -> bool:
    """Return whether the installed torch is this version, as in "2.13", or a later one."""
    return tuple(map(int, version.split("."))) <= INSTALLED


def needs_torch(version: str, feature: str) -> pytest.MarkDecorator:
    """Skip a test unless torch has a feature to compare with; the reason names the version and the feature."""
    return pytest.mark.skipif(not torch_has(version), reason=f"needs torch {version} to compare with: {feature}")
