"""Contract of communication hooks, as a function that you can call on your own hook.

`check_hook` calls the hook with buckets of several kinds over several steps, on real ranks, and compares the results
with the exact average. It needs no model. Buckets are packed as the hook's traits permit, so that a trait that does not
hold is noticed. Do not add clauses on which neither DDP nor its users rely.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch import Tensor

import torchdist_ref.groups as dist
from torchdist_ref.algorithms.bucket import Packing, split
from torchdist_ref.algorithms.ddp_comm_hooks import HookTraits, traits_of
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, StoreTimeoutError, explain
from torchdist_ref.groups.world import current
from torchdist_ref.parallel import GradBucket
from torchdist_ref.testing.filling import fill
from torchdist_ref.testing.running import run
from torchdist_ref.torch_internals import torch_private

Hook = Callable[[Any, GradBucket], Any]

Shapes = tuple[tuple[int, ...], ...]
# Per bucket, the shapes of its gradients: a matrix and a vector, a scalar, a convolution, one long vector; the last
# bucket has another dtype.
BUCKETS: tuple[Shapes, ...] = (((24, 16), (24,)), ((), (8, 4, 3, 3)), ((1027,),), ((7, 5), (3,)))
# Those of the first step: DDP divides the gradients anew after it.
FIRST_BUCKETS: tuple[Shapes, ...] = (((24, 16), (24,), ()), ((8, 4, 3, 3), (1027,)))
DTYPES = torch.float32, torch.float32, torch.float32, torch.bfloat16
# bfloat16 has eight significant bits, and sums of a few ranks lose one or two more.
BFLOAT16_TOLERANCE = 2.0**-6
# The last rank calls the hook once the others have returned from it, and fails if they have not after so long.
LATE_SECONDS = 20.0


def check_hook(
    hook: Hook,
    make_state: Callable[..., Any] = lambda *group: None,
    *,
    world_size: int = 2,
    backend: str = "ref",
    ranks: str = "threads",
    steps: int = 3,
    tolerance: float | None = 1e-6,
    alike: bool = True,
    members: Sequence[int] | None = None,
    sum_tolerance: float | None = None,
    bfloat16: bool = True,
) -> None:
    """Check a hook with some buckets a step, all launched before the first is waited for, as DDP does.

    Buckets have other sizes after the first step, and one has gradients in bfloat16. In the last step one rank calls
    the hook after all others have returned from it. At the end a gradient is NaN on one rank.

    Args:
        hook: Called as ``hook(state, bucket)``. Its traits are checked too: see `hook_traits`.
        make_state: Called once on each rank, inside its group; returns the state. With `members` it gets their group
            as argument. Default: the state is None.
        world_size: Number of ranks. Default 2.
        backend: The backend of their group. Default ``"ref"``.
        ranks: ``"threads"`` or ``"processes"``.
        steps: Number of steps with the same state, each with other gradients. Default 3.
        tolerance: Greatest distance of the result from the exact average, relative to the average's norm; None for
            hooks that do not average. Default 1e-6. For gradients in bfloat16 it is 1/64 at least.
        alike: Whether all ranks must get the same bits. Default True.
        members: Ranks that call the hook and average, for hooks with a group in their state. Default: all.
        sum_tolerance: Greatest distance of the sum of all steps' results from the sum of the averages, relative to the
            norm of the last average, from the second step on. With error feedback it does not grow with `steps`.
            Default: not checked.
        bfloat16: Whether a bucket has gradients in bfloat16. Default True.

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
    if tolerance is not None and not (isinstance(tolerance, (int, float)) and 0 <= tolerance < 1):
        expected = "from 0 to less than 1, or None for a hook that does not average"
        hint = "The norm of the average is 1: a hook that returns zeros would pass."
        raise ArgumentError(explain("check_hook", "tolerance", expected, tolerance, hint=hint))
    given: object = make_state
    if not callable(given):
        hint = "Pass a function that returns the state, since each rank needs its own."
        raise ArgumentTypeError(explain("check_hook", "make_state", "callable", given, hint=hint))
    ranks_of_group = tuple(range(world_size)) if members is None else tuple(members)
    check = HookCheck(
        hook, make_state, steps, tolerance, alike, ranks_of_group, members is not None, sum_tolerance, bfloat16
    )
    run(check, world_size, backend=backend, ranks=ranks)


