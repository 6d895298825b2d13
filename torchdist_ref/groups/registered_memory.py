"""Registered memory, as users allocate it: tensors that other ranks of the host read in place, without staging.

The backend allocates the memory (`Backend.empty`). Do not add anything that ranks must agree on: each call finds out
whether all its operands are registered.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchdist_ref.errors import ArgumentError, ArgumentTypeError, at_limit, explain, indexed
from torchdist_ref.groups.world import ProcessGroup, resolve


def empty_registered(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    group: ProcessGroup | int | None = None,
) -> Tensor:
    """Allocate a CPU tensor, like `torch.empty`, in memory that the other ranks of this host can read.

    Large collectives on such tensors, or on views of them, are zero-copy: each rank reads the others' tensors directly.
    No data is staged, and the call takes as little as half the time. All ranks have to pass registered tensors for
    that, but they may mix them with others: results are the same. The memory is freed with the last tensor that uses
    it, also after `destroy_process_group`. This function is local: other ranks need not call it.

    The memory belongs to the process: it serves every group whose ranks all share this host. On any other group,
    backend or platform the tensor is an ordinary one. After a fork, parent and child share its values; its storage
    cannot be resized.

    Args:
        size: Shape, as integers or as one sequence.
        dtype: Data type. Default: `torch.get_default_dtype()`.
        requires_grad: Record operations on the tensor for autograd. Default: False.
        group: Process group whose calls use the tensor. Default: all ranks.

    Returns:
        A contiguous tensor with unspecified values.

    Raises:
        ArgumentError: A size that is negative or too large, or this rank is not in the group.
        ArgumentTypeError: The size does not consist of integers, or `dtype` is none.
        OSError: No memory is free.
        NotInitializedError: `init_process_group` was not called.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     tensor = dist.empty_registered(3, 50_000)
        ...     tensor.fill_(rank + 1)
        ...     dist.all_reduce(tensor[1:])
        ...     return tensor[:, 0].tolist()
        >>> run(program, 2, ranks="processes")
        [[1.0, 3.0, 3.0], [2.0, 3.0, 3.0]]
    """
    found = resolve(group, "empty_registered")
    if found is None:
        raise ArgumentError(explain("empty_registered", "group", "a group that this rank is in", group))
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ArgumentTypeError(explain("empty_registered", "dtype", "a torch.dtype or None", dtype))
    shape = _shape(size)
    try:
        tensor = found.backend.empty(shape, dtype or torch.get_default_dtype())
    except OverflowError as error:
        expected = f"small enough for the memory of this host ({error})"
        raise ArgumentError(explain("empty_registered", "size", expected, tuple(shape))) from error
    except OSError as error:
        raise indexed(at_limit(f"empty_registered of {tuple(shape)}", error) or error) from error
    return tensor.requires_grad_(requires_grad)


def _shape(size: Sequence[int | Sequence[int]]) -> torch.Size:
    one = size[0] if len(size) == 1 else None
    try:
        shape = torch.Size(one if isinstance(one, Sequence) else size)  # type: ignore[arg-type]
    except TypeError as error:
        expected = "integers, or one sequence of them"
        raise ArgumentTypeError(explain("empty_registered", "size", expected, size)) from error
    if any(extent < 0 for extent in shape):
        raise ArgumentError(explain("empty_registered", "size", "at least 0 in every dimension", tuple(shape)))
    return shape
