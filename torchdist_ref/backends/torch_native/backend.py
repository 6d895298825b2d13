"""What all of torch's C++ backends have in common: our calls as their methods, our stores as theirs, our errors.

A call is one `match` arm: our value in, torch's method and options out. A backend keeps what C++ does not: a Python
reference to the store and to every running work. Tensors with strides go through contiguous copies here too: Gloo would
write outside a strided view, NCCL refuses one. Errors come back as ours, with the call, the rank and the group, because
torch's own name none of them. What one backend alone needs is in its own file: `gloo`, `nccl`, `third_party`.
"""

from __future__ import annotations

import contextvars
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import distributed_c10d as options

from torchdist_ref.backends.base import Backend, Membership, flat_operands, nbytes_of
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
from torchdist_ref.errors import DistBackendError, GroupAbortedError, UnsupportedError
from torchdist_ref.trace import Recorder
from torchdist_ref.work import Work

Tensors = Sequence[Tensor]


_OPS = {
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


Finished = Callable[[BaseException | None], BaseException | None]


# Brings results to where the caller wants them; whether there was anything to do.
BringBack = Callable[[], bool]


class Carried(NamedTuple):
    """A call as a backend of torch's gets it.

    Attributes:
        call: What to do, perhaps in other words.
        inputs: What is read, in one dimension.
        outputs: What is written.
        bring_back: Brings the results to the caller's tensors; whether there was anything to do.
    """

    call: Call
    inputs: list[Tensor]
    outputs: list[Tensor]
    bring_back: BringBack


class TorchWork(Work):
    """A work of torch's, with our errors; copies results back into strided outputs."""

    def __init__(self, name: str, outputs: Tensors, theirs: Any, bring_back: BringBack, finished: Finished) -> None:
        super().__init__(name, outputs)
        self._theirs, self._results, self._finished = theirs, bring_back, finished
        self._once = threading.Lock()

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """See `Work.wait`."""
        if not self._over:
            self._settled_by(lambda: self._wait_for_theirs(timeout))
        return super().wait(timeout)

    def _wait_for_theirs(self, timeout: timedelta | float | None) -> None:
        seconds = timeout if isinstance(timeout, timedelta) or timeout is None else timedelta(seconds=timeout)
        self._theirs.wait() if seconds is None else self._theirs.wait(seconds)

    def is_completed(self) -> bool:
        """See `Work.is_completed`."""
        if not self._over and self._theirs.is_completed():
            self._settled_by(self._theirs.wait)
        return self._over

    def _settled_by(self, wait: Callable[[], Any]) -> None:
        error: BaseException | None = None
        try:
            wait()
        except RuntimeError as raised:
            error = raised
        with self._once:
            if not self._over:
                self._deliver(error)

    def _deliver(self, error: BaseException | None) -> None:
        if error is None:
            self._bring_back()
        if self.name == "recv" and self.source < 0:
            self.source = _source(self._theirs)
        translated = self._finished(error)
        self.finish() if translated is None else self.fail(translated)

    def _bring_back(self) -> bool:
        """Fill the outputs that were not written in place; whether there were any."""
        return self._results()

    def get_future(self) -> torch.futures.Future[Any]:
        """See `Work.get_future`; settled from torch's own future."""
        future = super().get_future()
        if not self._over:
            # torch completes its future before its work, so the callback may ask only the future.
            # Callbacks run on a thread of torch's, and mean the world of whoever made the call.
            here = contextvars.copy_context()
            try:
                self._theirs.get_future().add_done_callback(lambda done: here.run(self._settled_by, done.value))
            except RuntimeError:
                # Works of messages have no future; whoever wants one anyway gets a thread that waits.
                threading.Thread(target=here.run, args=(self._settled_by, self._theirs.wait), daemon=True).start()
        return future


def brought_back(results: Tensors, outputs: Tensors) -> bool:
    """Fill the outputs whose results lie elsewhere; whether there were any."""
    copied = False
    for result, tensor in zip(results, outputs, strict=True):
        if result.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(result.view(tensor.dtype).view(tensor.shape))
            copied = True
    return copied


def _source(theirs: Any) -> int:
    try:
        return int(theirs._source_rank())
    except (RuntimeError, AttributeError):
        return -1


class TorchBackend(Backend):
    """A backend of torch's for one group.

    Attributes:
        title: What its errors call it.
        kind: The class of its works.
    """

    title: str
    kind: type[TorchWork] = TorchWork

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self.recorder = Recorder()
        self._sequence = 0
        # C++ keeps no reference to a Python store.
        self._store = StoreForTorch(membership.store)
        try:
            self._backend: Any = self._connect()
        except RuntimeError as error:
            if isinstance(error, DistBackendError) and error.definite:
                raise
            text = f"init_process_group: {self.title} could not connect {self._here()}: {error}"
            raise DistBackendError(text) from error
        self._settle_in()

    @abstractmethod
    def _connect(self) -> Any:
        """Make torch's object. RuntimeErrors of it are reported as errors of the connection."""

    def _settle_in(self) -> None:
        """What is to be done once the backend is there."""

    def _here(self) -> str:
        m = self._membership
        return f"on rank {m.rank} (global {m.members[m.rank]}) of group {m.name!r}"

    def submit(self, call: Call, inputs: Tensors, outputs: Tensors, wait: bool) -> Work:
        """See `Backend.submit`."""
        start = perf_counter()
        if self._backend is None:
            raise GroupAbortedError(f"{call} {self._here()}: the group was destroyed on this rank.")
        theirs_call, sources, targets, bring_back = self._carried(call, inputs, outputs)
        try:
            theirs = self._start(theirs_call, sources, targets)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            if isinstance(error, DistBackendError) and error.definite:
                raise
            raise self._translated(call, error) from error
        finished = self._finisher(call, nbytes_of(inputs, outputs), start)
        work = self.kind(call.op, flat_operands(outputs), theirs, bring_back, finished)
        if isinstance(call, Recv) and call.src is not None:
            work.source = call.src
        if wait:
            work.wait()
        return work

    def _carried(self, call: Call, inputs: Tensors, outputs: Tensors) -> Carried:
        """The call as the backend can take it."""
        plain = {id(t): self._plain(call, t) for t in [*inputs, *outputs]}
        into = [plain[id(t)] for t in outputs]
        return Carried(call, [plain[id(t)] for t in inputs], into, lambda: brought_back(into, outputs))

    def _plain(self, call: Call, tensor: Tensor) -> Tensor:
        """A tensor as the backend can take it: itself, flat, or a copy."""
        return tensor.detach().contiguous().view(-1)

    def _finisher(self, call: Call, nbytes: int, start: float) -> Finished:
        number, self._sequence = self._sequence, self._sequence + 1
        # The function must not hold the backend: it may be dropped last on a thread of Gloo's, which would then
        # have to wait for itself to end.
        recorder, here, title = self.recorder, self._here(), self.title

        def finished(error: BaseException | None) -> BaseException | None:
            recorder.add(number, call, nbytes, start, type(error).__name__ if error else "")
            return None if error is None else _failed(call, here, title, error)

        return finished

    def _translated(self, call: Call, error: BaseException) -> DistBackendError:
        return _failed(call, self._here(), self.title, error)

    def _start(self, call: Call, inputs: list[Tensor], outputs: list[Tensor]) -> Any:
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
                return backend.barrier(self._barrier())
            case Send():
                return backend.send(self._message(call, inputs), call.dst, call.tag)
            case Recv(src=None):
                return backend.recv_anysource(self._message(call, outputs), call.tag)
            case Recv():
                return backend.recv(self._message(call, outputs), call.src, call.tag)
        raise UnsupportedError(f"{call.op}: {self.title} has no such operation.")

    def _options(self, kind: Any, reducing: AllReduce | Reduce | ReduceScatter | None = None, root: int = -1) -> Any:
        made = kind()
        if reducing is not None:
            made.reduceOp = self._operation(reducing)
        if root >= 0:
            made.rootRank = root
        return made

    def _operation(self, call: AllReduce | Reduce | ReduceScatter) -> Any:
        """torch's reduction for a call.

        Raises:
            UnsupportedError: The backend has none.
        """
        if call.reduction not in _OPS:
            raise UnsupportedError(
                f"{call.op}: reduction {call.reduction!r} is not available on backend {self.name!r}; use SUM and scale."
            )
        return _OPS[call.reduction]

    def _barrier(self) -> Any:
        return options.BarrierOptions()

    def _message(self, call: Send | Recv, tensors: list[Tensor]) -> list[Tensor]:
        """What is sent or received, as the backend takes it."""
        return tensors

    def close(self) -> None:
        """See `Backend.close`. The backend's threads end here and now, not when garbage happens to be collected."""
        if self._backend is not None:
            self._backend.shutdown()
        self._backend = None

    def abort(self, reason: str) -> None:
        """See `Backend.abort`."""
        if self._backend is not None:
            self._backend.abort()


def _failed(call: Call, here: str, title: str, error: BaseException) -> DistBackendError:
    return DistBackendError(f"{call} {here} failed in {title}: {error}")
