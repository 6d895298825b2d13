"""Work of torch's over works of ours, and the reading of torch's options.

C++ calls only `wait` and `get_future`, and passes a time-out of zero for none; Python callers use the other methods.
The future has the list of outputs. torch makes one Work for several calls that it coalesces, so this one holds several
of ours. An option that `ref` does not support is an error. Do not add default values: torch's options have them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from inspect import isfunction
from time import monotonic
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.futures import Future

from torchdist_ref.calls import REDUCTIONS, Call
from torchdist_ref.errors import ArgumentTypeError, BackendArgumentError, UnsupportedError, explain
from torchdist_ref.timeouts import from_torch
from torchdist_ref.torch_internals import accelerators, torch_private
from torchdist_ref.work import Done, JoinedWork, Work, WorkForTorch


class RefWork(WorkForTorch):
    """Work of one call of torch's.

    Args:
        works: Our works, in the order of the calls.
        outputs: All tensors that they write.
        seconds: Time-out of waits in seconds, from now on; None: that of the group.
    """

    def __init__(self, works: Sequence[Work], outputs: Sequence[Tensor], seconds: float | None) -> None:
        self._outputs = list(outputs)
        super().__init__(
            works[0] if len(works) == 1 else JoinedWork(works[0].name if works else "", self._outputs, works)
        )
        self._deadline = None if seconds is None else monotonic() + seconds

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until all calls have completed, and raise the error of the first one that failed."""
        return self.work.wait(timeout or self._remaining())

    def _remaining(self) -> float | None:
        """Return the seconds until the deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - monotonic())

    def result(self) -> list[Tensor]:
        """Wait for all calls, and return the output tensors."""
        self.wait()
        return self._outputs


def completed_work(outputs: Sequence[Tensor], op: str = "") -> RefWork:
    """Return the work of a call that has completed."""
    return RefWork([Done(op, outputs)], outputs, None)


def with_local_step(part: RefWork, op: str, outputs: Sequence[Tensor], after: Callable[[], None], opts: Any) -> RefWork:
    """Return the work of a call that ends with a local step, after waiting for it unless the call is asynchronous.

    Args:
        part: Work of the communication.
        op: Name of the operation.
        outputs: All tensors that are written.
        after: The local step.
        opts: Options of the call.
    """
    work = RefWork([JoinedWork(op, outputs, [part.work], after)], outputs, limit(opts))
    if not opts.asyncOp:
        work.wait()
    return work


class HandedWork(RefWork):
    """Work that Python may hand to C++ and drop, as torch's DDP does with that of `join`.

    C++ then holds an object whose Python half is gone, and its `wait` is that of torch's base class, which never
    returns. So a work of which nobody has asked anything yet lives on among its group's last ones.

    Args:
        works: See `RefWork`.
        outputs: See `RefWork`.
        seconds: See `RefWork`.
        dropped: The group's last works of this kind.
    """

    _dropped: deque[RefWork] | None = None

    def __init__(
        self, works: Sequence[Work], outputs: Sequence[Tensor], seconds: float | None, dropped: deque[RefWork]
    ) -> None:
        super().__init__(works, outputs, seconds)
        self._dropped = dropped

    def wait(self, timeout: timedelta | None = None) -> bool:
        """See `RefWork.wait`."""
        self._dropped = None
        return super().wait(timeout)

    def get_future(self) -> Future[Any]:
        """See `RefWork.get_future`."""
        self._dropped = None
        return super().get_future()

    def __del__(self) -> None:
        dropped, self._dropped = self._dropped, None
        if dropped is not None:
            # The list has the only reference now, so the object lives on.
            dropped.append(self)


T = TypeVar("T")


_NAMES = {getattr(ReduceOp, word.upper()): word for word in REDUCTIONS}


class MethodArgumentError(BackendArgumentError):
    """Operands of a method that torch's Gloo refuses too, with its phrase."""


class NoTensorsError(MethodArgumentError, NotImplementedError):
    """An empty list of operands. torch's dispatcher raises a NotImplementedError, which is a RuntimeError."""


def refuse(op: str, argument: str, expected: str, got: Any, phrase: str) -> NoReturn:
    """Raise the error for an operand of a method.

    Args:
        op: Name of the operation.
        argument: Name of the argument.
        expected: Operands that it may have.
        got: What it has.
        phrase: Phrase of torch's error, which programs may look for.

    Raises:
        MethodArgumentError: Always.
    """
    raise MethodArgumentError(explain(op, argument, expected, got, hint=f"In torch's words: {phrase}."))


