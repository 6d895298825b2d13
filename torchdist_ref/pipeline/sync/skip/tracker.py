"""Carries stashed tensors to where they are popped.

While a partition works on a micro-batch, the tensors are in a dict of this thread; what stays there when it is done
goes on with the micro-batch. Outside a pipeline each thread has one dict, so a model with skip connections works
there too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from torch import Tensor

from torchdist_ref.pipeline.sync.skip.namespace import Namespace

__all__ = ["Key", "Skips", "current", "using"]

Key = tuple[Namespace | None, str]
Skips = dict[Key, Tensor | None]


class _Here(threading.local):
    def __init__(self) -> None:
        self.skips: Skips = {}


_here = _Here()


def current() -> Skips:
    """The tensors that are stashed at the moment."""
    return _here.skips


@contextlib.contextmanager
def using(skips: Skips) -> Iterator[Skips]:
    """Stash to another dict, and pop from it, for a while."""
    former, _here.skips = _here.skips, skips
    try:
        yield skips
    finally:
        _here.skips = former
