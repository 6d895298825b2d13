"""PowerSGD hooks: send two thin factors in place of each gradient matrix.

Algorithms 1 and 2 of T. Vogels, S. P. Karimireddy, M. Jaggi, *PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization*, NeurIPS 2019, in its symbols. `_compress_and_aggregate` is Algorithm 1, one step of power
iteration per training step; `compressed_average` is the part of Algorithm 2 between backward and the optimizer:

    M ← gradient + E                      (error feedback)
    P ← M Q, averaged over the ranks      (first round; vectors are sent with it)
    P ← orthonormalize(P)
    Q ← Mᵀ P, averaged over the ranks     (second round)
    gradient ← P Qᵀ,  E ← M - P Qᵀ

Both are generators that yield tensors to be summed; a `RoundQueue` runs them. Vectors (biases, norms) are averaged
exactly, in the message of P. Do not add linear algebra here: it is in `low_rank`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.futures import Future

from torchdist_ref.algorithms.bucket import GradBucket, width
from torchdist_ref.algorithms.ddp_comm_hooks import low_rank
from torchdist_ref.algorithms.ddp_comm_hooks.hook_support import HookGroup, HookRounds, RoundQueue, comm_hook
from torchdist_ref.algorithms.ddp_comm_hooks.low_rank import CompressionPlan, Matrix, orthonormalize
from torchdist_ref.algorithms.division import Divisor, average
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, explain

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]

logger = logging.getLogger("torchdist_ref.algorithms")

# ---- state

RankRule = Callable[[torch.Tensor], int]


def _check_state(process_group: Any, approximation_rank: Any, seed: Any) -> None:
    if process_group is not None and not hasattr(process_group, "size"):
        raise ArgumentTypeError(explain("PowerSGDState", "process_group", "a group or None", process_group))
    for name, value in (("matrix_approximation_rank", approximation_rank), ("random_seed", seed)):
        if not isinstance(value, int):
            raise ArgumentTypeError(explain("PowerSGDState", name, "an int", value))
    if approximation_rank < 1:
        raise ArgumentError(explain("PowerSGDState", "matrix_approximation_rank", "at least 1", approximation_rank))
    if not -(2**63) <= seed < 2**64:
        raise ArgumentError(explain("PowerSGDState", "random_seed", "an int of 64 bits", seed))


class SeedStream:
    """Seeds of the first Qs: the same on every rank, different at every step.

    Draws the numbers of ``numpy.random.RandomState(seed).randint(limit)``, so that runs compare with torch's.

    >>> SeedStream(7).randint(1_000_000_000)
    327741615
    """

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator("cpu").manual_seed(seed)

    def randint(self, limit: int) -> int:
        """Return a number from 0 to ``limit`` - 1, by rejection."""
        mask = (1 << (limit - 1).bit_length()) - 1
        while True:
            drawn = int(torch.empty(1, dtype=torch.int32, device="cpu").random_(generator=self.generator)) & mask
            if drawn < limit:
                return drawn

    def __getstate__(self) -> dict[str, torch.Tensor]:
        """Return the state of the generator."""
        return {"generator": self.generator.get_state()}

    def __setstate__(self, state: dict[str, torch.Tensor]) -> None:
        """Restore the generator."""
        self.generator = torch.Generator("cpu")
        self.generator.set_state(state["generator"])


@dataclass(frozen=True)
class BucketLayout:
    """Division of a bucket.

    Attributes:
        key: Values on which the division depends.
        plan: The division.
        owners: For the offset of each matrix, the number of its parameter; absent if it has no single parameter.
    """

    key: Any
    plan: CompressionPlan
    owners: dict[int, Any]


# Name of this class in pickles of PowerSGDState from before it was renamed.
Layout = BucketLayout


class PowerSGDState:
    """Options of `powerSGD_hook` and `batched_powerSGD_hook`, and their memory from step to step.

    Args:
        process_group: The group over which gradients are averaged; None for the default group.
        matrix_approximation_rank: Columns of the factors P and Q. More columns give better gradients and cost more
            bytes; 1, 2 and 4 are usual. Default 1.
        start_powerSGD_iter: Steps of plain averaging before compression begins, because early gradients matter most and
            DDP rebuilds its buckets after the first step. At least 2 with error feedback or warm start. Default 1000.
        min_compression_rate: A matrix is compressed only if that divides its size by more than this. Default 2.
        use_error_feedback: Add to each step's gradients what the last step's compression lost. Default True.
        warm_start: Begin each step with the last one's Q, so that steps converge to the best approximation of a slowly
            changing gradient. Default True.
        orthogonalization_epsilon: Added to norms that divide. Zero columns are safe without it. Default 0.
        random_seed: Seed of the first Q; the same on all ranks. Default 0.
        compression_stats_logging_frequency: Steps between log lines about the compression. Default 10,000.
        batch_tensors_with_same_shape: Draw the first Qs of equal shapes together, for the random numbers of torch's
            hook. Has no other effect. Default False.
        factor_dtype: Dtype in which the factors are sent, say ``torch.bfloat16`` for half the bytes. Default None: the
            gradients' own.
        rank_rule: Called with each parameter; returns the rank to use in place of ``matrix_approximation_rank``, 0 for
            no compression. Has to return the same on all ranks. See `layer_ranks`. Not part of a pickle. Default None.

    Training resumes from a pickle of the state to the same numbers: on a new DDP of the same model too, registered
    before its first step, although its first buckets differ. This holds for `powerSGD_hook` with ``warm_start``; the
    memory of the batched hook belongs to a whole bucket, and is dropped when the bucket changes.

    Raises:
        ArgumentError: ``start_powerSGD_iter`` or ``matrix_approximation_rank`` is too small.
        ArgumentTypeError: The group is none, or the rank or the seed is not an int.

    Example:
        >>> from torchdist_ref.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
        >>> state = PowerSGDState(process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=10)
        >>> state.compression_stats()
        (0, 0, 0)

    Elsewhere:
        None in MPI, NCCL and JAX. The authors of the paper publish the package ``powersgd``.
    """

    def __init__(
        self,
        process_group: Any,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
        factor_dtype: torch.dtype | None = None,
        rank_rule: RankRule | None = None,
    ) -> None:
        _check_state(process_group, matrix_approximation_rank, random_seed)
        for name, value in (
            ("start_powerSGD_iter", start_powerSGD_iter),
            ("compression_stats_logging_frequency", compression_stats_logging_frequency),
        ):
            if not isinstance(value, int):
                raise ArgumentTypeError(explain("PowerSGDState", name, "an int", value))
        for name, number in (
            ("min_compression_rate", min_compression_rate),
            ("orthogonalization_epsilon", orthogonalization_epsilon),
        ):
            if not isinstance(number, int | float):
                raise ArgumentTypeError(explain("PowerSGDState", name, "a number", number))
        if (use_error_feedback or warm_start) and start_powerSGD_iter <= 1:
            hint = "DDP rebuilds its buckets after the first step, and errors and factors would not fit them."
            name, expected = "start_powerSGD_iter", "at least 2 with use_error_feedback or warm_start"
            raise ArgumentError(explain("PowerSGDState", name, expected, start_powerSGD_iter, hint=hint))
        self.process_group = process_group
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.compression_stats_logging_frequency = max(1, compression_stats_logging_frequency)
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self.factor_dtype = factor_dtype
        self.rank_rule = rank_rule
        self.rng = SeedStream(random_seed)
        self.error_dict: dict[int, torch.Tensor] = {}
        self.p_memory_dict: dict[int, torch.Tensor] = {}
        self.q_memory_dict: dict[int, torch.Tensor] = {}
        self.layouts: dict[int, BucketLayout] = {}
        # Error and Q of parameters that have left a bucket and are not in another one yet, by the parameter's number.
        self._loose: dict[Any, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
        self.iter = 0
        self.next_stats_report = 0
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self._begin()

    NOT_SAVED = ("queue", "process_group", "rank_rule", "_numbers")

    def _begin(self) -> None:
        """Create the attributes that are not part of a pickle."""
        self.queue = RoundQueue()
        self._numbers: dict[int, tuple[torch.Tensor, int]] = {}

    def number_parameters(self, bucket: Any) -> list[Any]:
        """Return the number of each parameter of a bucket, in the order in which parameters were first seen.

        A new DDP starts in the order of definition, so a state from a pickle identifies parameters whatever the
        buckets. Gradients without parameters are identified by their position in the bucket.
        """
        parameters = bucket.parameters()
        if not parameters:
            return [(bucket.index(), position) for position in range(len(bucket.gradients()))]
        for parameter in parameters:
            self._numbers.setdefault(id(parameter), (parameter, len(self._numbers)))
        return [self._numbers[id(parameter)][1] for parameter in parameters]

    def set_layout(self, index: int, layout: BucketLayout, like: torch.Tensor) -> None:
        """Set the division of a bucket, and move the memory of its parameters to their new locations.

        Later buckets, which have not begun their step, release their memory: it may belong to this bucket now.
        """
        for later in sorted(self.layouts):
            if later >= index:
                self._release(later, self.layouts.pop(later))
        self.layouts[index] = layout
        matrices = layout.plan.matrices
        found = [self._loose.pop(layout.owners.get(matrix.start), None) for matrix in matrices]
        if self.use_error_feedback and any(found):
            errors = self.error_dict[index] = torch.zeros_like(like)
            for matrix, known in zip(matrices, found, strict=True):
                if known is not None and known[0] is not None and known[0].shape == (matrix.n, matrix.m):
                    matrix.of(errors).copy_(known[0])
        Qs = [known[1] for known in found if known is not None and known[1] is not None]
        if Qs and [(Q.shape, Q.dtype) for Q in Qs] == [((x.m, x.r), like.dtype) for x in matrices]:
            self.q_memory_dict[index] = torch.cat([Q.flatten() for Q in Qs])

    def _release(self, index: int, layout: BucketLayout) -> None:
        error, Q = self.error_dict.pop(index, None), self.q_memory_dict.pop(index, None)
        self.p_memory_dict.pop(index, None)
        matrices = layout.plan.matrices
        Qs = [None] * len(matrices) if Q is None else layout.plan.qs(Q)
        for matrix, one in zip(matrices, Qs, strict=True):
            if matrix.start in layout.owners:
                self._loose[layout.owners[matrix.start]] = None if error is None else matrix.of(error), one

    def ranks_for(self, parameter: torch.Tensor) -> Callable[[int, int], int]:
        """Return a function that maps the size of a parameter's matrix to a rank; 0 if compression saves too little."""
        wanted = self.matrix_approximation_rank if self.rank_rule is None else self.rank_rule(parameter)

        def rank_for(n: int, m: int) -> int:
            r = min(n, m, wanted)
            return r if (n + m) * r * self.min_compression_rate < n * m else 0

        return rank_for

    def maybe_increase_iter(self, bucket: Any) -> None:
        """Count a step when its last bucket is complete."""
        if bucket.is_last():
            self.iter += 1
            if self.iter == self.start_powerSGD_iter:
                logger.info("PowerSGD: compression begins after %d steps.", self.iter)

    def count(self, bucket: Any, before: int, after: int) -> None:
        """Add one bucket to the statistics, and log them when they are due."""
        self.total_numel_before_compression += before
        self.total_numel_after_compression += after
        if bucket.is_last() and self.iter >= self.next_stats_report:
            logger.info("PowerSGD: step %d, rate %.1f, %d elements became %d.", self.iter, *self.compression_stats())
            self.next_stats_report = self.iter + self.compression_stats_logging_frequency

    def compression_stats(self) -> tuple[float, int, int]:
        """Return the savings so far.

        Returns:
            The rate (elements before, divided by elements after), the elements before, the elements after.
        """
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after else 0), before, after

    def __getstate__(self) -> dict[str, Any]:
        """Return options and memory, without the group and the rank rule."""
        saved = {k: v for k, v in vars(self).items() if k not in self.NOT_SAVED}
        for name in ("error_dict", "p_memory_dict", "q_memory_dict"):
            saved[name] = {index: tensor.clone() for index, tensor in saved[name].items()}
        logger.warning("PowerSGDState: the process group and the rank rule are not part of a saved state.")
        return saved

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore options and memory, with the default group."""
        logger.warning("PowerSGDState: loaded with the default group; set process_group to use another one.")
        self.__dict__.update(state, process_group=None, rank_rule=None)
        self._begin()


# ---- hooks


def _require_state(hook: str, state: Any) -> None:
    if not isinstance(state, PowerSGDState):
        raise ArgumentTypeError(explain(hook, "state", "a PowerSGDState", state))


@comm_hook
def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average gradients as low-rank factors, each parameter by itself (Vogels et al., 2019).

    A weight of n × m elements costs (n + m) · r. The approximation loses information, which error feedback and warm
    start restore over the following steps. Before step ``state.start_powerSGD_iter`` it averages exactly. Works with
    any number of buckets on any backend: all ranks make the same calls in the same order.

    With one bucket, the results equal those of torch's hook. A sparse gradient is averaged exactly; torch's hook does
    not average it.

    Args:
        state: Options and memory. Every rank builds its own, with the same arguments.
        bucket: The gradients; overwritten.

    Returns:
        A Future of the bucket's buffer, with the same approximation of the average on every rank.

    Raises:
        DistBackendError: A rank died, aborted, or did not call in time. The Future raises the error of a call that has
            begun.

    Example:
        A matrix of rank 1 survives the compression:

        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     state = PowerSGDState(None, start_powerSGD_iter=2)
        ...     state.iter = 2
        ...     gradient = torch.outer(torch.arange(1.0, 9.0), torch.arange(1.0, 9.0)) * (1 + 2 * rank)
        ...     bucket = dist.GradBucket(buffer=gradient.flatten(), gradients=[gradient])
        ...     powerSGD_hook(state, bucket).wait()
        ...     return [round(x, 3) for x in bucket.gradients()[0][1, :3].tolist()], state.compression_stats()
        >>> run(program, 2)
        [([4.0, 8.0, 12.0], (4.0, 64, 16)), ([4.0, 8.0, 12.0], (4.0, 64, 16))]

    Elsewhere:
        None in MPI, NCCL and JAX. The authors of the paper publish the package ``powersgd``.
    """
    _require_state("powerSGD_hook", state)
    group = HookGroup(state.process_group, bucket)
    numbers = state.number_parameters(bucket)
    if state.iter < state.start_powerSGD_iter:
        state.maybe_increase_iter(bucket)
        return group.average(bucket)
    if bucket.buffer().is_sparse:
        return state.queue.submit(_exact_average(state, bucket, group.divisor), group, bucket.buffer().device)
    plan = plan_of(state, bucket, numbers)
    before, after = bucket.buffer().numel(), sum(plan.sizes()) + plan.rest_size
    state.count(bucket, before, after)
    return state.queue.submit(compressed_average(state, bucket, plan, group.divisor), group, bucket.buffer().device)


