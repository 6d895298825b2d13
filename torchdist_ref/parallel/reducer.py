"""Reducer: collects gradients while backward runs, and communicates each bucket when all of its gradients are ready.

The names are those of torch's reducer.hpp. One iteration, in order:

1. `Reducer.prepare_for_backward` (after forward) makes every gradient pending.
2. Autograd finishes a parameter's gradient, and `mark_variable_ready` copies it into its bucket.
3. `all_reduce_bucket` launches a bucket without pending gradients, in index order on all ranks. An exchange sums the
   gradients, or passes them to a communication hook (`exchange`).
4. When nothing is pending, `finalize_backward` runs at the end of backward. It waits for the buckets in order and
   copies the results to the parameters. The last bucket may be averaged in place (`storage.InPlaceGradients`).

`Phase` is the position in this sequence, and `Usage` says how the reducer learns which parameters take part.

After the first iteration `rebuild_buckets` divides the parameters anew, in the order in which gradients became ready on
rank 0. Do not add backends here, nor what a hook does with a bucket.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from time import time_ns
from typing import Any

import torch
from torch.autograd.graph import Node

from torchdist_ref import groups
from torchdist_ref.algorithms.bucket import BucketExchange
from torchdist_ref.algorithms.division import Divisor
from torchdist_ref.errors import DistError
from torchdist_ref.parallel import autograd_graph, bucketing, storage, synchronization
from torchdist_ref.parallel.bucketing import ParameterEntry, ReducerOptions
from torchdist_ref.parallel.exchange import AllReduceExchange
from torchdist_ref.parallel.logging_data import FIRST_ITERATIONS, RuntimeStatistics
from torchdist_ref.parallel.modes import LowPrecision
from torchdist_ref.torch_internals import torch_private

autograd = torch_private.AUTOGRAD.bind()

logger = logging.getLogger("torchdist_ref.parallel")

_GRAPH_CHANGED = "Your training graph has changed in this iteration"


class Phase(Enum):
    """Position of the reducer in an iteration. `LEGAL` lists every transition.

    An iteration without errors goes down one of two columns::

        IDLE                     IDLE
         |  forward               |  forward
        FORWARD_DONE             FORWARD_DONE
         |  first gradient        |  first gradient
        BACKWARD                 BACKWARD
         |  end of backward       |  all gradients ready; the caller finalizes
        IDLE                     AWAITS_CALLER
                                  |  Reducer.finalize_manually
                                 IDLE
    """

    IDLE = "no backward pass is expected"
    FORWARD_DONE = "a forward pass awaits its backward pass"
    BACKWARD = "gradients arrive, and buckets are launched"
    AWAITS_CALLER = "all gradients are ready, and the caller is to finalize"
    FAILED = "an exchange raised"


# Two forward passes may follow each other: the outputs of the first were only looked at. A failure lasts until the next
# forward pass, which then does not report gradients that are missing because of it. Every phase may lead to IDLE: in
# `Join`, a rank without inputs drops what its last iteration has left.
LEGAL = {
    Phase.IDLE: {Phase.IDLE, Phase.FORWARD_DONE},
    Phase.FORWARD_DONE: {Phase.IDLE, Phase.FORWARD_DONE, Phase.BACKWARD},
    Phase.BACKWARD: {Phase.IDLE, Phase.AWAITS_CALLER, Phase.FAILED},
    Phase.AWAITS_CALLER: {Phase.IDLE, Phase.FAILED},
    Phase.FAILED: {Phase.IDLE, Phase.FORWARD_DONE, Phase.FAILED},
}


class Usage(Enum):
    """How the reducer learns which parameters get a gradient in an iteration; chosen by the arguments of DDP.

    With SEARCHED and RECORDING, only the end of backward shows which parameters got none.
    """

    ALL = "every parameter gets one"
    SEARCHED = "find_unused_parameters: search the graph after each forward pass"
    RECORDING = "static_graph, first iteration: count how often autograd runs each hook"
    RECORDED = "static_graph, later iterations: as counted"


class Reducer:
    """Gradients of one module, averaged (or exchanged by a hook) over one group.

    Args:
        entries: The parameters, in the order of definition.
        group: Group that DDP was given.
        options: Arguments of DDP.
        statistics: Receives the times of sampled iterations.

    Attributes:
        phase: Position in the iteration.
        usage: How the reducer learns which parameters get a gradient.
        times: Times of this iteration, under torch's names, if it is sampled; else None.
        divisor: Divisor of the average; `Join` alone changes it.
        exchange: Exchange of the buckets.
        buckets: Buckets in the order of communication.
        in_place: Gradients that are averaged without a bucket.
        assignment: Indices of parameters, bucket by bucket.
        rebuilt: Whether the buckets are in the order of gradients.
        finalizes_manually: Whether `finalize_manually` ends an iteration, and not the end of backward.
    """

    def __init__(
        self, entries: Sequence[ParameterEntry], group: Any, options: ReducerOptions, statistics: RuntimeStatistics
    ) -> None:
        self.entries = entries
        self.group = group
        self.options = options
        self.statistics = statistics
        self.phase = Phase.IDLE
        self.usage = Usage.SEARCHED if options.find_unused else Usage.ALL
        if options.static_graph:
            self.usage = Usage.RECORDING
        self.times: dict[str, Any] | None = None
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
        # Parameters that this rank's forward pass does not reach.
        self._unused: list[int] = []
        # Parameters that the outputs of the last forward pass reach, but that had no gradient when its backward pass
        # ended. A gradient that arrives now comes from a second backward pass, and would not be averaged.
        self._given_up: frozenset[int] = frozenset()
        self._nodes: list[Node | None] = [None] * len(entries)
        self.finalizes_manually = False
        in_place = self._can_average_in_place()
        limits = options.caps.initial
        self._initialize_buckets(bucketing.in_definition_order(self.parameters, limits, self.sparse), in_place)
        self.precision: LowPrecision | None = None
        # Called at the end of backward, to wait for more than gradients.
        self.at_the_end: Callable[[], None] | None = None
        self.register_autograd_hooks()

    def _enter(self, phase: Phase) -> None:
        """Go on to a phase."""
        if phase not in LEGAL[self.phase]:
            raise DistError(f"DistributedDataParallel: a reducer cannot go from {self.phase.name} to {phase.name}.")
        self.phase = phase

    @property
    def _usage_is_open(self) -> bool:
        """Whether only the end of backward shows which parameters take part in this iteration."""
        return self.usage in (Usage.SEARCHED, Usage.RECORDING)

    def use(self, exchange: BucketExchange) -> None:
        """Exchange buckets like this from now on."""
        self.exchange = exchange
        # Averaging in place is decided with the next `rebuild_buckets`, where all ranks agree on it. Until then every
        # bucket has a buffer.
        self._initialize_buckets(self.assignment, False)

    def register_autograd_hooks(self) -> None:
        """Register `_autograd_hook` for each gradient; again, when parameters have changed their dtype."""
        former, self._nodes = self._nodes, [autograd_graph.accumulator(parameter) for parameter in self.parameters]
        for index, node in enumerate(self._nodes):
            # Parameters that keep their dtype keep the node, which has the hook.
            if node is not None and node is not former[index]:
                node.register_hook(_weak_hook(self, partial(Reducer._autograd_hook, index=index)))

    # ---- before forward

    def begin_iteration(self) -> None:
        """Count an iteration whose backward pass communicates, and choose whether to measure it.

        Raises:
            DistError: The caller has not finalized the last backward pass.
        """
        if self.phase is Phase.AWAITS_CALLER:
            raise DistError(
                "DistributedDataParallel: Expected to have finalized the prior backward pass before starting a new one "
                f"(on rank {groups.get_rank(self.group)}). Call finalize_backward() after backward() when "
                "require_manual_backward_finalization is True."
            )
        self.statistics.iteration += 1
        number, self.times = self.statistics.iteration, None
        if number and (number <= FIRST_ITERATIONS or not number % self.statistics.sample_rate):
            self.times = {"iteration": number, "forward_compute_time_start": time_ns(), "num_buckets_reduced": 0}

    def rebuild_buckets(self) -> bool:
        """Build buckets in rank 0's order of gradients; once, after an iteration in which all gradients were ready."""
        if self.rebuilt or len(self._ready_order) < len(self.entries) or self.usage is Usage.SEARCHED:
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
        """Return whether this rank could average gradients where they are, without a bucket.

        Gradients that are views need the bucket's memory, gradients that may stay untouched must not be averaged, and a
        hook has to receive the bucket.
        """
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
        # Bucket of each parameter, and its position there; None for a gradient that is averaged in place.
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
        self._ready_order.clear()
        for bucket in self.buckets:
            bucket.reset()
        if self._usage_is_open:
            self._search_unused_parameters(outputs)
        self._enter(Phase.FORWARD_DONE)

    def _search_unused_parameters(self, outputs: Any) -> None:
        """Find the parameters that backward cannot reach.

        Backward usually begins, for the reducer, with the first parameter's gradient. If it reaches no parameter there
        is none, so hooks on the outputs begin it.
        """
        tensors = list(autograd_graph.tensors_in(outputs))
        nodes = autograd_graph.reachable(tensors)
        self._unused = [i for i, node in enumerate(self._nodes) if node not in nodes]
        for tensor in tensors:
            if tensor.grad_fn is not None:
                tensor.register_hook(_weak_hook(self, lambda reducer, _: reducer.on_output_gradient()))

    def _check_finished(self) -> None:
        """Raise if the last backward pass has left gradients without their all_reduce."""
        if self.phase is not Phase.BACKWARD:
            return
        missing = [repr(entry.name) for entry, left in zip(self.entries, self._hooks_left, strict=True) if left > 0]
        # The phrases of torch's errors, which programs match, are in tests/groups/compatibility_table.py.
        advice = (
            f"{_GRAPH_CHANGED}: static_graph=True promises the same graph every time."
            if self.options.static_graph
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
        """Begin the backward pass, unless this one is a `torch.autograd.grad`, which accumulates no gradients."""
        if self.phase is Phase.FORWARD_DONE:
            reaches_none = len(self._unused) == len(self.entries)
            if reaches_none or autograd_graph.accumulates(self._nodes):
                self.begin_backward()

    def begin_backward(self) -> None:
        """Set the packing of this iteration, and mark parameters that backward cannot reach as ready."""
        with self._lock:
            if self.phase is not Phase.FORWARD_DONE:
                return
            self._enter(Phase.BACKWARD)
            if self.times is not None:
                self.times["backward_compute_time_start"] = time_ns()
            for bucket in self.buckets:
                bucket.set_packing(self.exchange.scale, self.exchange.wire_dtype)
            if self._usage_is_open:
                autograd.queue_callback(self._end_of_backward)
            if self.usage is not Usage.RECORDING:
                for index in self._unused:
                    self.mark_variable_ready(index)

    def _autograd_hook(self, _: Any, gradients: Any, index: int) -> None:
        """Note that autograd has finished a parameter: it has added a gradient, or found none to add."""
        if gradients[0] is not None:
            self._used_locally[index] = 1
        if self.precision is not None:
            self.precision.restore_after_backward()
        if self.phase is Phase.IDLE:
            if index in self._given_up and gradients[0] is not None:
                self._raise_too_late(index)
            return
        with self._lock:
            if self.phase is Phase.FORWARD_DONE:
                self.begin_backward()
            self._hooks_left[index] -= 1
            if self.usage is Usage.RECORDING:
                return
            if self._hooks_left[index] < 0:
                self._raise_marked_twice(index)
            if not self._hooks_left[index]:
                self.mark_variable_ready(index)

    def _raise_marked_twice(self, index: int) -> None:
        advice = (
            f"{_GRAPH_CHANGED}: static_graph=True promises the same graph, and the parameter was used more often."
            if self.options.static_graph
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
                self._enter(Phase.AWAITS_CALLER)
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
            self._enter(Phase.FAILED)
            raise

    # ---- at the end of backward

    def _end_of_backward(self) -> None:
        """Mark parameters without a gradient as ready, and finalize."""
        with self._lock, torch.no_grad():
            if self.usage is Usage.RECORDING:
                self._record_static_graph()
            else:
                self._given_up = frozenset(index for index, left in enumerate(self._hooks_left) if left > 0)
            for index, left in enumerate(self._hooks_left):
                if left > 0:
                    self.mark_variable_ready(index)
            if self.finalizes_manually:
                self._enter(Phase.AWAITS_CALLER)
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
        return self.phase is not Phase.IDLE

    @property
    def is_known_at_end_only(self) -> bool:
        """Whether only the end of the next backward pass shows that all gradients are ready."""
        will_rebuild = not (self.rebuilt or self.usage is Usage.SEARCHED)
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
        elif self.phase is Phase.FAILED:
            fault = "the exchange of its gradients failed. Make another forward and backward pass"
        elif self.phase in (Phase.IDLE, Phase.FORWARD_DONE):
            fault = (
                "no gradient reduction requires finalization: no_sync() was active, backward has not begun, or "
                "finalize_backward() was called before"
            )
        elif self.phase is not Phase.AWAITS_CALLER:
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
            if self.times is not None:
                self._end_times(self.times)
            if self.at_the_end is not None:
                self.at_the_end()
        except BaseException:
            self._enter(Phase.FAILED)
            raise
        self._reset()

    def _end_times(self, times: dict[str, Any]) -> None:
        """Complete the times of an iteration, and report them."""
        times["backward_comm_time_end"] = time_ns()
        # Buckets of the assignment that have no buffer are averaged in place.
        times["num_buckets_reduced"] += len(self.assignment) - len(self.buckets)
        times["prev_iteration_grad_ready_order_indices"] = ", ".join(map(str, self._ready_order))
        times["unused_parameter_size"] = sum(self.parameters[index].nbytes for index in self._unused)
        self.times = None
        self.statistics.end_iteration(times)

    def _finalize_buckets(self) -> None:
        """Wait for the buckets in their order, and copy each one out."""
        # While one bucket is copied out, the next is still being communicated.
        values: Iterable[torch.Tensor | None] = map(self._wait, self.buckets)
        if self._usage_is_open:
            # A hook may make further collectives in the callbacks of its Futures. Our own call has to come after all
            # of them on every rank, so all buckets are waited for before it.
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
        if self.usage is Usage.RECORDING:
            self._ready_order = []
            self.usage = Usage.RECORDED
        for bucket in self.buckets:
            bucket.release()
        self._enter(Phase.IDLE)
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
        if self.at_the_end is not None:
            self.at_the_end()
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
