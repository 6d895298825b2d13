"""PREMUL_SUM: each rank multiplies by a factor of its own, then the ranks add.

torch offers it on NCCL only, and makes its operator by ``torch.distributed._make_nccl_premul_sum(factor)``. Here the
function multiplies a copy, and every backend adds; the same on all of them, and the caller's input stays.
The factor is rounded to the tensors' dtype first, as NCCL does it (its manual, ``ncclRedOpCreatePreMulSum``). Ranks
need not give one factor: weights that differ are what the operation is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchdist_ref.calls import AllReduce, Reduce
from torchdist_ref.errors import ArgumentError, explain
from torchdist_ref.groups.group import ProcessGroup
from torchdist_ref.groups.joined import joined
from torchdist_ref.work import Work


def multiplied(operation: str, tensor: Tensor, op: Any) -> Tensor:
    """A copy of the tensor, times the factor of a PREMUL_SUM.

    Raises:
        ArgumentError: The tensor has no floating point numbers, or the factor is a tensor of another dtype.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        expected = "no ReduceOp.PREMUL_SUM where tensors are not floating point"
        raise ArgumentError(explain(operation, "op", expected, tensor.dtype))
    factor, real = op.__getstate__()[1], tensor.dtype.to_real()
    if isinstance(factor, Tensor) and factor.dtype != real:
        raise ArgumentError(explain(operation, "op", f"a PREMUL_SUM with a factor of {real}", factor.dtype))
    factor = torch.as_tensor(factor, dtype=real, device=tensor.device).detach().reshape(())
    plain = tensor.detach().contiguous()
    # torch stores 8-bit floats and does not multiply them.
    return (plain.float() * factor.float()).to(plain.dtype) if plain.itemsize == 1 else plain * factor


def submit_multiplied(
    group: ProcessGroup, operation: str, call: AllReduce | Reduce, tensor: Tensor, op: Any, async_op: bool
) -> Work | None:
    """Hand down a reduction in place; the caller's tensor gets the result where one is due."""
    scaled = multiplied(operation, tensor, op)
    due = not isinstance(call, Reduce) or call.root == group.rank()
    part = group.backend.submit(call, (scaled,), (scaled,), not async_op)
    return joined(operation, [tensor], [part], async_op, lambda: tensor.detach().copy_(scaled) if due else None)


def all_multiplied(operation: str, tensors: Sequence[Tensor], op: Any) -> list[Tensor]:
    """Copies of the inputs of a reduction whose output is another tensor."""
    return [multiplied(operation, tensor, op) for tensor in tensors]
