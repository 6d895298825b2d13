"""Tensors whose elements are not in memory: each call raises before it begins, and the group remains usable.

In torch's own groups torch's dispatcher has the first word: fake tensors return at once, DTensor and tensors with a
dispatch of their own raise, and results of functional collectives are waited for. There `ref` does what Gloo does.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as c10d
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn

# Each rank is a fork of this process, which therefore imports what ranks use.
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard

import torchdist_ref as dist
from tests.backends.inside_torch import compared, on
from torchdist_ref.testing import fill, run

PHRASE = "Cannot access data pointer of Tensor that doesn't have storage"


class Wrapper(Tensor):
    """Tensor without storage, which implements nothing."""

    @staticmethod
    def __new__(cls) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, (4,), dtype=torch.float32)  # type: ignore[attr-defined]
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(str(func))


def resized(nbytes: int) -> Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def batched() -> Tensor:
    kept = []
    torch.vmap(lambda row: (kept.append(row), row)[1])(torch.ones(2, 4))
    return kept[0]


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(4)


MADE: dict[str, Callable[[], Tensor]] = {
    "freed": lambda: resized(0),
    "too small": lambda: resized(12),
    "zero": lambda: torch._efficientzerotensor(4),
    "wrapper": Wrapper,
    "batched": batched,
    "fake": fake,
}


def calls(library: Any, rank: int, tensor: Tensor) -> dict[str, Callable[[], Any]]:
    full = torch.ones(4)
    return {
        "all_reduce": lambda: library.all_reduce(tensor),
        "without waiting": lambda: library.all_reduce(tensor, async_op=True).wait(),
        "broadcast": lambda: library.broadcast(tensor, 0),
        "all_gather": lambda: library.all_gather([torch.ones(4), torch.ones(4)], tensor),
        "into it": lambda: library.all_gather([tensor, torch.ones(4)], full),
        "two of it": lambda: library.all_gather([tensor, tensor], full),
        "all_gather_single": lambda: library.all_gather_into_tensor(torch.ones(8), tensor),
        "reduce_scatter": lambda: library.reduce_scatter(tensor, [full, full.clone()]),
        "coalesced": lambda: library.all_reduce_coalesced([tensor]),
        "message": lambda: library.send(tensor, 1) if rank == 0 else library.recv(tensor, 0),
    }


def refusals(rank: int, library: Any) -> list[str]:
    """Return the calls that raise no definite error, or a wrong one."""
    wrong = []
    for kind, make in MADE.items():
        for name, call in calls(library, rank, make()).items():
            try:
                wrong.append(f"{name}, {kind}: {call()!r}")
            except dist.ArgumentError as error:
                if not (error.definite and PHRASE in str(error) and "argument '" in str(error)):
                    wrong.append(f"{name}, {kind}: {error}")
    tensor = torch.tensor([rank + 1.0])
    library.all_reduce(tensor)
    assert tensor.item() == 3.0
    return wrong


def of_ours(rank: int) -> list[str]:
    return refusals(rank, dist)


@pytest.mark.parametrize("executor", ["fast", "reference"])
def test_tensors_without_memory_are_refused(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDIST_REF_EXECUTOR", executor)
    assert run(of_ours, 2, ranks="processes") == [[], []]


def answer(call: Callable[[], Any]) -> str:
    try:
        return f"returned {call()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def in_torchs_group(rank: int, size: int) -> list[str]:
    """Return what calls with tensors that torch's dispatcher knows return or raise."""
    found = []
    with FakeTensorMode():
        made = nn.Linear(4, 4)(torch.ones(2, 4))
        c10d.all_reduce(made)
        found.append(f"{type(made).__name__} {list(made.shape)}")
    model = nn.Linear(4, 4)
    fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    for tensor in (fake(), Wrapper(), model.weight.grad):
        assert tensor is not None
        for call in (
            lambda: c10d.all_reduce(tensor),  # noqa: B023 - called at once
            lambda: c10d.all_reduce(tensor, async_op=True).wait(),  # noqa: B023
            lambda: c10d.broadcast(tensor, 0),  # noqa: B023
            lambda: c10d.send(tensor, 1) if rank == 0 else c10d.recv(tensor, 0),  # noqa: B023
        ):
            found.append(answer(call).partition("\n")[0])
    total = torch.ones(2)
    c10d.all_reduce(total)
    return [*found, str(total.tolist())]


def test_torchs_dispatcher_decides_in_torchs_groups(tmp_path: Path) -> None:
    for ours, theirs, _ in compared(in_torchs_group, 2, str(tmp_path / "store")):
        assert ours == theirs
        assert sum("NotImplementedError" in text for text in ours) == 8 and ours[1] == "returned None"


