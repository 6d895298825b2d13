"""PowerSGD: send two thin factors in place of each gradient matrix.

Algorithm 1 and 2 of T. Vogels, S. P. Karimireddy, M. Jaggi, *PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization*, NeurIPS 2019, in its symbols: M is a gradient with the error E of the last step
added, P and Q are its factors, M ≈ P Qᵀ. One step of power iteration per training step:

    P ← M Q, summed over the ranks, orthonormalized      (first round; vectors travel with it)
    Q ← Mᵀ P, averaged over the ranks                    (second round)
    M̂ ← P Qᵀ,  E ← M - M̂

Each hook is a generator that yields what is to be summed; `sequence` runs it. Vectors (biases, norms) are
averaged exactly, in the same message as P.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from itertools import accumulate
from typing import Any

import torch
from torch.futures import Future

from torchdist_ref.algorithms.ddp_comm_hooks.default_hooks import average
from torchdist_ref.algorithms.ddp_comm_hooks.low_rank import (
    Matrix,
    Plan,
    approximate,
    orthonormalize,
    plan,
    product,
    transposed_product,
)
from torchdist_ref.algorithms.ddp_comm_hooks.peers import Peers, comm_hook
from torchdist_ref.algorithms.ddp_comm_hooks.powerSGD_state import Layout, PowerSGDState
from torchdist_ref.algorithms.ddp_comm_hooks.sequence import Rounds
from torchdist_ref.parallel.bucket import GradBucket, width

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]


@comm_hook
def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average gradients as low-rank factors, each parameter by itself (Vogels et al., 2019).

    A weight of n × m elements costs (n + m) · r; the fewer bytes are paid with an approximation, which error feedback
    and warm start make good over the following steps. Before step ``state.start_powerSGD_iter`` it averages exactly.
    Works with any number of buckets on any backend: all ranks make the same calls in the same order.

    On one bucket, numbers are those of torch's hook. Sparse gradients, which torch's leaves as they are, are averaged.

    Args:
        state: What to do, and the memory of the steps so far. Every rank builds its own, with the same arguments.
        bucket: The gradients; overwritten.

    Returns:
        A Future of the bucket's buffer, with the same approximation of the average on every rank.

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
    """
    peers = Peers(state.process_group, bucket)
    numbers = state.meet(bucket)
    if state.iter < state.start_powerSGD_iter:
        state.maybe_increase_iter(bucket)
        return average(peers, bucket)
    if bucket.buffer().is_sparse:
        return state.line.add(_exactly(state, bucket, peers.size), peers, bucket.buffer().device)
    layout = _layout(state, bucket, numbers)
    before, after = bucket.buffer().numel(), sum(layout.sizes()) + layout.rest_size
    state.count(bucket, before, after)
    return state.line.add(_rounds(state, bucket, layout, peers.size), peers, bucket.buffer().device)


@comm_hook
def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average the whole bucket as one square matrix of low rank: fewer calls, worse gradients than `powerSGD_hook`.

    Rows and columns of that matrix mean nothing, so a higher rank need not help; use it where rank 1 is good enough.

    Args:
        state: As for `powerSGD_hook`; ``min_compression_rate`` and ``rank_rule`` don't apply.
        bucket: The gradients; overwritten.

    Returns:
        A Future of the bucket's buffer, with the same approximation of the average on every rank.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     state = PowerSGDState(None, start_powerSGD_iter=2)
        ...     state.iter = 2
        ...     bucket = dist.GradBucket(buffer=torch.full((9,), 1.0 + rank))
        ...     return [round(x, 3) for x in batched_powerSGD_hook(state, bucket).wait()[:2].tolist()]
        >>> run(program, 2)
        [[1.5, 1.5], [1.5, 1.5]]
    """
    peers = Peers(state.process_group, bucket)
    buffer, numbers = bucket.buffer(), state.meet(bucket)
    if state.iter < state.start_powerSGD_iter:
        state.maybe_increase_iter(bucket)
        return average(peers, bucket)
    if buffer.is_sparse:
        return state.line.add(_exactly(state, bucket, peers.size), peers, buffer.device)
    side = math.isqrt(max(0, buffer.numel() - 1)) + 1
    layout = Plan((Matrix(0, side, side, min(side, state.matrix_approximation_rank)),), ())
    key = (buffer.dtype, layout, numbers)
    if bucket.index() not in state.layouts or state.layouts[bucket.index()].key != key:
        state.settle(bucket.index(), Layout(key, layout, {}), buffer)
    state.count(bucket, buffer.numel(), sum(layout.sizes()))
    square = torch.zeros(side * side, dtype=buffer.dtype, device=buffer.device)
    square[: buffer.numel()] = buffer
    padded = GradBucket(bucket.index(), square, is_last=bucket.is_last())
    return state.line.add(_unpadded(_rounds(state, padded, layout, peers.size), buffer), peers, buffer.device)


def _unpadded(rounds: Rounds, buffer: torch.Tensor) -> Rounds:
    square = yield from rounds
    return buffer.copy_(square[: buffer.numel()])


def _exactly(state: PowerSGDState, bucket: GradBucket, world: int) -> Rounds:
    """One step on a sparse gradient, which is no matrix to be factored: its average, when its turn comes."""
    out = bucket.buffer().div_(world)
    yield out
    state.maybe_increase_iter(bucket)
    return out


def _layout(state: PowerSGDState, bucket: GradBucket, numbers: list[Any]) -> Plan:
    """The bucket's plan, made again when the bucket is not what it was; what is remembered of its parameters moves."""
    # A complex gradient lies in the buffer as real numbers, and is compressed as those.
    gradients = [torch.view_as_real(g) if width(g, bucket.buffer()) == 2 else g for g in bucket.gradients()]
    shapes = [(number, g.shape, g.stride()) for number, g in zip(numbers, gradients, strict=True)]
    key = (bucket.buffer().dtype, state.matrix_approximation_rank, shapes)
    known = state.layouts.get(bucket.index())
    if known is not None and known.key == key:
        return known.plan
    layout = plan(gradients, [state.ranks_for(parameter) for parameter in bucket.parameters() or gradients])
    starts = accumulate((gradient.numel() for gradient in gradients), initial=0)
    # Of those that begin at one place only the last has elements.
    state.settle(bucket.index(), Layout(key, layout, dict(zip(starts, numbers, strict=False))), bucket.buffer())
    return layout