@comm_hook
def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average the whole bucket as one square matrix of low rank: fewer calls, worse gradients than `powerSGD_hook`.

    Rows and columns of that matrix have no meaning, so a higher rank need not help; use it where rank 1 is good enough.

    Args:
        state: As for `powerSGD_hook`; ``min_compression_rate`` and ``rank_rule`` do not apply.
        bucket: The gradients; overwritten.

    Returns:
        A Future of the bucket's buffer, with the same approximation of the average on every rank.

    Raises:
        DistBackendError: A rank died, aborted, or did not call in time. The Future raises the error of a call that has
            begun.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.algorithms.ddp_comm_hooks.powerSGD_hook import (
        ...     PowerSGDState, batched_powerSGD_hook)
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     state = PowerSGDState(None, start_powerSGD_iter=2)
        ...     state.iter = 2
        ...     bucket = dist.GradBucket(buffer=torch.full((9,), 1.0 + rank))
        ...     return [round(x, 3) for x in batched_powerSGD_hook(state, bucket).wait()[:2].tolist()]
        >>> run(program, 2)
        [[1.5, 1.5], [1.5, 1.5]]

    Elsewhere:
        None in MPI, NCCL and JAX.
    """
    _require_state("batched_powerSGD_hook", state)
    group = HookGroup(state.process_group, bucket)
    buffer, numbers = bucket.buffer(), state.number_parameters(bucket)
    if state.iter < state.start_powerSGD_iter:
        state.maybe_increase_iter(bucket)
        return group.average(bucket)
    if buffer.is_sparse:
        return state.queue.submit(_exact_average(state, bucket, group.divisor), group, buffer.device)
    side = math.isqrt(max(0, buffer.numel() - 1)) + 1
    plan = CompressionPlan((Matrix(0, side, side, min(side, state.matrix_approximation_rank)),), ())
    key = (buffer.dtype, plan, numbers)
    if bucket.index() not in state.layouts or state.layouts[bucket.index()].key != key:
        state.set_layout(bucket.index(), BucketLayout(key, plan, {}), buffer)
    state.count(bucket, buffer.numel(), sum(plan.sizes()))
    square = torch.zeros(side * side, dtype=buffer.dtype, device=buffer.device)
    square[: buffer.numel()] = buffer
    padded = GradBucket(bucket.index(), square, is_last=bucket.is_last())
    return state.queue.submit(
        _unpadded(compressed_average(state, padded, plan, group.divisor), buffer), group, buffer.device
    )


def _unpadded(rounds: HookRounds, buffer: torch.Tensor) -> HookRounds:
    square = yield from rounds
    return buffer.copy_(square[: buffer.numel()])


def _exact_average(state: PowerSGDState, bucket: GradBucket, divisor: Divisor) -> HookRounds:
    """Average a sparse gradient, which is not a matrix to be factored, when its turn in the queue comes."""
    out = average(bucket.buffer(), divisor)
    yield out
    state.maybe_increase_iter(bucket)
    return out


def plan_of(state: PowerSGDState, bucket: GradBucket, numbers: list[Any]) -> CompressionPlan:
    """Return the bucket's plan; if the bucket has changed, a new one, with the memory of its parameters moved."""
    # A complex gradient is compressed as the real numbers that it occupies in the buffer.
    gradients = [torch.view_as_real(g) if width(g, bucket.buffer()) == 2 else g for g in bucket.gradients()]
    shapes = [(number, g.shape, g.stride()) for number, g in zip(numbers, gradients, strict=True)]
    key = (bucket.buffer().dtype, state.matrix_approximation_rank, shapes)
    known = state.layouts.get(bucket.index())
    if known is not None and known.key == key:
        return known.plan
    plan = low_rank.plan(gradients, [state.ranks_for(parameter) for parameter in bucket.parameters() or gradients])
    starts = accumulate((gradient.numel() for gradient in gradients), initial=0)
    # Of several gradients with one offset only the last has elements.
    state.set_layout(bucket.index(), BucketLayout(key, plan, dict(zip(starts, numbers, strict=False))), bucket.buffer())
    return plan


