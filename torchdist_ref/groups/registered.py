"""Registered buffers: tensors that other ranks of the host read in place, so that calls need no staging.

The backend allocates the memory (`Backend.empty`). Do not add anything that ranks must agree on: each call finds out
whether all its operands are registered.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchdist_ref.errors import ArgumentError, ArgumentTypeError, explain
from torchdist_ref.groups.world import ProcessGroup, resolve


def empty_registered(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    group: ProcessGroup | int | None = None,
) -> Tensor:
    """A CPU tensor, like `torch.empty`, in memory that the other ranks of this host can read.

    Where all ranks pass such tensors (or parts of them) to a large collective, each works on the others' where they
    lie, and nothing is copied to be shared: that takes as little as half the time. Everything else is as with any
    tensor: results are the same, ranks may mix registered tensors with others, and the memory goes with the last
    tensor that lies in it, also after `destroy_process_group`. This call is local: other ranks need not make it, nor
    are they told.

    The memory is the process's: it serves every group whose ranks all share this host. On any other group, backend or
    platform the tensor is an ordinary one. After a fork, parent and child share its content; its storage cannot be
    resized.

    Args:
        size: The shape, as integers or as one sequence.
        dtype: Default: `torch.get_default_dtype()`.
        requires_grad: Whether autograd records what is done to it.
        group: Whose calls it is for. Default: the group of all ranks.

    Returns:
        A contiguous tensor with arbitrary values.

    Raises:
        ArgumentError: A negative size, or this rank is not in the group.
        ArgumentTypeError: The size is not made of integers.
        NotInitializedError: There is no group yet.

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
    found = resolve(group)
    if found is None:
        raise ArgumentError(explain("empty_registered", "group", "a group that this rank is in", group))
    tensor = found.backend.empty(_shape(size), dtype or torch.get_default_dtype())
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
