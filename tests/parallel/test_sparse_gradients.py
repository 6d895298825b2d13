"""Sparse gradients: buckets of their own, which hooks receive, compared with torch's indices and values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks as torch_debugging
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_default
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchdist_ref as dist
from tests.parallel.training import forked
from tests.torchs_world import start_torch
from torchdist_ref.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, quantization_hooks
from torchdist_ref.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from torchdist_ref.testing import fill, run

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
    pytest.mark.filterwarnings("ignore:torch.sparse"),
]
DDP = dist.DistributedDataParallel
BACKENDS = pytest.mark.parametrize("backend", ["ref", "gloo"])
TINY = 0.00001
Hook = Callable[[Any, Any], Any]


class Words(nn.Module):
    """Two sparse tables among dense layers; the second may be unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(10, 4, sparse=True)
        self.inner = nn.Linear(4, 4)
        self.bag = nn.EmbeddingBag(8, 4, sparse=True, mode="sum")
        self.outer = nn.Linear(4, 2)
        for number, parameter in enumerate(self.parameters()):
            parameter.data = fill(number, tuple(parameter.shape)) / 8

    def forward(self, words: Tensor, whole: bool = True) -> Tensor:
        hidden = self.inner(self.first(words).sum(1))
        return self.outer(hidden + self.bag(words % 8) if whole else hidden)


def words(rank: int, step: int) -> Tensor:
    """A word twice in a row, rows that all ranks have and rows of one; in step 2 the last rank has none."""
    if step == 2 and rank == dist.get_world_size() - 1:
        return torch.zeros((0, 3), dtype=torch.int64)
    return torch.tensor([[rank, rank, 3], [(5 + 2 * rank) % 10, 3, step]])


def backward(ddp: Any, rank: int, step: int, **asked: Any) -> None:
    ddp(words(rank, step), **asked).sin().sum().backward()


def watched(hook: Hook, seen: list[Any]) -> Hook:
    """Return the hook, which records each bucket before it runs."""

    # torch's DDP takes no annotation of the bucket but its own.
    def watching(state, bucket):  # type: ignore[no-untyped-def]
        buffer = bucket.buffer()
        rows = buffer._indices().flatten().tolist() if buffer.is_sparse else None
        parameters = [tuple(parameter.shape) for parameter in bucket.parameters()]
        pieces = [tuple(gradient.shape) for gradient in bucket.gradients()]
        seen.append((bucket.index(), bucket.is_last(), tuple(buffer.shape), rows, parameters, pieces))
        return hook(state, bucket)

    return watching


def gradients(module: nn.Module) -> list[Any]:
    """Return the gradients; sparse ones with sorted rows, and whether no row occurs twice."""
    found: list[Any] = []
    for gradient in (parameter.grad for parameter in module.parameters()):
        sparse = gradient is not None and gradient.is_sparse
        found.append((gradient._indices(), gradient._values(), gradient.is_coalesced()) if sparse else gradient)  # type: ignore[union-attr]
    return found


def trained(wrap: Any, rank: int, hook: Hook | None, **options: Any) -> tuple[list[Any], list[Any]]:
    """Run four steps; return gradients of each, and the buckets of the hook."""
    ddp, seen = wrap(Words(), **options), []
    if hook is not None:
        ddp.register_comm_hook(None, watched(hook, seen))
    found = []
    for step in range(4):
        ddp.zero_grad()
        backward(ddp, rank, step)
        found.append([g.clone() if isinstance(g, Tensor) else g for g in gradients(ddp.module)])
    return found, seen


def accumulated(wrap: Any, rank: int, hook: Hook | None) -> tuple[list[Any], list[Any]]:
    ddp, seen = wrap(Words()), []
    if hook is not None:
        ddp.register_comm_hook(None, watched(hook, seen))
    with ddp.no_sync():
        backward(ddp, rank, 0)
    backward(ddp, rank, 1)
    return gradients(ddp.module), seen


def joined(wrap: Any, rank: int, hook: Hook | None) -> tuple[list[Any], list[Any]]:
    ddp, seen = wrap(Words()), []
    if hook is not None:
        ddp.register_comm_hook(None, watched(hook, seen))
    with ddp.join():
        for step in range(2 + rank):
            ddp.zero_grad()
            backward(ddp, rank, step + 3)
    return gradients(ddp.module), seen


def mean(state: Any, bucket: Any) -> Any:
    """Divide, and sum with the functions of the library that made the bucket, as a user's hook does."""
    library = dist if isinstance(bucket, dist.GradBucket) else torch.distributed
    total = bucket.buffer().div_(library.get_world_size())
    return library.all_reduce(total, async_op=True).get_future().then(lambda future: future.value()[0])


