"""Random sequences of collectives and messages against formulas, over shared memory and TCP, with 2 to 4 ranks.

All ranks draw the same calls from one seed: function, dtype, size, root, reduction, group, strided tensors, and up to
four asynchronous calls at a time. Expected results are formulas over the data of all ranks. Every byte of a buffer is
compared, the gaps of strided tensors included.
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from functools import reduce as fold
from typing import Any

import torch
from torch import Tensor

import torchdist_ref as dist
from tests.soak import deaths
from tests.soak.proofs import Limits, Outcome
from torchdist_ref.stores import PrefixStore, TCPStore
from torchdist_ref.testing import fill, run

CALLS_A_PROGRAM, LONGEST, OUTSTANDING = 4000, 6000, 4
# A hang ends at the time-out of a call; a program may take minutes on a busy machine.
CALL_TIMEOUT, RANK_SECONDS = timedelta(seconds=100), 600.0
EXACT = (torch.float32, torch.float64, torch.int32, torch.int64)
DTYPES = (*EXACT, torch.float16, torch.bfloat16, torch.uint8, torch.bool)
REDUCTIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "PRODUCT": torch.mul,
    "BXOR": torch.bitwise_xor,
    "AVG": torch.add,
}
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
OTHERS = (
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "ring",
    "barrier",
    "all_gather_object",
)


@dataclass(frozen=True)
class Step:
    """One random call, the same on all ranks of its group.

    Attributes:
        call: Name of the function.
        dtype: dtype of the tensors.
        size: Number of elements of a tensor or block.
        op: Name of the reduction.
        root: Group rank of the root.
        group: Name of the group.
        strided: Whether tensors are every second element of a buffer.
        asynchronous: Whether it is waited for later.
        salt: Selects the data.
    """

    call: str
    dtype: torch.dtype
    size: int
    op: str
    root: int
    group: str
    strided: bool
    asynchronous: bool
    salt: int


def random_step(rng: random.Random, groups: Mapping[str, list[int]]) -> Step:
    """Return a random call on one of the groups."""
    call = rng.choice(REDUCING if rng.random() < 0.45 else OTHERS)
    dtype, op = rng.choice(DTYPES), "SUM"
    if call in REDUCING:
        ops = ["MIN", "MAX"]
        ops += ["SUM"] * (dtype is not torch.bool) + ["PRODUCT"] * (dtype in EXACT)
        ops += ["BXOR"] * (not dtype.is_floating_point) + ["AVG"] * (dtype in (torch.float32, torch.float64))
        op = rng.choice(ops)
    size = rng.choice((rng.randrange(9), rng.randrange(300), rng.randrange(LONGEST)))
    name = rng.choice([*groups])
    root = rng.randrange(len(groups[name]))
    return Step(call, dtype, size, op, root, name, rng.random() < 0.2, rng.random() < 0.4, rng.randrange(1000))


@cache
def base(number: int, dtype: torch.dtype) -> Tensor:
    return fill(number, (2 * LONGEST,), dtype)


class Placed:
    """Tensor of a call: contiguous, or every second element of a buffer whose other elements must stay."""

    def __init__(self, values: Tensor, strided: bool) -> None:
        self.tensor = values.clone()
        self._gaps: Tensor | None = None
        if strided:
            buffer = torch.ones(2 * len(values), dtype=values.dtype)
            self.tensor, self._gaps = buffer[::2], buffer[1::2]
            self.tensor.copy_(values)

    def equals(self, expected: Tensor, rounded: bool) -> bool:
        same = torch.allclose(self.tensor, expected, rtol=1e-5) if rounded else torch.equal(self.tensor, expected)
        return same and (self._gaps is None or bool((self._gaps == 1).all()))


class Part:
    """Part of one rank in one step: its data, its expected results, and the call."""

    def __init__(self, step: Step, me: int, members: list[int]) -> None:
        self.step, self.me, self.members, self.size = step, me, members, len(members)
        self.checks: list[tuple[Placed, Tensor]] = []
        self.is_root = me == step.root

    def data(self, rank: int, block: int = 0) -> Tensor:
        offset = (self.step.salt * 7 + block * 13) % LONGEST
        return base((self.step.salt + 3 * rank + block) % 16, self.step.dtype)[offset : offset + self.step.size]

    def place(self, values: Tensor, expected: Tensor | None = None) -> Tensor:
        """Return a tensor of the call, which must have the expected values after it; unchanged ones by default."""
        placed = Placed(values, self.step.strided)
        self.checks.append((placed, values if expected is None else expected))
        return placed.tensor

    def output(self, expected: Tensor) -> Tensor:
        return self.place(torch.zeros_like(expected), expected)

    def outputs(self, expected: list[Tensor]) -> list[Tensor]:
        return [self.output(each) for each in expected]

    def inputs(self, values: list[Tensor]) -> list[Tensor]:
        return [self.place(each) for each in values]

    def reduced(self, block: int = 0) -> Tensor:
        wide = torch.float64 if self.step.dtype.is_floating_point else torch.int64
        wide = torch.bool if self.step.dtype is torch.bool else wide
        total = fold(REDUCTIONS[self.step.op], [self.data(rank, block).to(wide) for rank in range(self.size)])
        return (total / self.size if self.step.op == "AVG" else total).to(self.step.dtype)

    def start(self, group: Any) -> Any:
        """Make the call; return what to wait for, or None."""
        return getattr(self, f"_{self.step.call}")({"group": group, "async_op": self.step.asynchronous})

    def check(self) -> None:
        for number, (placed, expected) in enumerate(self.checks):
            if not placed.equals(expected, self.step.op == "AVG"):
                raise AssertionError(f"{self.step}: tensor {number} is {placed.tensor}, expected {expected}")

    @property
    def op(self) -> Any:
        return getattr(dist.ReduceOp, self.step.op)

    @property
    def root(self) -> int:
        return self.members[self.step.root]

    def _all_reduce(self, common: dict[str, Any]) -> Any:
        return dist.all_reduce(self.place(self.data(self.me), self.reduced()), self.op, **common)

    def _reduce(self, common: dict[str, Any]) -> Any:
        tensor = self.place(self.data(self.me), self.reduced())
        if not self.is_root:
            # Its values after the call are unspecified.
            self.checks.clear()
        return dist.reduce(tensor, self.root, self.op, **common)

    def _reduce_scatter(self, common: dict[str, Any]) -> Any:
        blocks = self.inputs([self.data(self.me, block) for block in range(self.size)])
        return dist.reduce_scatter(self.output(self.reduced(self.me)), blocks, self.op, **common)

    def _reduce_scatter_tensor(self, common: dict[str, Any]) -> Any:
        blocks = torch.cat([self.data(self.me, block) for block in range(self.size)])
        return dist.reduce_scatter_tensor(self.output(self.reduced(self.me)), self.place(blocks), self.op, **common)

    def _broadcast(self, common: dict[str, Any]) -> Any:
        return dist.broadcast(self.place(self.data(self.me), self.data(self.step.root)), self.root, **common)

    def _all_gather(self, common: dict[str, Any]) -> Any:
        outputs = self.outputs([self.data(rank) for rank in range(self.size)])
        return dist.all_gather(outputs, self.place(self.data(self.me)), **common)

    def _all_gather_into_tensor(self, common: dict[str, Any]) -> Any:
        output = self.output(torch.cat([self.data(rank) for rank in range(self.size)]))
        return dist.all_gather_into_tensor(output, self.place(self.data(self.me)), **common)

    def _gather(self, common: dict[str, Any]) -> Any:
        outputs = self.outputs([self.data(rank) for rank in range(self.size)]) if self.is_root else None
        return dist.gather(self.place(self.data(self.me)), outputs, self.root, **common)

    def _scatter(self, common: dict[str, Any]) -> Any:
        blocks = self.inputs([self.data(self.step.root, to) for to in range(self.size)]) if self.is_root else None
        return dist.scatter(self.output(self.data(self.step.root, self.me)), blocks, self.root, **common)

    def _all_to_all(self, common: dict[str, Any]) -> Any:
        outputs = self.outputs([self.data(source, self.me) for source in range(self.size)])
        return dist.all_to_all(outputs, self.inputs([self.data(self.me, to) for to in range(self.size)]), **common)

    def _all_to_all_single(self, common: dict[str, Any]) -> Any:
        # Rank r sends a share to rank t that grows with r and t.
        def share(source: int, to: int) -> Tensor:
            return self.data(source, to)[: self.step.size * (1 + source + to) // (2 * self.size)]

        given = [share(self.me, to) for to in range(self.size)]
        wanted = [share(source, self.me) for source in range(self.size)]
        splits = [len(each) for each in wanted], [len(each) for each in given]
        return dist.all_to_all_single(self.output(torch.cat(wanted)), self.place(torch.cat(given)), *splits, **common)

    def _ring(self, common: dict[str, Any]) -> Any:
        after, before = (self.me + 1) % self.size, (self.me - 1) % self.size
        group, tag = common["group"], self.step.salt
        if self.size == 1:
            return None
        source, target = self.place(self.data(self.me)), self.output(self.data(before))
        works = [dist.irecv(target, self.members[before], group, tag)]
        works.append(dist.isend(source, self.members[after], group, tag))
        return works

    def _barrier(self, common: dict[str, Any]) -> Any:
        return dist.barrier(**common)

    def _all_gather_object(self, common: dict[str, Any]) -> Any:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, [self.step.salt, self.me**2], group=common["group"])
        if found != [[self.step.salt, rank**2] for rank in range(self.size)]:
            raise AssertionError(f"{self.step}: {found}")


def wait(found: Any) -> None:
    """Wait for a Work or several."""
    for work in found if isinstance(found, list) else [found]:
        if work is not None:
            work.wait()


def run_steps(
    rank: int, steps: Iterator[Step], groups: Mapping[str, list[int]], made: Mapping[str, Any], note: Callable[[], None]
) -> None:
    """Run the steps of one rank; `note` is called whenever it may begin to wait."""
    outstanding: deque[tuple[Part, Any]] = deque()

    def finish() -> None:
        part, work = outstanding.popleft()
        note()
        wait(work)
        part.check()

    for step in steps:
        members = groups[step.group]
        if rank in members:
            part = Part(step, members.index(rank), members)
            note()
            outstanding.append((part, part.start(made[step.group])))
        while len(outstanding) > (OUTSTANDING if step.asynchronous else 0):
            finish()
    while outstanding:
        finish()


def memberships(rng: random.Random, world: int) -> dict[str, list[int]]:
    """Return the groups of a program: the world, one that leaves out a rank, and random pairs."""
    everyone = list(range(world))
    left_out = rng.randrange(world)
    groups = {"world": everyone, "most": [rank for rank in everyone if rank != left_out] if world > 2 else everyone}
    return groups | {"pair": sorted(rng.sample(everyone, 2)), "reversed": everyone[::-1]}


def initialize(rank: int, world: int, transport: str, port: int, name: str, **options: Any) -> None:
    """Initialize the default group over a transport."""
    torch.set_num_threads(1)
    if transport == "tcp":
        os.environ["TORCHDIST_REF_HOST_ID"] = f"host {rank}"
    store = PrefixStore(name, TCPStore("127.0.0.1", port))
    dist.init_process_group("ref", store=store, rank=rank, world_size=world, **options)


def program(rank: int, world: int, transport: str, port: int, seed: int, count: int) -> None:
    """Run one program on one rank."""
    initialize(rank, world, transport, port, f"collectives {seed}", timeout=CALL_TIMEOUT)
    rng = random.Random(f"collectives {seed}")
    groups = memberships(rng, world)
    made = {name: dist.new_group(members, sort_ranks=False) for name, members in groups.items()}
    run_steps(rank, (random_step(rng, groups) for _ in range(count)), groups, made, lambda: None)
    dist.barrier()
    dist.destroy_process_group()


def prove(limits: Limits, calls: int = CALLS_A_PROGRAM) -> Outcome:
    """Run programs of random calls; each has a seed, which chooses the world and the transport too."""
    outcome = Outcome()
    deaths.warm_up()
    # Computed here once, for all ranks that are forked later.
    for number in range(16):
        for dtype in DTYPES:
            base(number, dtype)
    with deaths.store_server() as port:
        for seed, count in limits.seeds(calls):
            world, transport = 2 + seed % 3, deaths.TRANSPORTS[seed // 3 % 2]
            arguments = (world, transport, port, seed, count)
            try:
                run(program, world, *arguments, ranks="processes", init=False, backend=None, timeout=RANK_SECONDS)
            except Exception as error:
                outcome.fail(f"seed {seed}, {world} ranks, {transport}: {error}")
                continue
            outcome.done += count
            outcome.counts[f"{transport}, {world} ranks"] += count
    return outcome
