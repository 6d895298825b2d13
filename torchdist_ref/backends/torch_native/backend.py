"""Common part of torch's own backends: our calls as their methods, and their works and errors as ours.

A call is one `match` arm: our value in, torch's method and options out. A backend keeps Python references that C++ does
not keep: to the store and to every running work. Tensors with strides go through contiguous copies, since Gloo writes
outside a strided view and NCCL refuses one. Errors get the call, the rank and the group, which torch's own lack.

Do not add what one backend alone needs: that is in `gloo`, `nccl` or `third_party`.
"""

from __future__ import annotations

import contextvars
import re
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import distributed_c10d as options

from torchdist_ref.backends.base import Backend, Membership
from torchdist_ref.backends.observers import dispatched
from torchdist_ref.backends.operands import flat_operands, operands_of
from torchdist_ref.backends.torch_native.stores import StoreForTorch
from torchdist_ref.calls import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Call,
    Gather,
    Recv,
    Reduce,
    ReduceScatter,
    Scatter,
    Send,
)
from torchdist_ref.errors import (
    DistBackendError,
    DistError,
    GroupAbortedError,
    RankDiedError,
    RankStalledError,
    UnsupportedError,
    in_context,
)
from torchdist_ref.membership.events import PROGRAM_ENDED, Published
from torchdist_ref.membership.group_events import GroupEvents
from torchdist_ref.recorder import END, Entry
from torchdist_ref.torch_internals import torch_private
from torchdist_ref.torch_internals.torch_modes import outside_modes
from torchdist_ref.work import Work, refuse_inherited

if TYPE_CHECKING:
    from torchdist_ref.backends.worker_threads import CallbackRunner
    from torchdist_ref.membership.blame import Wait

Tensors = Sequence[Tensor]
# Records the end of a call, and returns the error that the caller gets.
Finished = Callable[[BaseException | None], BaseException | None]
# Copies results to the caller's tensors, and returns whether there was anything to copy.
CopyBack = Callable[[], bool]

_REDUCE_OPS = {
    "sum": c10d.ReduceOp.SUM,
    "avg": c10d.ReduceOp.AVG,
    "product": c10d.ReduceOp.PRODUCT,
    "min": c10d.ReduceOp.MIN,
    "max": c10d.ReduceOp.MAX,
    "band": c10d.ReduceOp.BAND,
    "bor": c10d.ReduceOp.BOR,
    "bxor": c10d.ReduceOp.BXOR,
    "premul_sum": c10d.ReduceOp.SUM,
}


# Texts of torch's backends on a connection that another rank has ended, or on which nothing arrives.
_CONNECTION = re.compile(r"connect|reset|closed|socket|pipe|peer|timed out|timeout|remote process", re.IGNORECASE)
# Those on a call of this rank's that nothing arrived for, and on a connection that another rank ended after its own.
_STALLED = re.compile(r"Timed out waiting \d+ms")
_ENDED = re.compile(r"Application timeout caused pair closure|Connection (closed|reset) by peer")


class TorchCall(NamedTuple):
    """A call with the operands that a backend of torch's gets.

    Attributes:
        call: The call, which may differ from the caller's.
        inputs: Tensors that are read, of one dimension.
        outputs: Tensors that are written.
        copy_back: Copies the results to the caller's tensors, and returns whether there was anything to copy.
    """

    call: Call
    inputs: list[Tensor]
    outputs: list[Tensor]
    copy_back: CopyBack


