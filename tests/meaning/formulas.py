"""Oracle: the meaning of every function as a plain formula over the data of all ranks, beside the call.

A `Meaning` is one rank's part of one case: its arguments, the call (the same for torch's function and ours), and the
expected outputs. Formulas use no backend, group or memory layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from functools import reduce as fold
from typing import Any

import torch
from torch import Tensor

from tests.meaning.cases import Case
from torchdist_ref.testing import fill

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
TAG = 3


@dataclass
class Meaning:
    """One rank's part of a case.

    Attributes:
        invoke: Function that makes the call: ``invoke(library, inputs, outputs, common)``.
        inputs: Values of the input tensors.
        outputs: Values of the output tensors before the call.
        expected: Values of the output tensors after the call; None where they are unspecified.
        plain: Expected result that is no tensor: objects, or a rank.
        own_results: True if `invoke` returns a result to compare with `plain`.
    """

    invoke: Callable[[Any, list[Tensor], list[Tensor], dict[str, Any]], Any]
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    expected: list[Tensor | None] = field(default_factory=list)
    plain: Any = None
    own_results: bool = False


class View:
    """Case from the viewpoint of one member of the group.

    Args:
        case: The case.
        me: Group rank of this rank.
        members: Global ranks of the group.
    """

    def __init__(self, case: Case, me: int, members: list[int]) -> None:
        self.case, self.me, self.members, self.size = case, me, members, len(members)
        self.root = case.root % self.size
        self.is_root = me == self.root

    def shape(self, block: int = 0) -> tuple[int, ...]:
        """Return the shape of a block."""
        shape = self.case.shape or (1,) * self.case.uneven
        return (shape[0] + block, *shape[1:]) if self.case.uneven else shape

    def data(self, rank: int, block: int = 0) -> Tensor:
        """Return the input of a rank for a block."""
        return _filled(self.case.seed + 5 * rank + block, self.shape(block), self.case.torch_dtype).clone()

    def empty(self, block: int = 0) -> Tensor:
        """Return the values of an output before the call."""
        return self.data(11, block)

    def op(self, library: Any) -> Any:
        """Return the `op` argument."""
        if self.case.op == "PREMUL_SUM":
            return torch.distributed._make_nccl_premul_sum(self.factor(self.me))
        return getattr(library.ReduceOp, self.case.op)

    def factor(self, rank: int) -> float:
        """Return a rank's factor in a PREMUL_SUM."""
        return 0.5 + 0.25 * rank

    def reduced(self, block: int = 0) -> Tensor:
        """Return the reduction of a block over all ranks, computed in a wider dtype."""
        dtype = self.case.torch_dtype
        if dtype is torch.bool:
            operands = [self.data(rank, block) for rank in range(self.size)]
        else:
            wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
            operands = [self.data(rank, block).to(wide) for rank in range(self.size)]
        if self.case.op == "PREMUL_SUM":
            operands = [self.factor(rank) * operand for rank, operand in enumerate(operands)]
        total = fold(_COMBINE[self.case.op], operands)
        return (total / self.size if self.case.op == "AVG" else total).to(dtype)