# Hooks for torch's DDP, and for ours.
HOOKS: dict[str, tuple[Hook | None, Hook | None]] = {
    "none": (None, None),
    "a user's": (mean, mean),
    "allreduce": (torch_default.allreduce_hook, default_hooks.allreduce_hook),
    "noop": (torch_debugging.noop_hook, debugging_hooks.noop_hook),
    "bfloat16": (torch_default.bf16_compress_hook, default_hooks.bf16_compress_hook),
    "bfloat16 around": (
        torch_default.bf16_compress_wrapper(torch_default.allreduce_hook),
        default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook),
    ),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "small buckets": {"bucket_cap_mb": TINY},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "found": {"find_unused_parameters": True},
}
kept: list[Any] = []


def beside(rank: int, path: str) -> dict[str, Any]:
    world = dist.get_world_size()
    start_torch(init_method=f"file://{path}", rank=rank, world_size=world)
    kept.append(torch.distributed.group.WORLD)
    found: dict[str, Any] = {}
    for name, (theirs, ours) in HOOKS.items():
        found[name] = trained(TorchDDP, rank, theirs), trained(DDP, rank, ours)
    for name, options in OPTIONS.items():
        for hook in ("none", "allreduce"):
            theirs, ours = HOOKS[hook]
            found[f"{name}, {hook}"] = trained(TorchDDP, rank, theirs, **options), trained(DDP, rank, ours, **options)
    for program in (accumulated, joined):
        for hook in ("none", "allreduce"):
            theirs, ours = HOOKS[hook]
            found[f"{program.__name__}, {hook}"] = program(TorchDDP, rank, theirs), program(DDP, rank, ours)
    torch.distributed.destroy_process_group()
    return found


# Four steps each of 20 programs on both libraries, in processes of which each makes torch's backend: some 3 s a world.
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.long)])
def test_sparse_buckets_and_gradients_equal_torchs(world: int, tmp_path: Path) -> None:
    for found in forked(beside, world, str(tmp_path / "meet")):
        for name, ((theirs, shown), (ours, ours_shown)) in found.items():
            if name == "static, allreduce":
                # torch calls every bucket of the first of these iterations number 0, and none the last.
                numbered = [(i, i == 2, *bucket[2:]) for i, bucket in enumerate(shown[:3])]
                shown = numbered + shown[3:]
            assert ours_shown == shown, name
            rounding = {"rtol": 1e-2, "atol": 1e-2} if "bfloat16" in name else {}
            torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}", **rounding)


# ---- what torch's DDP can't do: its hooks or its reducer fail there


def expected(world: int, programs: Callable[[int], list[bool]]) -> list[Tensor]:
    """Return the averages of gradients that each rank computes alone, all dense."""
    total = [torch.zeros_like(parameter) for parameter in Words().parameters()]
    for rank in range(world):
        model = Words()
        for step, whole in enumerate(programs(rank)):
            model(torch.tensor([[rank, rank, 3], [(5 + 2 * rank) % 10, 3, step]]), whole).sin().sum().backward()
        for sum_, parameter in zip(total, model.parameters(), strict=True):
            if parameter.grad is not None:
                sum_ += parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
    return [sum_ / world for sum_ in total]


def dense(module: nn.Module) -> list[Tensor]:
    return [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in module.parameters()]  # type: ignore[union-attr]


@BACKENDS
@pytest.mark.parametrize("hook", [None, default_hooks.allreduce_hook], ids=["no hook", "allreduce"])
def test_a_sparse_table_unused_on_one_rank_gets_the_others_rows(backend: str, hook: Hook | None) -> None:
    def program(rank: int) -> list[Tensor]:
        ddp = DDP(Words(), find_unused_parameters=True)
        if hook is not None:
            ddp.register_comm_hook(None, hook)
        backward(ddp, rank, 0, whole=rank == 0)
        return dense(ddp.module)

    for found in run(program, 2, backend=backend):
        torch.testing.assert_close(found, expected(2, lambda rank: [rank == 0]))


def test_a_sparse_table_unused_on_all_ranks_keeps_its_gradient() -> None:
    def program(rank: int, skip: bool) -> list[Any]:
        ddp = DDP(Words(), find_unused_parameters=True, skip_all_reduce_unused_params=skip)
        seen: list[Any] = []
        ddp.register_comm_hook(None, watched(default_hooks.allreduce_hook, seen))
        backward(ddp, rank, 0, whole=False)
        return [ddp.module.bag.weight.grad, len(seen)]

    assert run(program, 2, False) == [[None, 3]] * 2
    assert run(program, 2, True) == [[None, 2]] * 2


