"""A reduced element has the same bits in every slice, by every algorithm, executor, transport and form of the call.

The oracle adds the ranks' tensors along the tree of the number of ranks, by another definition than the library's.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torchdist_ref as dist
from torchdist_ref import simulation
from torchdist_ref.schedules import algorithms
from torchdist_ref.schedules.catalogue_rows import OTHER_TREES
from torchdist_ref.schedules.reduction_tree import are_subtrees
from torchdist_ref.testing import run

DTYPES = (torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int32)
WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
NAMES = ("SUM", "SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM")
FORMS = ("all_reduce", "async", "strided", "registered", "coalesced", "nn", "reduce", "reduce_scatter", "rows")
LENGTHS = (1, 2, 7, 100, 1000, 5003)
LONG = (20_000, 70_001, 300_007)
FACTOR = 0.3


@dataclass(frozen=True)
class Case:
    seed: int
    dtype: torch.dtype
    name: str
    form: str
    length: int
    offset: int


def a_case(source: random.Random, lengths: Sequence[int]) -> Case:
    dtype = source.choice(DTYPES)
    names = [n for n in NAMES if n in ("SUM", "AVG", "PREMUL_SUM") or not dtype.is_complex]
    names = [n for n in names if n != "PREMUL_SUM" or dtype.is_floating_point]
    form, length = source.choice(FORMS), source.choice(lengths)
    if form == "nn":
        # Zeros and NaN of a minimum with gradients are torch's `amin`.
        names = [n for n in names if n not in ("MIN", "MAX")]
    return Case(source.randrange(1 << 20), dtype, source.choice(names), form, length, source.randrange(9))


def whole(rank: int, case: Case, length: int) -> Tensor:
    """Return numbers whose sum depends on the order; for MIN and MAX zeros of both signs and NaN too."""
    generator = torch.Generator().manual_seed(case.seed + 1_000_003 * rank)
    found = torch.randn(length, generator=generator) * torch.randint(1, 9, (length,), generator=generator)
    if case.name in ("MIN", "MAX"):
        kind = torch.randint(0, 8, (length,), generator=generator)
        for number, value in enumerate(
            (0.0, -0.0, -0.0, torch.nan, -torch.nan)[: 5 if case.dtype.is_floating_point else 3]
        ):
            found[kind == number] = value
    return found.to(case.dtype)


def tree(values: list[Any], combine: Callable[[Any, Any], Any]) -> Any:
    if len(values) == 1:
        return values[0]
    core = 1 << (len(values).bit_length() - 1)
    left = core // 2 + min(len(values) - core, core // 2)
    return combine(tree(values[:left], combine), tree(values[left:], combine))


def oracle(tensors: list[Tensor], case: Case) -> Tensor:
    if case.name in ("MIN", "MAX"):
        return extreme(torch.stack(tensors), case.name)
    wide = [t.to(WIDE.get(case.dtype, case.dtype)) for t in tensors]
    if case.name == "PREMUL_SUM":
        wide = [(t * torch.tensor(FACTOR, dtype=t.dtype)).to(w.dtype) for t, w in zip(tensors, wide, strict=True)]
    total = tree(wide, torch.mul if case.name == "PRODUCT" else torch.add)
    if case.name == "AVG":
        total = total.div(len(tensors), rounding_mode=None if total.dtype != torch.int32 else "trunc")
    return total.to(case.dtype)


def extreme(rows: Tensor, name: str) -> Tensor:
    """Return the least or greatest of each column: NaN if one is, and -0 is less than 0."""
    found = rows.amin(0) if name == "MIN" else rows.amax(0)
    if rows.is_floating_point():
        negative = torch.signbit(rows).any(0) if name == "MIN" else torch.signbit(rows).all(0)
        found = torch.where(negative, -found.abs(), found.abs())
        found.masked_fill_(rows.isnan().any(0), torch.nan)
    return found


def bits(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).view(torch.uint8)


def perform(rank: int, size: int, case: Case, mine: Tensor) -> tuple[slice, Tensor]:
    """Make the call of a case on this rank's values; return the part that this rank has afterwards, and its values."""
    op = dist.ReduceOp.PREMUL_SUM(FACTOR) if case.name == "PREMUL_SUM" else getattr(dist.ReduceOp, case.name)
    everything, count = slice(None), mine.numel()
    match case.form:
        case "reduce":
            root = case.seed % size
            dist.reduce(mine, root, op)
            return (everything if rank == root else slice(0, 0)), (mine if rank == root else mine[:0])
        case "reduce_scatter" | "rows":
            each = count // size
            part, blocks = torch.empty(each, dtype=mine.dtype), mine[: each * size]
            if case.form == "rows":
                dist.reduce_scatter_tensor(part, blocks.clone(), op)
            else:
                dist.reduce_scatter(part, list(blocks.clone().split(each)) if each else [blocks] * size, op)
            return slice(rank * each, rank * each + each), part
        case "async":
            dist.all_reduce(mine, op, async_op=True).wait()
        case "strided":
            matrix = torch.empty(count, 3, dtype=mine.dtype)
            matrix[:, 1] = mine
            dist.all_reduce(matrix[:, 1], op)
            mine = matrix[:, 1].contiguous()
        case "registered":
            registered = dist.empty_registered(count, dtype=mine.dtype).copy_(mine)
            dist.all_reduce(registered, op)
            mine = registered.clone()
        case "coalesced":
            parts = list(mine.tensor_split(3))
            dist.all_reduce_coalesced(parts, op)
        case "nn":
            mine = dist.nn.functional.all_reduce(mine, op)
        case _:
            dist.all_reduce(mine, op)
    return everything, mine


