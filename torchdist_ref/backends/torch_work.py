"""A work of torch's backends as ours: our errors, our outputs, settled once whoever asks first.

The backend copies nothing back into strided outputs and names no rank in its errors; both happen here, when the work
has ended. How a call is started is in `torch_backend`. Don't add what only one backend does: it subclasses this.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchdist_ref.calls import Call
from torchdist_ref.work import Work

Tensors = Sequence[Tensor]
Finished = Callable[[BaseException | None], BaseException | None]
# Brings results to where the caller wants them; whether there was anything to do.
BringBack = Callable[[], bool]


class Carried(NamedTuple):
    """A call as a backend of torch's gets it.

    Attributes:
        call: What to do, perhaps in other words.
        inputs: What is read, in one dimension.
        outputs: What is written.
        bring_back: Brings the results to the caller's tensors; whether there was anything to do.
    """

    call: Call
    inputs: list[Tensor]
    outputs: list[Tensor]
    bring_back: BringBack


class TorchWork(Work):
    """A work of torch's, with our errors; copies results back into strided outputs."""

    def __init__(self, name: str, outputs: Tensors, theirs: Any, bring_back: BringBack, finished: Finished) -> None:
        super().__init__(name, outputs)
        self._theirs, self._results, self._finished = theirs, bring_back, finished
        self._once = threading.Lock()

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """See `Work.wait`."""
        if not self._over:
            self._settled_by(lambda: self._wait_for_theirs(timeout))
        return super().wait(timeout)

    def _wait_for_theirs(self, timeout: timedelta | float | None) -> None:
        seconds = timeout if isinstance(timeout, timedelta) or timeout is None else timedelta(seconds=timeout)
        self._theirs.wait() if seconds is None else self._theirs.wait(seconds)

    def is_completed(self) -> bool:
        """See `Work.is_completed`."""
        if not self._over and self._theirs.is_completed():
            self._settled_by(self._theirs.wait)
        return self._over

    def _settled_by(self, wait: Callable[[], Any]) -> None:
        error: BaseException | None = None
        try:
            wait()
        except RuntimeError as raised:
            error = raised
        with self._once:
            if not self._over:
                self._deliver(error)

    def _deliver(self, error: BaseException | None) -> None:
        if error is None:
            self._bring_back()
        if self.name == "recv" and self.source < 0:
            self.source = _source(self._theirs)
        translated = self._finished(error)
        self.finish() if translated is None else self.fail(translated)

    def _bring_back(self) -> bool:
        """Fill the outputs that were not written in place; whether there were any."""
        return self._results()

    def get_future(self) -> torch.futures.Future[Any]:
        """See `Work.get_future`; settled from torch's own future."""
        future = super().get_future()
        if not self._over:
            # torch completes its future before its work, so the callback may ask only the future.
            # Callbacks run on a thread of torch's, and mean the world of whoever made the call.
            here = contextvars.copy_context()
            try:
                self._theirs.get_future().add_done_callback(lambda done: here.run(self._settled_by, done.value))
            except RuntimeError:
                # Works of messages have no future; whoever wants one anyway gets a thread that waits.
                threading.Thread(target=here.run, args=(self._settled_by, self._theirs.wait), daemon=True).start()
        return future


def brought_back(results: Tensors, outputs: Tensors) -> bool:
    """Fill the outputs whose results lie elsewhere; whether there were any."""
    copied = False
    for result, tensor in zip(results, outputs, strict=True):
        if result.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(result.view(tensor.dtype).view(tensor.shape))
            copied = True
    return copied


def _source(theirs: Any) -> int:
    try:
        return int(theirs._source_rank())
    except (RuntimeError, AttributeError):
        return -1
