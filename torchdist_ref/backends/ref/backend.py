"""Ref: the backend that this project is about. Schedules, run on a link.

`submit` is the whole of it: a call that waits and has nothing before it runs on the spot; everything else
goes through the group's order. Planning, running, and matching messages have files of their own
(`planner`, `executor`, `point_to_point`). Don't add algorithms (schedules) or ways to move bytes (transports).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from time import monotonic, perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchdist_ref.backends.base import Backend, Membership, flat_operands
from torchdist_ref.backends.profiler_ranges import profiled
from torchdist_ref.backends.ref.callbacks import Callbacks
from torchdist_ref.backends.ref.executor import Executor, Prepared
from torchdist_ref.backends.ref.operands import IN_PLACE
from torchdist_ref.backends.ref.planner import Planner
from torchdist_ref.backends.ref.point_to_point import Inbox, Outbox, Posted
from torchdist_ref.backends.ref.progress import Lane, Order, OutOfTurnError
from torchdist_ref.backends.ref.staging import after, blank, bring_back, plain, straight
from torchdist_ref.calls import Barrier, Call, Recv, Send
from torchdist_ref.errors import GroupAbortedError
from torchdist_ref.numbers import Number, Numbers
from torchdist_ref.trace import Recorder
from torchdist_ref.transports import connect, registered_memory
from torchdist_ref.work import Done, Work

T = TypeVar("T")
Tensors = Sequence[Tensor]
_DONE = Done()
# Messages have no place among the numbers of a group's collectives.
POINT_TO_POINT: Number = (-1, 0)


class Ref(Backend):
    """Collectives on tensors of any strides, between threads, processes of one host, and hosts."""

    name = "ref"

    def __init__(self, membership: Membership) -> None:
        m = membership
        self.link = connect(m.store, m.rank, m.members, m.name, m.timeout)
        self.recorder = Recorder()
        self._timeout = m.timeout
        self._executor = Executor(self.link)
        self._planner = Planner(self.link, self._executor)
        self._outbox = Outbox(self.link)
        self._inbox = Inbox(self.link)
        # What a receive that was waited for returns, by its source: it says who sent.
        self._received: dict[int | None, Work] = {r: Done("recv", [], r) for r in range(self.link.size)}
        self._receives = Lane(f"{m.name} receives")
        self._numbers = Numbers(m.name)
        self._order = Order(m.name, self.link.check_awaited_call)
        self._callbacks = Callbacks(m.name)

    @profiled
    def submit(self, call: Call, inputs: Tensors, outputs: Tensors, wait: bool) -> Work:
        """See `Backend.submit`."""
        if self.link.broken is not None:
            self.link.check_usable(call.op)
        if isinstance(call, Send):
            return self._send(call, plain(inputs[0], call), wait)
        if isinstance(call, Recv):
            return self._recv(call, outputs[0], wait)
        if isinstance(call, Barrier):
            prepared, tensors = self._barrier, outputs
        else:
            written = flat_operands(outputs)
            tensors = written if call.op in IN_PLACE else (*flat_operands(inputs), *written)
            prepared = self._planner.plan(call, tensors, len(tensors) - len(written), (inputs, outputs))
        number, order = self._numbers.next(), self._order
        if not (wait and order.try_now()):
            return self._later(prepared, call, tensors, outputs, number, wait)
        try:
            self._run(prepared, call, tensors, number)
        except OutOfTurnError as turn:
            order.carry_out(number, partial(self._run, prepared, call, tensors, number), turn)
        finally:
            order.done()
        return _DONE

    @cached_property
    def _barrier(self) -> Prepared:
        """What every barrier is: it has no operands that a plan could depend on."""
        return self._planner.plan(Barrier(), (), 0, ((), ()))

    def _later(
        self, prepared: Prepared, call: Call, tensors: Tensors, outputs: Tensors, number: Number, wait: bool
    ) -> Work:
        work, aside = self._work(call, outputs, number), after(tensors)

        def run() -> None:
            with aside():
                self._run(prepared, call, tensors, number)

        self._order.later(number, lambda: _settle(work, lambda: self._order.carry_out(number, run)))
        if wait:
            work.wait()
        return work

    def _run(self, prepared: Prepared, call: Call, tensors: Tensors, number: Number) -> None:
        start, plan = perf_counter(), prepared.plan
        fits = plan.fits
        try:
            for tensor in tensors:
                if not fits(tensor):
                    self._run_on_copies(prepared, call, tensors, number)
                    break
            else:
                self._executor.run(prepared, tensors, number)
        except OutOfTurnError:
            raise
        except BaseException as failure:
            self.recorder.add(number[0], call, plan.nbytes, start, type(failure).__name__)
            raise
        self.recorder.add(number[0], call, plan.nbytes, start)

    def _run_on_copies(self, prepared: Prepared, call: Call, tensors: Tensors, number: Number) -> None:
        copies = [straight(t, call) for t in tensors]
        self._executor.run(prepared, copies, number)
        inputs = prepared.plan.inputs
        for tensor, result in zip(tensors[inputs:], copies[inputs:], strict=True):
            bring_back(result, tensor)

    def _work(self, call: Call, outputs: Tensors, number: Number) -> Work:
        return Work(call.op, flat_operands(outputs), self._callbacks.runner(), self._numbers.scope(number))

    def _send(self, call: Send, tensor: Tensor, wait: bool) -> Work:
        if call.dst == self.link.rank:
            self._inbox.keep(call.tag, tensor)
            return Done("send", [])
        lane = self._outbox.lanes[call.dst]
        if wait and lane.idle:
            self._timed(call, tensor, self._outbox.send, call, tensor)
            return _DONE
        work = self._work(call, [], POINT_TO_POINT)
        lane.put(lambda: _settle(work, partial(self._timed, call, tensor, self._outbox.send, call, tensor)))
        if wait:
            work.wait()
        return work

    def _recv(self, call: Recv, tensor: Tensor, wait: bool) -> Work:
        into = blank(tensor, call)
        if wait:
            return self._timed(call, tensor, self._receive, call, into, tensor)
        receive, aside = self._posted(call, into), after((tensor,))
        work = self._work(call, [tensor], POINT_TO_POINT)

        def finish_later() -> None:
            with aside():
                work.source = self._timed(call, tensor, self._finish, receive, tensor)

        self._receives.put(lambda: _settle(work, finish_later))
        return work

    def _receive(self, call: Recv, into: Tensor, tensor: Tensor) -> Work:
        if into is tensor and self._inbox.take_at_once(call, tensor):
            return self._received[call.src]
        return self._received[self._finish(self._posted(call, into), tensor)]

    def _posted(self, call: Recv, into: Tensor) -> Posted:
        receive = Posted(call, into, monotonic() + self._timeout)
        self._inbox.post(receive)
        return receive

    def _finish(self, receive: Posted, tensor: Tensor) -> int:
        self._inbox.finish(receive)
        if receive.tensor is not tensor:
            bring_back(receive.tensor, tensor)
        return receive.source

    def _timed(self, call: Call, tensor: Tensor, act: Callable[..., T], *arguments: Any) -> T:
        start, error = perf_counter(), ""
        try:
            return act(*arguments)
        except BaseException as failure:
            error = type(failure).__name__
            raise
        finally:
            self.recorder.add(POINT_TO_POINT[0], call, tensor.nbytes, start, error)

    @property
    def shares_memory(self) -> bool:
        """See `Backend.shares_memory`."""
        return self.link.hosts is None and self.link.size > 1

    def empty(self, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """See `Backend.empty`."""
        return registered_memory.empty(size, dtype) if self.shares_memory else super().empty(size, dtype)

    def failure(self, ranks: Sequence[int], description: str) -> BaseException | None:
        """See `Backend.failure`."""
        return self.link.process_failure(ranks, description)

    def close(self) -> None:
        """See `Backend.close`."""
        self._order.close()
        self._callbacks.close()
        for lane in [self._receives, *self._outbox.lanes.values()]:
            lane.close()
        self.link.close()

    def abort(self, reason: str) -> None:
        """See `Backend.abort`."""
        self.link.abort(GroupAbortedError(reason), "abort")


def _settle(work: Work, act: Callable[[], None]) -> None:
    try:
        act()
    except BaseException as error:
        work.fail(error)
    else:
        work.finish()
