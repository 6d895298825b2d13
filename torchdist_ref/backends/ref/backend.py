"""Backend `ref`: each call is planned, ordered among the others, and run by an executor.

A collective that its caller waits for runs at once, on the caller's thread, if no other call is ahead of it. Every
other one runs on the group's progress thread, in order, and completes its Work there. Plans are cached by call, dtype
and shapes, with what the executor has made of them. Sends and receives are in `tag_matching`.

Do not add algorithms (`schedules`), ways to move bytes (`transports`), or how a call runs (an executor).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchdist_ref.backends.base import Backend, Membership
from torchdist_ref.backends.observers import is_profiling, run_in_modes, run_in_range
from torchdist_ref.backends.operands import (
    PLAIN_TYPES,
    RowBlocks,
    are_apart,
    is_in_memory,
    operands_of,
    refuse_unsupported,
)
from torchdist_ref.backends.ref.contiguous import contiguous, copy_back, device_types, refuse_capture, side_streams
from torchdist_ref.backends.ref.fast import SETTINGS, prepared
from torchdist_ref.backends.ref.tag_matching import POINT_TO_POINT, Messages
from torchdist_ref.backends.worker_threads import (
    CallbackThreads,
    CallOrder,
    OutOfOrderError,
    WorkerThread,
    WorkFactory,
    end_threads,
    settle,
)
from torchdist_ref.calls import IN_PLACE, Call, Number, Numbers, Recv, Send
from torchdist_ref.recorder import CALL, END, NUMBER, START, Entry
from torchdist_ref.torch_internals.torch_modes import (
    dispatch_modes,
    has_function_mode,
    is_traced,
    outside_modes,
    transforms,
)
from torchdist_ref.transports import connect, empty_registered, succeed
from torchdist_ref.work import Done, Work, interrupted_since

if TYPE_CHECKING:
    from torchdist_ref.backends.ref.plan import Plan
    from torchdist_ref.membership.blame import Wait
    from torchdist_ref.stores import PrefixStore, Store

Tensors = Sequence[Tensor]
Planned = tuple["Plan", Any]
"""A plan, and what the executor has made of it."""

# Programs repeat a few kinds of calls. One that keeps inventing shapes (objects of all sizes) must not fill the memory.
MOST_PLANS = 1024
# Operands that are remembered as checked: sets of a plan, tensors. Programs call again and again with the same ones.
MOST_ADDRESSES = 64
_DONE = Done()
# Operations whose operands are their outputs: those that work in place, and that without operands.
_OUTPUTS_ONLY = IN_PLACE | {"barrier"}
# Properties of a tensor that a plan depends on.
_kind = attrgetter("dtype", "shape", "is_cpu")


def _check_memory(found: dict[int, int], call: Call, inputs: Tensors, outputs: Tensors, tensors: Tensors) -> None:
    """Raise what `refuse_unsupported` does if one of the tensors, which are all operands, is not in memory.

    `found` has the sizes in bytes of tensors that were found in memory, by address. Storages are asked for theirs only
    at addresses where no tensor as large was found: that takes some hundredths of a small call.
    """
    try:
        for tensor in tensors:
            address, nbytes = (tensor.data_ptr(), tensor.nbytes) if type(tensor) in PLAIN_TYPES else (0, 1)
            if found.get(address, 0) < nbytes:
                # As `is_in_memory`, for most tensors.
                before = tensor.storage_offset() * tensor.itemsize
                fits = address and before + nbytes <= tensor.untyped_storage().nbytes()
                if not (fits and tensor.is_contiguous()) or tensor.is_nested:
                    break
                if len(found) >= MOST_ADDRESSES:
                    found.clear()
                found[address] = nbytes
        else:
            return
    except RuntimeError:
        # A tensor without storage.
        pass
    refuse_unsupported(call, inputs, outputs, Ref.name)


class Ref(Backend):
    """Collectives on tensors of any strides, between threads, processes of one host, and hosts.

    Attributes:
        link: This rank's end of the group.
        plans: Plans by call, dtype and shapes.
    """

    name = "ref"

    def __init__(self, membership: Membership) -> None:
        m = membership
        self.link = connect(m.store, m.rank, m.members, m.name, m.timeout, m.watch)
        with self.link.joining():
            self._set_up(m)

    def _set_up(self, m: Membership) -> None:
        self.recorder = m.recorder
        self._made = monotonic()
        # Sizes in bytes of tensors that were found in memory, by address.
        self._in_memory: dict[int, int] = {}
        # No method of this object, which would keep it alive in a cycle.
        self._check_memory = partial(_check_memory, self._in_memory)
        self.plans: dict[Any, Planned] = {}
        # Held while a part of this object is made: two threads may make the first calls.
        self._making = threading.RLock()
        # One collective runs at a time.
        running = threading.Lock()
        self._running, self._begin, self._done = running, running.acquire, running.release
        self._callbacks: CallbackThreads | None = None
        self._make_work: WorkFactory | None = None
        self._order: CallOrder | None = None
        self._messages: Messages | None = None
        # Of two types, each with programs of its own type.
        self._executor: Any = None
        self._numbers: Any = None
        self._environment = [os.environ.get(name, "") for name in SETTINGS]
        if any(self._environment):
            # A wrong value is an error of the group's creation.
            self._prepare()

    def _prepare(self) -> None:
        """Make what runs collectives, for the first of them."""
        with self._making:
            if self._executor is None:
                self._numbers = self.numbers
                made, self._planner = prepared(self.link, *self._environment)
                self._executor = made

    @property
    def numbers(self) -> Numbers:
        """Numbers of the collectives."""
        with self._making:
            numbers: Numbers = self._numbers or Numbers(self.link.name)
            self._numbers = numbers
            return numbers

    @property
    def make_work(self) -> WorkFactory:
        """Maker of the Works of calls that do not run at once."""
        with self._making:
            if self._make_work is None:
                self._callbacks = CallbackThreads(self.link.name)
                self._make_work = WorkFactory(self.numbers, self._callbacks, self.link.awaited)
            return self._make_work

    @property
    def order(self) -> CallOrder:
        """Order of the collectives that do not run at once."""
        with self._making:
            self._order = self._order or CallOrder(self.link.name, self._running, self.link.check_awaited_call)
            return self._order

    @property
    def messages(self) -> Messages:
        """Sends and receives."""
        with self._making:
            if self._messages is None:
                parts = self.link, self.recorder, self.make_work, self._in_memory, self._check_memory
                self._messages = Messages(*parts)
            return self._messages

    def submit(
        self,
        call: Call,
        inputs: Tensors,
        outputs: Tensors,
        wait: bool,
        *,
        below_modes: bool = False,
        profiled: bool = False,
    ) -> Work:
        """See `Backend.submit`; a call that is `profiled` has its profiler range already.

        One that is `below_modes` is made outside of the caller's modes, and those of torch's dispatcher have seen it.
        """
        # As the decorators of `observers`, but two calls of functions shorter. Programs without modes enter no guard.
        if (dispatch_modes() or has_function_mode() or transforms() or is_traced()) and not below_modes:
            return self._submit_below_modes(call, inputs, outputs, wait)
        if is_profiling() and not profiled:
            again = partial(self.submit, call, inputs, outputs, wait, below_modes=below_modes)
            return run_in_range(self, call, wait, partial(again, profiled=True))
        if self.link.broken is not None:
            self._refuse(call, inputs, outputs)
        # As `flat_operands`, but a call of a function shorter.
        written = (outputs.tensor,) if type(outputs) is RowBlocks else outputs
        if call.op in _OUTPUTS_ONLY:
            tensors = written
        elif type(call) is Send:
            return (self._messages or self.messages).send(call, inputs, outputs, wait)
        elif type(call) is Recv:
            return (self._messages or self.messages).receive(call, inputs, outputs, wait)
        else:
            tensors = (inputs.tensor, *written) if type(inputs) is RowBlocks else (*inputs, *written)
        if len(tensors) == 1:
            # Quicker than `_kind`, and most calls have one tensor.
            t = tensors[0]
            key: Any = (call, len(written), t.dtype, t.shape, t.is_cpu)
            try:
                in_memory = type(t) in PLAIN_TYPES and self._in_memory.get(t.data_ptr(), 0) >= t.nbytes
            except RuntimeError:
                in_memory = False
        else:
            # Only a barrier has no operands.
            key, in_memory = (call, len(written), *map(_kind, tensors)) if tensors else call.op, not tensors
        if not in_memory:
            self._check_memory(call, inputs, outputs, tensors)
        planned = self.plans.get(key)
        if planned is None:
            planned = self._plan(key, call, tensors, len(tensors) - len(written), (inputs, outputs))
        return self._start(planned, call, tensors, written, wait)

    def _submit_below_modes(self, call: Call, inputs: Tensors, outputs: Tensors, wait: bool) -> Work:
        """Submit a call outside of the caller's modes, after those of torch's dispatcher have seen it."""
        start = outside_modes()(partial(self.submit, call, inputs, outputs, wait, below_modes=True))
        if dispatch_modes() or is_traced():
            return run_in_modes(self, call, inputs, outputs, wait, start)
        return start()

    def submit_repeated(self, call: Call, inputs: Tensors, outputs: Tensors, wait: bool) -> Work | None:
        """See `Backend.submit_repeated`. The lists of a plan have passed the checks once."""
        if self.link.broken is not None or is_profiling():
            return None
        if dispatch_modes() or has_function_mode() or transforms() or is_traced():
            return None
        tensors = (*inputs, *outputs)
        try:
            planned = self.plans.get((call, len(outputs), *map(_kind, tensors)))
            if planned is None or not all(map(planned[0].is_flat, tensors)):
                return None
            addresses, apart = (*map(Tensor.data_ptr, tensors),), planned[0].apart
        except (AttributeError, RuntimeError):
            # Other objects than tensors, or tensors without memory.
            return None
        if addresses not in apart:
            if not (are_apart(inputs, outputs) and all(map(is_in_memory, tensors))):
                return None
            if len(apart) >= MOST_ADDRESSES:
                apart.clear()
            apart.add(addresses)
        return self._start(planned, call, tensors, outputs, wait)

    def _start(self, planned: Planned, call: Call, tensors: Tensors, written: Tensors, wait: bool) -> Work:
        """Run a planned call now if no other call is ahead of it, else on the progress thread."""
        order = self._order
        if not planned[0].on_host:
            refuse_capture(tensors, call.op)
        entry: Entry = [-1, call, planned[0].operands, 0.0, 0.0, ""]
        try:
            entry[NUMBER] = self._numbers.next()
            self.recorder.record(entry)
            later = not wait or (order is not None and order.queued) or not self._begin(False)
            if not later:
                try:
                    self._run(planned, tensors, entry)
                except OutOfOrderError as first:
                    self._run_in_order(entry, partial(self._run, planned, tensors, entry), first)
                finally:
                    self._done()
                return _DONE
            work = self._later(planned, tensors, written, entry)
        except BaseException as failure:
            if not entry[START]:
                # A signal's handler has raised, or no thread can be started: the number is used up, and perhaps no call
                # can begin any more.
                self.link.abort_unless_definite(failure, planned[0].text)
            raise
        if wait:
            work.wait()
        return work

    def wrap_executor(self, wrap: Callable[[Any], Any]) -> None:
        """Replace the executor by what a function makes of it, before the first call; for debugging."""
        self._prepare()
        self._executor = wrap(self._executor)

    def _refuse(self, call: Call, inputs: Tensors, outputs: Tensors) -> None:
        """Raise because the group has failed, and record that; a call that comes late is known by that record."""
        number = POINT_TO_POINT if isinstance(call, Send | Recv) else self.numbers.next()
        entry = self.recorder.begin(number, call, operands_of(inputs, outputs))
        try:
            self.link.check_usable(call.op)
        except Exception as failure:
            self.recorder.fail(entry, failure)
            raise
        self.recorder.drop(entry)

    def _plan(self, key: Any, call: Call, tensors: Tensors, inputs: int, lists: tuple[Tensors, Tensors]) -> Planned:
        """Plan a call of a new kind, compile the plan, and remember both."""
        if len(self.plans) >= MOST_PLANS:
            self.plans.clear()
        try:
            # Tensors made under inference mode could not be changed after it.
            with torch.inference_mode(False):
                self._prepare()
                plan = self._planner.make(call, tensors, inputs, lists)
                planned = self.plans[key] = plan, self._executor.compile(plan)
        except Exception as error:
            self.link.abort_unless_definite(error, call.op)
            raise
        return planned

    def _later(self, planned: Planned, tensors: Tensors, written: Tensors, entry: Entry) -> Work:
        """Run a planned call on the progress thread, and return its Work."""
        number: Number = entry[NUMBER]
        call: Call = entry[CALL]
        work = self.make_work(call.op, written, number)
        on_side_streams = nullcontext if planned[0].on_host else side_streams(tensors, self.link, planned[0].text)

        def run() -> None:
            if self.link.broken is not None:
                self.link.check_usable(call.op)
            with on_side_streams():
                self._run(planned, tensors, entry)

        self.order.later(number, partial(settle, work, partial(self._run_in_order, entry, run)))
        return work

    def _run_in_order(self, entry: Entry, run: Callable[[], None], first: OutOfOrderError | None = None) -> None:
        """Run a call once those with smaller numbers have run on all ranks."""
        try:
            self.order.run_in_order(entry[NUMBER], run, first)
        except BaseException as failure:
            if not entry[END]:
                self.recorder.fail(entry, failure)
            raise

    def _run(self, planned: Planned, tensors: Tensors, entry: Entry) -> None:
        """Run a planned call on this thread, on contiguous copies where needed, and record its times."""
        plan, program = planned
        try:
            entry[START] = perf_counter()
            is_flat = plan.is_flat
            for tensor in tensors:
                if not is_flat(tensor):
                    self._run_on_copies(planned, tensors, entry)
                    break
            else:
                self._executor.run(program, tensors, entry[NUMBER])
        except OutOfOrderError:
            raise
        except BaseException as failure:
            # The other ranks first: the recorder may write a file.
            self.link.abort_unless_definite(failure, plan.text)
            self.recorder.fail(entry, failure)
            raise
        entry[END] = perf_counter()

    @outside_modes()
    def _run_on_copies(self, planned: Planned, tensors: Tensors, entry: Entry) -> None:
        plan, program = planned
        copies = [contiguous(t, entry[CALL]) for t in tensors]
        self._executor.run(program, copies, entry[NUMBER])
        for tensor, result in zip(tensors[plan.inputs :], copies[plan.inputs :], strict=True):
            copy_back(result, tensor)

    @property
    def device_types(self) -> Sequence[str]:
        """See `Backend.device_types`."""
        return device_types()

    @property
    def shares_memory(self) -> bool:
        """See `Backend.shares_memory`."""
        return self.link.hosts is None and self.link.size > 1

    def empty(self, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """See `Backend.empty`."""
        return empty_registered(size, dtype) if self.shares_memory else super().empty(size, dtype)

    def set_timeout(self, seconds: float) -> None:
        """See `Backend.set_timeout`."""
        self.link.set_timeout(seconds)

    def failure(self, ranks: Sequence[int], description: str, wait: Wait) -> BaseException | None:
        """See `Backend.failure`."""
        return self.link.failure_elsewhere(ranks, description, wait)

    def successor_store(self, store: Store, remaining: Sequence[int], timeout: float) -> PrefixStore | None:
        """See `Backend.successor_store`. The address is in the status table."""
        return succeed(self.link, store, remaining, timeout)

    def leave(self) -> bool:
        """See `Backend.leave`. Receives end at once, if no message for them has come."""
        busy = not all(thread.idle for thread in self._threads())
        if self.link.broken is not None or (busy and interrupted_since(self._made)):
            self.link.leave()
        if self._messages is not None:
            self._messages.end_receives()
        if self._order is None or self._order.progress.idle:
            self.link.announce_leave()
        # In the order in which one puts jobs into the next.
        return all(thread.idle for thread in self._threads()) and (self._callbacks is None or self._callbacks.idle)

    def _threads(self) -> list[WorkerThread]:
        """Return the threads of calls, those of callbacks excepted."""
        progress = [] if self._order is None else [self._order.progress]
        return progress if self._messages is None else [*progress, *self._messages.threads]

    def close(self) -> None:
        """See `Backend.close`."""
        # Calls that have not ended by now wait for peers: they raise at their next check.
        self.link.leave()
        threads = [*self._threads(), *(self._callbacks.threads if self._callbacks is not None else ())]
        if threads:
            end_threads(threads)
        self.plans.clear()
        if self._executor is not None:
            self._executor.close()
        self.link.close()

    @property
    def broken(self) -> BaseException | None:
        """See `Backend.broken`."""
        return self.link.broken

    def explain_leave(self, reason: str) -> None:
        """See `Backend.explain_leave`. The reason is in this rank's row of the status table."""
        self.link.explain_leave(reason)

    def announce_exit(self) -> None:
        """See `Backend.announce_exit`."""
        self.link.announce_program_end()

    def abort(self, reason: str) -> None:
        """See `Backend.abort`."""
        self.link.abort_because(reason)
