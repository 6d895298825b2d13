"""Training under observation: one model with one hook on one rank, its bytes, its errors, its timeline, and the link.

Bytes and calls are those of the group's recorder. `Spans` also takes the place of the reducer's exchange, records, and
forwards. Neither changes a computation. A hook's error is measured outside of it, by a second backward
pass without DDP, so that a hook cannot look better than it is.

Links: ``fast`` is the one of a backend on one host: shared memory for ``ref``, the loopback for ``gloo``. A rate such
as ``100mbit`` puts the first half of the ranks on one host of `torchdist_ref.testing.namespaces` and the rest on
another, with a cable of that rate. If such hosts cannot be made, the rate goes into a formula, and results are
marked as modeled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchdist_ref import groups, optim, parallel
from torchdist_ref.algorithms.model_averaging.averagers import PeriodicModelAverager
from torchdist_ref.benchmark.hooks_tasks import Batch, Contestant, Task
from torchdist_ref.benchmark.operations import OPERATIONS
from torchdist_ref.benchmark.ranks import HOSTS
from torchdist_ref.errors import ArgumentError, UnsupportedError, explain
from torchdist_ref.recorder import CallRecord
from torchdist_ref.testing import namespaces

if TYPE_CHECKING:
    from torchdist_ref.parallel.bucket import LaunchedBucket

Span = tuple[str, str, float, float]
# MiB. Several buckets even in a small model, so that computation and communication can overlap.
BUCKET_MIB = 1.0
FAST = "fast"
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)")


@dataclass(frozen=True)
class BenchmarkLink:
    """Link between the ranks.

    Attributes:
        name: Name in ``--links``.
        bits_per_second: The rate; None for this machine's own link.
    """

    name: str
    bits_per_second: float | None = None

    def seconds(self, nbytes: float) -> float:
        """Return the seconds that so many bytes take at least.

        >>> parse_link("100mbit").seconds(1_250_000), parse_link("fast").seconds(1_250_000)
        (0.1, 0.0)
        """
        return 0.0 if self.bits_per_second is None else nbytes * 8 / self.bits_per_second


def parse_link(text: str) -> BenchmarkLink:
    """Return a link from its name.

    >>> parse_link("1gbit")
    BenchmarkLink(name='1gbit', bits_per_second=1000000000.0)
    """
    if text == FAST:
        return BenchmarkLink(FAST)
    found = _RATE.fullmatch(text.lower())
    if found is None or not float(found[1]):
        expected = f"{FAST!r}, or rates such as 100mbit or 1gbit, with commas between"
        raise ArgumentError(explain("benchmark hooks", "--links", expected, text))
    return BenchmarkLink(text.lower(), float(found[1]) * _UNITS[found[2]])


def parse_links(command: str, option: str, text: str) -> tuple[BenchmarkLink, ...]:
    """Split a list of links."""
    return tuple(map(parse_link, dict.fromkeys(text.split(","))))


def obstacle(link: BenchmarkLink) -> str:
    """Return why a link can't be made on this machine; empty where it can.

    >>> obstacle(parse_link("fast"))
    ''
    """
    if link.bits_per_second is None:
        return ""
    if why := namespaces.missing():
        return why
    try:
        with namespaces.hosts(HOSTS, link.bits_per_second):
            return ""
    except UnsupportedError as error:
        return str(error)


def wire_bytes(host: namespaces.Host) -> int:
    """Return the bytes that a host sent over its cable so far, headers and acknowledgements included."""
    return sent_by(Path("/proc/thread-self/net/dev").read_text(), host.interface)


def sent_by(table: str, interface: str) -> int:
    r"""Return the bytes sent, from the text of /proc/net/dev.

    >>> sent_by("Inter-| Receive\n lo: 1 2 0 0 0 0 0 0 3 4\ncable: 10 1 0 0 0 0 0 0 20 2 0", "cable")
    20
    """
    line = next(line for line in table.splitlines() if line.strip().startswith(f"{interface}:"))
    return int(line.partition(":")[2].split()[8])


class CountedBytes:
    """Bytes of a group's calls, as `counted` counts them.

    Attributes:
        sent: Bytes of this rank.
    """

    sent = 0.0


@contextmanager
def counted(group: Any) -> Iterator[CountedBytes]:
    """Count the bytes of a group's calls in this block; the result has them after it.

    The convention is that of nccl-tests' bus bandwidth: the bytes that a rank has to send at the least for the
    operation, with any algorithm. So the figure is the same on every backend and link.

    >>> import torch, torchdist_ref as dist
    >>> from torchdist_ref.testing import run
    >>> def program(rank):
    ...     group = dist.new_group()
    ...     with counted(group) as counter:
    ...         dist.all_reduce(torch.zeros(1000), group=group)
    ...         dist.all_gather(list(torch.zeros(4, 1000)), torch.zeros(1000), group=group)
    ...     return counter.sent
    >>> run(program, 4)[0] == 2 * 3 / 4 * 4000 + 3 * 4000
    True
    """
    counter, begin = CountedBytes(), perf_counter()
    yield counter
    calls = calls_since(group, begin)
    counter.sent = sum(each.nbytes * OPERATIONS[each.call.op].factor(group.size()) for each in calls)


def calls_since(group: Any, begin: float) -> list[CallRecord]:
    """Return a group's calls that began after a moment and have ended; at most as many as its recorder keeps, 1,024."""
    return [record for record in group.recorder if record.start >= begin]


