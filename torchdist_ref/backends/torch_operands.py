"""Tensors as torch's Gloo can take them, and the way back.

Gloo knows eight types, one size for all blocks, and contiguous memory; it forgets a type's meaning where it adds truth
values. So data that only moves travels as bytes, whatever it is; numbers that Gloo can't reduce travel as others that
give the same result; gathered blocks of several sizes are padded to the largest; and blocks that ranks exchange lie in
one tensor. Don't add knowledge of C++ calls here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchdist_ref.backends.base import uncut
from torchdist_ref.backends.reductions import WIDENED, check, divide, reduction
from torchdist_ref.backends.torch_work import Carried, brought_back
from torchdist_ref.calls import AllGather, AllReduce, AllToAll, Barrier, Call, Reduce, ReduceScatter

Tensors = Sequence[Tensor]

# Types that Gloo does not reduce, and one that it does, with the same result.
_STAND_INS = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
    torch.complex32: torch.complex64,
    **dict.fromkeys(WIDENED - {torch.float16, torch.bfloat16}, torch.float32),
}
# What a reduction of truth values is on the bytes 0 and 1.
_OF_BOOL = {"sum": "max", "product": "min"}
_TOP = torch.iinfo(torch.int64).min


@dataclass(frozen=True)
class Exchange(AllToAll):
    """An exchange of blocks that lie in one tensor: how many bytes for each rank, and from each.

    Gloo takes lists of blocks from torch 2.13 on only.
    """

    given: tuple[int, ...] = ()
    taken: tuple[int, ...] = ()


def carried(call: Call, inputs: Tensors, outputs: Tensors, rank: int, size: int) -> Carried:
    """Make a call fit for Gloo.

    Raises:
        ArgumentError: The reduction makes no sense for the dtype.
    """
    match call:
        case AllReduce() | Reduce():
            return _in_place(call, outputs[0], rank)
        case ReduceScatter():
            return _scattering(call, inputs, outputs[0], size)
        case AllToAll():
            return _exchange(inputs, outputs, call.uneven)
        case AllGather() if len({t.numel() for t in outputs}) > 1:
            return _padded(call, inputs, outputs)
        case Barrier():
            return Carried(call, [], [], _nothing)
    sources, targets = [as_bytes(t) for t in inputs], [as_bytes(t) for t in outputs]
    return Carried(call, sources, targets, lambda: brought_back(targets, outputs))


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's bytes: its own memory where that is in one piece, else a copy."""
    plain = tensor.detach().contiguous()
    # One element, or none, may have any stride and count as contiguous.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def _in_place(call: AllReduce | Reduce, tensor: Tensor, rank: int) -> Carried:
    check(call.reduction, tensor.dtype, call.op)
    numbers = _numbers(tensor, call.reduction)
    if isinstance(call, Reduce) and call.root != rank:
        return Carried(_worded(call, tensor.dtype), [numbers], [numbers], _nothing)
    return Carried(_worded(call, tensor.dtype), [numbers], [numbers], lambda: _back(numbers, tensor, call.reduction))


def _scattering(call: ReduceScatter, inputs: Tensors, output: Tensor, size: int) -> Carried:
    """Every rank gets what the others have for it, and reduces that itself, in rank order.

    Gloo's own operation has no future, is never said to be completed, and does not come back for some small tensors.
    """
    operation = reduction(call.reduction, output.dtype, call.op)
    moved = _exchange(inputs, [output] * size)
    parts = [row.view(output.dtype) for row in moved.outputs[0].split([output.nbytes] * size)]

    def deliver() -> bool:
        wide = torch.float32 if output.dtype in WIDENED else output.dtype
        total = parts[0].to(wide)
        for part in parts[1:]:
            operation.into(total, part.to(wide))
        total = divide(total, size) if call.reduction == "avg" else total
        output.detach().copy_(total.view(output.shape))
        return True

    return moved._replace(bring_back=deliver)


def _worded(call: Any, dtype: torch.dtype) -> Any:
    word = _OF_BOOL.get(call.reduction) if dtype is torch.bool else None
    return call if word is None else replace(call, reduction=word)


def _numbers(tensor: Tensor, reduction: str) -> Tensor:
    """A tensor as a row of numbers that Gloo can reduce: its own memory where that is possible."""
    plain = tensor.detach().contiguous()
    plain = plain.as_strided((plain.numel(),), (1,))
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
    sources = [pad(as_bytes(t), (0, longest - t.nbytes)) if t.nbytes < longest else as_bytes(t) for t in inputs]
    targets = [torch.empty(longest, dtype=torch.uint8, device=t.device) for t in outputs]
    used = [row[: tensor.nbytes] for row, tensor in zip(targets, outputs, strict=True)]
    return Carried(call, sources, targets, lambda: brought_back(used, outputs))


def _exchange(inputs: Tensors, outputs: Tensors, uneven: bool = False) -> Carried:
    given, taken = (tuple(t.nbytes for t in tensors) for tensors in (inputs, outputs))
    source, whole = uncut(inputs), uncut(outputs)
    sent = as_bytes(source[0]) if len(source) == 1 else torch.cat([as_bytes(t) for t in source])
    if len(whole) == 1:
        target = as_bytes(whole[0])
        rows: Sequence[Tensor] = [target]
    else:
        # Where a rank gives less than is expected, Gloo says nothing: the rest stays as it is.
        target = (
            torch.cat([as_bytes(t) for t in outputs])
            if uneven
            else torch.empty(sum(taken), dtype=torch.uint8, device=outputs[0].device)
        )
        rows = target.split(taken)
    return Carried(Exchange(given=given, taken=taken), [sent], [target], lambda: brought_back(rows, whole))


def _nothing() -> bool:
    """Nothing comes back."""
    return False
