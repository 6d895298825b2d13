"""A work of torch's engines as ours: our errors, our outputs, settled once whoever asks first.

The engine copies nothing back into strided outputs and names no rank in its errors; both happen here, when the work
has ended. How a call is started is in `torch_engine`. Don't add what only one engine does: it subclasses this.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from torchdist_ref.work import Work

Tensors = Sequence[Tensor]
Finished = Callable[[BaseException | None], BaseException | None]


class TorchWork(Work):
    """A work of torch's, with our errors; copies results back into strided outputs."""

    def __init__(self, name: str, outputs: Tensors, theirs: Any, into: Tensors, finished: Finished) -> None:
        super().__init__(name, outputs)
        self._theirs, self._into, self._finished = theirs, into, finished
        self._once = threading.Lock()

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """See `Work.wait`."""
        if not self._event.is_set():
            self._settled_by(lambda: self._wait_for_theirs(timeout))
        return super().wait()

    def _wait_for_theirs(self, timeout: timedelta | float | None) -> None:
        seconds = timeout if isinstance(timeout, timedelta) or timeout is None else timedelta(seconds=timeout)
        self._theirs.wait() if seconds is None else self._theirs.wait(seconds)

    def is_completed(self) -> bool:
        """See `Work.is_completed`."""
        if not self._event.is_set() and self._theirs.is_completed():
            self._settled_by(self._theirs.wait)
        return self._event.is_set()

    def _settled_by(self, wait: Callable[[], Any]) -> None:
        error: BaseException | None = None
        try:
            wait()
        except RuntimeError as raised:
            error = raised
        with self._once:
            if not self._event.is_set():
                self._deliver(error)

    def _deliver(self, error: BaseException | None) -> None:
        for tensor, result in zip(self.outputs, self._into, strict=True):
            if error is None and result.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(result.view(tensor.shape))
        self.source = _source(self._theirs)
        translated = self._finished(error)
        self.finish() if translated is None else self.fail(translated)

    def get_future(self) -> torch.futures.Future[Any]:
        """See `Work.get_future`; settled from torch's own future."""
        future = super().get_future()
        if not self._event.is_set():
            # torch completes its future before its work, so the callback may ask only the future.
            # Callbacks run on a thread of torch's, and mean the world of whoever made the call.
            here = contextvars.copy_context()
            self._theirs.get_future().add_done_callback(lambda done: here.run(self._settled_by, done.value))
        return future


def _source(theirs: Any) -> int:
    try:
        return int(theirs._source_rank())
    except (RuntimeError, AttributeError):
        return -1
