"""The reference executor gives the same bits as the fast one, raises the same errors, and is short."""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torchdist_ref as dist
from tests.backends.device_stand_in import current_stream, on_device, seen_by_host, stand_in, to_be_doubled
from tests.covering import covering
from torchdist_ref.backends.ref import execute
from torchdist_ref.schedules import catalogue
from torchdist_ref.testing import fill, run

VARIABLE = "TORCHDIST_REF_EXECUTOR"
OPS = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")
MOST_ALGORITHMS = max(len(catalogue.algorithms(op)) for op in OPS)
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
)
REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
# For threads a window is 256 KiB in all: several windows, the last of them short.
LARGE = 140_003


def both(monkeypatch: pytest.MonkeyPatch, program: Callable[..., Any], size: int, *arguments: Any, **how: Any) -> Any:
    """Run a program under each executor; return the ranks' results under either."""
    results = []
    for executor in ("fast", "reference"):
        monkeypatch.setenv(VARIABLE, executor)
        results.append(run(program, size, *arguments, **how))
    return results


def same(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether tensors are equal bit by bit, not-a-number included."""
    pairs = zip(ones, others, strict=True)
    return all(a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def values(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Numbers whose sum depends on the order in which they are added, in types that round."""
    if not dtype.is_floating_point and not dtype.is_complex:
        return fill(rank, (count,), dtype)
    return torch.randn(count, generator=torch.Generator().manual_seed(1000 * rank + count)).to(dtype)


def makes_sense(name: str, dtype: torch.dtype) -> bool:
    if name in ("BAND", "BOR", "BXOR"):
        return not dtype.is_floating_point and not dtype.is_complex
    if dtype.is_complex:
        return name in ("SUM", "AVG")
    return name != "AVG" or dtype != torch.bool


def reductions(rank: int, size: int, count: int, dtype: torch.dtype, name: str) -> list[Tensor]:
    op, root = getattr(dist.ReduceOp, name), count % size
    dist.all_reduce(everywhere := values(rank, count, dtype), op)
    dist.reduce(at_root := values(rank, count, dtype), root, op)
    part = torch.zeros(count, dtype=dtype)
    dist.reduce_scatter(part, [values(rank + 7 * block, count, dtype) for block in range(size)], op)
    return [everywhere, at_root, part]


def copies(rank: int, size: int, count: int, dtype: torch.dtype) -> list[Tensor]:
    root, mine = count % size, values(rank, count, dtype)
    dist.broadcast(copy := mine.clone(), root)
    gathered, collected, exchanged = ([torch.zeros(count, dtype=dtype) for _ in range(size)] for _ in range(3))
    dist.all_gather(gathered, mine)
    dist.gather(mine, collected if rank == root else None, root)
    given = [values(rank + 5 * target, count, dtype) for target in range(size)]
    dist.scatter(part := torch.zeros(count, dtype=dtype), given if rank == root else None, root)
    dist.all_to_all(exchanged, given)
    rows = torch.zeros(count * size, dtype=dtype)
    dist.all_gather_into_tensor(rows, mine)
    return [copy, *gathered, *collected, part, *exchanged, rows]


def every_call(rank: int, size: int, dtypes: Sequence[torch.dtype], turn: int) -> list[Tensor]:
    """Calls on tensors of some dtypes with every reduction, of lengths that no number of ranks divides."""
    results = []
    for number, dtype in enumerate(dtypes):
        # The other length comes in another turn.
        count = (size - 1, 10 * size + 1)[(number + turn) % 2]
        results += copies(rank, size, count, dtype)
        for name in REDUCTIONS:
            if makes_sense(name, dtype):
                results += reductions(rank, size, count, dtype, name)
        if number == turn % len(dtypes):
            results += copies(rank, size, LARGE // size, dtype) + reductions(rank, size, LARGE, dtype, "SUM")
    return results


TURNS = range(MOST_ALGORITHMS)


@pytest.mark.parametrize(("size", "turn"), covering((3, 2, 5, 4), TURNS))
def test_both_executors_give_the_same_bits(size: int, turn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a second: hundreds of calls, twice. CI has each algorithm in a world, with a quarter of the dtypes."""
    taken = {op: (known := catalogue.algorithms(op))[turn % len(known)] for op in OPS}
    monkeypatch.setenv("TORCHDIST_REF_ALGORITHM", ",".join(f"{op}={name}" for op, name in taken.items()))
    fast, reference = both(monkeypatch, every_call, size, size, DTYPES[turn % 4 :: 4], turn)
    assert all(map(same, fast, reference))


def by_size(rank: int, size: int) -> list[Tensor]:
    """Calls whose algorithms their sizes choose, on tensors of one window and of several."""
    results = []
    for count in (1, 5000, 700_001):
        results += reductions(rank, size, count, torch.float32, "AVG") + copies(
            rank, size, count // size, torch.bfloat16
        )
    strided = values(rank, 3000, torch.float32).view(3, 1000).t()
    dist.all_reduce(strided)
    dist.barrier()
    return [*results, strided.contiguous()]


@pytest.mark.parametrize("size", [2, 3])
def test_both_give_the_same_bits_on_processes(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, reference = both(monkeypatch, by_size, size, size, ranks="processes")
    assert all(map(same, fast, reference))


def on_two_hosts(rank: int, size: int, path: str) -> list[Tensor]:
    os.environ["TORCHDIST_REF_HOST_ID"] = "aab"[rank]
    dist.init_process_group("ref", store=dist.FileStore(path, size), rank=rank, world_size=size)
    results = by_size(rank, size) + uneven(rank, size)
    dist.destroy_process_group()
    return results


def test_both_give_the_same_bits_over_tcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for executor in ("fast", "reference"):
        monkeypatch.setenv(VARIABLE, executor)
        results.append(run(on_two_hosts, 3, 3, str(tmp_path / executor), ranks="processes", init=False))
    assert all(map(same, *results))


def uneven(rank: int, size: int) -> list[Tensor]:
    def between(source: int, target: int) -> int:
        return (source * 3 + target * target) % 5 * 9001

    sent = torch.cat([values(7 * rank + target, between(rank, target), torch.float32) for target in range(size)])
    received = torch.zeros(sum(between(source, rank) for source in range(size)))
    to, of = [between(rank, target) for target in range(size)], [between(source, rank) for source in range(size)]
    dist.all_to_all_single(received, sent, of, to)
    lengths = [3 * r * r + 1 for r in range(size)]
    gathered = [torch.zeros(n) for n in lengths]
    dist.all_gather(gathered, values(rank, lengths[rank], torch.float32))
    return [received, *gathered]


def test_uneven_exchanges_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, reference = both(monkeypatch, uneven, 4, 4)
    assert all(map(same, fast, reference))
    wanted = [values(7 * source + 1, (source * 3 + 1) % 5 * 9001, torch.float32) for source in range(4)]
    assert torch.equal(reference[1][0], torch.cat(wanted))


def sizes_that_differ(rank: int) -> str:
    tensor = torch.zeros(4)
    with pytest.raises(dist.MismatchError) as caught:
        dist.all_to_all_single(torch.zeros(5 - rank), tensor, [2, 3 - rank], [2, 2])
    dist.all_reduce(tensor.fill_(rank + 1))
    assert tensor.eq(3).all(), "the group must stay usable"
    return str(caught.value)


def test_sizes_that_ranks_see_differently_raise_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, reference = both(monkeypatch, sizes_that_differ, 2)
    assert fast == reference and "elements" in reference[0]


def on_registered_tensors(rank: int) -> list[Tensor]:
    tensor = dist.empty_registered(300_000).copy_(values(rank, 300_000, torch.float32))
    dist.all_reduce(tensor)
    return [tensor.clone()]


def test_registered_tensors_are_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, reference = both(monkeypatch, on_registered_tensors, 2, ranks="processes")
    assert all(map(same, fast, reference))


def on_tensors_of_a_device(rank: int) -> list[Tensor]:
    results = []
    for wait in (True, False):
        tensor = to_be_doubled(on_device(values(rank, 1000, torch.float32)))
        work = dist.all_reduce(tensor, async_op=not wait)
        assert work is None or work.wait()
        dist.all_gather(rows := [on_device(torch.zeros(1000)) for _ in range(2)], tensor)
        current_stream().synchronize()
        results += [seen_by_host(tensor), *map(seen_by_host, rows)]
    return results


def test_tensors_of_a_device_are_staged_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    fast, reference = both(monkeypatch, on_tensors_of_a_device, 2)
    assert all(map(same, fast, reference))
    assert torch.equal(reference[0][0], 2 * (values(0, 1000, torch.float32) + values(1, 1000, torch.float32)))


def overlap(rank: int) -> list[float]:
    """Calls on their way at once, and a callback that makes one."""
    tensors = [torch.full((50_000,), float(rank + n)) for n in range(5)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    last = works[-1]
    assert last is not None
    future = last.get_future().then(lambda done: dist.all_reduce(tensors[0], async_op=True).wait())  # type: ignore[union-attr]
    for work in works:
        assert work is not None
        work.wait()
    future.wait()
    return [float(tensor[-1]) for tensor in tensors]


def test_calls_on_their_way_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "reference")
    assert run(overlap, 2) == [[2.0, 3.0, 5.0, 7.0, 9.0]] * 2


def reuse_at_once(rank: int) -> None:
    """What a rank has staged is not overwritten while a slow peer still reads it."""
    tensor = torch.empty(200_000)
    for turn in range(60):  # a fault here is a race, which a turn shows now and then
        dist.broadcast(tensor.fill_(turn if rank == 0 else -1), 0)
        assert tensor.eq(turn).all()


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_a_staging_buffer_is_not_written_while_it_is_read(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "reference")
    run(reuse_at_once, 3, ranks=ranks)


def with_different_executors(rank: int) -> str:
    os.environ[VARIABLE] = ("fast", "reference", "fast")[rank]
    group, tensor = dist.new_group(), fill(rank, (6,))
    with pytest.raises(dist.MismatchError) as caught:
        dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, fill(rank, (6,)))
    with pytest.raises(dist.MismatchError):
        dist.barrier(group)
    return str(caught.value)


def test_ranks_with_different_executors_raise_an_error_that_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    for text in run(with_different_executors, 3, ranks="processes"):
        assert "ranks 0, 2 used the fast executor and rank 1 the reference executor" in text and VARIABLE in text


def test_an_unknown_executor_is_an_error_that_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "quick")
    with pytest.raises(dist.ArgumentError, match=r"'fast' or 'reference'.*'quick'"):
        dist.init_process_group("ref", store=dist.HashStore(), rank=0, world_size=1)


def lines_of_code(tree: ast.Module) -> int:
    """Count the lines of a module without comments, docstrings and empty lines, as Python writes it from its tree."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return sum(bool(line.strip()) for line in ast.unparse(tree).splitlines())


def test_the_reference_executor_can_be_read() -> None:
    """A page of code and a loop that fits a screen, without functions made at run time, and without the fast one."""
    from tests.test_laws import length

    source = inspect.getsource(execute)
    tree = ast.parse(source)
    assert lines_of_code(tree) <= 120
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert all(length(function) <= 40 for function in functions)
    assert not any(isinstance(node, ast.Lambda) for node in ast.walk(tree))
    nested = [node for outer in functions for node in ast.walk(outer) if node is not outer]
    assert not any(isinstance(node, ast.FunctionDef) for node in nested)
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    ours = {module.rpartition(".")[2] for module in imported if module.startswith("torchdist_ref.backends.ref.")}
    assert ours == {"handshake", "plan"}, "nor anything that only the fast executor needs"
