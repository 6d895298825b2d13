"""A Work as torch wants one: a class of torch's, in whose future lies the list of outputs, over ours.

C++ sees `wait` and `get_future` only, and passes a time-out of zero for "none"; Python callers see the rest. torch
hands out one Work for several calls where it coalesces them, so this one stands for a list of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from time import monotonic
from typing import Any, TypeVar

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import ReduceOp
from torch.futures import Future, collect_all

from torchdist_ref.calls import REDUCTIONS, Call
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, UnsupportedError, explain
from torchdist_ref.work import Work


class RefWork(c10d.Work):
    """The handle of one call of torch's.

    Args:
        works: Ours, in the order of the calls.
        outputs: The tensors that they write, all of them.
        seconds: How long a wait takes at most, from now; None: as the group says.
    """

    def __init__(self, works: Sequence[Work], outputs: Sequence[Tensor], seconds: float | None) -> None:
        super().__init__()
        self._works, self._outputs = works, list(outputs)
        self._deadline = None if seconds is None else monotonic() + seconds

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until all calls are done; raises what the first of them failed with."""
        for work in self._works:
            work.wait(timeout or self._left())
        return True

    def _left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - monotonic())

    synchronize = block_current_stream = wait  # type: ignore[assignment]

    def get_future(self) -> Future[Any]:
        """A future of the list of output tensors."""
        if len(self._works) == 1:
            return self._works[0].get_future()
        outputs = self._outputs

        def value(futures: Future[list[Future[Any]]]) -> list[Tensor]:
            for future in futures.value():
                future.value()
            return outputs

        return collect_all([work.get_future() for work in self._works]).then(value)

    def is_completed(self) -> bool:
        """Whether all calls have ended, well or badly."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether all calls have ended well."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        """What the first call that failed has failed with."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[Tensor]:
        """The output tensors, once all calls are done."""
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        """See `Work.source_rank`."""
        return self._works[-1].source_rank()

    _source_rank = source_rank


T = TypeVar("T")


_WORDS = {getattr(ReduceOp, word.upper()): word for word in REDUCTIONS}


def only(op: str, argument: str, given: Sequence[T]) -> T:
    """The one element of a list. torch's lists are from the time when a process drove several devices."""
    if len(given) != 1:
        raise ArgumentError(explain(op, argument, "a list of one, as a rank has one device", len(given)))
    return given[0]


def reduction(op: str, opts: Any) -> str:
    """The reduction that options ask for.

    Raises:
        UnsupportedError: It is PREMUL_SUM.
        ArgumentTypeError: We know of no such reduction; guessing would be wrong silently.
    """
    asked = opts.reduceOp
    word = _WORDS.get(getattr(asked, "op", asked))
    if word is None:
        raise ArgumentTypeError(explain(op, "reduceOp", f"a ReduceOp, one of {', '.join(REDUCTIONS)}", asked))
    if word == "premul_sum":
        raise UnsupportedError(
            f"{op}: torch offers ReduceOp.PREMUL_SUM on NCCL only. Multiply first and use SUM, or "
            f"call torchdist_ref.{op}, which takes it on every backend."
        )
    return word


def limit(opts: Any) -> float | None:
    """Seconds after which a wait for the call ends; None where torch leaves that to the group."""
    timeout = getattr(opts, "timeout", None)
    return timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None


def usable(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """True, unless a tensor is none that `ref` can work on.

    Raises:
        UnsupportedError: It is sparse, or on an accelerator.
    """
    for tensor in (*inputs, *outputs):
        if tensor.layout is not torch.strided or not tensor.is_cpu:
            raise UnsupportedError(
                f"{call.op}: backend 'ref' works on dense CPU tensors, not {tensor.layout} on {tensor.device}. "
                f"Use .to_dense() or .cpu(), or a group on 'gloo' or 'nccl'."
            )
    return True
