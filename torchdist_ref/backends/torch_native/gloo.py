"""Gloo: torch's C++ backend for CPU tensors, driven by our stores and groups.

How our calls become calls of torch's is in `torch_backend`, and what Gloo can't take as it is in `torch_operands`; here
is only how ranks connect. Don't add other backends of torch's: each has a file of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import distributed_c10d as options
from torch.nn.functional import pad

from torchdist_ref.backends.base import flat_operands, refuse_unsupported
from torchdist_ref.backends.reductions import WIDENED, check, divide, reduction
from torchdist_ref.backends.torch_native.backend import Carried, TorchBackend, TorchWork, brought_back
from torchdist_ref.calls import AllGather, AllReduce, AllToAll, Barrier, Call, Recv, Reduce, ReduceScatter, Send
from torchdist_ref.errors import UnsupportedError

Tensors = Sequence[Tensor]


class GlooWork(TorchWork):
    """A work that one thread at a time asks, and nobody once it has ended.

    Gloo counts the completion of a message down when it is waited for: a second wait would last until the time-out,
    and then break the connection for all calls.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._asking = threading.Lock()

    def _settled_by(self, wait: Callable[[], Any]) -> None:
        # Whoever asks already will settle it. Not to wait here: futures end before works, and on the same thread.
        if self._asking.acquire(False):
            try:
                if not self._over:
                    super()._settled_by(wait)
            finally:
                self._asking.release()


class Gloo(TorchBackend):
    """torch's Gloo backend for one group."""

    name = "gloo"
    title = "Gloo"
    kind = GlooWork

    def _connect(self) -> Any:
        m = self._membership
        return c10d.ProcessGroupGloo(self._store, m.rank, m.size, timedelta(seconds=m.timeout))

    def _settle_in(self) -> None:
        """Nobody goes on, and perhaps ends the store, before everybody has read from it.

        Rank 0 may hold the store, so it leaves last: it waits until the others need nothing more.
        """
        store, m = self._membership.store, self._membership
        store.set(f"connected/{m.rank}", b"")
        if m.rank == 0:
            store.wait([f"connected/{r}" for r in range(m.size)], timedelta(seconds=m.timeout))
            store.set("all connected", b"")
            store.wait([f"gone on/{r}" for r in range(1, m.size)], timedelta(seconds=m.timeout))
        else:
            store.wait(["all connected"], timedelta(seconds=m.timeout))
            store.set(f"gone on/{m.rank}", b"")

    def _carried(self, call: Call, inputs: Tensors, outputs: Tensors) -> Carried:
        if isinstance(call, Send) and call.dst == self._membership.rank:
            raise UnsupportedError(
                f"{call} {self._here()}: Gloo has no messages from a rank to itself. Use backend 'ref', or .copy_()."
            )
        refuse_unsupported(call, (*flat_operands(inputs), *flat_operands(outputs)), self.name, ("cpu", "cuda"))
        return carried(call, inputs, outputs, self._membership.rank, self._membership.size)

    def _start(self, call: Call, inputs: list[Tensor], outputs: list[Tensor]) -> Any:
        if isinstance(call, Exchange):
            source, target, how = inputs[0], outputs[0], options.AllToAllOptions()
            return self._backend.alltoall_base(target, source, list(call.taken), list(call.given), how)
        return super()._start(call, inputs, outputs)

    def _message(self, call: Send | Recv, tensors: list[Tensor]) -> list[Tensor]:
        """Gloo refuses messages of no bytes, so they travel as one."""
        return [tensor if tensor.numel() else torch.zeros(1, dtype=torch.uint8) for tensor in tensors]


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
    source, whole = flat_operands(inputs), flat_operands(outputs)
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
