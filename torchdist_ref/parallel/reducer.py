"""The reducer: watches gradients become ready, and sends each bucket on its way as soon as it is full.

One iteration, in the order in which things happen:

1. `prepare` (after forward) arms it: every gradient is awaited.
2. Autograd finishes a parameter's gradient and calls `_on_gradient`, which copies it into its bucket.
3. Full buckets are launched in index order, never in the order in which they fill: ranks must agree.
4. When nothing is awaited any more, `_finish` is queued to run at the end of backward; it waits for the
   buckets, again in order, and hands the results to the parameters. The last bucket can be averaged `in_place`.

After the first iteration `rebuild` divides the parameters anew, in the order in which gradients arrived
on rank 0. The reducer knows no backends, and what a hook does with a bucket is none of its business.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable

from torchdist_ref import groups
from torchdist_ref.errors import DistError
from torchdist_ref.parallel import agreement, allotment, bucketing, faults, graph, in_place
from torchdist_ref.parallel.exchange import Averaging, Exchange
from torchdist_ref.parallel.options import Entry, Options
from torchdist_ref.parallel.precision import LowPrecision

logger = logging.getLogger("torchdist_ref.parallel")


class Reducer:
    """Gradients of one module, averaged (or whatever the hook does) over one group.

    Args:
        entries: The parameters, in the order of definition.
        group: The group that DDP was given.
        options: See `Options`.
    """

    def __init__(self, entries: Sequence[Entry], group: Any, options: Options) -> None:
        self.entries = entries
        self.group = group
        self.options = options
        # Whether every iteration is promised to use the same graph, and whether this is the one in which it is learned.
        self.static = self._surveying = options.static_graph
        self.average = Averaging(group, groups.get_world_size(group), early=not options.skip_unused)
        self.exchange: Exchange = self.average
        self.parameters = [entry.parameter for entry in entries]
        self.sparse = frozenset(i for i, entry in enumerate(entries) if entry.sparse)
        self.rebuilt = not entries
        self._lock = threading.RLock()
        self._expected = [1] * len(entries)
        self._arrivals: list[int] = []
        self._used = bytearray(len(entries))
        self._unused_everywhere: set[int] = set()
        self._absent: list[int] = []
        self._armed = self._begun = self._failed = False
        rests = in_place.suits(self.average, options, self.parameters)
        self._allot(bucketing.in_definition_order(self.parameters, options.caps.initial, self.sparse), rests)
        self.precision: LowPrecision | None = None
        # What else is to be waited for before backward is over.
        self.at_the_end: Callable[[], None] | None = None
        self.watch()

    def use(self, exchange: Exchange) -> None:
        """Let this decide how buckets are exchanged, in place of what did until now."""
        self.exchange = exchange
        # Hooks see all buckets until all ranks have agreed that nobody has to.
        self._allot(self.assignment, False)

    def watch(self) -> None:
        """Be told by autograd of each gradient. Again, when parameters have changed their dtype."""
        self._nodes = [graph.accumulator(parameter) for parameter in self.parameters]
        for index, node in enumerate(self._nodes):
            graph.when_done(node, _telling(self, partial(Reducer._on_gradient, index=index)))

    # ---- before forward

    def rebuild(self) -> bool:
        """Once, after an iteration in which all gradients arrived: new buckets, in rank 0's order of arrival."""
        if self.rebuilt or len(self._arrivals) < len(self.entries) or (self.options.find_unused and not self.static):
            return False
        # What a static graph leaves unused was settled first; it is not to hold the others up.
        arrived = sorted(self._arrivals, key=self._absent.__contains__)
        order = agreement.agree(arrived, self.group, self.parameters[0].device)
        rests = in_place.agreed(self.exchange, self.options, self.parameters, self.group)
        self._allot(bucketing.assign(self.parameters, self.options.caps.rebuilt, order, self.sparse), rests)
        self.rebuilt = True
        logger.info("DistributedDataParallel: %d buckets, rebuilt in the order of arrival", len(self.assignment))
        return True

    # Lightning calls it by torch's name, and `prepare` too.
    _rebuild_buckets = rebuild

    def _allot(self, assignment: list[list[int]], rests: bool) -> None:
        self.assignment = assignment
        # The memory of those before goes first.
        self.buckets: list[allotment.AnyBucket] = []
        self._places: list[tuple[allotment.AnyBucket, int] | None] = [None] * len(self.entries)
        resting = self.exchange if rests else None
        self.buckets, self.in_place = allotment.allot(assignment, self.entries, self.options, self.group, resting)
        for bucket in self.buckets:
            for place, member in enumerate(bucket.members):
                self._places[member] = bucket, place

    # ---- after forward

    def prepare(self, outputs: Any) -> None:
        """Await every gradient. Called after each forward pass whose backward is to communicate."""
        self._check_finished()
        self._left = self._expected.copy()
        self._missing = len(self.entries)
        self._launched = 0
        self._begun = self._failed = False
        self._arrivals.clear()
        for bucket in self.buckets:
            bucket.reset()
        self._expect(outputs)
        self._armed = True

    prepare_for_backward = prepare

    def _expect(self, outputs: Any) -> None:
        """Note which parameters this backward can't reach, and be told when it starts even if it reaches none."""
        if self._surveying or (self.options.find_unused and not self.static):
            tensors = list(graph.tensors_in(outputs))
            if not self.static:
                nodes = graph.reachable(tensors)
                self._absent = [i for i, node in enumerate(self._nodes) if node not in nodes]
            for tensor in tensors:
                if tensor.grad_fn is not None:
                    graph.when_reached(tensor, _telling(self, lambda reducer, _: reducer.begin()))

    def _check_finished(self) -> None:
        if self._armed and self._begun and not self._failed:
            names = [entry.name for entry, left in zip(self.entries, self._left, strict=True) if left > 0]
            raise DistError(faults.unfinished(names, groups.get_rank(self.group), self.static))

    # ---- during backward

    def begin(self) -> None:
        """Backward has started: settle at once what is known to get no gradient."""
        with self._lock:
            if self._begun or not self._armed:
                return
            self._begun = True
            for bucket in self.buckets:
                bucket.travel(self.exchange.scale, self.exchange.dtype)
            if self._surveying or (self.options.find_unused and not self.static):
                Variable._execution_engine.queue_callback(self._close)
            if not self._surveying:
                for index in self._absent:
                    self._ready(index)

    def _on_gradient(self, _: Any, gradients: Any, index: int) -> None:
        """Autograd is done with parameter ``index``: it has added a gradient, or found there was none to add."""
        if gradients[0] is not None:
            self._used[index] = 1
        if self.precision is not None:
            self.precision.restore_after_backward()
        if not self._armed:
            return
        with self._lock:
            if not self._begun:
                self.begin()
            self._left[index] -= 1
            if self._surveying:
                return
            if self._left[index] < 0:
                raise DistError(faults.twice(self.entries[index].name, groups.get_rank(self.group), self.static))
            if not self._left[index]:
                self._ready(index)

    def _ready(self, index: int) -> None:
        """Parameter ``index`` gets nothing more in this iteration: its gradient, if any, goes into its bucket."""
        self._left[index] = 0
        place = self._places[index]
        if place is not None:
            bucket, slot = place
            bucket.take(slot)
            bucket.waiting -= 1
            if not bucket.waiting:
                self._launch_full()
        if not self.rebuilt:
            self._arrivals.append(index)
        self._missing -= 1
        if not (self._missing or self._surveying or (self.options.find_unused and not self.static)):
            Variable._execution_engine.queue_callback(self._finish)

    def _launch_full(self) -> None:
        """Launch every full bucket whose predecessors have gone."""
        while self._launched < len(self.buckets) and not self.buckets[self._launched].waiting:
            self._launch(self.buckets[self._launched])
            self._launched += 1

    def _launch(self, bucket: allotment.AnyBucket) -> None:
        if self.options.skip_unused and all(member in self._absent for member in bucket.members):
            return
        self._failed = True
        bucket.started = self.exchange.start(bucket.offer())
        self._failed = False

    # ---- at the end of backward

    def _close(self) -> None:
        """Backward is over: whoever has not been heard of gets no gradient on this rank."""
        with self._lock, torch.no_grad():
            if self._surveying:
                self._learn()
            for index, left in enumerate(self._left):
                if left > 0:
                    self._ready(index)
            self._finish()

    def _learn(self) -> None:
        """A static graph's first iteration: how often each gradient arrives, from now on."""
        self._expected = [1 - left for left in self._left]
        self._absent = [index for index, times in enumerate(self._expected) if not times]
        self._left = [1] * len(self.entries)

    def _finish(self) -> None:
        """Wait for the buckets in order and hand out what came back."""
        self._failed = True
        with torch.no_grad():
            if self._surveying or (self.options.find_unused and not self.static):
                # All buckets first: a hook may still make calls from callbacks, and ours must not get between them.
                values = [self._collect(bucket) for bucket in self.buckets]
                self._survey_use()
                self._hand_out(values)
            else:
                # While one bucket is copied out, the next one is still on its way.
                self._hand_out(map(self._collect, self.buckets))
            self.in_place.average(self.exchange.divisor)
        self._end()

    def _hand_out(self, values: Iterable[torch.Tensor | None]) -> None:
        for bucket, value in zip(self.buckets, values, strict=True):
            if value is not None:
                bucket.give(value, self._unused_everywhere, self.exchange.unchanged)

    def _collect(self, bucket: allotment.AnyBucket) -> torch.Tensor | None:
        if bucket.started is None or bucket.sent is None:
            return None
        return self.exchange.finish(bucket.sent, bucket.started, bucket.length)

    def _survey_use(self) -> None:
        """Learn which parameters no rank has used: their gradients are left as they are."""
        if self._surveying or (self.options.find_unused and not self.static):
            used = torch.tensor(list(self._used), dtype=torch.int32, device=self.parameters[0].device)
            groups.all_reduce(used, group=self.group)
            self._unused_everywhere = {index for index, count in enumerate(used.tolist()) if not count}

    # ---- for a rank without inputs

    def shadow(self) -> None:
        """Answer the collectives of one backward pass of the other ranks, contributing zeros."""
        with torch.no_grad():
            for bucket in self.buckets:
                bucket.started = self.exchange.start(bucket.shadow())
            for bucket in self.buckets:
                self._collect(bucket)
            self._survey_use()
            self.in_place.shadow()
        if not self.rebuilt:
            self._arrivals = list(range(len(self.entries)))
        self._end()

    def _end(self) -> None:
        if self.at_the_end is not None:
            self.at_the_end()
        if self._surveying:
            self._arrivals = []
            self._surveying = False
        self._armed = self._begun = self._failed = False
        self._used = bytearray(len(self.entries))


def _telling(reducer: Reducer, tell: Callable[..., None]) -> Callable[..., None]:
    """A hook for autograd that doesn't keep the reducer alive, to which it tells what it sees."""
    reference = weakref.ref(reducer)

    def hook(*seen: Any) -> None:
        found = reference()
        if found is not None:
            tell(found, *seen)

    return hook