class TorchWork(Work):
    """Work of torch's, with our errors; it copies results back into strided outputs.

    The first thread that learns that torch's work has ended completes it.

    Args:
        name: The operation.
        outputs: The caller's output tensors.
        torch_work: torch's work.
        copy_back: Copies the results to the outputs, and returns whether there was anything to copy.
        finished: Records the end of the call, and returns the error that the caller gets.
        callbacks: See `Work`.
    """

    def __init__(
        self,
        name: str,
        outputs: Tensors,
        torch_work: Any,
        copy_back: CopyBack,
        finished: Finished,
        callbacks: CallbackRunner | None = None,
    ) -> None:
        super().__init__(name, outputs, callbacks)
        self._torch_work, self._copy_back, self._finished = torch_work, copy_back, finished
        self._once, self._has_thread = threading.Lock(), False

    def await_over(self, seconds: float | None) -> bool:
        """See `Work.await_over`; torch fails a call that a wait with a time-out gives up."""
        if not self._over:
            refuse_inherited(self.name, self._forks)
            self._complete_after(lambda: self._wait_for_torch(seconds))
        return super().await_over(seconds)

    def _wait_for_torch(self, seconds: float | None) -> None:
        """Wait for torch's work."""
        self._torch_work.wait() if seconds is None else self._torch_work.wait(timedelta(seconds=seconds))

    def is_over(self) -> bool:
        """See `Work.is_over`."""
        if not self._over and self._torch_work.is_completed():
            self._complete_after(self._torch_work.wait)
        return self._over

    def _complete_after(self, wait: Callable[[], Any]) -> None:
        """Complete this work with the outcome of a wait for torch's, unless another thread does."""
        error: BaseException | None = None
        try:
            wait()
        except RuntimeError as raised:
            error = raised
        with self._once:
            if not self._over:
                self._end(error)

    def _end(self, error: BaseException | None) -> None:
        """Copy results back and complete this work."""
        if error is None:
            with outside_modes():
                self._copy_results()
        if self.name == "recv" and self.source < 0:
            self.source = _source(self._torch_work)
        translated = self._finished(error)
        self.finish() if translated is None else self.fail(translated)

    def _copy_results(self) -> bool:
        """Fill the outputs that were not written in place, and return whether there were any."""
        return self._copy_back()

    def get_future(self) -> torch.futures.Future[Any]:
        """See `Work.get_future`; completed from torch's own future."""
        future = super().get_future()
        if not self._over:
            # torch completes its future before its work, so the callback may use only the future. Callbacks run on a
            # thread of torch's, in the context of the caller.
            context = contextvars.copy_context()
            try:
                torchs = self._torch_work.get_future()
                torchs.add_done_callback(lambda done: context.run(self._complete_after, done.value))
            except RuntimeError:
                # Works of messages have no future.
                self._wait_on_a_thread()
        return future

    def _wait_on_a_thread(self) -> None:
        """Let a thread wait for torch's work, unless one does."""
        with self._once:
            if not self._has_thread:
                arguments = (self._complete_after, self._torch_work.wait)
                threading.Thread(target=contextvars.copy_context().run, args=arguments, daemon=True).start()
                self._has_thread = True