def compressed_average(state: PowerSGDState, bucket: GradBucket, plan: CompressionPlan, divisor: Divisor) -> HookRounds:
    """Run one iteration of Algorithm 2 on a bucket: error feedback around `_compress_and_aggregate`."""
    out = bucket.buffer()
    gradients = [matrix.of(out) for matrix in plan.matrices]
    first, second = _factor_memory(state, bucket.index(), out, plan)
    # M = gradient + E is computed in the memory of E. Without error feedback M is the gradient itself.
    error = _error_memory(state, bucket.index(), out) if state.use_error_feedback else None
    Ms = gradients if error is None else [matrix.of(error) for matrix in plan.matrices]

    _load_vectors(first, out, plan)
    Ps, Qs = yield from _compress_and_aggregate(state, plan, gradients, Ms, first, second, divisor)
    _store_vectors(average(first[: plan.rest_size], divisor), out, plan)

    for P, Q, gradient, M in zip(Ps, Qs, gradients, Ms, strict=True):
        low_rank.decompress(P, Q, gradient, None if error is None else M)
    if not state.warm_start:
        state.p_memory_dict.pop(bucket.index())
        state.q_memory_dict.pop(bucket.index())
    state.maybe_increase_iter(bucket)
    return out


def _compress_and_aggregate(
    state: PowerSGDState,
    plan: CompressionPlan,
    gradients: Sequence[torch.Tensor],
    Ms: Sequence[torch.Tensor],
    first: torch.Tensor,
    second: torch.Tensor,
    divisor: Divisor,
) -> Generator[torch.Tensor, None, tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Run Algorithm 1, rank-r compression, on all matrices of a bucket.

    Args:
        state: Options.
        plan: Division of the bucket.
        gradients: Gradients, to be added to the Ms if those are other tensors.
        Ms: Matrices to be compressed: errors of the last step, or the gradients.
        first: Memory of the first round: vectors, which are sent as they are, and all P.
        second: Memory of the second round: all Q, those of the last step at first.
        divisor: Number of ranks.

    Returns:
        All P, which are orthonormal, and all Q, which are averages.
    """
    Ps, Qs = plan.ps(first[plan.rest_size :]), plan.qs(second)
    orthonormalize(Qs, state.orthogonalization_epsilon)

    for gradient, M, P, Q in zip(gradients, Ms, Ps, Qs, strict=True):
        low_rank.multiply(M, Q, P, None if M is gradient else gradient)
    # The columns of P are normalized next, so it makes no difference whether they are summed or averaged.
    yield from _first_round(first, plan.rest_size, state.factor_dtype)
    orthonormalize(Ps, state.orthogonalization_epsilon)

    for M, P, Q in zip(Ms, Ps, Qs, strict=True):
        low_rank.multiply_transposed(M, P, Q)
    yield from _summed(second, state.factor_dtype)
    average(second, divisor)
    return Ps, Qs


def _first_round(first: torch.Tensor, rest_size: int, dtype: torch.dtype | None) -> Generator[torch.Tensor, None, None]:
    """Sum vectors and P in one message; in two if P is sent in another dtype, so that vectors stay exact."""
    if dtype is None:
        yield first
    else:
        yield first[:rest_size]
        yield from _summed(first[rest_size:], dtype)


def _summed(tensor: torch.Tensor, dtype: torch.dtype | None) -> Generator[torch.Tensor, None, None]:
    """Sum ``tensor`` over the ranks, in a dtype of fewer bytes if one is given."""
    operand = tensor if dtype is None else tensor.to(dtype)
    yield operand
    if operand is not tensor:
        tensor.copy_(operand)


def _error_memory(state: PowerSGDState, index: int, like: torch.Tensor) -> torch.Tensor:
    """Return the errors of the last step, flat; zeros where there are none."""
    error = state.error_dict.get(index)
    if error is None or error.shape != like.shape:
        error = state.error_dict[index] = torch.zeros_like(like)
    return error


def _factor_memory(
    state: PowerSGDState, index: int, like: torch.Tensor, plan: CompressionPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for the two rounds: vectors and all P, and all Q. Without a Q of the last step, Q is random."""
    p_size, q_size = plan.sizes()
    if index not in state.p_memory_dict:
        state.p_memory_dict[index] = like.new_empty(plan.rest_size + p_size)
    if index not in state.q_memory_dict:
        state.q_memory_dict[index] = like.new_empty(q_size)
        generator = torch.Generator("cpu").manual_seed(state.rng.randint(1_000_000_000))
        for Qs in torch.split(state.q_memory_dict[index], plan.draws(state.batch_tensors_with_same_shape)):
            Qs.copy_(torch.randn(Qs.shape, generator=generator, dtype=like.dtype, device="cpu"))
    return state.p_memory_dict[index], state.q_memory_dict[index]


def _load_vectors(first: torch.Tensor, out: torch.Tensor, plan: CompressionPlan) -> None:
    if plan.rest:
        torch.cat([out[start:stop] for start, stop in plan.rest], out=first[: plan.rest_size])


def _store_vectors(averages: torch.Tensor, out: torch.Tensor, plan: CompressionPlan) -> None:
    pieces = torch.split(averages, [stop - start for start, stop in plan.rest])
    for (start, stop), piece in zip(plan.rest, pieces, strict=True):
        out[start:stop] = piece
