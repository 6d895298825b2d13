"""Collectives of one group: each call is planned, ordered among the others, and run by an executor.

A call that its caller waits for runs at once, on the caller's thread, if no other call is ahead of it. Every other call
runs on the group's progress thread, in order, and completes its Work there. Do not add what a call does: that is a
schedule, and an executor runs it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from time import perf_counter
from typing import Any

from torch import Tensor

from torchdist_ref.backends.base import flat_operands
from torchdist_ref.backends.ref.execute import ReferenceExecutor
from torchdist_ref.backends.ref.fast import FastExecutor
from torchdist_ref.backends.ref.handshake import EXECUTOR_VARIABLE, executor_name
from torchdist_ref.backends.ref.plan import IN_PLACE
from torchdist_ref.backends.ref.planner import Planned, Planner
from torchdist_ref.backends.ref.progress import CallOrder, OutOfOrderError
from torchdist_ref.backends.ref.staging import contiguous, copy_back, side_streams
from torchdist_ref.calls import Barrier, Call, Number, Numbers, Recorder
from torchdist_ref.transports.link import Link
from torchdist_ref.work import Done, Work

Tensors = Sequence[Tensor]
MakeWork = Callable[[str, Tensors, Number], Work]
_DONE = Done()


def executor_for(link: Link) -> FastExecutor | ReferenceExecutor:
    """Return the executor that the environment asks for; see `handshake.executor_name`."""
    name = executor_name(os.environ.get(EXECUTOR_VARIABLE, ""))
    return ReferenceExecutor(link) if name == ReferenceExecutor.name else FastExecutor(link)


class CollectiveCalls:
    """The collectives of one group on one rank.

    Args:
        link: This rank's end of the group.
        numbers: Numbers of the group's calls.
        recorder: The last calls of this group on this rank.
        make_work: Makes the Work of a call (operation, outputs, number).
    """

    def __init__(self, link: Link, numbers: Numbers, recorder: Recorder, make_work: MakeWork) -> None:
        self._link, self._numbers, self._recorder, self._make_work = link, numbers, recorder, make_work
        # One of two types, each with programs of its own type.
        self._executor: Any = executor_for(link)
        self.planner = Planner(link, self._executor)
        self._order = CallOrder(link.name, link.check_awaited_call)

    def submit(self, call: Call, inputs: Tensors, outputs: Tensors, wait: bool) -> Work:
        """Start a collective; see `Backend.submit`."""
        if isinstance(call, Barrier):
            planned, tensors = self._barrier, outputs
        else:
            written = flat_operands(outputs)
            tensors = written if call.op in IN_PLACE else (*flat_operands(inputs), *written)
            planned = self.planner.plan(call, tensors, len(tensors) - len(written), (inputs, outputs))
        number, order = self._numbers.next(), self._order
        if not (wait and order.try_now()):
            return self._later(planned, call, tensors, outputs, number, wait)
        try:
            self._run(planned, call, tensors, number)
        except OutOfOrderError as first:
            order.run_in_order(number, partial(self._run, planned, call, tensors, number), first)
        finally:
            order.done()
        return _DONE

    @cached_property
    def _barrier(self) -> Planned:
        """The plan of every barrier: it has no operands that a plan could depend on."""
        return self.planner.plan(Barrier(), (), 0, ((), ()))

    def _later(
        self, planned: Planned, call: Call, tensors: Tensors, outputs: Tensors, number: Number, wait: bool
    ) -> Work:
        work, on_side_streams = self._make_work(call.op, flat_operands(outputs), number), side_streams(tensors)

        def run() -> None:
            with on_side_streams():
                self._run(planned, call, tensors, number)

        self._order.later(number, lambda: settle(work, lambda: self._order.run_in_order(number, run)))
        if wait:
            work.wait()
        return work

    def _run(self, planned: Planned, call: Call, tensors: Tensors, number: Number) -> None:
        """Run a planned call on this thread, on contiguous copies where needed, and record it."""
        start, (plan, program) = perf_counter(), planned
        is_flat = plan.is_flat
        try:
            for tensor in tensors:
                if not is_flat(tensor):
                    self._run_on_copies(planned, call, tensors, number)
                    break
            else:
                self._executor.run(program, tensors, number)
        except OutOfOrderError:
            raise
        except BaseException as failure:
            self._recorder.add(number[0], call, plan.nbytes, start, type(failure).__name__)
            raise
        self._recorder.add(number[0], call, plan.nbytes, start)

    def _run_on_copies(self, planned: Planned, call: Call, tensors: Tensors, number: Number) -> None:
        plan, program = planned
        copies = [contiguous(t, call) for t in tensors]
        self._executor.run(program, copies, number)
        for tensor, result in zip(tensors[plan.inputs :], copies[plan.inputs :], strict=True):
            copy_back(result, tensor)

    def close(self) -> None:
        """End the progress thread."""
        self._order.close()


def settle(work: Work, act: Callable[[], None]) -> None:
    """Run something and complete its Work, with the error that it raises if it does."""
    try:
        act()
    except BaseException as error:
        work.fail(error)
    else:
        work.finish()