class TorchBackend(Backend):
    """Backend of torch's for one group.

    Attributes:
        title: The backend's name in errors.
        kind: The class of its works.
        waited_is_ended: Whether a call that was waited for has ended; else the backend records the ends itself.
        store_type: The class of the store that it gets.
        device: The kind of device for which torch has this backend in a group.
    """

    title: str
    device = "cpu"
    kind: type[TorchWork] = TorchWork
    waited_is_ended = True
    store_type: type[StoreForTorch] = StoreForTorch

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self.recorder = membership.recorder
        self._events = GroupEvents(membership.store, membership.rank, membership.members)
        self._sequence = 0
        if membership.existing is not None:
            self._backend: Any = torch_private.BACKEND_OF_GROUP.of(membership.existing)(torch.device(self.device))
            return
        # C++ keeps no reference to a Python store.
        self._store = self.store_type(membership.store)
        try:
            self._backend = self._connect()
        except RuntimeError as error:
            if isinstance(error, DistBackendError) and error.definite:
                raise
            operation = "init_process_group" if membership.watch is None else membership.watch.operation
            text = f"{operation}: {self.title} could not connect {self._location()}: {error}"
            if isinstance(error, GroupAbortedError | RankDiedError):
                raise in_context(text, error) from error
            raise DistBackendError(text).naming(getattr(error, "ranks", ())) from error
        self._after_connect()
        if membership.watch is not None:
            # A backend that connects later still reads this store.
            membership.watch.complete()

    @abstractmethod
    def _connect(self) -> Any:
        """Create torch's object. Its RuntimeErrors are reported as connection errors."""

    def _after_connect(self) -> None:
        """Run the steps that follow the connection; none by default."""

    def _location(self) -> str:
        """Return the rank and the group, for messages."""
        m = self._membership
        return f"on rank {m.rank} (global {m.members[m.rank]}) of group {m.name!r}"

    @dispatched
    def submit(self, call: Call, inputs: Tensors, outputs: Tensors, wait: bool) -> Work:
        """See `Backend.submit`."""
        if self._backend is None:
            raise GroupAbortedError(f"{call} {self._location()}: the group was destroyed on this rank.")
        # torch's threads work in the modes in which a call was started.
        with outside_modes():
            torch_call, sources, targets, copy_back = self._translate(call, inputs, outputs)
            entry = self.recorder.begin((self._next_number(call), 0), call, operands_of(inputs, outputs))
            try:
                torch_work = self._start(torch_call, sources, targets)
            except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
                self.recorder.fail(entry, error)
                if isinstance(error, DistBackendError) and error.definite:
                    raise
                raise _failed(call, self._location(), self.title, error, self._events) from error
        finished = self._finisher(call, entry)
        callbacks = None if wait else self._runner_of_callbacks()
        work = self.kind(call.op, flat_operands(outputs), torch_work, copy_back, finished, callbacks)
        if isinstance(call, Recv) and call.src is not None:
            work.source = call.src
        self._call_started(work, entry)
        if wait:
            work.wait()
        return work

    def _call_started(self, work: TorchWork, entry: Entry) -> None:
        """Run a step after each call has been started; none by default."""

    def _runner_of_callbacks(self) -> CallbackRunner | None:
        """Return what runs the callbacks of a call made now; None for the thread that finds that it has ended."""
        return None

    def _translate(self, call: Call, inputs: Tensors, outputs: Tensors) -> TorchCall:
        """Return the call with operands that the backend accepts."""
        accepted = {id(t): self._flat(call, t) for t in [*inputs, *outputs]}
        targets = [accepted[id(t)] for t in outputs]
        return TorchCall(call, [accepted[id(t)] for t in inputs], targets, lambda: copy_results(targets, outputs))

    def _flat(self, call: Call, tensor: Tensor) -> Tensor:
        """Return a contiguous tensor of one dimension: a view if possible, else a copy."""
        return tensor.contiguous().view(-1)

    def _next_number(self, call: Call) -> int:
        """Return the number of a call: messages have none, which is -1."""
        if isinstance(call, Send | Recv):
            return -1
        number, self._sequence = self._sequence, self._sequence + 1
        return number

    def _finisher(self, call: Call, entry: Entry) -> Finished:
        """Return the function that records the end of a call and translates its error."""
        # The function must not hold the backend: the last reference may be dropped on a thread of Gloo's, which
        # would then join itself.
        recorder, location, title, events = self.recorder, self._location(), self.title, self._events
        waited_is_ended = self.waited_is_ended

        def finished(error: BaseException | None) -> BaseException | None:
            if error is None:
                if waited_is_ended:
                    entry[END] = perf_counter()
                return None
            failure = _failed(call, location, title, error, events)
            failure.__cause__ = error
            recorder.fail(entry, failure)
            return failure

        return finished

    def _start(self, call: Call, inputs: list[Tensor], outputs: list[Tensor]) -> Any:
        """Call torch's method, and return torch's work."""
        backend = self._backend
        match call:
            case AllReduce():
                return backend.allreduce(outputs, self._options(options.AllreduceOptions, call))
            case Reduce():
                return backend.reduce(outputs, self._options(options.ReduceOptions, call, call.root))
            case Broadcast():
                return backend.broadcast(outputs, self._options(options.BroadcastOptions, root=call.root))
            case AllGather():
                return backend.allgather([outputs], inputs, options.AllgatherOptions())
            case Gather():
                lists = [outputs] if outputs else []
                return backend.gather(lists, inputs, self._options(options.GatherOptions, root=call.root))
            case Scatter():
                lists = [inputs] if inputs else []
                return backend.scatter(outputs, lists, self._options(options.ScatterOptions, root=call.root))
            case ReduceScatter():
                return backend.reduce_scatter(outputs, [inputs], self._options(options.ReduceScatterOptions, call))
            case AllToAll():
                return backend.alltoall(outputs, inputs, options.AllToAllOptions())
            case Barrier():
                return backend.barrier(self._barrier_options())
            case Send():
                return backend.send(self._message(call, inputs), call.dst, call.tag)
            case Recv(src=None):
                return backend.recv_anysource(self._message(call, outputs), call.tag)
            case Recv():
                return backend.recv(self._message(call, outputs), call.src, call.tag)
        raise UnsupportedError(f"{call.op}: {self.title} does not support this operation.")

    def _options(self, kind: Any, reducing: AllReduce | Reduce | ReduceScatter | None = None, root: int = -1) -> Any:
        """Return torch's options of a kind, with a reduction or a root if the call has one."""
        made = kind()
        if reducing is not None:
            made.reduceOp = self._reduce_op(reducing)
        if root >= 0:
            made.rootRank = root
        return made

    def _reduce_op(self, call: AllReduce | Reduce | ReduceScatter) -> Any:
        """Return torch's reduction for a call.

        Raises:
            UnsupportedError: The backend has no such reduction.
        """
        if call.reduction not in _REDUCE_OPS:
            raise UnsupportedError(
                f"{call.op}: backend {self.name!r} does not support reduction {call.reduction!r}; use SUM and scale."
            )
        return _REDUCE_OPS[call.reduction]

    def _barrier_options(self) -> Any:
        """Return torch's options of a barrier."""
        return options.BarrierOptions()

    def _message(self, call: Send | Recv, tensors: list[Tensor]) -> list[Tensor]:
        """Return the tensors of a message as the backend accepts them."""
        return tensors

    def implementation(self, device_type: str | None) -> Any:
        """See `Backend.implementation`: torch's object."""
        return self._backend

    def set_timeout(self, seconds: float) -> None:
        """See `Backend.set_timeout`."""
        try:
            self._backend.set_timeout(timedelta(seconds=seconds))
        except (AttributeError, RuntimeError):
            # A backend of another package, or of an older torch.
            super().set_timeout(seconds)

    def failure(self, ranks: Sequence[int], description: str, wait: Wait) -> BaseException | None:
        """See `Backend.failure`."""
        return self._events.known(ranks, f"{description} {self._location()}", wait)

    @property
    def broken(self) -> BaseException | None:
        """See `Backend.broken`. Known once a call has failed because of another rank."""
        return self._events.met

    def explain_leave(self, reason: str) -> None:
        """See `Backend.explain_leave`."""
        self._events.explain_leave(reason)

    def announce_exit(self) -> None:
        """See `Backend.announce_exit`. The process may live on for longer than the others look for its end."""
        if self._backend is not None:
            self._events.publish(Published(self._global_rank, PROGRAM_ENDED))

    @property
    def _global_rank(self) -> int:
        return self._membership.members[self._membership.rank]

    def close(self) -> None:
        """See `Backend.close`. The backend's threads end now, not at a garbage collection.

        The others learn first who leaves: they ask when their connections end.
        """
        if self._backend is not None:
            self._events.publish_leave()
            self._backend.shutdown()
        self._backend = None

    def end_calls(self, reason: str) -> None:
        """See `Backend.end_calls`."""
        if self._backend is not None:
            self._events.publish(Published(self._global_rank, text=reason, continues=True))
            self._backend.abort()

    def abort(self, reason: str) -> None:
        """See `Backend.abort`. The reason is published first, as in `close`; this rank has not left before that."""
        if self._backend is not None:
            self._events.abort(reason)
            self._backend.abort()


