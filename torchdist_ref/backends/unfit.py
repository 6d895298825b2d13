"""Tensors that a backend must not even look at: torch's own backends read memory that isn't there, and end the process.

Layouts other than dense ones are refused at the front door, which knows the argument's name. Don't add what one backend
alone can't do; that stands beside what it does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from torchdist_ref.calls import Call
from torchdist_ref.errors import UnsupportedError, on_rank


def refuse_unfit(call: Call, tensors: Iterable[Tensor], backend: str, devices: Sequence[str]) -> None:
    """Raise if a tensor is on a device that the backend doesn't know, or holds numbers that stand for others.

    Args:
        call: What was to be done.
        tensors: Its operands.
        backend: The backend's name.
        devices: The types of devices whose memory the backend can use.

    Raises:
        UnsupportedError: There is such a tensor.
    """
    for tensor in tensors:
        if tensor.device.type not in devices:
            raise UnsupportedError(
                f"{call.op}: backend {backend!r} works on tensors of {' and '.join(devices)}, and this one is on "
                f"{tensor.device}{on_rank()}. Move it with .cpu()."
            )
        if tensor.is_quantized:
            hint = "Send .int_repr(), and the scale and zero point once."
            raise UnsupportedError(f"{call.op}: no backend works on quantized tensors{on_rank()}. {hint}")