class Spans:
    """Timeline of one step of a model under DDP: row, name, begin and end of each span, in seconds.

    `part` names the parts of the step; buckets and the backend's calls have names of their own, and the wait for them
    at the end of backward is a part of its own, ``wait``.

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

    def __init__(self, model: parallel.DistributedDataParallel) -> None:
        self._model = model
        self._inner = model.reducer.exchange
        self._parts: list[tuple[str, float, float]] = []
        self._started: dict[int, float] = {}
        self._finished: dict[int, tuple[float, float]] = {}
        self._calls: list[CallRecord] = []

    def __enter__(self) -> Spans:
        self._entered = perf_counter()
        self._model.reducer.use(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._model.reducer.use(self._inner)
        self._calls = calls_since(self._model.process_group, self._entered)

    @contextmanager
    def part(self, what: str) -> Iterator[None]:
        """Name the part of the step in this block."""
        begin = perf_counter()
        yield
        self._parts.append((what, begin, perf_counter()))

    # The reducer uses these instead of the exchange's own, and the exchange's attributes.

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def average_group(self) -> None:
        """None: the reducer then passes every bucket to `launch`."""
        return None

    def launch(self, bucket: LaunchedBucket) -> Any:
        """Record when a bucket is launched."""
        self._started[bucket.index] = perf_counter()
        return self._inner.launch(bucket)

    def wait(self, bucket: LaunchedBucket, handle: Any) -> Tensor:
        """Record how long the step waits for a bucket."""
        begin = perf_counter()
        value = self._inner.wait(bucket, handle)
        self._finished[bucket.index] = begin, perf_counter()
        return value

    def __iter__(self) -> Iterator[Span]:
        zero = min(begin for _, begin, _ in self._parts)
        for row, what, begin, end in [*self._compute(), *self._buckets(), *self._communication()]:
            yield row, what, begin - zero, end - zero

    def _compute(self) -> Iterator[Span]:
        """Yield the parts; one that waits for buckets ends where the wait begins."""
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


class Trainee:
    """Model under DDP, its hook, its optimizer, and its progress.

    Args:
        task: Task that it learns.
        contestant: Hook.
        group: The group over which gradients are averaged; None for the default group.

    >>> from torchdist_ref.benchmark.hooks_tasks import CONTESTANTS, Text
    >>> from torchdist_ref.testing import run
    >>> def program(rank):
    ...     trainee = Trainee(Text(), CONTESTANTS["fp16"])
    ...     loss = trainee.step(trainee.batch())
    ...     return trainee.steps, trainee.expected_bytes()
    >>> run(program, 2)
    [(1, 1903360.0), (1, 1903360.0)]
    """

    def __init__(self, task: Task, contestant: Contestant, group: Any = None) -> None:
        self.task, self.contestant = task, contestant
        self.model = parallel.DistributedDataParallel(task.model(), process_group=group, bucket_cap_mb=BUCKET_MIB)
        self.group = self.model.process_group
        contestant.hook.register(self.model, self.group)
        self._own_optimizer = task.optimizer(self.model)
        self.optimizer = self._with_averager(contestant.every)
        self.rank, self.world = groups.get_rank(self.group), groups.get_world_size(self.group)
        self.steps = 0
        self._drawn = 0

    def _with_averager(self, every: int) -> torch.optim.Optimizer:
        """Return the optimizer, which also averages the models after every so many steps, if the hook has that."""
        if not every:
            return self._own_optimizer
        return optim.PostLocalSGDOptimizer(self._own_optimizer, PeriodicModelAverager(every, every - 1, self.group))

    def batch(self) -> Batch:
        """Return the next batch, another one at each call."""
        self._drawn += 1
        return self.task.batch(self._drawn - 1, self.rank, self.world)

    def step(self, batch: Batch) -> Tensor:
        """Take a step: forward, backward, optimizer. Return this rank's loss."""
        loss = self._gradients(batch)
        self.optimizer.step()
        self.steps += 1
        return loss

    def _gradients(self, batch: Batch) -> Tensor:
        inputs, targets = batch
        self.optimizer.zero_grad()
        loss = self.task.loss(self.model(inputs), targets)
        loss.backward()
        return loss.detach()

    def spans(self) -> list[Span]:
        """Take a step, and return its timeline."""
        inputs, targets = self.batch()
        with Spans(self.model) as spans:
            with spans.part("forward"):
                self.optimizer.zero_grad()
                loss = self.task.loss(self.model(inputs), targets)
            with spans.part("backward"):
                loss.backward()
            with spans.part("optimizer"):
                self._own_optimizer.step()
        return list(spans)

    def error(self, exchange: Callable[[Any], list[Any]]) -> float:
        """Take a step, and return the error of its gradients.

        Args:
            exchange: Function that gives every rank's value to every rank, without the group.

        Returns:
            ‖got - average‖ / ‖average‖ of all gradients together; the average is computed in double precision.
        """
        batch = self.batch()
        gathered = exchange(self._local_gradients(batch).numpy())
        exact = torch.stack([torch.from_numpy(each) for each in gathered]).double().mean(0)
        self._gradients(batch)
        got = torch.cat([weight.grad.flatten() for weight in self.model.parameters() if weight.grad is not None])
        self._own_optimizer.step()
        return float((got.double() - exact).norm() / exact.norm())

    def _local_gradients(self, batch: Batch) -> Tensor:
        """Return the gradients of this rank's part of the batch, without DDP."""
        inputs, targets = batch
        loss = self.task.loss(self.model.module(inputs), targets)
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(self.model.parameters()))])

    def buckets(self) -> list[list[torch.Size]]:
        """Return the shapes in each bucket, as they are now."""
        reducer = self.model.reducer
        return [[reducer.parameters[member].shape for member in members] for members in reducer.assignment]

    def expected_bytes(self) -> float:
        """Return the bytes that a step should send, by the hook's formula."""
        return self.contestant.nbytes(self.buckets(), self.world)