@BACKENDS
@pytest.mark.parametrize("hook", [torch_default.allreduce_hook, torch_default.bf16_compress_hook])
def test_torchs_hooks_average_sparse_gradients_on_ours(backend: str, hook: Hook) -> None:
    def program(rank: int) -> list[Tensor]:
        ddp = DDP(Words())
        ddp.register_comm_hook(None, hook)
        backward(ddp, rank, 0)
        return dense(ddp.module)

    for found in forked(program, 2, backend=backend):
        torch.testing.assert_close(found, expected(2, lambda rank: [True]), rtol=1e-2, atol=1e-2)


@BACKENDS
@pytest.mark.parametrize("hook", [powerSGD_hook, batched_powerSGD_hook])
def test_powersgd_averages_sparse_gradients_exactly(backend: str, hook: Hook) -> None:
    def program(rank: int) -> tuple[list[Tensor], int]:
        ddp = DDP(Words(), bucket_cap_mb=TINY)
        state = PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.1)
        ddp.register_comm_hook(state, hook)
        for _ in range(3):
            ddp.zero_grad()
            ddp(torch.tensor([[rank, rank, 3], [5 + 2 * rank, 3, 0]])).sin().sum().backward()
        return dense(ddp.module), state.iter

    for found, steps in run(program, 2, backend=backend):
        wanted = expected(2, lambda rank: [True])
        torch.testing.assert_close([found[0], found[3]], [wanted[0], wanted[3]])
        assert steps == 3


def test_float16_of_sparse_gradients() -> None:
    def program(rank: int) -> list[Tensor]:
        ddp = DDP(Words())
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        backward(ddp, rank, 0)
        return dense(ddp.module)

    for found in run(program, 2):
        torch.testing.assert_close(found, expected(2, lambda rank: [True]), rtol=1e-2, atol=1e-2)


def done(value: Any) -> Any:
    future: Any = Future()
    future.set_result(value)
    return future


def made_dense(state: Any, bucket: Any) -> Any:
    return done(bucket.buffer().to_dense() if bucket.buffer().is_sparse else bucket.buffer())


def too_narrow(state: Any, bucket: Any) -> Any:
    buffer = bucket.buffer()
    return done(torch.sparse_coo_tensor([[1]], torch.ones(1, 8), (4, 8)) if buffer.is_sparse else buffer)


WRONG: dict[str, tuple[Hook, str]] = {
    "dense": (made_dense, "hook 'made_dense', bucket 0, rank {}: its Future holds a tensor of torch.float32 on cpu"),
    "another shape": (too_narrow, "hook 'too_narrow', bucket 0, rank {}: its Future holds a tensor of torch.float32"),
    "in eight bits": (quantization_hooks.quantization_pertensor_hook, "hook', bucket 0, rank {} raised Not"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_error_of_a_hook_without_sparse_support_explains_it(wrong: str) -> None:
    hook, fault = WRONG[wrong]

    def program(rank: int) -> str:
        ddp = DDP(Words())
        ddp.register_comm_hook(None, hook)
        with pytest.raises(dist.DistError) as caught:
            backward(ddp, rank, 0)
        return str(caught.value)

    for rank, text in enumerate(run(program, 2)):
        assert fault.format(rank) in text
        assert "one sparse gradient of shape (8, 4)" in text and "embeddings with sparse=False" in text


def test_a_sparse_bucket_made_by_hand() -> None:
    table = nn.Embedding(5, 2, sparse=True).weight
    rows = torch.sparse_coo_tensor([[1, 1]], [[1.0, 2.0], [3.0, 4.0]], (5, 2))
    bucket = dist.GradBucket(2, rows, None, [table])
    assert bucket.buffer() is rows and bucket.gradients() == [] and bucket.parameters()[0] is table
    bucket.set_buffer(rows * 2)
    assert bucket.buffer().to_dense()[1].tolist() == [8.0, 12.0]
    with pytest.raises(ValueError, match=r"'gradients' must be left out if the buffer is sparse, got 1"):
        dist.GradBucket(0, rows, [rows])
    with pytest.raises(
        ValueError, match=r"'parameters' must be left out, or one parameter of the sparse buffer's shape \(5, 2\)"
    ):
        dist.GradBucket(0, rows, None, [table, table])
