"""The five ``..._multigpu`` collectives on several tensors per rank, which torch removed in 2.2.

Each function combines this rank's tensors, makes one call among the ranks, and copies the result to this rank's other
tensors. The outcome is as if every tensor had been on a rank of its own. Tensors of one call have one size and dtype.
`ref` and `gloo` accept any number of CPU tensors.

torch's documentation numbered blocks ``k * world_size + j``, where `j` is an index into the list of rank `k`. The
factor is the length of that list, which equals the world size only if each rank has as many tensors as there are ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchdist_ref.calls import AllGather, Broadcast, Reduce
from torchdist_ref.errors import ArgumentError, explain
from torchdist_ref.groups.arguments import (
    ALL_REDUCE,
    REDUCE_SCATTER,
    SUM,
    check_elements,
    check_one_dtype,
    check_tensors,
    check_writable,
    member_group,
    multiplied,
    root_of,
    word_of,
)
from torchdist_ref.groups.collectives import joined, submit
from torchdist_ref.groups.world import ProcessGroup
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


def all_gather_multigpu(
    output_tensor_lists: list[list[Tensor]],
    input_tensor_list: list[Tensor],
    group: ProcessGroup | int | None = None,
    async_op: bool = False,
) -> Work | None:
    """Give every tensor's list the tensors of all ranks.

    Args:
        output_tensor_lists: Output: one list for each of this rank's tensors, each with all tensors of all ranks:
            tensor `j` of group rank `k` at place ``k * len(input_tensor_list) + j``.
        input_tensor_list: Input; equally many on all ranks.
        group: Which ranks. Default: all.
        async_op: Return at once with a Work to wait for.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: Lists of the wrong length, or tensors of different sizes or dtypes.
        ArgumentTypeError: Not lists of tensors.
        MismatchError: Ranks called different things. Nothing was written.
        DistBackendError: A rank died, gave up, or did not come in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     tensors = [torch.tensor([10 * rank]), torch.tensor([10 * rank + 1])]
        ...     outputs = [[torch.tensor([0]) for _ in range(4)] for _ in tensors]
        ...     dist.all_gather_multigpu(outputs, tensors)
        ...     return [[tensor.item() for tensor in output] for output in outputs]
        >>> run(program, 2)[1]
        [[0, 1, 10, 11], [0, 1, 10, 11]]
    """
    name = "all_gather_multigpu"
    found = member_group(name, group)
    if found is None:
        return None
    check_alike(name, "input_tensor_list", input_tensor_list)
    total = len(input_tensor_list) * found.size()
    check_lists(name, "output_tensor_lists", output_tensor_lists, len(input_tensor_list), total, input_tensor_list[0])
    mine = packed(input_tensor_list)
    everybody = mine.new_empty((found.size(), *mine.shape))
    parts = [submit(found, AllGather(), (mine,), list(everybody.unbind()), True)]
    rows = everybody.view(total, -1)
    outputs = [output for outputs in output_tensor_lists for output in outputs]
    every = [*rows] * len(output_tensor_lists)
    return joined(name, output_tensor_lists, parts, async_op, lambda: copy_each(every, outputs))


def reduce_scatter_multigpu(
    output_tensor_list: list[Tensor],
    input_tensor_lists: list[list[Tensor]],
    op: Any = SUM,
    group: ProcessGroup | int | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce lists over all lists of all ranks, and give every output its place of the result.

    Args:
        output_tensor_list: Output: entry `j` of group rank `k` becomes place ``k * len(output_tensor_list) + j``.
        input_tensor_lists: Input: one list for each output, each with a tensor for every output of every rank.
        op: How to reduce. Default: the sum. AVG divides by the number of all lists.
        group: Which ranks. Default: all.
        async_op: Return at once with a Work to wait for.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: Lists of the wrong length, tensors of different sizes or dtypes, or a reduction that makes no
            sense for them.
        ArgumentTypeError: Not lists of tensors, or not a ReduceOp.
        MismatchError: Ranks called different things. Nothing was written.
        DistBackendError: A rank died, gave up, or did not come in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     outputs = [torch.tensor([0]), torch.tensor([0])]
        ...     inputs = [[torch.tensor([place + 10 * rank]) for place in range(4)] for _ in outputs]
        ...     dist.reduce_scatter_multigpu(outputs, inputs)
        ...     return [tensor.item() for tensor in outputs]
        >>> run(program, 2)
        [[20, 24], [28, 32]]
    """
    name = "reduce_scatter_multigpu"
    found = member_group(name, group)
    if found is None:
        return None
    check_alike(name, "output_tensor_list", output_tensor_list)
    count = len(output_tensor_list)
    check_lists(name, "input_tensor_lists", input_tensor_lists, count, count * found.size(), output_tensor_list[0])
    word = word_of(op, name)
    combined = combined_of(name, [packed(inputs) for inputs in input_tensor_lists], op)
    result = combined.new_empty((count, combined.shape[1]))
    blocks = list(combined.view(found.size(), *result.shape).unbind())
    parts = [submit(found, REDUCE_SCATTER[word], blocks, (result,), True)]
    return joined(name, output_tensor_list, parts, async_op, lambda: copy_each(result, output_tensor_list))


