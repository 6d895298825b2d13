"""The five collectives on several tensors a rank, which torch removed in 2.2: lists of tensors of this process.

Each combines this rank's tensors first, makes one call among the ranks, and copies the result to this rank's others:
what each tensor holds afterwards is as if every tensor had been on a rank of its own. Tensors of one call have one size
and dtype. `ref` and `gloo` take tensors of the CPU, any number of them.

What is shared by all five is in `tensor_lists`; those with blocks are in `multigpu_blocks`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchdist_ref.calls import Broadcast, Reduce
from torchdist_ref.groups.arguments import ALL_REDUCE, SUM, member_group, root_of, word_of
from torchdist_ref.groups.collectives import submit
from torchdist_ref.groups.group import ProcessGroup
from torchdist_ref.groups.joined import joined
from torchdist_ref.groups.tensor_lists import check_alike, combined_of, copy_each, entry
from torchdist_ref.work import Work


def broadcast_multigpu(
    tensor_list: list[Tensor],
    src: int,
    group: ProcessGroup | int | None = None,
    async_op: bool = False,
    src_tensor: int = 0,
) -> Work | None:
    """Copy one tensor of one rank to all tensors of all ranks.

    Args:
        tensor_list: On the source, entry `src_tensor` is the input; all others are outputs.
        src: The source, as a global rank.
        group: Which ranks. Default: all.
        async_op: Return at once with a Work to wait for.
        src_tensor: Which tensor of the source.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: The source is not in the group, no such tensor, or tensors of different sizes or dtypes.
        ArgumentTypeError: Not a list of tensors.
        MismatchError: Ranks called different things. Nothing was written.
        DistBackendError: A rank died, gave up, or did not come in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     tensors = [torch.tensor([10 * rank]), torch.tensor([10 * rank + 1])]
        ...     dist.broadcast_multigpu(tensors, src=1, src_tensor=1)
        ...     return [tensor.item() for tensor in tensors]
        >>> run(program, 2)
        [[11, 11], [11, 11]]
    """
    name = "broadcast_multigpu"
    found = member_group(name, group)
    if found is None:
        return None
    check_alike(name, "tensor_list", tensor_list)
    root = root_of(found, name, src, None)
    source = entry(name, "src_tensor", tensor_list, src_tensor if root == found.rank() else 0)
    scratch = source.clone(memory_format=torch.contiguous_format)
    parts = [submit(found, Broadcast(root), (scratch,), (scratch,), True)]
    return joined(name, tensor_list, parts, async_op, lambda: copy_each([scratch] * len(tensor_list), tensor_list))


def all_reduce_multigpu(
    tensor_list: list[Tensor], op: Any = SUM, group: ProcessGroup | int | None = None, async_op: bool = False
) -> Work | None:
    """Reduce all tensors of all ranks to one value, in place of each of them.

    Args:
        tensor_list: Input and output.
        op: How to reduce. Default: the sum. AVG divides by the number of all tensors.
        group: Which ranks. Default: all.
        async_op: Return at once with a Work to wait for.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: Tensors of different sizes or dtypes, or a reduction that makes no sense for them.
        ArgumentTypeError: Not a list of tensors, or not a ReduceOp.
        MismatchError: Ranks called different things. Nothing was written.
        DistBackendError: A rank died, gave up, or did not come in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     tensors = [torch.tensor([10 * rank]), torch.tensor([10 * rank + 1])]
        ...     dist.all_reduce_multigpu(tensors)
        ...     return [tensor.item() for tensor in tensors]
        >>> run(program, 2)
        [[22, 22], [22, 22]]
    """
    name = "all_reduce_multigpu"
    found = member_group(name, group)
    if found is None:
        return None
    check_alike(name, "tensor_list", tensor_list)
    word = word_of(op, name)
    scratch = combined_of(name, tensor_list, op)
    parts = [submit(found, ALL_REDUCE[word], (scratch,), (scratch,), True)]
    return joined(name, tensor_list, parts, async_op, lambda: copy_each([scratch] * len(tensor_list), tensor_list))


def reduce_multigpu(
    tensor_list: list[Tensor],
    dst: int,
    op: Any = SUM,
    group: ProcessGroup | int | None = None,
    async_op: bool = False,
    dst_tensor: int = 0,
) -> Work | None:
    """Reduce all tensors of all ranks to one tensor of one rank.

    Args:
        tensor_list: Input; on the destination, entry `dst_tensor` is the output, and the others are kept.
        dst: The destination, as a global rank.
        op: How to reduce. Default: the sum. AVG divides by the number of all tensors.
        group: Which ranks. Default: all.
        async_op: Return at once with a Work to wait for.
        dst_tensor: Which tensor of the destination.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: The destination is not in the group, no such tensor, or tensors of different sizes or dtypes.
        ArgumentTypeError: Not a list of tensors, or not a ReduceOp.
        MismatchError: Ranks called different things. Nothing was written.
        DistBackendError: A rank died, gave up, or did not come in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     tensors = [torch.tensor([10 * rank]), torch.tensor([10 * rank + 1])]
        ...     dist.reduce_multigpu(tensors, dst=0, dst_tensor=1)
        ...     return [tensor.item() for tensor in tensors]
        >>> run(program, 2)
        [[0, 22], [10, 11]]
    """
    name = "reduce_multigpu"
    found = member_group(name, group)
    if found is None:
        return None
    check_alike(name, "tensor_list", tensor_list)
    root, word = root_of(found, name, dst, None, "dst"), word_of(op, name)
    target = [entry(name, "dst_tensor", tensor_list, dst_tensor)] if root == found.rank() else []
    scratch = combined_of(name, tensor_list, op)
    parts = [submit(found, Reduce(root, word), (scratch,), (scratch,), True)]
    return joined(name, tensor_list, parts, async_op, lambda: copy_each([scratch][: len(target)], target))
