"""Gradients averaged in place, without a bucket: torch's bits, for any size, layout and dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchdist_ref as dist
from torchdist_ref.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_wrapper,
)
from torchdist_ref.parallel import storage
from torchdist_ref.testing import fill, run

DDP = dist.DistributedDataParallel


class Uneven(nn.Module):
    """Large and small parameters, one of them stored by columns, for the last bucket; and one of a dtype of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(fill(1, (40, 30)))
        self.columns = nn.Parameter(fill(2, (25, 40)).t())
        self.small = nn.Parameter(fill(3, (25,)))
        self.wide = nn.Parameter(fill(4, (25, 33), torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.large.t()) @ self.columns + self.small).double() @ self.wide


HOOKS = {
    "allreduce": allreduce_hook,
    "bf16": bf16_compress_hook,
    "bf16 wrapper": bf16_compress_wrapper(allreduce_hook),
    "fp16 wrapper": fp16_compress_wrapper(allreduce_hook),
}


def around(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a user's function around a hook, which has to receive every bucket."""
    return lambda state, bucket: hook(state, bucket)


def gradients(model: Any, rank: int) -> list[Tensor]:
    model(fill(rank, (7, 30))).sin().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def average(world: int) -> list[Tensor]:
    every = [gradients(Uneven(), rank) for rank in range(world)]
    return [sum(each / world for each in grads) for grads in zip(*every, strict=True)]  # type: ignore[misc]


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limits, so that small tensors are divided into pieces like large ones."""
    monkeypatch.setattr(storage, "LARGE_GRADIENT_BYTES", 2048)
    monkeypatch.setattr(storage, "PIECE_BYTES", 1024)


@pytest.mark.parametrize("world", [2, 3])
def test_in_place_gradients_are_averages_and_keep_their_tensors(pieces: None, world: int) -> None:
    def program(rank: int) -> tuple[list[Tensor], bool]:
        ddp = DDP(Uneven())
        first = gradients(ddp, rank)
        kept = [p.grad for p in ddp.parameters()]
        for gradient in kept:
            gradient.zero_()  # type: ignore[union-attr]
        second = gradients(ddp, rank)
        same = all(p.grad is gradient for p, gradient in zip(ddp.parameters(), kept, strict=True))
        return first + second, same and len(ddp.reducer.in_place.parameters) == 3

    expected = average(world)
    for found, same in run(program, world):
        torch.testing.assert_close(found, expected + expected, rtol=1e-4, atol=1e-3)
        assert same


def test_in_place_gradients_have_the_bits_of_buckets(pieces: None) -> None:
    def program(rank: int, views: bool) -> list[Tensor]:
        return gradients(DDP(Uneven(), gradient_as_bucket_view=views), rank)

    apart, together = run(program, 2, False), run(program, 2, True)
    for one, other in zip(apart, together, strict=True):
        assert len(one) == 4 and all(map(torch.equal, one, other))


@pytest.mark.filterwarnings("ignore:grad and param do not obey:UserWarning")
def test_a_gradient_of_another_layout_or_none_is_averaged(pieces: None) -> None:
    """Rank 0 has its gradient column-major, rank 1 row-major; the small one is missing on rank 1."""

    def program(rank: int) -> tuple[list[Tensor], bool]:
        model = Uneven()
        if rank == 0:
            model.large.grad = torch.zeros(30, 40).t()
        ddp = DDP(model)
        if rank == 1:
            model.small.register_hook(lambda gradient: gradient * 0)
        found = gradients(ddp, rank)
        return found, model.large.grad is not None and model.large.grad.is_contiguous() == (rank == 1)

    expected = average(2)
    (one, by_columns), (other, by_rows) = run(program, 2)
    assert by_columns and by_rows
    assert all(map(torch.equal, one, other))
    torch.testing.assert_close(one[:2], expected[:2], rtol=1e-4, atol=1e-3)


def test_in_place_gradients_are_local_until_backward_ends(pieces: None) -> None:
    def program(rank: int) -> tuple[bool, bool]:
        x = fill(rank, (7, 30)).requires_grad_()
        model = Uneven()
        ddp, seen = DDP(model), []
        # The input's gradient comes last of all.
        x.register_hook(lambda _: seen.append(model.wide.grad.clone()))  # type: ignore[union-attr]
        ddp(x).sin().sum().backward()
        own = gradients(Uneven(), rank)[3]
        return torch.equal(seen[0], own), torch.equal(model.wide.grad, own)  # type: ignore[arg-type]

    assert run(program, 2) == [(True, False)] * 2


@pytest.mark.parametrize("name", [None, *HOOKS])
def test_join_contributes_zeros_and_keeps_gradients(pieces: None, name: str | None) -> None:
    def program(rank: int) -> tuple[list[Tensor], list[Tensor]]:
        ddp, found = DDP(Uneven()), []
        if name is not None:
            ddp.register_comm_hook(None, HOOKS[name])
        with ddp.join():
            for step in range(2 + rank):
                ddp.zero_grad()
                found = gradients(ddp, 2 * step + rank)
        return found, [p.grad for p in ddp.parameters()]  # type: ignore[misc]

    idle, busy = run(program, 2)
    alone = gradients(Uneven(), 5)
    assert all(map(torch.equal, *idle)) and all(map(torch.equal, *busy))
    near = {"rtol": 1e-4, "atol": 1e-3} if name in (None, "allreduce") else {"rtol": 1e-2, "atol": 1e-1}
    torch.testing.assert_close(busy[0], [gradient / 2 for gradient in alone], **near)


@pytest.mark.parametrize("way", ["hook", "views", "unused", "static", "gloo"])
def test_no_gradient_is_in_place_if_an_option_needs_buckets(way: str) -> None:
    asked = {"views": "gradient_as_bucket_view", "unused": "find_unused_parameters", "static": "static_graph"}

    def program(rank: int) -> int:
        ddp = DDP(Uneven(), **({asked[way]: True} if way in asked else {}))
        if way == "hook":
            ddp.register_comm_hook(None, around(allreduce_hook))
        gradients(ddp, rank)
        ddp(fill(rank, (7, 30)))
        return len(ddp.reducer.buckets) - len(ddp.reducer.assignment)

    gloo = way == "gloo"
    assert run(program, 2, backend="gloo" if gloo else "ref", ranks="processes" if gloo else "threads") == [0, 0]


@pytest.mark.parametrize("name", HOOKS)
def test_averaging_hooks_are_not_called_for_in_place_gradients(pieces: None, name: str) -> None:
    hook = HOOKS[name]

    def program(rank: int, hooks: list[Callable[..., Any]]) -> tuple[list[Tensor], int]:
        ddp = DDP(Uneven())
        ddp.register_comm_hook(None, hooks[rank])
        found = gradients(ddp, rank) + gradients(ddp, rank + 2)
        return found, len(ddp.reducer.in_place.parameters)

    watched, plain = run(program, 2, [around(hook)] * 2), run(program, 2, [hook] * 2)
    mixed = run(program, 2, [hook, around(hook)])
    for (expected, zero), (found, three), (together, none) in zip(watched, plain, mixed, strict=True):
        assert (zero, three, none) == (0, 3, 0)
        assert len(found) == 8 and all(map(torch.equal, found, expected)) and all(map(torch.equal, together, expected))


def test_a_hook_averages_over_the_group_that_is_its_state(pieces: None) -> None:
    def program(rank: int) -> tuple[list[Tensor], int]:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        ddp = DDP(Uneven())
        ddp.register_comm_hook(pairs[rank // 2], allreduce_hook)
        gradients(ddp, rank)
        ddp.zero_grad()
        return gradients(ddp, rank), len(ddp.reducer.in_place.parameters)

    every = [gradients(Uneven(), rank) for rank in range(4)]
    for rank, (found, three) in enumerate(run(program, 4)):
        one, other = every[rank // 2 * 2 : rank // 2 * 2 + 2]
        assert three == 3
        torch.testing.assert_close(found, [(a + b) / 2 for a, b in zip(one, other, strict=True)], rtol=1e-4, atol=1e-3)
