"""Reducer: collects gradients while backward runs, and communicates each bucket when all of its gradients are ready.

The names are those of torch's reducer.hpp. One iteration, in order:

1. `Reducer.prepare_for_backward` (after forward) makes every gradient pending.
2. Autograd finishes a parameter's gradient, and `mark_variable_ready` copies it into its bucket.
3. `all_reduce_bucket` launches a bucket without pending gradients, in index order on all ranks: its gradients are
   summed (`AllReduceExchange`), or given to a communication hook (`exchange.HookExchange`).
4. When nothing is pending, `finalize_backward` runs at the end of backward. It waits for the buckets in order and
   copies the results to the parameters. The last bucket may be averaged in place (`storage.InPlaceGradients`).

After the first iteration `rebuild_buckets` divides the parameters anew, in the order in which gradients became ready on
rank 0. Do not add backends here, nor what a hook does with a bucket.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from time import time_ns
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

from torchdist_ref import groups
from torchdist_ref.algorithms.bucket import BucketExchange, LaunchedBucket
from torchdist_ref.algorithms.division import Divisor, average
from torchdist_ref.calls import AllReduce
from torchdist_ref.errors import DistError
from torchdist_ref.parallel import bucketing, storage, synchronization
from torchdist_ref.parallel.bucketing import ParameterEntry, ReducerOptions
from torchdist_ref.parallel.modes import LowPrecision
from torchdist_ref.torch_internals import torch_private

autograd = torch_private.AUTOGRAD.bind()

logger = logging.getLogger("torchdist_ref.parallel")
_SUM = AllReduce()


_GRAPH_CHANGED = "Your training graph has changed in this iteration"
# The first iterations are sampled all, but for the first; later ones at the rate.
FIRST_ITERATIONS = 10
DEFAULT_SAMPLE_RATE = 100

_DURATIONS = {
    "forward_compute_time": ("forward_compute_time_start", "backward_compute_time_start"),
    "backward_compute_time": ("backward_compute_time_start", "backward_compute_time_end"),
    "backward_comm_time": ("backward_comm_time_start", "backward_comm_time_end"),
    "backward_compute_comm_overlap_time": ("backward_comm_time_start", "backward_compute_time_end"),
}


class RuntimeStatistics:
    """Times of the last sampled iteration, and averages over all sampled ones.

    Attributes:
        sample_rate: Every iteration whose number divides by it is sampled, and the first ones.
        iteration: Number of iterations that have begun, less one.
        values: Times and counts of the last sampled iteration, under torch's names.
    """

    def __init__(self) -> None:
        self.sample_rate = DEFAULT_SAMPLE_RATE
        self.iteration = -1
        self.values: dict[str, Any] = {}
        self._sampled = 0
        self._sums = dict.fromkeys(_DURATIONS, 0)

    def begin_iteration(self) -> dict[str, Any] | None:
        """Return a dict for the times of an iteration that begins now, or None if it is not sampled."""
        self.iteration += 1
        number = self.iteration
        if not number or (number > FIRST_ITERATIONS and number % self.sample_rate):
            return None
        return {"iteration": number, "forward_compute_time_start": time_ns(), "num_buckets_reduced": 0}

    def end_iteration(self, times: dict[str, Any]) -> None:
        """Compute the durations of a sampled iteration, and add them to the averages."""
        times.setdefault("backward_comm_time_start", times["backward_compute_time_end"])
        self._sampled += 1
        for name, (begin, end) in _DURATIONS.items():
            times[name] = max(0, times[end] - times[begin])
            self._sums[name] += times[name]
            times[f"avg_{name}"] = self._sums[name] // self._sampled
        self.values = times


class AllReduceExchange:
    """Average without a hook: divide, then sum.

    Submits the call to the group's backend itself, since the reducer's own buffer needs no checks of arguments, and
    waits on the Work, which is faster than its Future. Gradients are divided while they are packed, which saves a pass
    over memory, and before the sum, so that sums of 16-bit floats stay in range.

    Args:
        group: Group that DDP was given.
        divisor: Divisor of the sums.
        fold: Whether gradients are divided while they are packed. False divides whole buckets, and only those that are
            launched. Default True.
    """

    wire_dtype: torch.dtype | None = None
    keeps_buffer = False

    def __init__(self, group: Any, divisor: Divisor, fold: bool = True) -> None:
        self.group: Any = groups.world.resolve(group)
        self.divisor = divisor
        self.fold = fold
        self.average_group = self.group

    @property
    def scale(self) -> float:
        """Reciprocal of the divisor, unless whole buckets are divided."""
        return self.divisor.factor if self.fold else 1.0

    def launch(self, bucket: LaunchedBucket) -> Any:
        """Start the sum."""
        contents = bucket.contents()
        if bucket.scale == 1.0:
            average(contents, self.divisor)
        if contents.is_sparse:
            return groups.all_reduce(contents, group=self.group, async_op=True), contents
        return self.group.backend.submit(_SUM, (contents,), (contents,), False), contents

    def wait(self, bucket: LaunchedBucket, handle: Any) -> torch.Tensor:
        """Wait for the sum, as long as the group's time-out allows."""
        work, contents = handle
        work.wait()
        result: torch.Tensor = contents
        return result


