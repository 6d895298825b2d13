"""Tensors as torch's Gloo can take them, and the way back.

Gloo knows eight types, one size for all blocks, and contiguous memory; it forgets a type's meaning where it adds truth
values. So data that only moves travels as bytes, whatever it is; numbers that Gloo can't reduce travel as others that
give the same result; and blocks of several sizes are padded to the largest. Don't add knowledge of C++ calls here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchdist_ref.backends.reductions import WIDENED, check
from torchdist_ref.backends.torch_work import Carried, brought_back
from torchdist_ref.calls import AllGather, AllReduce, Barrier, Call, Reduce, ReduceScatter

Tensors = Sequence[Tensor]
Reducing = AllReduce | Reduce | ReduceScatter

# Types that Gloo does not reduce, and one that it does, with the same result.
_STAND_INS = {
    torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64,
    torch.complex32: torch.complex64,
    **dict.fromkeys(WIDENED - {torch.float16, torch.bfloat16}, torch.float32),
}  # fmt: skip
# What a reduction of truth values is on the bytes 0 and 1.
_OF_BOOL = {"sum": "max", "product": "min"}
_TOP = torch.iinfo(torch.int64).min


def carried(call: Call, inputs: Tensors, outputs: Tensors, rank: int) -> Carried:
    """Make a call fit for Gloo.

    Raises:
        ArgumentError: The reduction makes no sense for the dtype.
    """
    match call:
        case AllReduce() | Reduce():
            return _in_place(call, outputs[0], rank)
        case ReduceScatter():
            return _scattering(call, inputs, outputs[0], rank)
        case AllGather() if len({t.numel() for t in outputs}) > 1:
            return _padded(call, inputs, outputs)
        case Barrier():
            return Carried(call, [], [], _nothing)
    sources, targets = [as_bytes(t) for t in inputs], [as_bytes(t) for t in outputs]
    return Carried(call, sources, targets, lambda: brought_back(targets, outputs))


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's bytes: its own memory where that is in one piece, else a copy."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _in_place(call: AllReduce | Reduce, tensor: Tensor, rank: int) -> Carried:
    check(call.reduction, tensor.dtype, call.op)
    numbers = _numbers(tensor, call.reduction)
    if isinstance(call, Reduce) and call.root != rank:
        return Carried(_worded(call, tensor.dtype), [numbers], [numbers], _nothing)
    return Carried(_worded(call, tensor.dtype), [numbers], [numbers], lambda: _back(numbers, tensor, call.reduction))


def _scattering(call: ReduceScatter, inputs: Tensors, output: Tensor, rank: int) -> Carried:
    """Blocks of several sizes are reduced as one row, of which each rank takes its part."""
    check(call.reduction, output.dtype, call.op)
    numbers, worded = [_numbers(t, call.reduction) for t in inputs], _worded(call, output.dtype)
    if len({t.numel() for t in inputs}) == 1:
        result = torch.empty_like(numbers[rank])
        return Carried(worded, numbers, [result], lambda: _back(result, output, call.reduction))
    row = torch.cat(numbers)
    mine = row.split([t.numel() for t in numbers])[rank]
    return Carried(AllReduce(worded.reduction), [row], [row], lambda: _back(mine, output, call.reduction))


def _worded(call: Any, dtype: torch.dtype) -> Any:
    word = _OF_BOOL.get(call.reduction) if dtype is torch.bool else None
    return call if word is None else replace(call, reduction=word)


def _numbers(tensor: Tensor, reduction: str) -> Tensor:
    """A tensor as a row of numbers that Gloo can reduce: its own memory where that is possible."""
    plain = tensor.detach().contiguous().view(-1)
    if plain.dtype is torch.bool:
        return plain.view(torch.uint8)
    plain = plain.to(_STAND_INS.get(plain.dtype, plain.dtype))
    if plain.is_complex():
        return torch.view_as_real(plain).view(-1)
    return plain ^ _TOP if _turned(tensor, reduction) else plain


def _turned(tensor: Tensor, reduction: str) -> bool:
    """Whether large numbers without a sign have to be turned around, since as signed ones they compare as negative."""
    return tensor.dtype is torch.uint64 and reduction in ("min", "max")


def _back(numbers: Tensor, tensor: Tensor, reduction: str) -> bool:
    if numbers.data_ptr() == tensor.data_ptr():
        return False
    if tensor.is_complex():
        numbers = torch.view_as_complex(numbers.view(-1, 2))
    elif tensor.dtype is torch.bool:
        numbers = numbers.view(torch.bool)
    elif _turned(tensor, reduction):
        numbers = numbers ^ _TOP
    tensor.detach().copy_(numbers.view(tensor.shape))
    return True


def _padded(call: Call, inputs: Tensors, outputs: Tensors) -> Carried:
    """Blocks of several sizes, each in a row as long as the longest; receivers know what of it is theirs."""
    longest = max(t.nbytes for t in (*inputs, *outputs))
    sources = [torch.zeros(longest, dtype=torch.uint8) for _ in inputs]
    targets = [torch.empty(longest, dtype=torch.uint8) for _ in outputs]
    for row, tensor in zip(sources, inputs, strict=True):
        row[: tensor.nbytes].copy_(as_bytes(tensor))
    used = [row[: tensor.nbytes] for row, tensor in zip(targets, outputs, strict=True)]
    return Carried(call, sources, targets, lambda: brought_back(used, outputs))


def _nothing() -> bool:
    """Nothing comes back."""
    return False