_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "premul_sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def check_alike(name: str, argument: str, tensors: Any) -> None:
    """Raise unless it is a list of tensors of one size and dtype."""
    check_tensors(name, argument, tensors)
    if not tensors:
        raise ArgumentError(explain(name, argument, "a list of at least one tensor", tensors))
    check_one_dtype(name, tensors)
    for index, tensor in enumerate(tensors):
        check_elements(name, f"{argument}[{index}]", tensor, tensors[0].numel(), f"as {argument}[0] has")
        check_writable(name, f"{argument}[{index}]", tensor)


def check_lists(name: str, argument: str, lists: Any, count: int, length: int, like: Tensor) -> None:
    """Raise unless there are `count` lists of `length` tensors, all of the size and dtype of `like`."""
    if not isinstance(lists, Sequence) or len(lists) != count:
        got = len(lists) if isinstance(lists, Sequence) else lists
        raise ArgumentError(explain(name, argument, f"a list of {count} lists, one for each tensor", got))
    for index, tensors in enumerate(lists):
        check_alike(name, f"{argument}[{index}]", tensors)
        check_one_dtype(name, [like, *tensors])
        check_elements(name, f"{argument}[{index}][0]", tensors[0], like.numel(), "as the other list has")
        if len(tensors) != length:
            expected = f"a list of {length} tensors, one for each tensor of each rank"
            raise ArgumentError(explain(name, f"{argument}[{index}]", expected, len(tensors)))


def entry(name: str, argument: str, tensors: Sequence[Tensor], index: int) -> Tensor:
    """One tensor of the list, by a number that the caller gave."""
    if not isinstance(index, int) or not 0 <= index < len(tensors):
        raise ArgumentError(explain(name, argument, f"a place in the list, from 0 to {len(tensors) - 1}", index))
    return tensors[index].detach()


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors as rows of one."""
    return torch.stack([tensor.detach().reshape(-1) for tensor in tensors])


def combined_of(name: str, tensors: Sequence[Tensor], op: Any) -> Tensor:
    """This rank's tensors as one, so that the ranks have one to reduce."""
    word = word_of(op, name)
    # An average of whole numbers is the backend's to refuse, on all ranks alike.
    whole = not (tensors[0].is_floating_point() or tensors[0].is_complex())
    total = tensors[0].detach().clone(memory_format=torch.contiguous_format)
    try:
        for tensor in tensors[1:]:
            total = _COMBINE[word](total, tensor.detach().reshape(total.shape))
        total = multiplied(name, total, op) if word == "premul_sum" else total
        return total / len(tensors) if word == "avg" and not whole else total
    except RuntimeError as error:
        raise ArgumentError(f"{name}: ReduceOp.{word.upper()} makes no sense for {total.dtype} ({error}).") from error


def copy_each(sources: Sequence[Tensor] | Tensor, targets: Sequence[Tensor]) -> None:
    """Write results to the tensors of the caller, whatever their shape and strides."""
    for source, target in zip(sources, targets, strict=True):
        target.detach().copy_(source.view(target.shape))
