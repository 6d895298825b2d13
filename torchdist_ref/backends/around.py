"""A backend around a backend: where calls are compared, counted or disturbed on their way down.

All but `submit` goes to the backend inside. Don't add what to do at a call: that is each wrapper's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from torchdist_ref.backends.base import Backend


class Around(Backend):
    """A backend that does something at each call, in `submit`, and leaves the rest to another backend."""

    def __init__(self, backend: Backend) -> None:
        self.name, self.recorder, self._backend = backend.name, backend.recorder, backend

    @property
    def shares_memory(self) -> bool:
        """See `Backend.shares_memory`."""
        return self._backend.shares_memory

    def empty(self, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """See `Backend.empty`."""
        return self._backend.empty(size, dtype)

    def trouble(self, ranks: Sequence[int], doing: str) -> BaseException | None:
        """See `Backend.trouble`."""
        return self._backend.trouble(ranks, doing)

    def together(self) -> AbstractContextManager[None]:
        """See `Backend.together`."""
        return self._backend.together()

    def close(self) -> None:
        """See `Backend.close`."""
        self._backend.close()

    def abort(self, reason: str) -> None:
        """See `Backend.abort`."""
        self._backend.abort(reason)
