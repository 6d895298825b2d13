"""Tensors that an engine must not even look at: torch's own engines read memory that isn't there, and end the process.

Layouts other than dense ones are refused at the front door, which knows the argument's name. Don't add what one engine
alone can't do; that stands beside what it does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from torchdist_ref.calls import Call
from torchdist_ref.errors import UnsupportedError, on_rank


def refuse_unfit(call: Call, tensors: Iterable[Tensor], engine: str, devices: Sequence[str]) -> None:
    """Raise if a tensor is on a device that the engine doesn't know, or holds numbers that stand for others.

    Args:
        call: What was to be done.
        tensors: Its operands.
        engine: The backend's name.
        devices: The types of devices whose memory the engine can use.

    Raises:
        UnsupportedError: There is such a tensor.
    """
    for tensor in tensors:
        if tensor.device.type not in devices:
            raise UnsupportedError(
                f"{call.op}: backend {engine!r} works on tensors of {' and '.join(devices)}, and this one is on "
                f"{tensor.device}{on_rank()}. Move it with .cpu()."
            )
        if tensor.is_quantized:
            hint = "Send .int_repr(), and the scale and zero point once."
            raise UnsupportedError(f"{call.op}: no engine works on quantized tensors{on_rank()}. {hint}")
