"""Moving: bytes from one address to another, without the price of a tensor operation.

What tensors of one dtype copy is bytes, wherever they lie: a stage, a mailbox, a tensor of the caller. The addresses
come from tensors (`Tensor.data_ptr`), which have to be contiguous and have to outlive the call. Don't add anything that
looks at the values: that is for tensor operations.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

_MOVE = ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
_POINTERS = (None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
# To let go of the interpreter lock and take it again costs as much as to move some kilobytes.
_HOLD = 16 * 1024
_briefly, _freely = ctypes.PYFUNCTYPE(*_POINTERS)(_MOVE), ctypes.CFUNCTYPE(*_POINTERS)(_MOVE)


def mover(nbytes: int) -> Callable[[int, int, int], None]:
    """What moves so many bytes: (to this address, from this address, bytes).

    >>> import torch
    >>> source, target = torch.tensor([1.5, 2.5]), torch.zeros(2)
    >>> mover(8)(target.data_ptr(), source.data_ptr(), 8)
    >>> target
    tensor([1.5000, 2.5000])
    """
    return _briefly if nbytes <= _HOLD else _freely