def gradients(rank: int, step: int, index: int) -> list[Tensor]:
    """Return a rank's gradients of a bucket at a step: fractions, of another magnitude on each rank and step.

    Whole numbers with one maximum would hide a hook that rounds, or that decodes with the scale of another rank. Those
    of bucket 1 are large: hooks do not clip.
    """
    scale = 0.37 * 4.0 ** ((rank + 2 * step) % 3 - 1) * (100 if index == 1 else 1)
    first = 7 * rank + 3 * step + 11 * index
    shapes = buckets_of(step)[index]
    return [(fill(first + position, shape) * scale).to(DTYPES[index]) for position, shape in enumerate(shapes)]


def buckets_of(step: int) -> tuple[Shapes, ...]:
    """Return the shapes of the gradients of each bucket at a step."""
    return BUCKETS if step else FIRST_BUCKETS


def _bucket(rank: int, step: int, index: int, traits: HookTraits, size: int, nan: bool = False) -> GradBucket:
    parts = gradients(rank, step, index)
    if nan:
        parts[0].view(-1)[0] = torch.nan
    parameters = [torch.nn.Parameter(torch.ones_like(part)) for part in parts]
    buffer = torch.cat([part.flatten() for part in parts])
    packing = None if traits == HookTraits() else _packed(buffer, parts, traits, index, size)
    return GradBucket(index, buffer, parts, parameters, index == len(buckets_of(step)) - 1, packing)


def _packed(buffer: Tensor, parts: Sequence[Tensor], traits: HookTraits, index: int, size: int) -> Packing:
    """Pack a buffer as DDP may for a hook with these traits: scaled or not, and in the wire dtype only."""
    # DDP scales where that is exact, so a hook has to read the scale of each bucket.
    scale = 1 / size if traits.only_averages and index != 1 else 1.0
    wire_buffer = cache(lambda dtype: torch.empty(buffer.shape, dtype=dtype, device=buffer.device))
    if traits.wire_dtype is None:
        buffer.mul_(scale)
    else:
        wire_buffer(traits.wire_dtype).copy_(buffer).mul_(scale)
        # DDP leaves the buffer as it was, so a hook that reads it must not pass.
        buffer.fill_(torch.nan)
    return Packing(split(buffer, parts), scale, traits.wire_dtype, wire_buffer)


