"""Exchanges of blocks of any sizes: all ranks first tell each other their sizes, then move the blocks.

A rank knows only what it gives and takes itself. So the opening of such a call carries two rows of numbers, and once
all ranks have all of them, all see the same difference, if there is one, and raise before anything is written. If not,
what follows is an ordinary plan, whose slots have the sizes of their pairs. One call for the group's order, with one
announcement. Don't add how plans run: that is the executor's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torchdist_ref.backends.ref.executor import CarryOut, Executor, Prepared
from torchdist_ref.backends.ref.operands import Sizes
from torchdist_ref.backends.ref.plan import Plan
from torchdist_ref.errors import MismatchError
from torchdist_ref.schedules import catalogue
from torchdist_ref.transports.link import Link

Pairs = tuple[tuple[int, ...], ...]
# Programs that route tokens have other sizes in every call; plans of all of them must not fill the memory.
MOST = 256


class Uneven:
    """The exchanges of one link."""

    def __init__(self, link: Link, executor: Executor) -> None:
        self._link, self._executor = link, executor
        self._exchanges: dict[tuple[torch.dtype, Pairs], CarryOut] = {}

    def prepared(self, plan: Plan, through_host: Callable[[CarryOut], CarryOut] | None) -> Prepared:
        """A call ready to run.

        Args:
            plan: Says all but the sizes of the blocks.
            through_host: Makes what runs on tensors of the host run on those of devices; None where none is needed.
        """
        made = self._carry_out(plan)
        carry_out = made if through_host is None else through_host(made)
        return Prepared(plan, carry_out, carry_out)

    def _carry_out(self, plan: Plan) -> CarryOut:
        link, size = self._link, self._link.size
        meet = self._executor.staged(self._opening(plan))

        def carry_out(tensors: Sequence[Tensor], unseen: bool) -> None:
            mine = torch.tensor([tensor.numel() for tensor in tensors])
            table = torch.empty(size, 2, size, dtype=torch.int64)
            meet((mine, table), unseen)
            given, wanted = table.unbind(1)
            if not torch.equal(given, wanted.t()):
                raise _difference(link, plan, given, wanted.t())
            self._exchange(plan, tuple(map(tuple, given.tolist())))(tensors, False)

        return carry_out

    def _opening(self, plan: Plan) -> Plan:
        size = self._link.size
        schedule = catalogue.build("all_gather", "direct", size, 0, hosts=self._link.hosts)
        sizes = Sizes("all_gather", (2 * size,), schedule.chunks, frozenset(("out",)))
        return replace(plan, schedule=schedule, sizes=sizes, dtype=torch.int64, inputs=1, shape=None, _code={})

    def _exchange(self, plan: Plan, pairs: Pairs) -> CarryOut:
        found = self._exchanges.get((plan.dtype, pairs))
        if found is None:
            if len(self._exchanges) >= MOST:
                self._exchanges.clear()
            sizes = replace(plan.sizes, blocks=(max(map(max, pairs)),), pairs=pairs)
            found = self._executor.staged(replace(plan, sizes=sizes, shape=None, _code={}))
            self._exchanges[plan.dtype, pairs] = found
        return found


def _difference(link: Link, plan: Plan, given: Tensor, wanted: Tensor) -> MismatchError:
    """The same words on all ranks, about the first pair that differs."""
    giver, taker = torch.nonzero(given != wanted)[0].tolist()
    one, other = link.rank_names([giver]), link.rank_names([taker])
    sizes = f"{one} gives {other} {given[giver, taker]} elements, and {other} expects {wanted[giver, taker]}"
    return MismatchError(
        f"{link.context(plan.doing)}: {sizes}. Give input_split_sizes[{taker}] there what "
        f"output_split_sizes[{giver}] is here. Nothing was written, and the group can be used."
    )
