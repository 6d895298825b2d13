"""Traits of hooks: declared by a decorator, kept through wraps, partial and our wrappers, and used by DDP."""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import nn
from torchdist_ref.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

import torchdist_ref as dist
from torchdist_ref.algorithms.ddp_comm_hooks import HookTraits, hook_traits, traits_of
from torchdist_ref.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torchdist_ref.errors import ArgumentError
from torchdist_ref.testing import RankError, check_hook, fill, hook_contract, run

ALL = HookTraits(only_averages=True, wire_dtype=torch.float16, keeps_buffer=True)


@hook_traits(only_averages=True, wire_dtype=torch.float16, keeps_buffer=True)
def declared(state: Any, bucket: Any) -> Any: ...


def plain(state: Any, bucket: Any) -> Any: ...


def test_a_declared_hook_is_the_function_itself_and_others_have_no_traits() -> None:
    assert declared.__name__ == "declared" and traits_of(declared) == ALL
    assert traits_of(plain) == HookTraits() == HookTraits(False, None, False)
    for odd in (None, 3, len, [], {}):
        assert traits_of(odd) == HookTraits()


def test_traits_survive_functools_partial() -> None:
    def hook(state: Any, bucket: Any, size: int) -> Any: ...

    decorated = hook_traits(only_averages=True)(hook)
    assert traits_of(partial(decorated, size=3)) == HookTraits(only_averages=True)
    assert traits_of(partial(partial(decorated, size=3), size=4)) == HookTraits(only_averages=True)
    assert traits_of(partial(plain)) == HookTraits()


def test_traits_of_a_wrapping_function_survive_functools_wraps_in_either_order() -> None:
    """`functools.wraps` copies attributes of the hook inside, which must not replace what the wrapper declares."""

    @hook_traits(keeps_buffer=True)
    @wraps(declared)
    def outside(state: Any, bucket: Any) -> Any: ...

    @wraps(declared)
    @hook_traits(keeps_buffer=True)
    def inside(state: Any, bucket: Any) -> Any: ...

    assert traits_of(outside) == traits_of(inside) == HookTraits(keeps_buffer=True)
    assert traits_of(declared) == ALL


def test_a_wrapping_function_keeps_the_traits_of_the_hook_inside_if_it_says_so() -> None:
    @hook_traits(like=declared)
    @wraps(declared)
    def counting(state: Any, bucket: Any) -> Any:
        return declared(state, bucket)

    @wraps(declared)
    def clipping(state: Any, bucket: Any) -> Any:
        bucket.buffer().clamp_(-1, 1)
        return declared(state, bucket)

    assert traits_of(counting) == traits_of(partial(counting)) == ALL
    # Else DDP would average in place without calling it, and nothing would be clipped.
    assert traits_of(clipping) == HookTraits()


def test_traits_of_methods_and_callable_objects() -> None:
    class Hook:
        @hook_traits(only_averages=True)
        def method(self, state: Any, bucket: Any) -> Any: ...

        @hook_traits(keeps_buffer=True)
        def __call__(self, state: Any, bucket: Any) -> Any: ...

    assert traits_of(Hook().method) == HookTraits(only_averages=True)
    assert traits_of(Hook()) == traits_of(Hook().__call__) == HookTraits(keeps_buffer=True)


@pytest.mark.parametrize(
    ("hook", "wanted"),
    [
        (allreduce_hook, HookTraits(only_averages=True)),
        (noop_hook, HookTraits(keeps_buffer=True)),
        (fp16_compress_hook, HookTraits(True, torch.float16)),
        (bf16_compress_hook, HookTraits(True, torch.bfloat16)),
        (fp16_compress_wrapper(allreduce_hook), HookTraits(True, torch.float16)),
        (bf16_compress_wrapper(partial(allreduce_hook)), HookTraits(True, torch.bfloat16)),
        (fp16_compress_wrapper(plain), HookTraits(False, torch.float16)),
        # The inner hook rounds once more, and divides after that.
        (bf16_compress_wrapper(fp16_compress_hook), HookTraits(False, torch.bfloat16)),
        (bf16_compress_wrapper(fp16_compress_wrapper(allreduce_hook)), HookTraits(False, torch.bfloat16)),
    ],
)
def test_traits_of_our_hooks_and_wrappers(hook: Any, wanted: HookTraits) -> None:
    assert traits_of(hook) == wanted