def differences(rank: int, size: int, cases: Sequence[Case]) -> list[Case]:
    """Run cases; return those of which a bit differs from the oracle, on this rank."""
    found = []
    for case in cases:
        length = case.length + case.offset + 5
        part = slice(case.offset, case.offset + case.length)
        expected = oracle([whole(r, case, length)[part] for r in range(size)], case)
        where, got = perform(rank, size, case, whole(rank, case, length)[part].clone())
        if not torch.equal(bits(expected[where]), bits(got)):
            found.append(case)
    return found


def apart(rank: int, size: int, cases: Sequence[Case], path: str, hosts: str) -> list[Case]:
    os.environ["TORCHDIST_REF_HOST_ID"] = hosts[rank]
    dist.init_process_group("ref", store=dist.FileStore(path, size), rank=rank, world_size=size)
    found = differences(rank, size, cases)
    dist.destroy_process_group()
    return found


def settings(source: random.Random, hosts: str = "") -> dict[str, str]:
    """Return a random executor, and random algorithms with the tree."""
    hierarchy = are_subtrees(tuple(map(ord, hosts))) if hosts else True
    executor = source.choice(("fast", "fast", "reference"))
    if source.random() < 0.4:
        return {"TORCHDIST_REF_EXECUTOR": executor}
    named = []
    for op in ("all_reduce", "reduce", "reduce_scatter"):
        known = [n for n in algorithms(op) if (op, n) not in OTHER_TREES and (hierarchy or n != "hierarchical")]
        named.append(f"{op}={source.choice(known)}")
    return {"TORCHDIST_REF_EXECUTOR": executor, "TORCHDIST_REF_ALGORITHM": ",".join(named)}


def check(seed: int, ranks: str, count: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run some random cases in a random world, under random settings."""
    source = random.Random(seed)
    size = source.randint(2, 9 if ranks in ("threads", "simulated") else 5)
    hosts = source.choice(("abcde", "aabbc", "aaabb", "ababa"))[:size] if ranks == "tcp" else ""
    chosen = settings(source, hosts)
    cases = [a_case(source, LENGTHS if number % 8 else LONG) for number in range(count)]
    if "TORCHDIST_REF_ALGORITHM" in chosen:
        # Partial results travel by these algorithms, and are rounded: of 16-bit floats only `choose` keeps the bits.
        cases = [case if case.dtype not in WIDE else replace(case, dtype=torch.float32) for case in cases]
    for name in ("TORCHDIST_REF_EXECUTOR", "TORCHDIST_REF_ALGORITHM"):
        monkeypatch.setenv(name, chosen.get(name, ""))
    if ranks == "tcp":
        found = run(apart, size, size, cases, str(path / f"store{seed}"), hosts, ranks="processes", init=False)
    elif ranks == "simulated":
        found = simulation.run(differences, size, size, cases, seed=seed).values
    else:
        found = run(differences, size, size, cases, ranks=ranks)
    assert not any(found), f"seed {seed}, {size} ranks, {chosen}: {next(cases for cases in found if cases)[0]}"


@pytest.mark.parametrize("seed", range(6))
def test_every_element_has_the_bits_of_the_oracle(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(seed, "threads", 25, tmp_path, monkeypatch)


@pytest.mark.parametrize("ranks", ["processes", "tcp", "simulated"])
def test_on_other_ranks(ranks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(101, ranks, 25, tmp_path, monkeypatch)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_minima_have_one_nan_and_ordered_zeros(size: int) -> None:
    """In vectors and in the elements after them: a conversion of floats makes other NaN there."""
    nan, least, most = 0x7FC0, -0x8000, 0

    def program(rank: int) -> list[list[int]]:
        found = []
        for value in (torch.nan if rank == 1 else 1.0, -0.0 if rank == 1 else 0.0):
            for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
                dist.all_reduce(tensor := torch.full((45,), value, dtype=torch.bfloat16), op)
                found.append(tensor.view(torch.int16).unique().tolist())
        return found

    assert run(program, size) == [[[nan], [nan], [least], [most]]] * size


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1000, 1050))
@pytest.mark.parametrize("ranks", ["threads", "processes", "tcp", "simulated"])
def test_ten_thousand_random_calls(ranks: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(seed, ranks, 50, tmp_path, monkeypatch)
