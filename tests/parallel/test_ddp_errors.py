"""Errors of DDP name the parameter or hook, the bucket, the rank and the remedy; no deadlock, only a time-out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.futures import Future

import torchdist_ref as dist
from tests.parallel.training import batch, build, caught_by_others
from torchdist_ref.algorithms.ddp_comm_hooks import powerSGD_hook
from torchdist_ref.testing import RankError, fill, run

DDP = dist.DistributedDataParallel
SMALL = 0.0005
BACKENDS = pytest.mark.parametrize("backend", ["ref", "gloo"])


def failure(fn: Callable[[int], Any], world: int = 2, **kw: Any) -> BaseException:
    """Return the error of the first rank to fail."""
    with pytest.raises(RankError) as caught:
        run(fn, world, **kw)
    assert caught.value.__cause__ is not None
    return caught.value.__cause__


def outcomes(fn: Callable[[int], Any], world: int = 2, **kw: Any) -> list[str]:
    """Return the error of every rank as text."""

    def guarded(rank: int) -> str:
        try:
            fn(rank)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    return run(guarded, world, **kw)


# ---- construction


@BACKENDS
def test_mismatch_of_parameters_names_parameter_and_ranks(backend: str) -> None:
    def program(rank: int) -> None:
        DDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5 if rank == 1 else 4)))

    for rank, text in enumerate(outcomes(program, 3, backend=backend)):
        assert "MismatchError: DistributedDataParallel: parameter 2 ('1.weight') differs between ranks" in text
        assert "shape (4, 4), strides (4, 1) on ranks [0, 2]; " in text and "shape (5, 4)" in text
        assert f"this is rank {rank}" in text


@pytest.mark.parametrize(
    ("odd", "fault"),
    [
        (lambda m: m.double(), "torch.float64 of shape"),
        (lambda m: m.to(memory_format=torch.channels_last), r"strides (27, 1, 9, 3) on ranks [1]"),
        (lambda m: nn.Sequential(m, nn.Linear(2, 2)), "parameter 2 (which this rank doesn't have) differs"),
    ],
    ids=["dtype", "layout", "number"],
)
def test_mismatch_of_dtype_layout_or_number_raises(odd: Callable[[nn.Module], nn.Module], fault: str) -> None:
    def program(rank: int) -> None:
        module = nn.Conv2d(3, 2, 3)
        DDP(odd(module) if rank == 1 else module)

    assert fault in outcomes(program)[0]


@pytest.mark.parametrize(
    ("make", "arguments", "kind", "fault"),
    [
        (lambda: nn.ReLU(), {}, dist.DistError, "no parameter that requires a gradient"),
        (lambda: nn.LazyLinear(3), {}, dist.DistError, "parameter 'weight' has no shape yet"),
        (lambda: nn.Linear(2, 2), {"device_ids": [0]}, dist.ArgumentError, "'device_ids' must be left out"),
        (lambda: nn.Linear(2, 2), {"device_ids": [0, 1]}, dist.ArgumentError, "one device"),
        (lambda: nn.SyncBatchNorm(3), {}, dist.ArgumentError, "works on accelerators only"),
    ],
)
def test_invalid_modules_and_arguments_raise(
    make: Callable[[], nn.Module], arguments: dict[str, Any], kind: type[Exception], fault: str
) -> None:
    error = failure(lambda rank: DDP(make(), **arguments), 1)
    assert isinstance(error, kind) and fault in str(error)


# ---- graphs


class Part(nn.Module):
    """Two layers; the second is used only if asked."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, both: bool = False) -> Tensor:
        return self.spare(self.used(x)) if both else self.used(x)


def test_unused_parameter_raises_at_the_next_forward() -> None:
    def program(rank: int) -> None:
        ddp = DDP(Part())
        ddp(fill(rank, (2, 3))).sum().backward()
        ddp(fill(rank, (2, 3)))

    for rank, text in enumerate(outcomes(program)):
        assert f"on rank {rank}): no gradient arrived for 'spare.weight', 'spare.bias'" in text
        assert "find_unused_parameters=True" in text