def averaging(seen: list[Any], wire_dtype: torch.dtype | None) -> Any:
    """A user's hook that divides what is left to divide, and notes what DDP has done."""

    def hook(group: Any, bucket: dist.GradBucket) -> Any:
        seen.append((bucket.scale, bucket.wire_dtype))
        operand = bucket.buffer() if wire_dtype is None else bucket.wire_buffer(wire_dtype)
        operand.div_(dist.get_world_size(group) * bucket.scale)
        work: Any = dist.all_reduce(operand, group=group, async_op=True)
        return work.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))

    return hook


def gradient(rank: int, hook: Any, **options: Any) -> torch.Tensor:
    model = nn.Linear(5, 3, bias=False)
    ddp = dist.DistributedDataParallel(model, **options)
    ddp.register_comm_hook(None, hook)
    ddp(fill(rank, (4, 5)) / 7).sum().backward()
    assert model.weight.grad is not None
    return model.weight.grad


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("wire_dtype", [None, torch.float16])
def test_a_users_hook_gets_what_it_declares_and_the_same_bits_as_without(
    wire_dtype: torch.dtype | None, world: int
) -> None:
    def program(rank: int) -> Any:
        told: list[Any] = []
        untold: list[Any] = []
        decorate = hook_traits(only_averages=True, wire_dtype=wire_dtype)
        with_traits = gradient(rank, decorate(averaging(told, wire_dtype)))
        without = gradient(rank, averaging(untold, wire_dtype))
        return torch.equal(with_traits, without), with_traits, told, untold

    # Another divisor is not a power of two: the factor would have other bits, so it is not folded in.
    scale = 1.0 if world == 3 else 1 / world
    exact = torch.stack([(fill(rank, (4, 5)) / 7).sum(0) for rank in range(world)]).mean(0).expand(3, 5)
    for same, found, told, untold in run(program, world):
        assert same
        assert told == [(scale, wire_dtype)] and untold == [(1.0, None)]
        torch.testing.assert_close(found, exact, rtol=1e-2 if wire_dtype else 1e-5, atol=1e-2 if wire_dtype else 1e-5)


def mean_of(tensor: Any, divisor: float) -> Any:
    work: Any = dist.all_reduce(tensor.div_(divisor), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def test_check_hook_packs_buckets_as_the_traits_permit() -> None:
    @hook_traits(only_averages=True, wire_dtype=torch.bfloat16)
    def right(state: Any, bucket: Any) -> Any:
        return mean_of(bucket.wire_buffer(torch.bfloat16), dist.get_world_size() * bucket.scale)

    @hook_traits(only_averages=True)
    def ignores_scale(state: Any, bucket: Any) -> Any:
        return mean_of(bucket.buffer(), dist.get_world_size())

    @hook_traits(wire_dtype=torch.bfloat16)
    def reads_buffer(state: Any, bucket: Any) -> Any:
        return mean_of(bucket.buffer(), dist.get_world_size())

    @hook_traits(keeps_buffer=True)
    def averages(state: Any, bucket: Any) -> Any:
        return mean_of(bucket.buffer(), dist.get_world_size())

    check_hook(right, world_size=3, tolerance=1e-2)
    with pytest.raises(RankError, match=r"within 1e-06; .*0\.667\. With only_averages, divide by .* bucket\.scale"):
        check_hook(ignores_scale, world_size=3)
    with pytest.raises(RankError, match=r"nan\. With a wire_dtype, read bucket\.wire_buffer"):
        check_hook(reads_buffer)
    with pytest.raises(RankError, match="trait keeps_buffer: the value is this rank's gradients; step 0, bucket 0"):
        check_hook(averages)


def test_check_hook_notices_lost_fractions_foreign_scales_and_a_missing_division() -> None:
    """Whole numbers with one maximum, always scaled by 1 / world, once let all three pass."""

    def truncates(state: Any, bucket: Any) -> Any:
        whole = bucket.buffer().to(torch.int8).float() / dist.get_world_size()
        return dist.all_reduce(whole, async_op=True).get_future().then(lambda future: future.value()[0])

    def decodes_with_its_own_scale(state: Any, bucket: Any) -> Any:
        scale = bucket.buffer().abs().max() / 127
        codes = (bucket.buffer() / scale).round()
        summed = dist.all_reduce(codes, async_op=True).get_future()
        return summed.then(lambda future: future.value()[0] * scale / dist.get_world_size())

    @hook_traits(only_averages=True)
    def never_divides(state: Any, bucket: Any) -> Any:
        summed = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return summed.then(lambda future: future.value()[0])

    for hook in (truncates, decodes_with_its_own_scale, never_divides):
        with pytest.raises(RankError, match=r"the value is the average within 0\.05"):
            check_hook(hook, world_size=3, tolerance=5e-2)


def by_parts(tensor: torch.Tensor) -> Any:
    """Average a tensor over the default group."""
    return mean_of(tensor, dist.get_world_size())


def hides_nan(state: Any, bucket: Any) -> Any:
    return by_parts(bucket.buffer().nan_to_num_())


def clips(state: Any, bucket: Any) -> Any:
    return by_parts(bucket.buffer().clamp_(-40, 40))


def returns_float32(state: Any, bucket: Any) -> Any:
    return by_parts(bucket.buffer().float())


def keeps_its_first_sizes(state: dict[int, torch.Tensor], bucket: Any) -> Any:
    own = state.setdefault(bucket.index(), torch.empty_like(bucket.buffer()))
    return by_parts(own.copy_(bucket.buffer()).clone())


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (hides_nan, r"has a NaN where a rank's gradient is NaN; lost in buckets \[0, 1, 2, 3\]"),
        (clips, r"average within 1e-06; step 0, bucket 1: 0\.\d+\nSee: "),
        (returns_float32, r"gradients' dtype \(torch.bfloat16\); step 1, bucket 3: torch.float32"),
        (keeps_its_first_sizes, r"RuntimeError: The size of tensor"),
    ],
)
def test_check_hook_notices_hooks_for_one_kind_of_bucket(hook: Any, message: str) -> None:
    with pytest.raises(RankError, match=message):
        check_hook(hook, dict)
    check_hook(lambda state, bucket: by_parts(bucket.buffer()), dict)


