"""torch's options and lists, read as our calls mean them: whatever we can't honour is an error here.

Every function answers one question about what torch handed over. Don't add defaults: torch's options have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from torchdist_ref.calls import REDUCTIONS, Call
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, UnsupportedError, explain

T = TypeVar("T")
_WORDS = {getattr(ReduceOp, word.upper()): word for word in REDUCTIONS}


def only(op: str, argument: str, given: Sequence[T]) -> T:
    """The one element of a list. torch's lists are from the time when a process drove several devices."""
    if len(given) != 1:
        raise ArgumentError(explain(op, argument, "a list of one, as a rank has one device", len(given)))
    return given[0]


def reduction(op: str, opts: Any) -> str:
    """The reduction that options ask for.

    Raises:
        UnsupportedError: It is PREMUL_SUM.
        ArgumentTypeError: We know of no such reduction; guessing would be wrong silently.
    """
    asked = opts.reduceOp
    word = _WORDS.get(getattr(asked, "op", asked))
    if word is None:
        raise ArgumentTypeError(explain(op, "reduceOp", f"a ReduceOp, one of {', '.join(REDUCTIONS)}", asked))
    if word == "premul_sum":
        raise UnsupportedError(
            f"{op}: torch offers ReduceOp.PREMUL_SUM on NCCL only. Multiply first and use SUM, or "
            f"call torchdist_ref.{op}, which takes it on every backend."
        )
    return word


def limit(opts: Any) -> float | None:
    """Seconds after which a wait for the call ends; None where torch leaves that to the group."""
    timeout = getattr(opts, "timeout", None)
    return timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None


def usable(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """True, unless a tensor is none that `ref` can work on.

    Raises:
        UnsupportedError: It is sparse, or on an accelerator.
    """
    for tensor in (*inputs, *outputs):
        if tensor.layout is not torch.strided or not tensor.is_cpu:
            raise UnsupportedError(
                f"{call.op}: backend 'ref' works on dense CPU tensors, not {tensor.layout} on {tensor.device}. "
                f"Use .to_dense() or .cpu(), or a group on 'gloo' or 'nccl'."
            )
    return True
