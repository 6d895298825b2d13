"""`all_reduce` of sparse tensors: what may be asked of it, and one Work for all. The sum is in `backends.sparse`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchdist_ref.backends.sparse import start_sum
from torchdist_ref.errors import BackendArgumentError, explain
from torchdist_ref.groups.arguments import word_of
from torchdist_ref.groups.group import ProcessGroup
from torchdist_ref.groups.joined import joined
from torchdist_ref.work import Work


def sum_sparse(group: ProcessGroup, tensor: Tensor, op: Any, async_op: bool) -> Work | None:
    """The sum over all ranks, in place, of tensors in coordinate format; waits for the ranks also if asked not to.

    Raises:
        BackendArgumentError: Another reduction than the sum.
    """
    if word_of(op, "all_reduce") != "sum":
        raise BackendArgumentError(explain("all_reduce", "op", "ReduceOp.SUM where tensors are sparse", op))
    works, add_up = start_sum(group.backend, group.size(), tensor)
    return joined("all_reduce", [tensor], works, async_op, add_up)
