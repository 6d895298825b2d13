"""Named ranges for torch's profilers: each call of a backend shows as ``ref:all_reduce`` beside torch's own operators.

A range lasts from the start of the call to its end, also where the caller does not wait. torch's C++ backends show
theirs by themselves, in the same form. Nobody pays who does not profile, but for the question whether to, which takes
a tenth of a microsecond. Don't add numbers of bytes or ranks to a range: the recorder has them.

A range that ends after its profiler has stopped writes into memory that the profiler has freed, and the process dies
of it. So a range ends before anybody can see that the call has: who waits for a call inside the profiled block is safe.
For calls still on their way when the profiler stops, the range is left open for good, which shows them without an end.
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

Backend = TypeVar("Backend")
Tensors = Sequence[Tensor]
Submit = Callable[[Backend, Call, Tensors, Tensors, bool], Work]

# Ranges that outlived their profiler: what destroys one ends it first.
_left_open: list[Future[None]] = []

_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def profiled(submit: Submit[Backend]) -> Submit[Backend]:
    """For the `submit` of a backend: give its calls ranges while a profiler of torch's watches the calling thread.

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
    def asking(self: Backend, call: Call, inputs: Tensors, outputs: Tensors, wait: bool) -> Work:
        if _profiling():
            return _ranged(self, call, wait, partial(submit, self, call, inputs, outputs, wait))
        return submit(self, call, inputs, outputs, wait)

    return asking


def _ranged(backend: Any, call: Call, wait: bool, start: Callable[[], Work]) -> Work:
    with profiler.record_function(f"{backend.name}:{call.op}") as named:
        work = start()
        if not wait:
            end: Future[None] = Future()
            named._call_end_callbacks_on_future(end)
            work.run_before_completion(partial(_end, end))
    return work


def _end(range_: Future[None]) -> None:
    if profiler._is_profiler_enabled:
        range_.set_result(None)
    else:
        _left_open.append(range_)
