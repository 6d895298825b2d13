"""Contract of communication hooks, as a function that you can call on your own hook.

`check_hook` calls the hook with buckets of several kinds over several steps, on real ranks, and compares the results
with the exact average. It needs no model. Buckets are packed as the hook's traits permit, so that a trait that does not
hold is noticed. Do not add clauses on which neither DDP nor its users rely.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

import torchdist_ref.groups as dist
from torchdist_ref import torch_private
from torchdist_ref.algorithms.ddp_comm_hooks import HookTraits, traits_of
from torchdist_ref.errors import ArgumentError, explain
from torchdist_ref.parallel import GradBucket
from torchdist_ref.parallel.bucket import Packing, split
from torchdist_ref.testing.filling import fill
from torchdist_ref.testing.running import run

Hook = Callable[[Any, GradBucket], Any]

# Per bucket, the shapes of its gradients: a matrix and a vector, a scalar, a convolution, one long vector.
BUCKETS: tuple[tuple[tuple[int, ...], ...], ...] = (((24, 16), (24,)), ((), (8, 4, 3, 3)), ((1027,),))


def check_hook(
    hook: Hook,
    make_state: Callable[[], Any] = lambda: None,
    *,
    world_size: int = 2,
    backend: str = "ref",
    ranks: str = "threads",
    steps: int = 3,
    tolerance: float | None = 1e-6,
    alike: bool = True,
) -> None:
    """Check a hook with three buckets a step, all launched before the first is waited for, as DDP does.

    Args:
        hook: Called as ``hook(state, bucket)``. Its traits are checked too: see `hook_traits`.
        make_state: Called once on each rank, inside its group; returns the state. Default: the state is None.
        world_size: Number of ranks. Default 2.
        backend: The backend of their group. Default ``"ref"``.
        ranks: ``"threads"`` or ``"processes"``.
        steps: Number of steps with the same state, each with other gradients. Default 3.
        tolerance: Greatest distance of the result from the exact average, relative to the average's norm; None for
            hooks that do not average. Default 1e-6.
        alike: Whether all ranks must get the same bits. Default True.

    Raises:
        ArgumentError: With these arguments every hook would pass.
        RankError: The hook violates a clause; the cause names it, with the step and the bucket.

    Example:
        >>> from torchdist_ref.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
        >>> from torchdist_ref.testing.hook_contract import check_hook
        >>> check_hook(allreduce_hook)
        >>> check_hook(fp16_compress_hook, tolerance=1e-3)
    """
    if steps < 1:
        raise ArgumentError(explain("check_hook", "steps", "at least 1", steps))
    if tolerance is not None and not 0 <= tolerance < 1:
        expected = "from 0 to less than 1, or None for a hook that does not average"
        hint = "The norm of the average is 1: a hook that returns zeros would pass."
        raise ArgumentError(explain("check_hook", "tolerance", expected, tolerance, hint=hint))
    run(_check, world_size, hook, make_state, steps, tolerance, alike, backend=backend, ranks=ranks)


def gradients(rank: int, step: int, index: int) -> list[Tensor]:
    """Return a rank's gradients of a bucket at a step: fractions, of another magnitude on each rank and step.

    Whole numbers with one maximum would hide a hook that rounds, or that decodes with the scale of another rank.
    """
    scale = 0.37 * 4.0 ** ((rank + 2 * step) % 3 - 1)
    first = 7 * rank + 3 * step + 11 * index
    return [fill(first + position, shape) * scale for position, shape in enumerate(BUCKETS[index])]


def _bucket(rank: int, step: int, index: int, traits: HookTraits) -> GradBucket:
    parts = gradients(rank, step, index)
    parameters = [torch.nn.Parameter(torch.ones_like(part)) for part in parts]
    buffer = torch.cat([part.flatten() for part in parts])
    packing = None if traits == HookTraits() else _packed(buffer, parts, traits, index)
    return GradBucket(index, buffer, parts, parameters, index == len(BUCKETS) - 1, packing)


def _packed(buffer: Tensor, parts: Sequence[Tensor], traits: HookTraits, index: int) -> Packing:
    """Pack a buffer as DDP may for a hook with these traits: scaled or not, and in the wire dtype only."""
    # DDP scales where that is exact, so a hook has to read the scale of each bucket.
    scale = 1 / dist.get_world_size() if traits.only_averages and index != 1 else 1.0
    wire_buffer = cache(lambda dtype: torch.empty(buffer.shape, dtype=dtype))
    if traits.wire_dtype is None:
        buffer.mul_(scale)
    else:
        wire_buffer(traits.wire_dtype).copy_(buffer).mul_(scale)
        # DDP leaves the buffer as it was, so a hook that reads it must not pass.
        buffer.fill_(torch.nan)
    return Packing(split(buffer, parts), scale, traits.wire_dtype, wire_buffer)


def _check(
    rank: int, hook: Hook, make_state: Callable[[], Any], steps: int, tolerance: float | None, alike: bool
) -> None:
    state, traits = make_state(), traits_of(hook)
    for step in range(steps):
        buckets = [_bucket(rank, step, index, traits) for index in range(len(BUCKETS))]
        futures = [_launch(hook, state, bucket, step) for bucket in buckets]
        # All are waited for first: a hook may still communicate for a later bucket, before our own collectives.
        values = [_value(future, bucket, step, traits) for future, bucket in zip(futures, buckets, strict=True)]
        for index, value in enumerate(values):
            if tolerance is not None:
                _check_average(value, step, index, tolerance, traits)
            if traits.keeps_buffer:
                own = torch.cat([part.flatten() for part in gradients(rank, step, index)])
                kept = torch.equal(value, own)
                assert kept, f"trait keeps_buffer: the value is this rank's gradients; step {step}, bucket {index}"
            if alike:
                _check_alike(value, step, index)


def _launch(hook: Hook, state: Any, bucket: GradBucket, step: int) -> Any:
    future = hook(state, bucket)
    assert isinstance(future, torch_private.FUTURE.get()), (
        f"a hook returns a torch.futures.Future; step {step}, bucket {bucket.index()}: {type(future).__name__}"
    )
    return future


def _value(future: Any, bucket: GradBucket, step: int, traits: HookTraits) -> Tensor:
    value = future.wait()
    where = f"step {step}, bucket {bucket.index()}"
    assert isinstance(value, Tensor), f"the Future's value is one tensor; {where}: {type(value).__name__}"
    length = sum(parameter.numel() for parameter in bucket.parameters())
    assert value.numel() == length, f"the value is as long as the bucket ({length}); {where}: {value.numel()}"
    dtype = bucket.parameters()[0].dtype
    assert value.dtype in (dtype, traits.wire_dtype), (
        f"the value has the gradients' dtype ({dtype}); {where}: {value.dtype}"
    )
    changed = [index for index, parameter in enumerate(bucket.parameters()) if not bool((parameter == 1).all())]
    assert not changed, f"a hook leaves parameters alone; {where}: changed {changed}"
    return value.detach().reshape(-1)


def exact_average(world: int, step: int, index: int) -> Tensor:
    """Return the exact average of all ranks' gradients of one bucket."""
    flat: Sequence[Tensor] = [torch.cat([g.flatten() for g in gradients(r, step, index)]) for r in range(world)]
    return torch.stack(list(flat)).double().mean(0)


def _hint(traits: HookTraits) -> str:
    divide = ". With only_averages, divide by the number of ranks times bucket.scale" if traits.only_averages else ""
    read = ". With a wire_dtype, read bucket.wire_buffer(wire_dtype), not bucket.buffer()" if traits.wire_dtype else ""
    return divide + read


def _check_average(value: Tensor, step: int, index: int, tolerance: float, traits: HookTraits) -> None:
    wanted = exact_average(dist.get_world_size(), step, index)
    error = float((value.double() - wanted).norm() / wanted.norm())
    assert error <= tolerance, (
        f"the value is the average within {tolerance}; step {step}, bucket {index}: {error:.3g}{_hint(traits)}"
    )


def _check_alike(value: Tensor, step: int, index: int) -> None:
    everyone = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, value.contiguous())
    same = all(torch.equal(one, everyone[0]) for one in everyone)
    assert same, f"every rank gets the same bits; step {step}, bucket {index}"
