"""What passes between DDP, a hook and the backend while a model learns: bytes, and when each thing began and ended.

Both watchers stand in for something that DDP calls, count or note, and hand on: `Ledger` for the backend, `Spans` for
the reducer's exchange. Neither changes what is computed. What is made of the figures is not here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from torchdist_ref.backends.base import Backend, BackendWrapper
from torchdist_ref.benchmark.operations import OPERATIONS
from torchdist_ref.calls import Call
from torchdist_ref.parallel import DistributedDataParallel
from torchdist_ref.parallel.bucket import Divisor
from torchdist_ref.parallel.exchange import LaunchedBucket
from torchdist_ref.trace import CallRecord, Recorder
from torchdist_ref.work import Work

Span = tuple[str, str, float, float]


class Ledger(BackendWrapper):
    """A backend that counts the bytes it is asked to send, and has another do the work.

    The convention is nccl-tests' one of bus bandwidth: what a rank has to send at the least for the operation, whatever
    the algorithm does. So the figure is the same on every backend and link.

    Attributes:
        sent: Bytes of this rank so far.
    """

    def __init__(self, backend: Backend, world: int) -> None:
        super().__init__(backend)
        self.sent, self._world = 0.0, world

    def submit(self, call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor], wait: bool) -> Work:
        """Count, and hand on."""
        whole = max(sum(tensor.nbytes for tensor in side) for side in (inputs, outputs))
        self.sent += whole * OPERATIONS[call.op].factor(self._world)
        return self.wrapped.submit(call, inputs, outputs, wait)


@contextmanager
def counted(group: Any) -> Iterator[Ledger]:
    """Count what a group is asked to send while this is open.

    >>> import torch, torchdist_ref as dist
    >>> from torchdist_ref.testing import run
    >>> def program(rank):
    ...     group = dist.new_group()
    ...     with counted(group) as ledger:
    ...         dist.all_reduce(torch.zeros(1000), group=group)
    ...         dist.all_gather([torch.zeros(1000)] * 4, torch.zeros(1000), group=group)
    ...     return ledger.sent
    >>> run(program, 4)[0] == 2 * 3 / 4 * 4000 + 3 * 4000
    True
    """
    backend = group.backend
    group.backend = ledger = Ledger(backend, group.size())
    try:
        yield ledger
    finally:
        group.backend = backend


class Spans:
    """What happened in one step of a model under DDP: which row, what, from when to when, in seconds since it began.

    The parts of the step are named by whoever takes it, with `part`; buckets and the backend's calls name themselves,
    and what the step waits for them at the end of backward is a part of its own, ``wait``.

    Args:
        model: A `DistributedDataParallel`, with a hook or without.

    >>> import torch, torchdist_ref as dist
    >>> from torchdist_ref.testing import run
    >>> def program(rank):
    ...     model = dist.DistributedDataParallel(torch.nn.Linear(2, 1))
    ...     with Spans(model) as spans:
    ...         with spans.part("forward"):
    ...             loss = model(torch.ones(1, 2)).sum()
    ...         with spans.part("backward"):
    ...             loss.backward()
    ...     return [(row, what) for row, what, _, _ in spans]
    >>> run(program, 2)[0]  # doctest: +NORMALIZE_WHITESPACE
    [('compute', 'forward'), ('compute', 'backward'), ('compute', 'wait'), ('buckets', 'bucket 0'),
     ('calls', 'all_reduce, 12 bytes')]
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        self._inner = model.reducer.exchange
        self._parts: list[tuple[str, float, float]] = []
        self._started: dict[int, float] = {}
        self._finished: dict[int, tuple[float, float]] = {}
        self._calls: list[CallRecord] = []

    def __enter__(self) -> Spans:
        self._seen = self._recorder.total
        self._model.reducer.use(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._model.reducer.use(self._inner)
        made = self._recorder.total - self._seen
        self._calls = list(self._recorder)[-made:] if made else []

    @property
    def _recorder(self) -> Recorder:
        recorder: Recorder = self._model.process_group.recorder
        return recorder

    @contextmanager
    def part(self, what: str) -> Iterator[None]:
        """Name what is done in this block."""
        begin = perf_counter()
        yield
        self._parts.append((what, begin, perf_counter()))

    # The reducer calls these in place of the exchange's own.

    @property
    def scale(self) -> float:
        """The exchange's own."""
        return self._inner.scale

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """The exchange's own."""
        return self._inner.wire_dtype

    @property
    def keeps_buffer(self) -> bool:
        """The exchange's own."""
        return self._inner.keeps_buffer

    @property
    def average_group(self) -> None:
        """All buckets are to be seen."""
        return None

    @property
    def divisor(self) -> Divisor:
        """The exchange's own."""
        return self._inner.divisor

    def launch(self, bucket: LaunchedBucket) -> Any:
        """Note when a bucket is launched."""
        self._started[bucket.index] = perf_counter()
        return self._inner.launch(bucket)

    def wait(self, bucket: LaunchedBucket, handle: Any) -> Tensor:
        """Note for how long the step waits for it."""
        begin = perf_counter()
        value = self._inner.wait(bucket, handle)
        self._finished[bucket.index] = begin, perf_counter()
        return value

    def __iter__(self) -> Iterator[Span]:
        zero = min(begin for _, begin, _ in self._parts)
        for row, what, begin, end in [*self._compute(), *self._buckets(), *self._communication()]:
            yield row, what, begin - zero, end - zero

    def _compute(self) -> Iterator[Span]:
        """The parts; the one in which buckets were waited for ends where the waiting begins."""
        waiting = min((begin for begin, _ in self._finished.values()), default=0.0)
        waited = max((end for _, end in self._finished.values()), default=0.0)
        for what, begin, end in self._parts:
            if begin < waiting < end:
                yield from (("compute", what, begin, waiting), ("compute", "wait", waiting, waited))
            else:
                yield "compute", what, begin, end

    def _buckets(self) -> Iterator[Span]:
        for index, begin in self._started.items():
            yield "buckets", f"bucket {index}", begin, self._finished[index][1]

    def _communication(self) -> Iterator[Span]:
        for event in self._calls:
            yield "calls", f"{event.call.op}, {event.nbytes} bytes", event.start, event.end
