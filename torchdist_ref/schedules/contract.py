"""Contract of each operation: the slots that have values before, those that exist, and the values after.

The definition is executable: `verify` starts from ``before`` and compares with ``after``. A **contribution**
is the value of one slot of one rank at the start, written ``(rank, slot)``; a result is the set of contributions
that must have been combined in it, each exactly once.

================  =====================================  ========================================================
operation         before                                 after
================  =====================================  ========================================================
all_reduce        data[c] on every rank                  data[c] on every rank: all ranks' data[c]
reduce            data[c] on every rank                  data[c] on the root: all ranks' data[c]
broadcast         data[c] on every rank                  data[c] on every rank: the root's data[c]
all_gather        in[0] on every rank                    out[r] on every rank: rank r's in[0]
gather            in[0] on every rank                    out[r] on the root: rank r's in[0]
scatter           in[r] on the root, for all r           out[0] on rank r: the root's in[r]
reduce_scatter    in[c] on every rank, for all c         out[0] on rank c: all ranks' in[c]
all_to_all        in[d] on every rank, for all d         out[s] on rank d: rank s's in[d]
send              in[0] on the root                      out[0] on the rank after the root: the root's in[0]
barrier           a signal on every rank                  every rank was notified, also indirectly, by every rank
================  =====================================  ========================================================

Do not add here: the check (`verify`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torchdist_ref.calls import IN_PLACE
from torchdist_ref.errors import ArgumentError, explain
from torchdist_ref.schedules.schedule import Slot

Contribution = tuple[int, Slot]
Results = Mapping[Slot, tuple[Contribution, ...]]
SIGNAL: Slot = ("tmp", 0)


@dataclass(frozen=True)
class Contract:
    """Contract of one operation for one world.

    Args:
        before: rank -> slots that have a value at the start.
        writable: rank -> slots that may be written (``tmp`` slots may always be).
        after: rank -> slot -> the contributions that must be combined there at the end.
        replicated: several ranks have the same result, and must have the same bits.
    """

    before: Callable[[int], Iterable[Slot]]
    writable: Callable[[int], Iterable[Slot]]
    after: Callable[[int], Results]
    replicated: bool = False

    @property
    def room(self) -> Callable[[int], Iterable[Slot]]:
        """Former name of ``writable``."""
        warnings.warn("Contract.room is deprecated; use Contract.writable.", DeprecationWarning, stacklevel=2)
        return self.writable


def _slots(buffer: str, count: int) -> tuple[Slot, ...]:
    return tuple((buffer, i) for i in range(count))


def _on(rank: int, slots: tuple[Slot, ...]) -> Callable[[int], tuple[Slot, ...]]:
    """Return a function from a rank to these slots on one rank, none on the others."""
    return lambda r: slots if r == rank else ()


def _in_place(op: str, world: int, chunks: int, root: int) -> Contract:
    data = _slots("data", chunks)
    sums = {slot: tuple((rank, slot) for rank in range(world)) for slot in data}
    roots = {slot: ((root, slot),) for slot in data}
    after: dict[str, Callable[[int], Results]] = {
        "all_reduce": lambda r: sums,
        "reduce": lambda r: sums if r == root else {},
        "broadcast": lambda r: roots,
    }
    return Contract(lambda r: data, lambda r: data, after[op], replicated=op == "all_reduce")


def _collecting(op: str, world: int, chunks: int, root: int) -> Contract:
    one, out = _slots("in", 1), _slots("out", world)
    every = {("out", s): ((s, ("in", 0)),) for s in range(world)}
    to_all = op == "all_gather"
    writable = (lambda r: out) if to_all else _on(root, out)
    return Contract(lambda r: one, writable, lambda r: every if to_all or r == root else {})


def _distributing(op: str, world: int, chunks: int, root: int) -> Contract:
    blocks, out = _slots("in", world), _slots("out", 1)
    after: dict[str, Callable[[int], Results]] = {
        "scatter": lambda r: {out[0]: ((root, ("in", r)),)},
        "reduce_scatter": lambda r: {out[0]: tuple((s, ("in", r)) for s in range(world))},
    }
    before = _on(root, blocks) if op == "scatter" else lambda r: blocks
    return Contract(before, lambda r: out, after[op])


def _all_to_all(op: str, world: int, chunks: int, root: int) -> Contract:
    blocks, out = _slots("in", world), _slots("out", world)
    return Contract(lambda r: blocks, lambda r: out, lambda r: {o: ((o[1], ("in", r)),) for o in out})


def _send(op: str, world: int, chunks: int, root: int) -> Contract:
    dst, out = (root + 1) % world, _slots("out", 1)
    result: Results = {out[0]: ((root, ("in", 0)),)}
    return Contract(_on(root, _slots("in", 1)), _on(dst, out), lambda r: result if r == dst else {})


def _barrier(op: str, world: int, chunks: int, root: int) -> Contract:
    all_ranks = {SIGNAL: tuple((r, SIGNAL) for r in range(world))}
    return Contract(lambda r: (SIGNAL,), lambda r: (), lambda r: all_ranks)


_CONTRACTS: dict[str, Callable[[str, int, int, int], Contract]] = {
    **dict.fromkeys(IN_PLACE, _in_place),
    **dict.fromkeys(("all_gather", "gather"), _collecting),
    **dict.fromkeys(("scatter", "reduce_scatter"), _distributing),
    "all_to_all": _all_to_all,
    "send": _send,
    "barrier": _barrier,
}


def contract(op: str, world: int, chunks: int = 1, root: int = 0) -> Contract:
    """Return the contract of an operation.

    Args:
        op: operation, such as ``"all_reduce"``.
        world: number of ranks.
        chunks: how many slots ``data`` has (default 1).
        root: for rooted operations (default 0).

    Raises:
        ArgumentError: no such operation, or no such root.

    >>> from torchdist_ref.schedules import contract
    >>> contract("scatter", world=3, root=1).after(2)
    {('out', 0): ((1, ('in', 2)),)}
    """
    if op not in _CONTRACTS:
        raise ArgumentError(explain("contract", "op", f"one of {', '.join(_CONTRACTS)}", op))
    if not 0 <= root < world:
        raise ArgumentError(explain(op, "root", f"a rank from 0 to {world - 1}", root))
    return _CONTRACTS[op](op, world, chunks, root)
