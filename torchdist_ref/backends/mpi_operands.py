"""Tensors as MPI sees them: bytes where data only moves, typed numbers where it is reduced.

MPI has no half-precision or 8-bit floats and does not add truth values, so those are reduced as another type, and
turned back when the call is done. Don't add knowledge of calls here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchdist_ref.backends.reductions import WIDENED, check
from torchdist_ref.errors import UnsupportedError

# The names of MPI's types and operations, as mpi4py has them.
_TYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
}
_OPS = {
    "sum": "SUM",
    "premul_sum": "SUM",
    "avg": "SUM",
    "product": "PROD",
    "min": "MIN",
    "max": "MAX",
    "band": "BAND",
    "bor": "BOR",
    "bxor": "BXOR",
}
# What a reduction of truth values is on the bytes 0 and 1.
_OF_BOOL = {"sum": "MAX", "product": "MIN"}


class Operand(NamedTuple):
    """Numbers that MPI can reduce.

    Attributes:
        buffer: The numbers, in one row.
        type: The name of their MPI type.
        op: The name of the MPI operation.
    """

    buffer: Tensor
    type: str
    op: str

    def spec(self, mpi: Any, buffer: Tensor | None = None) -> list[Any]:
        """The operand, or another tensor like it, as mpi4py takes it."""
        numbers = self.buffer if buffer is None else buffer
        return [raw(numbers), numbers.numel(), getattr(mpi, self.type)]


def operand(tensors: Sequence[Tensor], name: str, call: str) -> Operand:
    """Copies of the tensors, one after the other, in a type that MPI can reduce.

    Raises:
        ArgumentError: The reduction makes no sense for the dtype.
        UnsupportedError: MPI has neither this reduction nor this dtype.
    """
    dtype = tensors[0].dtype
    check(name, dtype, call)
    stand_in = torch.float32 if dtype in WIDENED else torch.uint8 if dtype is torch.bool else dtype
    if stand_in not in _TYPES:
        raise UnsupportedError(f"{call}: MPI can't reduce {dtype}; use .float(), or backend 'ref'.")
    op = _OF_BOOL.get(name, _OPS[name]) if dtype is torch.bool else _OPS[name]
    return Operand(joined(tensors).to(stand_in), _TYPES[stand_in], op)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of the tensors in one row."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)


def raw(tensor: Tensor) -> Any:
    """The bytes of a contiguous tensor, as an array over its own memory."""
    # One element, or none, may have any stride and count as contiguous.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()


def counts(tensors: Sequence[Tensor]) -> list[int]:
    """Bytes of each tensor."""
    return [tensor.nbytes for tensor in tensors]


def split_into(row: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a row to the tensors that it holds, one after the other."""
    for part, tensor in zip(row.view(-1).split([tensor.numel() for tensor in tensors]), tensors, strict=True):
        tensor.detach().copy_(part.view(tensor.shape))
