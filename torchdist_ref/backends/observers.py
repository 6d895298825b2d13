"""Observers: the modes of torch's dispatcher and its profiler, which see each call of a backend as they see operators.

Profiler ranges: each call of a backend appears as ``ref:all_reduce`` beside torch's own operators, from its start to
its end, also if it is asynchronous. torch's C++ backends make such ranges themselves. Without a profiler a call costs
one check, a tenth of a microsecond. A range that ends after its profiler has stopped writes into memory that the
profiler has freed, and the process crashes. So a range ends before any thread can see that the call has ended: waiting
for a call inside the profiled block is safe. If a call is still running when the profiler stops, its range stays open
and is shown without an end.

Do not add numbers of bytes or ranks to a range: the recorder has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, TypeVar

from torch import Tensor
from torch.autograd import profiler
from torch.futures import Future

from torchdist_ref.backends.base import Backend
from torchdist_ref.calls import Call
from torchdist_ref.errors import UnsupportedError, on_rank
from torchdist_ref.torch_internals import torch_private
from torchdist_ref.torch_internals.torch_modes import dispatch_modes, is_traced
from torchdist_ref.work import Work

Tensors = Sequence[Tensor]


AnyBackend = TypeVar("AnyBackend", bound=Backend)
Submit = Callable[[AnyBackend, Call, Tensors, Tensors, bool], Work]

# ---- modes of torch's dispatcher


def dispatched(submit: Submit[AnyBackend]) -> Submit[AnyBackend]:
    """Decorate the `submit` of a backend: modes of torch's dispatcher on the calling thread see its calls.

    >>> import torchdist_ref as dist
    >>> from torch.distributed.tensor.debug import CommDebugMode
    >>> from torchdist_ref.testing import run
    >>> def program(rank):
    ...     with CommDebugMode() as seen:
    ...         dist.all_reduce(torch.ones(2))
    ...     return {str(operator): count for operator, count in seen.get_comm_counts().items()}
    >>> run(program, 1)
    [{'c10d.allreduce_': 1}]
    """

    @wraps(submit)
    def submit_dispatched(self: AnyBackend, call: Call, inputs: Tensors, outputs: Tensors, wait: bool) -> Work:
        if dispatch_modes() or is_traced():
            return run_in_modes(self, call, inputs, outputs, wait, partial(submit, self, call, inputs, outputs, wait))
        return submit(self, call, inputs, outputs, wait)

    return submit_dispatched


def run_in_modes(
    backend: Backend, call: Call, inputs: Tensors, outputs: Tensors, wait: bool, start: Callable[[], Work]
) -> Work:
    """Pass a call to torch's dispatcher, at whose end `start` submits it, without modes.

    Raises:
        UnsupportedError: ``torch.jit.trace`` runs. Its trace would keep the data of the other ranks as constants.
    """
    if is_traced():
        raise UnsupportedError(
            f"{call.op}: Tried to trace a collective, which torch.jit.trace cannot record{on_rank()}. Use "
            f"torch.compile or torch.export, or call it outside the traced function."
        )
    group = None if backend.group is None else backend.group()
    if group is None:
        return start()
    work: Work = group.dispatch(call, inputs, outputs, wait, start)
    return work


# ---- profiler ranges

# Ranges that outlived their profiler. They are kept, since destroying a range ends it.
_left_open: list[Future[None]] = []

is_profiling: Callable[[], bool] = torch_private.PROFILER_ENABLED.bind()
end_range_with: Callable[[Any, Future[None]], Any] = torch_private.END_RANGE_LATER.bind()


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
        if is_profiling():
            return run_in_range(self, call, wait, partial(submit, self, call, inputs, outputs, wait))
        return submit(self, call, inputs, outputs, wait)

    return submit_profiled


def run_in_range(backend: Backend, call: Call, wait: bool, start: Callable[[], Work]) -> Work:
    """Start a call in a profiler range that ends with it; `start` submits the call."""
    with profiler.record_function(f"{backend.name}:{call.op}") as named:
        work = start()
        if not wait:
            end: Future[None] = Future()
            end_range_with(named, end)
            work.run_before_completion(partial(_end, end))
    return work


def _end(range_: Future[None]) -> None:
    """End a range if its profiler still runs."""
    if torch_private.PROFILER_RUNS.get():
        range_.set_result(None)
    else:
        _left_open.append(range_)