@lru_cache(maxsize=1024)
def _filled(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return what `fill` does; each backend and each rank's formula asks for the same data again."""
    return fill(rank, shape, dtype)


def meaning(case: Case, me: int, members: list[int]) -> Meaning:
    """Return a member's part of a case."""
    return MEANINGS[case.call](View(case, me, members))


def _all_reduce(v: View) -> Meaning:
    def invoke(library: Any, _: list[Tensor], outputs: list[Tensor], common: dict[str, Any]) -> Any:
        return library.all_reduce(outputs[0], v.op(library), **common)

    return Meaning(invoke, [], [v.data(v.me)], [v.reduced()])


def _all_reduce_coalesced(v: View) -> Meaning:
    def invoke(library: Any, _: list[Tensor], outputs: list[Tensor], common: dict[str, Any]) -> Any:
        return library.all_reduce_coalesced(outputs, v.op(library), **common)

    blocks = range(3)
    return Meaning(invoke, [], [v.data(v.me, b) for b in blocks], [v.reduced(b) for b in blocks])


def _reduce(v: View) -> Meaning:
    def invoke(library: Any, _: list[Tensor], outputs: list[Tensor], common: dict[str, Any]) -> Any:
        return library.reduce(outputs[0], v.members[v.root], v.op(library), **common)

    return Meaning(invoke, [], [v.data(v.me)], [v.reduced() if v.is_root else None])


def _broadcast(v: View) -> Meaning:
    def invoke(library: Any, _: list[Tensor], outputs: list[Tensor], common: dict[str, Any]) -> Any:
        return library.broadcast(outputs[0], v.members[v.root], **common)

    return Meaning(invoke, [], [v.data(v.me)], [v.data(v.root)])


def _all_gather(v: View) -> Meaning:
    def invoke(library: Any, inputs: list[Tensor], outputs: list[Tensor], common: dict[str, Any]) -> Any:
        return library.all_gather(outputs, inputs[0], **common)

    ranks = range(v.size)
    return Meaning(invoke, [v.data(v.me, v.me)], [v.empty(r) for r in ranks], [v.data(r, r) for r in ranks])


def _all_gather_coalesced(v: View) -> Meaning:
    def invoke(library: Any, inputs: list[Tensor], outputs: list[Tensor], common: dict[str, Any]) -> Any:
        lists = [outputs[2 * rank : 2 * rank + 2] for rank in range(v.size)]
        return library.all_gather_coalesced(lists, inputs, **common)

    pairs = [(rank, block) for rank in range(v.size) for block in range(2)]
    return Meaning(
        invoke, [v.data(v.me, 0), v.data(v.me, 1)], [v.empty(b) for _, b in pairs], [v.data(r, b) for r, b in pairs]
    )


def _stacked(tensors: list[Tensor]) -> Tensor:
    """Blocks in one tensor: along the first dimension, or as the only one."""
    return torch.cat([t.reshape(1) if not t.dim() else t for t in tensors])


def _all_gather_into_tensor(v: View) -> Meaning:
    def invoke(library: Any, inputs: list[Tensor], outputs: list[Tensor], common: dict[str, Any]) -> Any:
        return getattr(library, v.case.call)(outputs[0], inputs[0], **common)

    ranks = range(v.size)
    return Meaning(invoke, [v.data(v.me)], [_stacked([v.empty()] * v.size)], [_stacked([v.data(r) for r in ranks])])


def _gather(v: View) -> Meaning:
    def invoke(library: Any, inputs: list[Tensor], outputs: list[Tensor], common: dict[str, Any]) -> Any:
        return library.gather(inputs[0], outputs if v.is_root else None, v.members[v.root], **common)

    ranks = range(v.size) if v.is_root else ()
    return Meaning(invoke, [v.data(v.me, v.me)], [v.empty(r) for r in ranks], [v.data(r, r) for r in ranks])


def _gather_single(v: View) -> Meaning:
    def invoke(library: Any, inputs: list[Tensor], outputs: list[Tensor], common: dict[str, Any]) -> Any:
        return library.gather_single(inputs[0], outputs[0] if v.is_root else None, v.members[v.root], **common)

    if not v.is_root:
        return Meaning(invoke, [v.data(v.me)], [], [])
    ranks = range(v.size)
    return Meaning(invoke, [v.data(v.me)], [_stacked([v.empty()] * v.size)], [_stacked([v.data(r) for r in ranks])])


def _scatter(v: View) -> Meaning:
    def invoke(library: Any, inputs: list[Tensor], outputs: list[Tensor], common: dict[str, Any]) -> Any:
        return library.scatter(outputs[0], inputs if v.is_root else None, v.members[v.root], **common)

    ranks = range(v.size) if v.is_root else ()
    return Meaning(invoke, [v.data(v.root, r) for r in ranks], [v.empty(v.me)], [v.data(v.root, v.me)])


def _reduce_scatter(v: View) -> Meaning:
    def invoke(library: Any, inputs: list[Tensor], outputs: list[Tensor], common: dict[str, Any]) -> Any:
        return library.reduce_scatter(outputs[0], inputs, v.op(library), **common)

    return Meaning(invoke, [v.data(v.me, b) for b in range(v.size)], [v.empty(v.me)], [v.reduced(v.me)])


def _reduce_scatter_tensor(v: View) -> Meaning:
    def invoke(library: Any, inputs: list[Tensor], outputs: list[Tensor], common: dict[str, Any]) -> Any:
        return getattr(library, v.case.call)(outputs[0], inputs[0], v.op(library), **common)

    inputs = [_stacked([v.data(v.me, b) for b in range(v.size)])]
    return Meaning(invoke, inputs, [v.empty(v.me)], [v.reduced(v.me)])


def _all_to_all(v: View) -> Meaning:
    def invoke(library: Any, inputs: list[Tensor], outputs: list[Tensor], common: dict[str, Any]) -> Any:
        return library.all_to_all(outputs, inputs, **common)

    ranks = range(v.size)
    return Meaning(
        invoke, [v.data(v.me, d) for d in ranks], [v.empty(v.me) for _ in ranks], [v.data(s, v.me) for s in ranks]
    )


def _all_to_all_single(v: View) -> Meaning:
    ranks, splits = range(v.size), [[], []]
    if v.case.uneven:
        splits = [[v.shape(v.me)[0]] * v.size, [v.shape(d)[0] for d in ranks]]

    def invoke(library: Any, inputs: list[Tensor], outputs: list[Tensor], common: dict[str, Any]) -> Any:
        return library.all_to_all_single(outputs[0], inputs[0], *[s or None for s in splits], **common)

    given, wanted = [v.data(v.me, d) for d in ranks], [v.data(s, v.me) for s in ranks]
    return Meaning(invoke, [_stacked(given)], [_stacked([v.empty(v.me)] * v.size)], [_stacked(wanted)])


def _ring(v: View) -> Meaning:
    """Everybody sends to the next and receives from the one before; alone, to oneself."""
    after, before = (v.me + 1) % v.size, (v.me - 1) % v.size

    def invoke(library: Any, inputs: list[Tensor], outputs: list[Tensor], common: dict[str, Any]) -> Any:
        group = common["group"]
        source = None if v.case.call == "from_any_source" else v.members[before]
        sending = library.isend(inputs[0], v.members[after], group, TAG)
        got = library.recv(outputs[0], source, group, TAG)
        sending.wait()
        return got

    return Meaning(invoke, [v.data(v.me)], [v.empty()], [v.data(before)], plain=v.members[before], own_results=True)


def _barrier(v: View) -> Meaning:
    return Meaning(lambda library, inputs, outputs, common: library.barrier(**common))


def _thing(v: View, rank: int, block: int = 0) -> Any:
    """An object that differs from rank to rank."""
    numbers = v.data(rank, block).to(torch.complex64).tolist()
    return {"rank": rank, "block": block, "numbers": numbers, "text": "ä" * rank}


def _all_gather_object(v: View) -> Meaning:
    def invoke(library: Any, inputs: list[Tensor], outputs: list[Tensor], common: dict[str, Any]) -> Any:
        got = [None] * v.size
        library.all_gather_object(got, _thing(v, v.me), group=common["group"])
        return got

    return Meaning(invoke, plain=[_thing(v, r) for r in range(v.size)], own_results=True)


def _broadcast_object_list(v: View) -> Meaning:
    def invoke(library: Any, inputs: list[Tensor], outputs: list[Tensor], common: dict[str, Any]) -> Any:
        got = [_thing(v, v.me, block) for block in range(3)]
        library.broadcast_object_list(got, v.members[v.root], group=common["group"])
        return got

    return Meaning(invoke, plain=[_thing(v, v.root, block) for block in range(3)], own_results=True)


def _gather_object(v: View) -> Meaning:
    def invoke(library: Any, inputs: list[Tensor], outputs: list[Tensor], common: dict[str, Any]) -> Any:
        got = [None] * v.size if v.is_root else None
        library.gather_object(_thing(v, v.me), got, v.members[v.root], group=common["group"])
        return got

    return Meaning(invoke, plain=[_thing(v, r) for r in range(v.size)] if v.is_root else None, own_results=True)


def _scatter_object_list(v: View) -> Meaning:
    def invoke(library: Any, inputs: list[Tensor], outputs: list[Tensor], common: dict[str, Any]) -> Any:
        got, given = [None, "kept"], [_thing(v, v.root, r) for r in range(v.size)] if v.is_root else None
        library.scatter_object_list(got, given, v.members[v.root], group=common["group"])
        return got

    return Meaning(invoke, plain=[_thing(v, v.root, v.me), "kept"], own_results=True)


MEANINGS: dict[str, Callable[[View], Meaning]] = {
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_coalesced": _all_gather_coalesced,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_gather_single": _all_gather_into_tensor,
    "gather": _gather,
    "gather_single": _gather_single,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "reduce_scatter_single": _reduce_scatter_tensor,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "ring": _ring,
    "from_any_source": _ring,
    "barrier": _barrier,
    "all_gather_object": _all_gather_object,
    "broadcast_object_list": _broadcast_object_list,
    "gather_object": _gather_object,
    "scatter_object_list": _scatter_object_list,
}
