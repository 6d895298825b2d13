"""Operands of backend `mpi` as mpi4py accepts them: the bytes of tensors, and numbers of a type that MPI can reduce.

MPI reduces only its own types. Others are reduced in a wider type, and bools as bytes. Do not add calls (`backend`).
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
# Reductions of bool as reductions of the bytes 0 and 1.
_BOOL_OPS = {"sum": "MAX", "product": "MIN"}


class MpiOperand(NamedTuple):
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
        """Return the operand, or another tensor of its type, for mpi4py."""
        numbers = self.buffer if buffer is None else buffer
        return [raw(numbers), numbers.numel(), getattr(mpi, self.type)]


def operand(tensors: Sequence[Tensor], name: str, call: str) -> MpiOperand:
    """Return copies of the tensors, one after the other, in a type that MPI can reduce.

    Raises:
        ArgumentError: The reduction is not defined for the dtype.
        UnsupportedError: MPI has neither this reduction nor this dtype.
    """
    dtype = tensors[0].dtype
    check(name, dtype, call)
    mpi_dtype = torch.float32 if dtype in WIDENED else torch.uint8 if dtype is torch.bool else dtype
    if mpi_dtype not in _TYPES:
        raise UnsupportedError(f"{call}: MPI can't reduce {dtype}; use .float(), or backend 'ref'.")
    op = _BOOL_OPS.get(name, _OPS[name]) if dtype is torch.bool else _OPS[name]
    return MpiOperand(joined(tensors).to(mpi_dtype), _TYPES[mpi_dtype], op)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return a copy of the tensors in one row."""
    rows = [tensor.reshape(-1) for tensor in tensors]
    return torch.cat(rows) if rows else torch.empty(0, dtype=torch.uint8, device="cpu")


def raw(tensor: Tensor) -> Any:
    """Return the bytes of a contiguous tensor, as an array over its own memory."""
    # A tensor of one element, or none, counts as contiguous with any stride.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()


def counts(tensors: Sequence[Tensor]) -> list[int]:
    """Return the number of bytes of each tensor."""
    return [tensor.nbytes for tensor in tensors]


def split_into(row: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a row to the tensors that it holds, one after the other."""
    for part, tensor in zip(row.view(-1).split([tensor.numel() for tensor in tensors]), tensors, strict=True):
        tensor.copy_(part.view(tensor.shape))