def _rounds(state: PowerSGDState, bucket: GradBucket, layout: Plan, world: int) -> Rounds:
    """One step of PowerSGD on one bucket."""
    out = bucket.buffer()
    memory = _memory(state, bucket.index(), out)
    Ms = [matrix.of(memory) for matrix in layout.matrices]
    first, second = _factors(state, bucket.index(), out, layout)
    Ps, Qs = layout.ps(first[layout.rest_size :]), layout.qs(second)
    orthonormalize(Qs, state.orthogonalization_epsilon)

    for matrix, M, P, Q in zip(layout.matrices, Ms, Ps, Qs, strict=True):
        product(M, Q, P, matrix.of(out) if state.use_error_feedback else None)
    _load(first, out, layout)
    yield from _first_round(first, layout.rest_size, state.factor_dtype)
    _unload(first[: layout.rest_size].div_(world), out, layout)
    orthonormalize(Ps, state.orthogonalization_epsilon)

    for M, P, Q in zip(Ms, Ps, Qs, strict=True):
        transposed_product(M, P, Q)
    yield from _summed(second, state.factor_dtype)
    second.div_(world)

    for matrix, M, P, Q in zip(layout.matrices, Ms, Ps, Qs, strict=True):
        approximate(P, Q, matrix.of(out), M if state.use_error_feedback else None)
    if not state.warm_start:
        state.p_memory_dict.pop(bucket.index())
        state.q_memory_dict.pop(bucket.index())
    state.maybe_increase_iter(bucket)
    return out


def _first_round(first: torch.Tensor, rest_size: int, dtype: torch.dtype | None) -> Generator[torch.Tensor, None, None]:
    """Sum vectors and P in one message; if P travels in another dtype, in two, so that vectors stay exact."""
    if dtype is None:
        yield first
    else:
        yield first[:rest_size]
        yield from _summed(first[rest_size:], dtype)


def _summed(tensor: torch.Tensor, dtype: torch.dtype | None) -> Generator[torch.Tensor, None, None]:
    """Have ``tensor`` summed over the ranks, if asked in a dtype of fewer bytes."""
    travelling = tensor if dtype is None else tensor.to(dtype)
    yield travelling
    if travelling is not tensor:
        tensor.copy_(travelling)


def _memory(state: PowerSGDState, index: int, out: torch.Tensor) -> torch.Tensor:
    """Flat memory for the matrices M: the gradients' own, or with error feedback that of E, to be added to."""
    if not state.use_error_feedback:
        return out
    error = state.error_dict.get(index)
    if error is None or error.shape != out.shape:
        error = state.error_dict[index] = torch.zeros_like(out)
    return error


def _factors(state: PowerSGDState, index: int, like: torch.Tensor, layout: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the two rounds: uncompressed elements and all P, and all Q. Q is random where none is remembered."""
    p_size, q_size = layout.sizes()
    if index not in state.p_memory_dict:
        state.p_memory_dict[index] = like.new_empty(layout.rest_size + p_size)
    if index not in state.q_memory_dict:
        state.q_memory_dict[index] = like.new_empty(q_size)
        generator = torch.Generator().manual_seed(state.rng.randint(1_000_000_000))
        for Qs in torch.split(state.q_memory_dict[index], layout.draws(state.batch_tensors_with_same_shape)):
            Qs.copy_(torch.randn(Qs.shape, generator=generator, dtype=like.dtype))
    return state.p_memory_dict[index], state.q_memory_dict[index]


def _load(first: torch.Tensor, out: torch.Tensor, layout: Plan) -> None:
    if layout.rest:
        torch.cat([out[start:stop] for start, stop in layout.rest], out=first[: layout.rest_size])


def _unload(averages: torch.Tensor, out: torch.Tensor, layout: Plan) -> None:
    """Averaged vectors go back to their places."""
    pieces = torch.split(averages, [stop - start for start, stop in layout.rest])
    for (start, stop), piece in zip(layout.rest, pieces, strict=True):
        out[start:stop] = piece
