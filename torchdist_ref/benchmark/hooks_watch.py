"""What passes between DDP, a hook and the engine while a trainee learns: bytes, and when each thing began and ended.

Both watchers stand in for something that DDP calls, count or note, and hand on: `Ledger` for the engine, `Spans` for
the reducer's exchange. Neither changes what is computed. What is made of the figures is not here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import Any

from torch import Tensor

from torchdist_ref.backends.base import Backend
from torchdist_ref.benchmark.hooks_trainee import Trainee
from torchdist_ref.benchmark.operations import OPERATIONS
from torchdist_ref.calls import Call
from torchdist_ref.work import Work

Span = tuple[str, str, float, float]


class Ledger(Backend):
    """An engine that counts the bytes it is asked to send, and has another do the work.

    The convention is nccl-tests' one of bus bandwidth: what a rank has to send at the least for the operation, whatever
    the algorithm does. So the figure is the same on every engine and link.

    Attributes:
        sent: Bytes of this rank so far.
    """

    def __init__(self, engine: Backend, world: int) -> None:
        self.name, self.recorder = engine.name, engine.recorder
        self.sent = 0.0
        self._engine, self._world = engine, world

    def submit(self, call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor], wait: bool) -> Work:
        """Count, and hand on."""
        whole = max(sum(tensor.nbytes for tensor in side) for side in (inputs, outputs))
        self.sent += whole * OPERATIONS[call.op].factor(self._world)
        return self._engine.submit(call, inputs, outputs, wait)

    def together(self) -> AbstractContextManager[None]:
        """The engine's own."""
        return self._engine.together()

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()

    def abort(self, reason: str) -> None:
        """Abort the engine."""
        self._engine.abort(reason)


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
    engine = group.backend
    group.backend = ledger = Ledger(engine, group.size())
    try:
        yield ledger
    finally:
        group.backend = engine


class Spans:
    """What happened in one step of a trainee: name of the row, what, from when to when, in seconds from its beginning.

    >>> from torchdist_ref.benchmark.hooks_contestants import CONTESTANTS
    >>> from torchdist_ref.benchmark.hooks_tasks import Text
    >>> from torchdist_ref.testing import run
    >>> def program(rank):
    ...     trainee = Trainee(Text(), CONTESTANTS["none"])
    ...     return [what for row, what, _, _ in Spans(trainee) if row == "compute"]
    >>> run(program, 2)[0]
    ['forward', 'backward', 'wait', 'optimizer']
    """

    def __init__(self, trainee: Trainee) -> None:
        self._trainee = trainee
        self._reducer = trainee.model.reducer
        self._inner = self._reducer.exchange
        self._started: dict[int, float] = {}
        self._finished: dict[int, tuple[float, float]] = {}
        self._take()

    # The reducer calls these two in place of the exchange's own.

    def start(self, bucket: Any) -> Any:
        """Note when a bucket goes."""
        self._started[bucket.index()] = perf_counter()
        return self._inner.start(bucket)

    def finish(self, bucket: Any, started: Any, length: int) -> Tensor:
        """Note for how long the step waits for it."""
        begin = perf_counter()
        value = self._inner.finish(bucket, started, length)
        self._finished[bucket.index()] = begin, perf_counter()
        return value

    def _take(self) -> None:
        trainee = self._trainee
        recorder = trainee.group.recorder
        before = recorder.total
        inputs, targets = trainee.batch()
        self._reducer.exchange = self
        try:
            times = [perf_counter()]
            trainee.optimizer.zero_grad()
            loss = trainee.task.loss(trainee.model(inputs), targets)
            times.append(perf_counter())
            loss.backward()
            times.append(perf_counter())
            trainee.optimizer.step()
            times.append(perf_counter())
        finally:
            self._reducer.exchange = self._inner
        self._times = times
        made = recorder.total - before
        self._calls = list(recorder)[-made:] if made else []

    def __iter__(self) -> Iterator[Span]:
        zero = self._times[0]
        for row, what, begin, end in [*self._compute(), *self._buckets(), *self._communication()]:
            yield row, what, begin - zero, end - zero

    def _compute(self) -> list[Span]:
        begin, forward, backward, end = self._times
        waiting = min(start for start, _ in self._finished.values())
        waited = max(finish for _, finish in self._finished.values())
        return [
            ("compute", "forward", begin, forward), ("compute", "backward", forward, waiting),
            ("compute", "wait", waiting, waited), ("compute", "optimizer", backward, end),
        ]  # fmt: skip

    def _buckets(self) -> list[Span]:
        return [
            ("buckets", f"bucket {index}", begin, self._finished[index][1]) for index, begin in self._started.items()
        ]

    def _communication(self) -> list[Span]:
        return [("calls", f"{event.call.op}, {event.nbytes} bytes", event.start, event.end) for event in self._calls]
