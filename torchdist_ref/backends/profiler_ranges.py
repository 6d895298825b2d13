"""Profiler ranges: each call of a backend appears as ``ref:all_reduce`` beside torch's own operators.

A range lasts from the start of the call to its end, also for asynchronous calls. torch's C++ backends make such ranges
themselves. Without a profiler a call costs one check, a tenth of a microsecond.

A range that ends after its profiler has stopped writes into memory that the profiler has freed, and the process
crashes. So a range ends before any thread can see that the call has ended: waiting for a call inside the profiled block
is safe. If a call is still running when the profiler stops, its range stays open and is shown without an end.

Do not add numbers of bytes or ranks to a range: the recorder has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.futures import Future

from torchdist_ref.calls import Call
from torchdist_ref.work import Work

AnyBackend = TypeVar("AnyBackend")
Tensors = Sequence[Tensor]
Submit = Callable[[AnyBackend, Call, Tensors, Tensors, bool], Work]

# Ranges that outlived their profiler. They are kept, since destroying a range ends it.
_left_open: list[Future[None]] = []

# torch has no public names for the profiler's state and for ending a range later.
_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]  # noqa: SLF001


def profiled(submit: Submit[AnyBackend]) -> Submit[AnyBackend]:
    """Decorate the `submit` of a backend: its calls get ranges while a profiler of torch runs on the calling thread.

    >>> import torchdist_ref as dist
    >>> from torchdist_ref.testing import run
    >>> def program(rank):
    ...     with torch.autograd.profiler.profile() as seen:
    ...         dist.barrier()
    ...     return [event.name for event in seen.function_events if "barrier" in event.name]
    >>> run(program, 1)
    [['ref:barrier']]
    """

    @wraps(submit)
    def submit_profiled(self: AnyBackend, call: Call, inputs: Tensors, outputs: Tensors, wait: bool) -> Work:
        if _profiling():
            return _in_range(self, call, wait, partial(submit, self, call, inputs, outputs, wait))
        return submit(self, call, inputs, outputs, wait)

    return submit_profiled


def _in_range(backend: Any, call: Call, wait: bool, start: Callable[[], Work]) -> Work:
    """Start a call in a range that ends with it."""
    with profiler.record_function(f"{backend.name}:{call.op}") as named:
        work = start()
        if not wait:
            end: Future[None] = Future()
            named._call_end_callbacks_on_future(end)  # noqa: SLF001
            work.run_before_completion(partial(_end, end))
    return work


def _end(range_: Future[None]) -> None:
    """End a range if its profiler still runs."""
    if profiler._is_profiler_enabled:  # noqa: SLF001
        range_.set_result(None)
    else:
        _left_open.append(range_)