def copy_results(results: Tensors, outputs: Tensors) -> bool:
    """Fill the outputs whose results are in other memory, and return whether there were any."""
    copied = False
    for result, tensor in zip(results, outputs, strict=True):
        if result.data_ptr() != tensor.data_ptr():
            tensor.copy_(result.view(tensor.dtype).view(tensor.shape))
            copied = True
    return copied


def _source(torch_work: Any) -> int:
    """Return the source of a received message, or -1 if the backend does not know it."""
    try:
        return int(torch_private.SOURCE_RANK.of(torch_work)())
    except RuntimeError:
        return -1


def _failed(call: Call, location: str, title: str, error: BaseException, events: GroupEvents) -> DistError:
    """Return our error for one of torch's; if a connection ended, that for the rank that failed, if it is known."""
    failed = f"{call} {location} failed in {title}"
    named = events.find(failed) if _CONNECTION.search(str(error)) else None
    if named is None:
        return _kind(str(error))(f"{failed}: {error}")
    return in_context(f"{named}. {title}: {error}", named)


def _kind(text: str) -> type[DistBackendError]:
    """Return the class of an error of torch's that names no rank."""
    if _STALLED.search(text):
        return RankStalledError
    return GroupAbortedError if _ENDED.search(text) else DistBackendError
