"""What every differentiable collective asks of its arguments: the group, and what kind of reduction is meant.

A reduction is linear, and then runs on the group's backend; or it is one of those here, which each rank carries out by
itself on the gathered tensors, because their derivative needs the tensors of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.distributed import ReduceOp

from torchdist_ref import groups
from torchdist_ref.errors import ArgumentError, explain
from torchdist_ref.groups import ProcessGroup

Group = ProcessGroup | int | None


def member_group(operation: str, group: Group) -> ProcessGroup:
    """The group itself: backward may run on a thread of autograd's, where the default group may be another."""
    found = groups.GroupMember.WORLD if group is None else group
    if isinstance(found, ProcessGroup):
        return found
    groups.get_rank()  # raises where there is no group at all
    hint = "Call it on the group's members only."
    raise ArgumentError(explain(operation, "group", "a group that this rank is in", found, hint=hint))


def _product(stacked: Tensor) -> Tensor:
    return stacked.prod(0, dtype=stacked.dtype)


def _minimum(stacked: Tensor) -> Tensor:
    return stacked.amin(0)


def _maximum(stacked: Tensor) -> Tensor:
    return stacked.amax(0)


_LOCAL = ((ReduceOp.PRODUCT, _product), (ReduceOp.MIN, _minimum), (ReduceOp.MAX, _maximum))


def reduction_here(op: object) -> Callable[[Tensor], Tensor] | None:
    """How each rank reduces stacked tensors by itself, for the reductions that are not linear; else None."""
    return next((function for known, function in _LOCAL if op == known), None)