class Reducer:
    """Gradients of one module, averaged (or exchanged by a hook) over one group.

    Args:
        entries: The parameters, in the order of definition.
        group: Group that DDP was given.
        options: Arguments of DDP.

    Attributes:
        divisor: Divisor of the average; `Join` alone changes it.
        exchange: Exchange of the buckets.
        buckets: Buckets in the order of communication.
        in_place: Gradients that are averaged without a bucket.
        assignment: Indices of parameters, bucket by bucket.
        rebuilt: Whether the buckets are in the order of gradients.
        finalizes_manually: Whether `finalize_manually` ends an iteration, and not the end of backward.
    """

    def __init__(self, entries: Sequence[ParameterEntry], group: Any, options: ReducerOptions) -> None:
        self.entries = entries
        self.group = group
        self.options = options
        # Times of this iteration, if it is sampled; `logging_data` sets both.
        self.times: dict[str, Any] | None = None
        self.on_times: Callable[[dict[str, Any]], None] = lambda times: None
        self.static_graph = self._static_graph_first_iteration = options.static_graph
        # Whether unused parameters are searched for in every iteration.
        self.dynamic_graph_find_unused = options.find_unused and not options.static_graph
        # Whether only the end of backward shows which parameters take part in this iteration.
        self._usage_is_open = self.static_graph or self.dynamic_graph_find_unused
        self.divisor = Divisor(groups.get_world_size(group))
        self.exchange: BucketExchange = AllReduceExchange(group, self.divisor, fold=not options.skip_unused)
        self.parameters = [entry.parameter for entry in entries]
        self.sparse = frozenset(i for i, entry in enumerate(entries) if entry.sparse)
        self.rebuilt = not entries
        self._lock = threading.RLock()
        # How often autograd runs each parameter's hook in one iteration.
        self._hook_counts = [1] * len(entries)
        self._ready_order: list[int] = []
        self._used_locally = bytearray(len(entries))
        self._unused_everywhere: set[int] = set()
        self._unused: list[int] = []
        # Whether the outputs of this rank's forward pass reach no parameter.
        self._reaches_none = False
        # Parameters without a gradient at the end of the last backward pass, though its outputs reach them.
        self._given_up: frozenset[int] = frozenset()
        self._nodes: list[Node | None] = [None] * len(entries)
        # Whether an exchange raised: then the next forward pass does not report missing gradients.
        self._armed = self._begun = self._failed = False
        self.finalizes_manually = self._awaits_finalization = False
        in_place = self._can_average_in_place()
        limits = options.caps.initial
        self._initialize_buckets(bucketing.in_definition_order(self.parameters, limits, self.sparse), in_place)
        self.precision: LowPrecision | None = None
        # Called at the end of backward, to wait for more than gradients.
        self.at_the_end: Callable[[], None] | None = None
        self.register_autograd_hooks()

    def use(self, exchange: BucketExchange) -> None:
        """Exchange buckets like this from now on."""
        self.exchange = exchange
        # All buckets have buffers until all ranks have agreed that one needs none.
        self._initialize_buckets(self.assignment, False)

    def register_autograd_hooks(self) -> None:
        """Register `_autograd_hook` for each gradient; again, when parameters have changed their dtype."""
        former, self._nodes = self._nodes, [accumulator(parameter) for parameter in self.parameters]
        for index, node in enumerate(self._nodes):
            # Parameters that keep their dtype keep the node, which has the hook.
            if node is not None and node is not former[index]:
                node.register_hook(_weak_hook(self, partial(Reducer._autograd_hook, index=index)))

    # ---- before forward

    def require_finalized(self) -> None:
        """Raise if the caller has not finalized the last backward pass, which waits for it."""
        if self._awaits_finalization and not self._failed:
            raise DistError(
                "DistributedDataParallel: Expected to have finalized the prior backward pass before starting a new one "
                f"(on rank {groups.get_rank(self.group)}). Call finalize_backward() after backward() when "
                "require_manual_backward_finalization is True."
            )

    def rebuild_buckets(self) -> bool:
        """Build buckets in rank 0's order of gradients; once, after an iteration in which all gradients were ready."""
        if self.rebuilt or len(self._ready_order) < len(self.entries) or self.dynamic_graph_find_unused:
            return False
        # Parameters that a static graph leaves unused are ready first; they must not delay the others.
        ready = sorted(self._ready_order, key=self._unused.__contains__)
        order = synchronization.broadcast_order(ready, self.group, self.parameters[0].device)
        in_place = synchronization.all_agree(self._can_average_in_place(), self.group, self.parameters[0].device)
        limits = self.options.caps.rebuilt
        self._initialize_buckets(bucketing.assign(self.parameters, limits, order, self.sparse), in_place)
        self.rebuilt = True
        logger.info("DistributedDataParallel: %d buckets, rebuilt in the order of gradients", len(self.assignment))
        return True

    # Lightning calls torch's name.
    _rebuild_buckets = rebuild_buckets

    def _can_average_in_place(self) -> bool:
        """Return whether no gradient is a view or left alone, and none has to be shown to a hook."""
        options, exchange = self.options, self.exchange
        if options.gradient_as_view or options.find_unused or options.static_graph or exchange.average_group is None:
            return False
        # Complex numbers would have to be split before they are rounded.
        plain = all(each.is_cpu and not (exchange.wire_dtype and each.is_complex()) for each in self.parameters)
        return plain and bool(exchange.average_group.backend.shares_memory)

    def _initialize_buckets(self, assignment: list[list[int]], in_place: bool) -> None:
        self.assignment = assignment
        # The memory of the former buckets is freed first.
        self.buckets: list[storage.ReducerBucket] = []
        self._locators: list[tuple[storage.ReducerBucket, int] | None] = [None] * len(self.entries)
        over = (self.exchange.average_group, self.exchange.wire_dtype) if in_place else ()
        self.buckets, self.in_place = storage.build_buckets(assignment, self.entries, self.options, self.group, *over)
        for bucket in self.buckets:
            for slot, member in enumerate(bucket.members):
                self._locators[member] = bucket, slot

    # ---- after forward

    def prepare_for_backward(self, outputs: Any) -> None:
        """Make every gradient pending. Called after each forward pass whose backward communicates."""
        self._check_finished()
        self._hooks_left = self._hook_counts.copy()
        self._pending = len(self.entries)
        self._next_bucket = 0
        self._begun = self._failed = self._awaits_finalization = False
        self._ready_order.clear()
        for bucket in self.buckets:
            bucket.reset()
        if self._usage_is_open:
            self._search_unused_parameters(outputs)
        self._armed = True

    def _search_unused_parameters(self, outputs: Any) -> None:
        """Find the parameters that backward cannot reach, and be notified when it begins even if it reaches none."""
        tensors = list(tensors_in(outputs))
        if not self.static_graph or self._static_graph_first_iteration:
            nodes = reachable(tensors)
            unused = [i for i, node in enumerate(self._nodes) if node not in nodes]
            self._reaches_none = len(unused) == len(self.entries)
            if not self.static_graph:
                self._unused = unused
        for tensor in tensors:
            if tensor.grad_fn is not None:
                tensor.register_hook(_weak_hook(self, lambda reducer, _: reducer.on_output_gradient()))

    def _check_finished(self) -> None:
        """Raise if the last backward pass has left gradients without their all_reduce."""
        if not (self._armed and self._begun) or self._failed:
            return
        missing = [repr(entry.name) for entry, left in zip(self.entries, self._hooks_left, strict=True) if left > 0]
        # The phrases of torch's errors, which programs match, are in tests/groups/compatibility_table.py.
        advice = (
            f"{_GRAPH_CHANGED}: static_graph=True promises the same graph every time."
            if self.static_graph
            else "If they are meant to take no part, pass find_unused_parameters=True; "
            "if they are not, make sure that every output of forward reaches the loss."
        )
        raise DistError(
            "DistributedDataParallel: Expected to have finished reduction in the prior iteration before starting a new "
            "one: the last backward pass did not finish its reduction before this forward pass "
            f"(on rank {groups.get_rank(self.group)}): no gradient arrived for {', '.join(missing)}, "
            f"parameters that were not used in producing loss, so nothing was averaged. {advice}"
        )

    # ---- during backward

    def on_output_gradient(self) -> None:
        """Begin if the pass that runs accumulates gradients: `torch.autograd.grad` may come before it."""
        if self._armed and not self._begun and (self._reaches_none or _accumulates(self._nodes)):
            self.begin_backward()

    def begin_backward(self) -> None:
        """Set the packing of this iteration, and mark parameters that backward cannot reach as ready."""
        with self._lock:
            if self._begun or not self._armed:
                return
            self._begun = True
            if self.times is not None:
                self.times["backward_compute_time_start"] = time_ns()
            for bucket in self.buckets:
                bucket.set_packing(self.exchange.scale, self.exchange.wire_dtype)
            if self._usage_is_open:
                autograd.queue_callback(self._end_of_backward)
            if not self._static_graph_first_iteration:
                for index in self._unused:
                    self.mark_variable_ready(index)

    def _autograd_hook(self, _: Any, gradients: Any, index: int) -> None:
        """Note that autograd has finished a parameter: it has added a gradient, or found none to add."""
        if gradients[0] is not None:
            self._used_locally[index] = 1
        if self.precision is not None:
            self.precision.restore_after_backward()
        if not self._armed:
            if index in self._given_up and gradients[0] is not None:
                self._raise_too_late(index)
            return
        with self._lock:
            if not self._begun:
                self.begin_backward()
            self._hooks_left[index] -= 1
            if self._static_graph_first_iteration:
                return
            if self._hooks_left[index] < 0:
                self._raise_marked_twice(index)
            if not self._hooks_left[index]:
                self.mark_variable_ready(index)

    def _raise_marked_twice(self, index: int) -> None:
        advice = (
            f"{_GRAPH_CHANGED}: static_graph=True promises the same graph, and the parameter was used more often."
            if self.static_graph
            else "It is probably used by two forward passes, or in reentrant backward passes (activation "
            "checkpointing); if the graph is always the same, pass static_graph=True."
        )
        rank, name = groups.get_rank(self.group), self.entries[index].name
        fault = f"parameter {name!r} got its gradient twice in one iteration (on rank {rank})"
        fault = f"Expected to mark a variable ready only once: {fault}"
        raise DistError(f"DistributedDataParallel: {fault}. {advice}")

    def _raise_too_late(self, index: int) -> None:
        rank, name = groups.get_rank(self.group), self.entries[index].name
        raise DistError(
            f"DistributedDataParallel: parameter {name!r} got its gradient after the reduction had finished (on rank "
            f"{rank}): the outputs of one forward pass were differentiated in several backward passes, and the first "
            f"one averages. Call backward once, on the sum of the losses, or make a forward pass for each."
        )

    def new_forward(self) -> None:
        """Forget the last iteration's parameters without gradients; called before each forward pass."""
        self._given_up = frozenset()

    def mark_variable_ready(self, index: int) -> None:
        """Copy the final gradient of a parameter, if any, into its bucket, and launch what is complete."""
        self._hooks_left[index] = 0
        locator = self._locators[index]
        if locator is not None:
            bucket, slot = locator
            bucket.copy_in(slot)
            bucket.pending -= 1
            if not bucket.pending:
                self._launch_ready_buckets()
        if not self.rebuilt or self.times is not None:
            self._ready_order.append(index)
        self._pending -= 1
        if not (self._pending or self._usage_is_open):
            if self.finalizes_manually:
                self._awaits_finalization = True
            else:
                autograd.queue_callback(self.finalize_backward)

    def _launch_ready_buckets(self) -> None:
        """Launch every bucket without pending gradients whose predecessors are launched."""
        while self._next_bucket < len(self.buckets) and not self.buckets[self._next_bucket].pending:
            self.all_reduce_bucket(self.buckets[self._next_bucket])
            self._next_bucket += 1

    def all_reduce_bucket(self, bucket: storage.ReducerBucket) -> None:
        """Launch the exchange of a bucket, unless it has no used parameter and is to be skipped then."""
        if self.options.skip_unused and all(member in self._unused for member in bucket.members):
            return
        if self.times is not None:
            self.times.setdefault("backward_comm_time_start", time_ns())
            self.times["num_buckets_reduced"] += 1
        try:
            bucket.launched = self.exchange.launch(bucket)
        except BaseException:
            self._failed = True
            raise

    # ---- at the end of backward

    def _end_of_backward(self) -> None:
        """Mark parameters without a gradient as ready, and finalize."""
        with self._lock, torch.no_grad():
            if self._static_graph_first_iteration:
                self._record_static_graph()
            else:
                self._given_up = frozenset(index for index, left in enumerate(self._hooks_left) if left > 0)
            for index, left in enumerate(self._hooks_left):
                if left > 0:
                    self.mark_variable_ready(index)
            if self.finalizes_manually:
                self._awaits_finalization = True
            else:
                self.finalize_backward()

    def _record_static_graph(self) -> None:
        """Record how often autograd runs each hook in the first iteration of a static graph."""
        self._hook_counts = [1 - left for left in self._hooks_left]
        self._unused = [index for index, count in enumerate(self._hook_counts) if not count]
        self._hooks_left = [1] * len(self.entries)

    @property
    def expects_backward(self) -> bool:
        """Whether a forward pass awaits its backward pass, or that its finalization."""
        return self._armed

    @property
    def is_known_at_end_only(self) -> bool:
        """Whether only the end of the next backward pass shows that all gradients are ready."""
        will_rebuild = not (self.rebuilt or self.dynamic_graph_find_unused)
        return will_rebuild or self._usage_is_open or self.precision is not None

    def finalize_manually(self) -> None:
        """Finalize a backward pass whose gradients are ready, for callers that have chosen to do so.

        Raises:
            DistError: It was not chosen, nothing is to be finalized, or gradients are pending.
        """
        if not self.finalizes_manually:
            fault = (
                "manual backward finalization is not required. Set require_manual_backward_finalization to True before "
                "the forward pass"
            )
        elif not (self._armed and self._begun):
            fault = (
                "no gradient reduction requires finalization: no_sync() was active, backward has not begun, or "
                "finalize_backward() was called before"
            )
        elif not self._awaits_finalization:
            fault = "not all gradient buckets are ready. Call it after backward, or later in it"
        else:
            with self._lock:
                self.finalize_backward()
            return
        raise DistError(
            f"DistributedDataParallel: finalize_backward() called but {fault} (on rank {groups.get_rank(self.group)})."
        )

    def finalize_backward(self) -> None:
        """Wait for the buckets in order, and copy the results to the parameters."""
        if self.times is not None:
            self.times["backward_compute_time_end"] = time_ns()
        if self.precision is not None:
            # Gradients are copied out in the dtype of the full-precision parameters.
            self.precision.restore()
        try:
            with torch.no_grad():
                self._finalize_buckets()
                self.in_place.average(self.exchange.divisor)
        except BaseException:
            self._failed = True
            raise
        if self.times is not None:
            self._end_times(self.times)
        self._reset()

    def _end_times(self, times: dict[str, Any]) -> None:
        """Complete the times of an iteration, and report them."""
        times["backward_comm_time_end"] = time_ns()
        # Others are averaged in place.
        times["num_buckets_reduced"] += len(self.assignment) - len(self.buckets)
        times["prev_iteration_grad_ready_order_indices"] = ", ".join(map(str, self._ready_order))
        times["unused_parameter_size"] = sum(self.parameters[index].nbytes for index in self._unused)
        self.times = None
        self.on_times(times)

    def _finalize_buckets(self) -> None:
        """Wait for the buckets in their order, and copy each one out."""
        # While one bucket is copied out, the next is still being communicated.
        values: Iterable[torch.Tensor | None] = map(self._wait, self.buckets)
        if self._usage_is_open:
            # All buckets first: a hook may communicate from callbacks, and our call must not get in between.
            values = list(values)
            self._all_reduce_local_usage()
        for bucket, value in zip(self.buckets, values, strict=True):
            if value is not None:
                bucket.copy_out(value, self._unused_everywhere, self.exchange.keeps_buffer)

    def _wait(self, bucket: storage.ReducerBucket) -> torch.Tensor | None:
        """Return the result of a bucket when its exchange is over; None if it was not launched."""
        return None if bucket.launched is None else self.exchange.wait(bucket, bucket.launched)

    def _all_reduce_local_usage(self) -> None:
        """Learn which parameters no rank has used: their gradients are left as they are."""
        if self._usage_is_open:
            used = torch.tensor(list(self._used_locally), dtype=torch.int32, device=self.parameters[0].device)
            groups.all_reduce(used, group=self.group)
            self._unused_everywhere = {index for index, count in enumerate(used.tolist()) if not count}

    def _reset(self) -> None:
        """Be ready for the next iteration."""
        if self.at_the_end is not None:
            self.at_the_end()
        if self._static_graph_first_iteration:
            self._ready_order = []
            self._static_graph_first_iteration = False
            self._usage_is_open = self.dynamic_graph_find_unused
        for bucket in self.buckets:
            bucket.release()
        self._armed = self._begun = self._failed = self._awaits_finalization = False
        self._used_locally = bytearray(len(self.entries))

    # ---- for a rank without inputs

    def participate_with_zeros(self) -> None:
        """Match the collectives of one backward pass of the other ranks, contributing zeros."""
        with torch.no_grad():
            for bucket in self.buckets:
                bucket.reset()
                bucket.zero()
                bucket.launched = self.exchange.launch(bucket)
            for bucket in self.buckets:
                self._wait(bucket)
            self._all_reduce_local_usage()
            self.in_place.participate_with_zeros()
        if not self.rebuilt:
            self._ready_order = list(range(len(self.entries)))
        self._reset()