def test_a_static_graph_that_changes_raises() -> None:
    def program(rank: int) -> None:
        ddp = DDP(Part(), static_graph=True)
        for both in (True, True, False, False):
            ddp(fill(rank, (2, 3)), both).sum().backward()

    assert all("static_graph=True promises" in text and "'spare.weight'" in text for text in outcomes(program))


def test_a_parameter_ready_twice_in_one_iteration_raises() -> None:
    def program(rank: int) -> None:
        ddp = DDP(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
        ddp(fill(rank, (2, 3)))
        hidden = ddp.module[1](fill(rank, (2, 3)))
        hidden.sum().backward()
        ddp.module[1](fill(rank, (2, 3))).sum().backward()

    assert all("' got its gradient twice" in text and "parameter '1." in text for text in outcomes(program))


def test_dense_gradient_of_a_sparse_embedding_raises() -> None:
    def program(rank: int) -> None:
        words = nn.Embedding(5, 2, sparse=True)

        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.words = words

            def forward(self, x: Tensor) -> Tensor:
                return x @ self.words.weight

        ddp = DDP(Tied())
        ddp(torch.ones(1, 5)).sum().backward()

    wanted = "'words.weight' of an embedding with sparse=True got a dense"
    assert all(wanted in text for text in outcomes(program))


# ---- hooks


class Unprintable(Exception):
    def __str__(self) -> str:
        return str(1 // 0)


def done(value: Any) -> Any:
    future: Any = Future()
    future.set_result(value)
    return future


def raising(state: Any, bucket: dist.GradBucket) -> Any:
    if bucket.index() == 1:
        raise KeyError("lost")
    return done(bucket.buffer())


def failing_later(state: Any, bucket: dist.GradBucket) -> Any:
    return done(bucket.buffer()).then(lambda future: 1 // 0)


WRONG: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "raises": (raising, dist.DistError, "hook 'raising', bucket 1, rank {} raised KeyError: 'lost'"),
    "fails later": (failing_later, dist.DistError, "hook 'failing_later', bucket 0, rank {}: its Future ended with "),
    "None": (lambda state, bucket: None, dist.ArgumentTypeError, "bucket 0, rank {} returned NoneType. It has to"),
    "a tensor": (lambda state, bucket: bucket.buffer(), dist.ArgumentTypeError, "bucket 0, rank {} returned Tensor."),
    "a list": (lambda state, bucket: done([bucket.buffer()]), dist.ArgumentTypeError, "rank {}: its Future holds list"),
    "sparse": (lambda state, bucket: done(bucket.buffer().to_sparse()), dist.DistError, "layout torch.sparse_coo"),
    "no memory": (lambda state, bucket: done(bucket.buffer().to("meta")), dist.DistError, "torch.float32 on meta"),
    "complex": (lambda state, bucket: done(bucket.buffer() * 1j), dist.DistError, "tensor of torch.complex64"),
    "too short": (lambda state, bucket: done(torch.ones(3)), dist.DistError, "rank {}: its Future holds a tensor of 3"),
}


def backward(ddp: Any, rank: int) -> None:
    inputs, _ = batch(rank, 0)
    ddp(inputs).pow(2).mean().backward()


@pytest.mark.parametrize("wrong", WRONG)
def test_error_of_a_hook_names_hook_bucket_and_rank(wrong: str) -> None:
    hook, kind, fault = WRONG[wrong]

    def program(rank: int) -> None:
        ddp = DDP(build("mlp"), bucket_cap_mb=SMALL, find_unused_parameters=True)
        ddp.register_comm_hook(None, hook)
        backward(ddp, rank)

    for rank, text in enumerate(outcomes(program)):
        assert text.startswith(f"{kind.__name__}: DistributedDataParallel: communication hook")
        assert fault.format(rank) in text


def of(error: BaseException) -> Callable[..., Any]:
    def hook(state: Any, bucket: Any) -> Any:
        raise error

    return hook


# Each on rank 1 alone, and a part of the reason that rank 0 gets.
ON_ONE_RANK: dict[str, tuple[Callable[..., Any], str]] = {
    "raises": (of(KeyError("lost")), "raised KeyError: 'lost'"),
    "raises an error of the library": (of(dist.UnsupportedError("not here")), "raised UnsupportedError: not here"),
    "raises Ctrl-C": (of(KeyboardInterrupt()), "KeyboardInterrupt in a communication hook"),
    "raises without text": (of(Unprintable()), "raised Unprintable: its text cannot be read: ZeroDivisionError"),
    "raises with bytes that are no text": (of(OSError("/data/\udce9.pt")), "raised OSError: /data/\\udce9.pt"),
    "fails later": (failing_later, "its Future ended with"),
    "returns None": (lambda state, bucket: None, "returned NoneType"),
    "returns a Future of None": (lambda state, bucket: done(None), "its Future holds NoneType"),
    "returns too little": (lambda state, bucket: done(torch.ones(3)), "its Future holds a tensor of 3"),
}


@pytest.mark.parametrize("wrong", ON_ONE_RANK)
def test_a_hook_that_fails_on_one_rank_ends_the_others_wait(wrong: str) -> None:
    hook, reason = ON_ONE_RANK[wrong]
    told = threading.Event()

    def program(rank: int) -> str:
        def summed(state: Any, bucket: dist.GradBucket) -> Any:
            if rank == 1:
                return hook(state, bucket)
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda each: each.value()[0])

        ddp = DDP(build("mlp"))
        ddp.register_comm_hook(None, summed)
        return caught_by_others(lambda: backward(ddp, rank), rank, told)

    text = run(program, 2, timeout=10)[0]
    assert text.startswith("GroupAbortedError: DistributedDataParallel: communication hook")
    assert "its Future ended with GroupAbortedError" in text and "rank 1 aborted" in text and reason in text


def failing_call(error: Exception) -> Callable[..., Any]:
    """Return a hook whose Future ends with an error."""

    def hook(state: Any, bucket: dist.GradBucket) -> Any:
        future: Any = Future()
        future.set_exception(error)
        return future

    return hook


@pytest.mark.parametrize("failing", [of, failing_call])
def test_an_error_of_a_call_in_a_hook_keeps_its_class_and_its_ranks(failing: Callable[..., Any]) -> None:
    def program(rank: int) -> Any:
        ddp = DDP(build("mlp"))
        ddp.register_comm_hook(None, failing(dist.RankDiedError("rank 1 was killed").naming([1])))
        with pytest.raises(dist.RankDiedError, match=r"communication hook 'hook'.* RankDiedError: rank 1") as caught:
            backward(ddp, rank)
        return caught.value.ranks

    assert run(program, 1) == [(1,)]


@pytest.mark.parametrize(
    "state_of",
    [
        lambda group: group,
        lambda group: powerSGD_hook.PowerSGDState(group),
        lambda group: [7, group],
        lambda group: {"group": group},
    ],
    ids=["the group", "an attribute", "an item", "a value"],
)
def test_a_hook_that_fails_on_one_rank_ends_the_waits_in_the_group_of_its_state(
    state_of: Callable[[Any], Any],
) -> None:
    told = threading.Event()

    def program(rank: int) -> str:
        own, other = dist.new_group(group_desc="the hook's"), dist.new_group(group_desc="another")
        state = state_of(own)

        def summed(state: Any, bucket: dist.GradBucket) -> Any:
            if rank == 1:
                raise OSError("no space")
            return dist.all_reduce(bucket.buffer(), group=own, async_op=True).get_future().then(lambda f: f.value()[0])

        ddp = DDP(build("mlp"))
        ddp.register_comm_hook(state, summed)
        # Rank 1 stays until rank 0 has its error, so only the abort can have ended that wait.
        text = caught_by_others(lambda: backward(ddp, rank), rank, told)
        usable = torch.tensor([rank + 5])
        dist.all_reduce(usable, group=other)
        assert usable.item() == 11, "a group that the hook does not use"
        return text

    text = run(program, 2, timeout=10)[0]
    assert "its Future ended with GroupAbortedError" in text and "the hook's" in text
    assert "rank 1 aborted" in text and "raised OSError: no space" in text


@BACKENDS
def test_a_future_that_is_never_completed_raises_at_the_time_out(backend: str) -> None:
    def program(rank: int) -> None:
        ddp = DDP(build("mlp"))
        # No collective runs from here on, so the ranks need not be on time.
        dist.group.WORLD.timeout = 0.05
        ddp.register_comm_hook(None, lambda state, bucket: Future())
        backward(ddp, rank)

    error = failure(program, backend=backend)
    assert isinstance(error, dist.RankStalledError) and "was not completed within 0.05 s" in str(error)


def test_the_iteration_after_a_failed_hook_works() -> None:
    def program(rank: int) -> Any:
        calls = []

        def hook(state: Any, bucket: dist.GradBucket) -> Any:
            calls.append(bucket.index())
            if len(calls) == 1:
                raise OSError("once")
            return done(bucket.buffer())

        ddp = DDP(build("mlp"))
        ddp.register_comm_hook(None, hook)
        with pytest.raises(dist.DistError, match="once"):
            backward(ddp, rank)
        backward(ddp, rank)
        return calls

    assert run(program, 2) == [[0, 0]] * 2


class Callable2:
    def __call__(self, state: Any, bucket: dist.GradBucket) -> Any:
        return done(bucket.buffer())


def annotated(state: object, bucket: dist.GradBucket) -> Future[Tensor]:
    return done(bucket.buffer())


def annotated_in_short(state: Any, bucket: Any) -> Future:  # type: ignore[type-arg]
    return done(bucket.buffer())


def misled(state: Any, bucket: int) -> Any:
    return bucket


def misleading(state: Any, bucket: Any) -> list[int]:
    return bucket


@pytest.mark.parametrize("hook", [Callable2(), partial(annotated), annotated, annotated_in_short, Callable2().__call__])
def test_any_kind_of_callable_is_a_hook(hook: Any) -> None:
    def program(rank: int) -> float:
        ddp = DDP(nn.Linear(1, 1, bias=False))
        ddp.register_comm_hook(None, hook)
        ddp(torch.tensor([[1.0 + rank]])).sum().backward()
        return ddp.module.weight.grad.item()

    assert run(program, 2) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("hook", "kind", "fault"),
    [
        (None, dist.ArgumentTypeError, "'hook' must be callable, got 'NoneType' (on rank 0)"),
        (lambda bucket: bucket, dist.ArgumentTypeError, "callable with two arguments"),
        (misled, dist.ArgumentError, "annotated to take a GradBucket, not int"),
        (misleading, dist.ArgumentError, "annotated to return torch.futures.Future[torch.Tensor], not list[int]"),
    ],
)
def test_invalid_hooks_raise_at_registration(hook: Any, kind: type[Exception], fault: str) -> None:
    error = failure(lambda rank: DDP(nn.Linear(1, 1)).register_comm_hook(None, hook), 1)
    assert isinstance(error, kind) and fault in str(error)


def test_a_second_hook_raises() -> None:
    def program(rank: int) -> None:
        ddp = DDP(nn.Linear(1, 1))
        ddp.register_comm_hook(None, annotated)
        ddp.register_comm_hook(None, annotated)

    error = failure(program, 1)
    assert isinstance(error, RuntimeError) and "has a hook already, 'annotated' (on rank 0)" in str(error)
