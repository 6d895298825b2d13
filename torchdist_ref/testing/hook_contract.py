"""Contract of communication hooks, as a function that you can call on your own hook.

`check_hook` calls the hook with buckets of several kinds over several steps, on real ranks, and compares the results
with the exact average. It needs no model. Do not add clauses on which neither DDP nor its users rely.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import torchdist_ref.groups as dist
from torchdist_ref.parallel import GradBucket
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
        hook: Called as ``hook(state, bucket)``.
        make_state: Called once on each rank, inside its group. Default: the state is None.
        world_size: Number of ranks. Default 2.
        backend: The backend of their group. Default ``"ref"``.
        ranks: ``"threads"`` or ``"processes"``.
        steps: Number of steps with the same state, each with other gradients. Default 3.
        tolerance: Greatest distance of the result from the exact average, relative to the average's norm; None for
            hooks that do not average. Default 1e-6.
        alike: Whether all ranks must get the same bits. Default True.

    Raises:
        RankError: The hook violates a clause; the cause names it, with the step and the bucket.

    Example:
        >>> from torchdist_ref.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
        >>> from torchdist_ref.testing.hook_contract import check_hook
        >>> check_hook(allreduce_hook)
        >>> check_hook(fp16_compress_hook, tolerance=1e-3)
    """
    run(_check, world_size, hook, make_state, steps, tolerance, alike, backend=backend, ranks=ranks)


def gradients(rank: int, step: int, index: int) -> list[Tensor]:
    """Return a rank's gradients of a bucket at a step: small whole numbers, so that averages are nearly exact."""
    return [fill(7 * rank + 3 * step + 11 * index + position, shape) for position, shape in enumerate(BUCKETS[index])]


def _bucket(rank: int, step: int, index: int) -> GradBucket:
    parts = gradients(rank, step, index)
    parameters = [torch.nn.Parameter(torch.ones_like(part)) for part in parts]
    buffer = torch.cat([part.flatten() for part in parts])
    return GradBucket(index, buffer, parts, parameters, index == len(BUCKETS) - 1)


def _check(
    rank: int, hook: Hook, make_state: Callable[[], Any], steps: int, tolerance: float | None, alike: bool
) -> None:
    state = make_state()
    for step in range(steps):
        buckets = [_bucket(rank, step, index) for index in range(len(BUCKETS))]
        futures = [_launch(hook, state, bucket, step) for bucket in buckets]
        # All are waited for first: a hook may still communicate for a later bucket, before our own collectives.
        values = [_value(future, bucket, step) for future, bucket in zip(futures, buckets, strict=True)]
        for index, value in enumerate(values):
            if tolerance is not None:
                _check_average(value, step, index, tolerance)
            if alike:
                _check_alike(value, step, index)


def _launch(hook: Hook, state: Any, bucket: GradBucket, step: int) -> Any:
    future = hook(state, bucket)
    assert isinstance(future, torch._C.Future), (  # noqa: SLF001 (torch's)
        f"a hook returns a torch.futures.Future; step {step}, bucket {bucket.index()}: {type(future).__name__}"
    )
    return future


def _value(future: Any, bucket: GradBucket, step: int) -> Tensor:
    value = future.wait()
    where = f"step {step}, bucket {bucket.index()}"
    assert isinstance(value, Tensor), f"the Future's value is one tensor; {where}: {type(value).__name__}"
    length = sum(parameter.numel() for parameter in bucket.parameters())
    assert value.numel() == length, f"the value is as long as the bucket ({length}); {where}: {value.numel()}"
    dtype = bucket.parameters()[0].dtype
    assert value.dtype == dtype, f"the value has the gradients' dtype ({dtype}); {where}: {value.dtype}"
    changed = [index for index, parameter in enumerate(bucket.parameters()) if not bool((parameter == 1).all())]
    assert not changed, f"a hook leaves parameters alone; {where}: changed {changed}"
    return value.detach().reshape(-1)


def exact_average(world: int, step: int, index: int) -> Tensor:
    """Return the exact average of all ranks' gradients of one bucket."""
    flat: Sequence[Tensor] = [torch.cat([g.flatten() for g in gradients(r, step, index)]) for r in range(world)]
    return torch.stack(list(flat)).double().mean(0)


def _check_average(value: Tensor, step: int, index: int, tolerance: float) -> None:
    wanted = exact_average(dist.get_world_size(), step, index)
    error = float((value.double() - wanted).norm() / wanted.norm())
    assert error <= tolerance, f"the value is the average within {tolerance}; step {step}, bucket {index}: {error:.3g}"


def _check_alike(value: Tensor, step: int, index: int) -> None:
    everyone = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, value.contiguous())
    same = all(torch.equal(one, everyone[0]) for one in everyone)
    assert same, f"every rank gets the same bits; step {step}, bucket {index}"