def _weak_hook(reducer: Reducer, method: Callable[..., None]) -> Callable[..., None]:
    """Return a hook for autograd that calls ``method(reducer, ...)`` without keeping the reducer alive."""
    reference = weakref.ref(reducer)

    def hook(*arguments: Any) -> None:
        found = reference()
        if found is not None:
            method(found, *arguments)

    return hook


# ---- the autograd graph


def _accumulates(nodes: Iterable[Node | None]) -> bool:
    """Return whether the backward pass that runs accumulates a gradient at one of the nodes."""
    will_execute = torch_private.WILL_EXECUTE.bind()
    try:
        return any(map(will_execute, nodes))
    except RuntimeError:
        # torch refuses to tell in `torch.autograd.grad` of parameters, which accumulates nowhere.
        return False


def accumulator(parameter: torch.Tensor) -> Node:
    """Return the node that adds a gradient into ``parameter.grad``.

    Its post-hooks run on every arrival, also when the gradient that arrives is undefined; a hook on the tensor itself
    would miss that case. The node lives as long as a reference to it.
    """
    return get_gradient_edge(parameter).node


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in the outputs of a forward pass: in nested sequences, mappings and dataclasses.

    >>> [t.item() for t in tensors_in({"a": torch.tensor(1), "b": [torch.tensor(2), "text"]})]
    [1, 2]
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def reachable(outputs: Iterable[torch.Tensor]) -> set[Node]:
    """Return every node that a backward pass from ``outputs`` could run."""
    frontier = [_entrance(output) for output in outputs if output.requires_grad]
    seen = set(frontier)
    while frontier:
        for node, _ in frontier.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                frontier.append(node)
    return seen


def _entrance(output: torch.Tensor) -> Node:
    return accumulator(output) if output.grad_fn is None else output.grad_fn