@dataclass(frozen=True)
class HookCheck:
    """Check of one hook on one rank, with the arguments of `check_hook`; a call of it runs all steps."""

    hook: Hook
    make_state: Callable[..., Any]
    steps: int
    tolerance: float | None
    alike: bool
    members: tuple[int, ...]
    subgroup: bool
    sum_tolerance: float | None
    bfloat16: bool

    def __call__(self, rank: int) -> None:
        """Run all steps, then one with NaN."""
        group = dist.new_group(list(self.members)) if self.subgroup else None
        if rank not in self.members:
            return
        state = self.make_state(*[group] * self.subgroup)
        traits = traits_of(self.hook)
        errors: dict[int, Tensor] = {}
        for step in range(self.steps):
            for index, value in enumerate(self._values(state, rank, step)):
                if self.tolerance is not None:
                    self._check_average(value, step, index)
                if step and self.sum_tolerance is not None:
                    average = exact_average(self.members, step, index)
                    errors[index] = errors.get(index, 0) + value.double() - average
                    self._check_sum(errors[index], average, step, index)
                if traits.keeps_buffer:
                    own = torch.cat([part.flatten() for part in gradients(rank, step, index)])
                    kept = torch.equal(value, own)
                    assert kept, f"trait keeps_buffer: the value is this rank's gradients; step {step}, bucket {index}"
                if self.alike:
                    _check_alike(value, group, step, index)
        if self.tolerance is not None:
            values = self._values(state, rank, self.steps, nan=True)
            lost = [index for index, value in enumerate(values) if not value.isnan().any()]
            assert not lost, f"the value has a NaN where a rank's gradient is NaN; lost in buckets {lost}"

    def _values(self, state: Any, rank: int, step: int, nan: bool = False) -> list[Tensor]:
        """Call the hook for each bucket, and return the values of its futures."""
        traits, last, size = traits_of(self.hook), self.members[-1], len(self.members)
        kept = len(buckets_of(step)) if self.bfloat16 else DTYPES.index(torch.bfloat16)
        indices = range(len(buckets_of(step)[:kept]))
        buckets = [_bucket(rank, step, i, traits, size, nan and rank == last) for i in indices]
        if step == self.steps - 1 and rank == last:
            _wait_for_launches(size - 1)
        futures = [_launch(self.hook, state, bucket, step) for bucket in buckets]
        if step == self.steps - 1 and rank != last:
            _count_launch(size - 1)
        # All are waited for first: a hook may still communicate for a later bucket, before our own collectives.
        return [_value(future, bucket, step, traits) for future, bucket in zip(futures, buckets, strict=True)]

    def _check_average(self, value: Tensor, step: int, index: int) -> None:
        assert self.tolerance is not None
        tolerance = self.tolerance if DTYPES[index] == torch.float32 else max(self.tolerance, BFLOAT16_TOLERANCE)
        wanted = exact_average(self.members, step, index)
        error = float((value.double() - wanted).norm() / wanted.norm())
        assert error <= tolerance, (
            f"the value is the average within {tolerance}; step {step}, bucket {index}: {error:.3g}"
            f"{_hint(traits_of(self.hook))}"
        )

    def _check_sum(self, error: Tensor, average: Tensor, step: int, index: int) -> None:
        relative = float(error.norm() / average.norm())
        assert self.sum_tolerance is None or relative <= self.sum_tolerance, (
            f"the sum of the values of steps 1 to {step} is that of the averages within {self.sum_tolerance} times the "
            f"last one; bucket {index}: {relative:.3g}. Add to each step's gradients what the step before lost"
        )


_LAUNCHED = "check_hook/launched"


def _count_launch(others: int) -> None:
    store = current().store
    assert store is not None
    if store.add("check_hook/launches", 1) == others:
        store.set(_LAUNCHED, "")


def _wait_for_launches(others: int) -> None:
    """Wait until the other ranks have returned from the hook, which they call before this one."""
    store = current().store
    assert store is not None
    try:
        store.wait([_LAUNCHED] if others else [], timedelta(seconds=LATE_SECONDS))
    except StoreTimeoutError as error:
        raise AssertionError(
            "a hook returns before other ranks call it: start collectives with async_op=True, put the rest into then"
        ) from error


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


def exact_average(ranks: int | Sequence[int], step: int, index: int) -> Tensor:
    """Return the exact average of the gradients of one bucket: of some ranks, or of so many."""
    ranks = range(ranks) if isinstance(ranks, int) else ranks
    flat = [torch.cat([g.flatten() for g in gradients(r, step, index)]) for r in ranks]
    return torch.stack(flat).double().mean(0)


def _hint(traits: HookTraits) -> str:
    divide = ". With only_averages, divide by the number of ranks times bucket.scale" if traits.only_averages else ""
    read = ". With a wire_dtype, read bucket.wire_buffer(wire_dtype), not bucket.buffer()" if traits.wire_dtype else ""
    return divide + read


def _check_alike(value: Tensor, group: Any, step: int, index: int) -> None:
    everyone = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, value.contiguous(), group)
    same = all(torch.equal(one, everyone[0]) for one in everyone)
    assert same, f"every rank gets the same bits; step {step}, bucket {index}"
