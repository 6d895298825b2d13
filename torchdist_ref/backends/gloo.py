"""Gloo: torch's C++ backend for CPU tensors, driven by our stores and groups.

How our calls become calls of torch's is in `torch_backend`, and what Gloo can't take as it is in `torch_operands`; here
is only how ranks connect. Don't add other backends of torch's: each has a file of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import distributed_c10d as options

from torchdist_ref.backends.base import uncut
from torchdist_ref.backends.torch_backend import TorchBackend
from torchdist_ref.backends.torch_operands import Exchange, carried
from torchdist_ref.backends.torch_work import Carried, TorchWork
from torchdist_ref.backends.unfit import refuse_unfit
from torchdist_ref.calls import Call, Recv, Send
from torchdist_ref.errors import UnsupportedError

Tensors = Sequence[Tensor]


class GlooWork(TorchWork):
    """A work that one thread at a time asks, and nobody once it has ended.

    Gloo counts the completion of a message down when it is waited for: a second wait would last until the time-out,
    and then break the connection for all calls.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._asking = threading.Lock()

    def _settled_by(self, wait: Callable[[], Any]) -> None:
        # Whoever asks already will settle it. Not to wait here: futures end before works, and on the same thread.
        if self._asking.acquire(False):
            try:
                if not self._over:
                    super()._settled_by(wait)
            finally:
                self._asking.release()


class Gloo(TorchBackend):
    """torch's Gloo backend for one group."""

    name = "gloo"
    title = "Gloo"
    kind = GlooWork

    def _connect(self) -> Any:
        m = self._membership
        return c10d.ProcessGroupGloo(self._store, m.rank, m.size, timedelta(seconds=m.timeout))

    def _settle_in(self) -> None:
        """Nobody goes on, and perhaps ends the store, before everybody has read from it.

        Rank 0 may hold the store, so it leaves last: it waits until the others need nothing more.
        """
        store, m = self._membership.store, self._membership
        store.set(f"connected/{m.rank}", b"")
        if m.rank == 0:
            store.wait([f"connected/{r}" for r in range(m.size)], timedelta(seconds=m.timeout))
            store.set("all connected", b"")
            store.wait([f"gone on/{r}" for r in range(1, m.size)], timedelta(seconds=m.timeout))
        else:
            store.wait(["all connected"], timedelta(seconds=m.timeout))
            store.set(f"gone on/{m.rank}", b"")

    def _carried(self, call: Call, inputs: Tensors, outputs: Tensors) -> Carried:
        if isinstance(call, Send) and call.dst == self._membership.rank:
            raise UnsupportedError(
                f"{call} {self._here()}: Gloo has no messages from a rank to itself. Use backend 'ref', or .copy_()."
            )
        refuse_unfit(call, (*uncut(inputs), *uncut(outputs)), self.name, ("cpu", "cuda"))
        return carried(call, inputs, outputs, self._membership.rank, self._membership.size)

    def _start(self, call: Call, inputs: list[Tensor], outputs: list[Tensor]) -> Any:
        if isinstance(call, Exchange):
            source, target, how = inputs[0], outputs[0], options.AllToAllOptions()
            return self._backend.alltoall_base(target, source, list(call.taken), list(call.given), how)
        return super()._start(call, inputs, outputs)

    def _message(self, call: Send | Recv, tensors: list[Tensor]) -> list[Tensor]:
        """Gloo refuses messages of no bytes, so they travel as one."""
        return [tensor if tensor.numel() else torch.zeros(1, dtype=torch.uint8) for tensor in tensors]
