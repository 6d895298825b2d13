"""Gloo: torch's C++ engine, driven by our stores and groups.

A call is one `match` arm: our value in, torch's method and options out. The engine keeps what C++ does not:
a Python reference to the store and to every running work. Tensors with strides go through contiguous copies
here too: Gloo itself would write outside a strided view. Errors come back as ours, with the call, the rank
and the group, because torch's own name none of them.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import perf_counter
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import distributed_c10d as options

from torchdist_ref.backends.base import Backend, Membership
from torchdist_ref.calls import (
    AllGather, AllReduce, AllToAll, Barrier, Broadcast, Call, Gather, Recv, Reduce, ReduceScatter, Scatter, Send,
)  # fmt: skip
from torchdist_ref.errors import DistBackendError, GroupAbortedError, UnsupportedError
from torchdist_ref.stores import Store
from torchdist_ref.trace import Recorder
from torchdist_ref.work import Work

Tensors = Sequence[Tensor]
_OPS = {
    "sum": c10d.ReduceOp.SUM, "avg": c10d.ReduceOp.AVG, "product": c10d.ReduceOp.PRODUCT,
    "min": c10d.ReduceOp.MIN, "max": c10d.ReduceOp.MAX, "band": c10d.ReduceOp.BAND,
    "bor": c10d.ReduceOp.BOR, "bxor": c10d.ReduceOp.BXOR,
}  # fmt: skip


class StoreForTorch(c10d.Store):
    """One of our stores, as torch's C++ sees a store."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: Any) -> None:
        """Store a value."""
        self._store.set(key, bytes(value) if not isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        """The value of a key, once it is there."""
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all keys are there."""
        self._store.wait(keys) if timeout is None else self._store.wait(keys, timeout)

    def add(self, key: str, value: int) -> int:
        """Add to a counter."""
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return self._store.check(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set if it has the expected value."""
        return self._store.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        """Remove a key."""
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        """How many keys there are."""
        return self._store.num_keys()


class Gloo(Backend):
    """torch's Gloo engine for one group."""

    name = "gloo"

    def __init__(self, membership: Membership) -> None:
        self._membership = m = membership
        self.recorder = Recorder()
        self._sequence = 0
        # C++ keeps no reference to a Python store.
        self._store = StoreForTorch(m.store)
        try:
            self._engine: Any = c10d.ProcessGroupGloo(self._store, m.rank, m.size, timedelta(seconds=m.timeout))
        except RuntimeError as error:
            raise DistBackendError(f"init_process_group: Gloo could not connect {self._here()}: {error}") from error
        self._all_connected()

    def _all_connected(self) -> None:
        """Nobody goes on, and perhaps ends the store, before everybody has read from it.

        Rank 0 may hold the store, so it leaves last: it waits until the others need nothing more.
        """
        store, m = self._membership.store, self._membership
        store.set(f"connected/{m.rank}", b"")
        if m.rank == 0:
            store.wait([f"connected/{r}" for r in range(m.size)], timedelta(seconds=m.timeout))
            store.set("all connected", b"")
            store.wait([f"gone on/{r}" for r in range(1, m.size)], timedelta(seconds=m.timeout))
        else:
            store.wait(["all connected"], timedelta(seconds=m.timeout))
            store.set(f"gone on/{m.rank}", b"")

    def _here(self) -> str:
        m = self._membership
        return f"on rank {m.rank} (global {m.members[m.rank]}) of group {m.name!r}"

    def submit(self, call: Call, inputs: Tensors, outputs: Tensors, wait: bool) -> Work:
        """See `Backend.submit`."""
        start = perf_counter()
        if self._engine is None:
            raise GroupAbortedError(f"{call} {self._here()}: the group was destroyed on this rank.")
        plain = {id(t): t.detach().contiguous().view(-1) for t in [*inputs, *outputs]}
        into = [plain[id(t)] for t in outputs]
        try:
            theirs = self._start(call, [plain[id(t)] for t in inputs], into)
        except (RuntimeError, ValueError) as error:
            raise _translated(call, self._here(), error) from error
        work = TorchWork(call.op, outputs, theirs, into, self._finisher(call, outputs, start))
        if wait:
            work.wait()
        return work

    def _finisher(self, call: Call, outputs: Tensors, start: float) -> Callable[[BaseException | None], Any]:
        number, self._sequence = self._sequence, self._sequence + 1
        nbytes = sum(t.nbytes for t in outputs)
        # The function must not hold the engine: it may be dropped last on a thread of Gloo's, which would then
        # have to wait for itself to end.
        recorder, here = self.recorder, self._here()

        def finished(error: BaseException | None) -> BaseException | None:
            recorder.add(number, call, nbytes, start, type(error).__name__ if error else "")
            return None if error is None else _translated(call, here, error)

        return finished

    def _start(self, call: Call, inputs: list[Tensor], outputs: list[Tensor]) -> Any:
        engine = self._engine
        match call:
            case AllReduce():
                return engine.allreduce(outputs, _options(options.AllreduceOptions, op=call.reduction))
            case Reduce():
                return engine.reduce(outputs, _options(options.ReduceOptions, op=call.reduction, root=call.root))
            case Broadcast():
                return engine.broadcast(outputs, _options(options.BroadcastOptions, root=call.root))
            case AllGather():
                return engine.allgather([outputs], inputs, options.AllgatherOptions())
            case Gather():
                lists = [outputs] if outputs else []
                return engine.gather(lists, inputs, _options(options.GatherOptions, root=call.root))
            case Scatter():
                lists = [inputs] if inputs else []
                return engine.scatter(outputs, lists, _options(options.ScatterOptions, root=call.root))
            case ReduceScatter():
                chosen = _options(options.ReduceScatterOptions, op=call.reduction)
                return engine.reduce_scatter(outputs, [inputs], chosen)
            case AllToAll():
                return engine.alltoall(outputs, inputs, options.AllToAllOptions())
            case Barrier():
                return engine.barrier(options.BarrierOptions())
            case Send():
                return engine.send(_message(inputs), call.dst, call.tag)
            case Recv(src=None):
                return engine.recv_anysource(_message(outputs), call.tag)
            case Recv():
                return engine.recv(_message(outputs), call.src, call.tag)
        raise UnsupportedError(f"{call.op}: Gloo has no such operation.")

    def close(self) -> None:
        """See `Backend.close`. The engine's threads end here and now, not when garbage happens to be collected."""
        if self._engine is not None:
            self._engine.shutdown()
        self._engine = None

    def abort(self, reason: str) -> None:
        """See `Backend.abort`."""
        if self._engine is not None:
            self._engine.abort()


class TorchWork(Work):
    """A work of torch's, with our errors; copies results back into strided outputs."""

    def __init__(
        self, name: str, outputs: Tensors, theirs: Any, into: list[Tensor], finished: Callable[..., Any]
    ) -> None:
        super().__init__(name, outputs)
        self._theirs, self._into, self._finished = theirs, into, finished
        self._once = threading.Lock()

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """See `Work.wait`."""
        seconds = timeout if isinstance(timeout, timedelta) or timeout is None else timedelta(seconds=timeout)
        if not self._event.is_set():
            self._settled_by(lambda: self._theirs.wait() if seconds is None else self._theirs.wait(seconds))
        return super().wait()

    def is_completed(self) -> bool:
        """See `Work.is_completed`."""
        if not self._event.is_set() and self._theirs.is_completed():
            self._settled_by(self._theirs.wait)
        return self._event.is_set()

    def _settled_by(self, wait: Callable[[], Any]) -> None:
        error: BaseException | None = None
        try:
            wait()
        except RuntimeError as raised:
            error = raised
        with self._once:
            if not self._event.is_set():
                self._deliver(error)

    def _deliver(self, error: BaseException | None) -> None:
        for tensor, result in zip(self.outputs, self._into, strict=True):
            if error is None and result.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(result.view(tensor.shape))
        self.source = _source(self._theirs)
        translated = self._finished(error)
        self.finish() if translated is None else self.fail(translated)

    def get_future(self) -> torch.futures.Future[Any]:
        """See `Work.get_future`; settled from torch's own future."""
        future = super().get_future()
        if not self._event.is_set():
            # torch completes its future before its work, so the callback may ask only the future.
            # Callbacks run on a thread of torch's, and mean the world of whoever made the call.
            here = contextvars.copy_context()
            self._theirs.get_future().add_done_callback(lambda done: here.run(self._settled_by, done.value))
        return future


def _message(tensors: list[Tensor]) -> list[Tensor]:
    """Gloo refuses messages of no bytes, so they travel as one."""
    return [tensor if tensor.numel() else torch.zeros(1, dtype=torch.uint8) for tensor in tensors]


def _translated(call: Call, here: str, error: BaseException) -> DistBackendError:
    return DistBackendError(f"{call} {here} failed in Gloo: {error}")


def _source(theirs: Any) -> int:
    try:
        return int(theirs._source_rank())
    except RuntimeError:
        return -1


def _options(kind: Any, op: str | None = None, root: int | None = None) -> Any:
    made = kind()
    if op is not None:
        if op not in _OPS:
            raise UnsupportedError(f"reduction {op!r} is not available on backend 'gloo'; use SUM and scale.")
        made.reduceOp = _OPS[op]
    if root is not None:
        made.rootRank = root
    return made