_ONE = "a list of one, as a rank has one device"


def check_some(op: str, argument: str, values: Sequence[Any], expected: str = "a list of at least one tensor") -> None:
    """Raise NoTensorsError if a list of operands is empty."""
    if not values:
        hint = "In torch's words: There were no tensor arguments to this function."
        raise NoTensorsError(explain(op, argument, expected, 0, hint=hint))


def only(op: str, argument: str, values: Sequence[T], phrase: str = "requires a single-element tensor list") -> T:
    """Return the element of a list of one. torch's lists date from processes with several devices.

    Raises:
        MethodArgumentError: The list has another length; `phrase` is torch's for that.
    """
    if len(values) != 1:
        if argument not in ("output_lists", "input_lists"):
            check_some(op, argument, values, _ONE)
        refuse(op, argument, _ONE, len(values), phrase)
    return values[0]


def check_alike(op: str, argument: str, first: Tensor, others: Sequence[Tensor], start: int = 0) -> None:
    """Raise MethodArgumentError unless operands have one shape and one dtype; `start` numbers the first of `others`."""
    for index, tensor in enumerate(others, start):
        if tensor.dtype != first.dtype or tensor.layout != first.layout:
            refuse(op, argument, "of one dtype and layout", tensor.dtype, f"invalid tensor type at index {index}")
        if tensor.shape != first.shape:
            refuse(op, argument, "of one shape", list(tensor.shape), f"invalid tensor size at index {index}")


def reduction(op: str, opts: Any) -> str:
    """Return the name of the reduction that options name.

    Raises:
        UnsupportedError: The reduction is PREMUL_SUM.
        ArgumentTypeError: The reduction is unknown.
    """
    requested = opts.reduceOp
    name = _NAMES.get(getattr(requested, "op", requested))
    if name is None:
        raise ArgumentTypeError(explain(op, "reduceOp", f"a ReduceOp, one of {', '.join(REDUCTIONS)}", requested))
    if name == "premul_sum":
        raise UnsupportedError(
            f"{op}: torch offers ReduceOp.PREMUL_SUM on NCCL only. Multiply first and use SUM, or "
            f"call torchdist_ref.{op}, which supports it on every backend."
        )
    return name


def limit(opts: Any) -> float | None:
    """Return the time-out of a call in seconds, or None if torch leaves it to the group."""
    timeout = from_torch(getattr(opts, "timeout", timedelta(0)))
    return timeout.total_seconds() if timeout > timedelta(0) else None


def require_dense(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Raise if `ref` inside torch does not support a tensor.

    Raises:
        UnsupportedError: A tensor is sparse, or on a device that is neither the CPU nor an accelerator.
    """
    for tensor in (*inputs, *outputs):
        on_device = tensor.is_cpu or accelerators.is_accelerator(tensor.device)
        if tensor.layout is not torch.strided or not on_device:
            raise UnsupportedError(
                f"{call.op}: backend 'ref' works on dense tensors of the CPU and of accelerators, not {tensor.layout} "
                f"on {tensor.device}. Use .to_dense() or .cpu(), or a group on 'gloo' or 'nccl'."
            )


def hide_from_compilers(*hidden: Any) -> None:
    """Exclude functions and the methods of classes, and the functions that they call, from torch's compiler.

    Compiled programs call the functions where their graph breaks, and C++ calls the methods, as in DDP. The compiler
    then looks at every Python function. It refuses to trace process groups, and the program fails.
    """
    names = torch_private.EXEC_STRATEGY, torch_private.EXEC_ACTION, torch_private.SET_EXEC_STRATEGY
    if not all(name.exists() for name in names):
        # torch's compiler then raises at such a program; all others run.
        return
    strategy, action, set_strategy = (name.get() for name in names)
    skip = strategy(action.SKIP, action.SKIP)
    for each in hidden:
        for function in (each,) if isfunction(each) else vars(each).values():
            if isfunction(function):
                set_strategy(function.__code__, skip)


def keep_flight_recorder_off(backend: str) -> None:
    """Tell torch that a backend records its calls itself: torch's recorder needs a backend in C++."""
    if torch_private.SELF_RECORDING.exists():
        torch_private.SELF_RECORDING.get().add(backend)


hide_from_compilers(WorkForTorch, RefWork, HandedWork)