def test_check_hook_notices_a_hook_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(state: Any, bucket: Any) -> Any:
        work: Any = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        work.wait()
        return work.get_future().then(lambda done: done.value()[0])

    monkeypatch.setattr(hook_contract, "LATE_SECONDS", 0.2)
    with pytest.raises(RankError, match="a hook returns before other ranks call it: start collectives with async_op"):
        check_hook(waits)


def test_check_hook_averages_over_the_group_of_the_state() -> None:
    def right(group: Any, bucket: Any) -> Any:
        scaled = bucket.buffer().div_(dist.get_world_size(group))
        work: Any = dist.all_reduce(scaled, group=group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def divides_by_the_world(group: Any, bucket: Any) -> Any:
        work: Any = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), group=group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    check_hook(right, lambda group: group, world_size=3, members=(0, 2))
    with pytest.raises(RankError, match=r"the value is the average within 1e-06; step 0, bucket 0: 0\.333"):
        check_hook(divides_by_the_world, lambda group: group, world_size=3, members=(0, 2))


@pytest.mark.parametrize("feedback", [True, False])
def test_check_hook_compares_sums_of_hooks_with_error_feedback(feedback: bool) -> None:
    """Each step loses up to 0.25 of each gradient: feedback adds it to the next."""

    def rounds_down(lost: dict[Any, torch.Tensor], bucket: Any) -> Any:
        key = bucket.index(), len(bucket.buffer())
        whole = bucket.buffer() + (lost.get(key, 0) if feedback else 0)
        rounded = (whole * 4).floor() / 4
        lost[key] = whole - rounded
        return by_parts(rounded)

    def check() -> None:
        check_hook(rounds_down, dict, steps=12, tolerance=0.5, sum_tolerance=0.5)

    if feedback:
        check()
    else:
        with pytest.raises(RankError, match=r"is that of the averages within 0\.5 times the last one; bucket"):
            check()


@pytest.mark.parametrize(
    "arguments", [{"steps": 0}, {"tolerance": float("inf")}, {"tolerance": 1.0}, {"tolerance": "1"}]
)
def test_check_hook_refuses_arguments_with_which_every_hook_passes(arguments: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"check_hook: argument '{next(iter(arguments))}' must be"):
        check_hook(allreduce_hook, **arguments)


def test_check_hook_refuses_a_state_in_place_of_its_function() -> None:
    with pytest.raises(
        TypeError, match=r"'make_state' must be callable, got \{\}.* Pass a function that returns the state"
    ):
        check_hook(allreduce_hook, {})  # type: ignore[arg-type]
