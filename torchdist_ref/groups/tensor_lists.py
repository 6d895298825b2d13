"""Lists of tensors of one rank: all alike, combined into one, and written back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchdist_ref.errors import ArgumentError, explain
from torchdist_ref.groups.arguments import check_elements, check_one_dtype, check_tensors, check_writable, word_of
from torchdist_ref.groups.premultiplied import multiplied

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
