"""Named ranges for torch's profilers: each call of an engine shows as ``ref:all_reduce`` beside torch's own operators.

A range lasts from the start of the call to its end, also where the caller does not wait. torch's C++ engines show
theirs by themselves, in the same form. Nobody pays who does not profile, but for the question whether to, which takes
a tenth of a microsecond. Don't add numbers of bytes or ranks to a range: the recorder has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function

from torchdist_ref.calls import Call
from torchdist_ref.work import Work

Engine = TypeVar("Engine")
Tensors = Sequence[Tensor]
Submit = Callable[[Engine, Call, Tensors, Tensors, bool], Work]

_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def in_a_range(submit: Submit[Engine]) -> Submit[Engine]:
    """For the `submit` of an engine: give its calls ranges while a profiler of torch's watches the calling thread.

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
    def asking(self: Engine, call: Call, inputs: Tensors, outputs: Tensors, wait: bool) -> Work:
        if _profiling():
            return _ranged(self, call, wait, partial(submit, self, call, inputs, outputs, wait))
        return submit(self, call, inputs, outputs, wait)

    return asking


def _ranged(engine: Any, call: Call, wait: bool, start: Callable[[], Work]) -> Work:
    with record_function(f"{engine.name}:{call.op}") as named:
        work = start()
        if not wait:
            named._call_end_callbacks_on_future(work.get_future())
    return work
