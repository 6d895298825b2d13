"""What one rank finds out about its backend: for each function whether it gives the right numbers, and where not.

Every function is called in the default group, with blocks whose size differs from rank to rank where it takes blocks,
and in a group that counts the ranks backwards. What is right is said by the formulas of `tests.meaning`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import torchdist_ref as dist
from tests.meaning.cases import Case
from tests.meaning.compare import common, wait_for
from tests.meaning.formulas import meaning
from torchdist_ref.testing import fill

YES, NO_BLOCKS = "yes", "no blocks"
# Only one rank knows the other's sizes there, so the others could not be told that they differ.
ONE_SIZE = "one size"
ASPECTS = ("plain", "unequal", "subgroup")
# How the table names what a case of `tests.meaning` calls.
NAMED = {"ring": "isend, recv", "from_any_source": "recv from any rank"}
FUNCTIONS = (
    "ring",
    "from_any_source",
    "broadcast",
    "all_reduce",
    "all_reduce_coalesced",
    "reduce",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
)
WITH_BLOCKS = ("all_gather", "reduce_scatter", "all_to_all", "all_to_all_single")
FROM_A_ROOT = ("gather", "scatter")

Cells = dict[str, dict[str, str]]


def measured(device: str = "cpu") -> Cells:
    """For each function, what came of it in each aspect."""
    backwards = dist.new_group(list(reversed(range(dist.get_world_size()))), sort_ranks=False)
    cells = {NAMED.get(name, name): _cell(name, backwards, device) for name in FUNCTIONS}
    for name, probe in OTHERS.items():
        plain, subgroup = outcome(partial(probe, None, device)), outcome(partial(probe, backwards, device))
        cells[name] = {"plain": plain, "unequal": NO_BLOCKS, "subgroup": subgroup}
    return cells


def _cell(name: str, backwards: Any, device: str) -> dict[str, str]:
    case, odd = Case(name, shape=(3, 2), root=1), Case(name, shape=(3, 2), root=1, uneven=True)
    unequal = ONE_SIZE if name in FROM_A_ROOT else NO_BLOCKS
    if name in WITH_BLOCKS:
        unequal = outcome(lambda: right(odd, None, device))
    plain, subgroup = outcome(lambda: right(case, None, device)), outcome(lambda: right(case, backwards, device))
    return {"plain": plain, "unequal": unequal, "subgroup": subgroup}


def outcome(act: Callable[[], object]) -> str:
    """Yes, or what was wrong: the kind of the error."""
    try:
        act()
    except Exception as error:
        return f"no: {type(error).__name__}"
    return YES


def right(case: Case, group: Any, device: str) -> None:
    """Call a function and raise unless its outputs are right."""
    members = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    part = meaning(case, dist.get_rank(group), members)
    inputs, outputs = [t.to(device) for t in part.inputs], [t.to(device) for t in part.outputs]
    answer = part.invoke(dist, inputs, outputs, common(case, group))
    wait_for(case, answer)
    assert not part.own_results or answer == part.plain
    for got, wanted in zip(outputs, part.expected, strict=True):
        assert wanted is None or torch.equal(got.cpu(), wanted)


def _batch(group: Any, device: str) -> None:
    me, size = dist.get_rank(group), dist.get_world_size(group)
    after, before = (me + 1) % size, (me - 1) % size
    got = torch.zeros(5, device=device)
    operations = [
        dist.P2POp(dist.isend, fill(me, (5,)).to(device), group_peer=after, group=group),
        dist.P2POp(dist.irecv, got, group_peer=before, group=group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert torch.equal(got.cpu(), fill(before, (5,)))


def _objects(group: Any, device: str) -> None:
    got: list[Any] = [None]
    if dist.get_rank(group) == 0:
        dist.send_object_list([{"of": "rank 0"}], group_dst=1, group=group)
    elif dist.get_rank(group) == 1:
        dist.recv_object_list(got, group_src=0, group=group)
        assert got == [{"of": "rank 0"}]


def _monitored(group: Any, device: str) -> None:
    dist.monitored_barrier(group)


def _split(group: Any, device: str) -> None:
    parent = dist.group.WORLD if group is None else group
    part = dist.split_group(parent, [[rank] for rank in range(dist.get_world_size(group))])
    assert part is not None and dist.get_world_size(part) == 1
    tensor = torch.ones(1, device=device)
    dist.all_reduce(tensor, group=part)
    assert tensor.item() == 1.0


OTHERS: dict[str, Callable[[Any, str], None]] = {
    "batch_isend_irecv": _batch,
    "send_object_list, recv_object_list": _objects,
    "monitored_barrier": _monitored,
    "split_group": _split,
}