def results_not_waited_for(rank: int, size: int, c10d: Any = c10d) -> list[Any]:
    """Return the results of calls whose operands are results of functional collectives that nobody has waited for."""

    def pending(*shape: int) -> Tensor:
        made = functional.all_reduce(fill(rank, shape), "sum", c10d.group.WORLD)
        assert type(made).__name__ == "AsyncCollectiveTensor"
        return made

    def written(call: Callable[[Tensor], Any], *shape: int) -> list[Any]:
        tensor = pending(*shape)
        call(tensor)
        values: list[Any] = (tensor + 0).tolist()
        return values

    def read(call: Callable[[Tensor], Any], *shape: int) -> list[Any]:
        values: list[Any] = (call(output := torch.zeros(shape)), output.tolist())[1]
        return values

    blocks = [torch.zeros(3) for _ in range(size)]
    c10d.all_gather(blocks, pending(3))
    into = [pending(3) for _ in range(size)]
    c10d.all_gather(into, fill(rank, (3,)))
    message = pending(3)
    return [
        written(lambda tensor: c10d.all_reduce(tensor), 2, 3),
        written(lambda tensor: c10d.all_reduce(tensor, async_op=True).wait(), 4),
        written(lambda tensor: c10d.broadcast(tensor, 1), 4),
        written(lambda tensor: c10d.all_reduce_coalesced([torch.ones(2), tensor]), 4),
        [block.tolist() for block in blocks],
        [(block + 0).tolist() for block in into],
        read(lambda output: c10d.reduce_scatter(output, [pending(2), pending(2)]), 2),
        read(lambda output: c10d.all_to_all_single(output, pending(4)), 4),
        read(lambda output: c10d.send(message, 1) if rank == 0 else c10d.recv(output, 0), 3),
        written(lambda tensor: c10d.send(fill(7, (3,)), 1) if rank == 0 else c10d.recv(tensor, 0), 3),
    ]


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_results_of_functional_collectives_are_waited_for_in_torchs_groups(tmp_path: Path) -> None:
    for ours, theirs, _ in compared(results_not_waited_for, 2, str(tmp_path / "store")):
        assert ours == theirs


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_results_of_functional_collectives_are_waited_for_by_our_functions(backend: str, tmp_path: Path) -> None:
    wanted = [theirs for _, theirs, _ in compared(results_not_waited_for, 2, str(tmp_path / "store"))]
    assert run(lambda rank: results_not_waited_for(rank, 2, dist), 2, backend=backend, ranks="processes") == wanted


def reduce_doubled(tensor: Tensor) -> Tensor:
    c10d.all_reduce(tensor := tensor * 2)
    return tensor


def exchange(tensor: Tensor) -> Tensor:
    c10d.all_to_all_single(output := torch.zeros_like(tensor), tensor)
    return output + tensor


def gather_changed(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor[:1].mul_(3)
    c10d.all_gather(outputs := [torch.zeros_like(tensor) for _ in range(2)], tensor)
    return outputs[0] - outputs[1] + tensor


def in_transforms(rank: int, size: int) -> list[Any]:
    """Return values, derivatives and errors of functions that call collectives, in transforms of torch.func."""
    tensor, captured = fill(rank, (4,)), fill(rank, (4,), torch.float64)

    def sum_captured(tensor: Tensor) -> Tensor:
        c10d.all_reduce(captured)
        return tensor * 2

    found: list[Any] = []
    for call in (reduce_doubled, exchange, gather_changed, sum_captured):
        found += torch.func.jvp(call, (tensor,), (tensor + 1,))
        found += [
            torch.func.grad(lambda operand, call=call: call(operand).sum())(tensor),
            torch.func.functionalize(call)(tensor),
        ]
    found.append(captured)
    return [*(each.tolist() for each in found), answer(lambda: torch.vmap(reduce_doubled)(tensor.view(2, 2)))]


# torch's transforms load modules that use `torch.jit.script`.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_calls_in_transforms_of_torch_func_give_the_values_of_gloo(tmp_path: Path) -> None:
    for ours, theirs, _ in compared(in_transforms, 2, str(tmp_path / "store")):
        assert ours == theirs
        assert len(ours) == 18 and "Batching rule not implemented" in ours[-1]


def refused_in_torchs_group(rank: int, path: str) -> list[str]:
    MADE.pop("fake"), MADE.pop("wrapper"), MADE.pop("batched")
    result, _ = on("ref", rank, 2, path, lambda rank, size: refusals(rank, c10d))
    return list(result)


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_tensors_without_memory_are_refused_in_torchs_groups(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    assert run(refused_in_torchs_group, 2, path, init=False, ranks="processes") == [[], []]


def odd_arguments(rank: int, size: int) -> list[str]:
    """Return what calls raise that once failed after they had begun."""
    tensor = torch.ones(1)
    calls: list[Callable[[], Any]] = [
        lambda: c10d.all_reduce(torch.ones(1).expand(4)),
        lambda: c10d.broadcast(torch.ones(1).expand(4), 0),
        *(
            lambda tag=tag: c10d.send(tensor, 1, tag=tag) if rank == 0 else c10d.recv(tensor, 0, tag=tag)  # type: ignore[misc]
            for tag in (-1, 2**31, 1.5)
        ),
    ]
    calls.append(lambda: c10d.new_group(group_desc=5))  # type: ignore[arg-type]
    found = [answer(call) for call in calls]
    c10d.all_reduce(tensor, group=c10d.new_group(timeout=timedelta(days=10**6)))
    return [*found, str(tensor.item())]


def on_ref(rank: int, path: str) -> list[str]:
    result, _ = on("ref", rank, 2, path, odd_arguments)
    return list(result)


def test_overlapping_outputs_odd_tags_and_descriptions_are_refused_before_a_call_begins(tmp_path: Path) -> None:
    for found in run(on_ref, 2, str(tmp_path / "store"), init=False, ranks="processes"):
        kinds = [text.partition(":")[0] for text in found]
        assert kinds == [*["ArgumentError"] * 2, "BackendArgumentError", *["ArgumentTypeError"] * 3, "2.0"], found
        assert all("elements do not overlap" in text for text in found[:2])
        assert all("argument 'tag'" in text for text in found[2:5])
