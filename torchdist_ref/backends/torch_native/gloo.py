"""Gloo: torch's C++ backend for CPU tensors, on our stores and groups.

Gloo supports eight dtypes, equal block sizes and contiguous memory, and it ignores the meaning of bool when it adds. So
data that only moves is sent as bytes. Numbers that Gloo cannot reduce are reduced in another dtype, with the same
result. Gathered blocks of several sizes are padded to the largest, and exchanged blocks are joined in one tensor.

Do not add other backends of torch's: each has a module of its own.
"""

from __future__ import annotations

import json
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

from torchdist_ref.backends.base import Membership
from torchdist_ref.backends.operands import flat_operands, refuse_unsupported
from torchdist_ref.backends.reductions import WIDENED, check, divide, reduction
from torchdist_ref.backends.torch_native.backend import TorchBackend, TorchCall, TorchWork, copy_results
from torchdist_ref.backends.torch_native.stores import AddressStore
from torchdist_ref.backends.worker_threads import CallbackRunner, CallbackThreads
from torchdist_ref.calls import AllGather, AllReduce, AllToAll, Barrier, Call, Recv, Reduce, ReduceScatter, Send
from torchdist_ref.errors import ArgumentError, UnsupportedError, on_rank
from torchdist_ref.processes.identity import process_identity
from torchdist_ref.stores import PrefixStore, Store

Tensors = Sequence[Tensor]

# Dtypes that Gloo does not reduce, and one that it reduces with the same result.
_WIRE_DTYPES = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
    torch.complex32: torch.complex64,
    **dict.fromkeys(WIDENED - {torch.float16, torch.bfloat16}, torch.float32),
}
# Reductions of bool as reductions of the bytes 0 and 1.
_BOOL_REDUCTIONS = {"sum": "max", "product": "min"}
_SIGN_BIT = torch.iinfo(torch.int64).min


@dataclass(frozen=True)
class ByteExchange(AllToAll):
    """All-to-all of blocks in one tensor, with the number of bytes sent to and received from each rank.

    Gloo takes lists of blocks from torch 2.13 on only.
    """

    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()


class GlooWork(TorchWork):
    """Work of Gloo's, which one thread at a time waits for, and none after it has ended.

    Gloo decrements a message's count of completions at each wait: a second wait would last until the time-out, and
    then break the connection for all calls.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._waiting = threading.Lock()

    def is_over(self) -> bool:
        """See `Work.is_over`. torch's works of messages end only in a wait, for which nobody may be there."""
        if not self._over and self.name in ("send", "recv"):
            self._wait_on_a_thread()
        return super().is_over()

    def _complete_after(self, wait: Callable[[], Any]) -> None:
        # The thread that holds the lock will complete this work. Do not block on the lock: torch's futures complete
        # before its works, and on the same thread.
        if self._waiting.acquire(False):
            try:
                if not self._over:
                    super()._complete_after(wait)
            finally:
                self._waiting.release()


class Gloo(TorchBackend):
    """Backend of torch's Gloo for one group."""

    name = "gloo"
    title = "Gloo"
    kind = GlooWork
    store_type = AddressStore

    def __init__(self, membership: Membership) -> None:
        # A thread that waits must not run callbacks: they may wait for a lock that it holds.
        self._callbacks = CallbackThreads(membership.name)
        super().__init__(membership)

    def _runner_of_callbacks(self) -> CallbackRunner | None:
        """See `TorchBackend._runner_of_callbacks`."""
        return self._callbacks.runner()

    def close(self) -> None:
        """See `Backend.close`."""
        super().close()
        self._callbacks.close()

    def _connect(self) -> Any:
        m = self._membership
        return c10d.ProcessGroupGloo(self._store, m.rank, m.size, timedelta(seconds=m.timeout))

    def _after_connect(self) -> None:
        """Wait until all ranks have read from the store, since a rank that returns may close it.

        Rank 0 may serve the store, so it returns last: it waits until the others need the store no more.
        """
        store, m = self._membership.store, self._membership
        timeout, others = timedelta(seconds=m.timeout), [r for r in range(m.size) if r != m.rank]
        if m.rank == 0:
            connected = store.wait_get([f"connected/{r}" for r in others], timeout) if others else []
            processes = [process_identity(), *(each.decode() for each in connected)]
            store.set("all connected", json.dumps(processes))
            # Read, not only waited for: anybody who reaches the store can set a key, but not seal its value.
            _watching_absent(m, others).wait_get([f"gone on/{r}" for r in others], timeout)
        else:
            (known,) = store.wait_get(["all connected"], timeout, {f"connected/{m.rank}": process_identity()})
            processes = json.loads(known)
            store.set(f"gone on/{m.rank}", b"")
        self._events.watch({r: processes[r] for r in others})

    def _translate(self, call: Call, inputs: Tensors, outputs: Tensors) -> TorchCall:
        if isinstance(call, Send) and call.dst == self._membership.rank:
            raise UnsupportedError(
                f"{call} {self._location()}: Gloo has no messages from a rank to itself. "
                f"Use backend 'ref', or .copy_()."
            )
        if isinstance(call, Recv) and call.src == self._membership.rank:
            raise ArgumentError(
                "recv: Invalid source rank: source rank should not be the same as the rank of the current process"
                f"{on_rank()}. Gloo has no messages from a rank to itself. Use backend 'ref', or .copy_()."
            )
        refuse_unsupported(call, inputs, outputs, self.name, c10d.Backend.backend_capability["gloo"])
        return gloo_call(call, inputs, outputs, self._membership.rank, self._membership.size)

    def _start(self, call: Call, inputs: list[Tensor], outputs: list[Tensor]) -> Any:
        if isinstance(call, ByteExchange):
            source, target, opts = inputs[0], outputs[0], options.AllToAllOptions()
            return self._backend.alltoall_base(target, source, list(call.received), list(call.sent), opts)
        return super()._start(call, inputs, outputs)

    def _message(self, call: Send | Recv, tensors: list[Tensor]) -> list[Tensor]:
        """Return the tensors, with one byte for an empty message, which Gloo refuses."""
        return [tensor if tensor.numel() else torch.zeros(1, dtype=torch.uint8, device="cpu") for tensor in tensors]


def _watching_absent(membership: Membership, others: Sequence[int]) -> Store:
    """Return the group's store, whose waits the end of a rank that has gone on does not end."""
    store, watch = membership.store, membership.watch
    if watch is None or not isinstance(store, PrefixStore):
        return store
    return watch.over(store, lambda: [r for r in others if not store.check([f"gone on/{r}"])])


def gloo_call(call: Call, inputs: Tensors, outputs: Tensors, rank: int, size: int) -> TorchCall:
    """Return a call with operands that Gloo accepts.

    Raises:
        ArgumentError: The reduction is not defined for the dtype.
    """
    match call:
        case AllReduce() | Reduce():
            return _reduce_in_place(call, outputs[0], rank)
        case ReduceScatter():
            return _reduce_scatter(call, inputs, outputs[0], size)
        case AllToAll():
            return _exchange(inputs, outputs, call.uneven)
        case AllGather() if len({t.numel() for t in outputs}) > 1:
            return _padded(call, inputs, outputs)
        case Barrier():
            return TorchCall(call, [], [], _copy_nothing)
    sources, targets = [as_bytes(t) for t in inputs], [as_bytes(t) for t in outputs]
    return TorchCall(call, sources, targets, lambda: copy_results(targets, outputs))


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes: its own memory if that is contiguous, else a copy."""
    contiguous = tensor.contiguous()
    # A tensor of one element, or none, counts as contiguous with any stride.
    return contiguous.as_strided((contiguous.numel(),), (1,)).view(torch.uint8)


def _reduce_in_place(call: AllReduce | Reduce, tensor: Tensor, rank: int) -> TorchCall:
    """Return an all-reduce or reduce; only the root copies the result of a reduce back."""
    check(call.reduction, tensor.dtype, call.op)
    numbers = _numbers(tensor, call.reduction)
    gloo = _with_gloo_reduction(call, tensor.dtype)
    if isinstance(call, Reduce) and call.root != rank:
        return TorchCall(gloo, [numbers], [numbers], _copy_nothing)
    return TorchCall(gloo, [numbers], [numbers], lambda: _copy_numbers(numbers, tensor, call.reduction))


def _reduce_scatter(call: ReduceScatter, inputs: Tensors, output: Tensor, size: int) -> TorchCall:
    """Return an exchange of the blocks, which each rank then reduces itself, in rank order.

    Gloo's own reduce-scatter has no future, never reports completion, and hangs for some small tensors.
    """
    operation = reduction(call.reduction, output.dtype, call.op)
    exchange = _exchange(inputs, [output] * size)
    parts = [row.view(output.dtype) for row in exchange.outputs[0].split([output.nbytes] * size)]

    def reduce_parts() -> bool:
        wide = torch.float32 if output.dtype in WIDENED else output.dtype
        total = parts[0].to(wide)
        for part in parts[1:]:
            operation.into(total, part.to(wide))
        total = divide(total, size) if call.reduction == "avg" else total
        # With one rank, an output that counts as contiguous is itself the exchange's.
        if total.data_ptr() != output.data_ptr():
            output.copy_(total.view(output.shape))
        return True

    return exchange._replace(copy_back=reduce_parts)


def _with_gloo_reduction(call: Any, dtype: torch.dtype) -> Any:
    """Return the call with the reduction that Gloo has to run on its numbers."""
    reduction = _BOOL_REDUCTIONS.get(call.reduction) if dtype is torch.bool else None
    return call if reduction is None else replace(call, reduction=reduction)


def _numbers(tensor: Tensor, reduction: str) -> Tensor:
    """Return a tensor as numbers that Gloo can reduce, in one dimension: its own memory if possible."""
    flat = tensor.contiguous()
    flat = flat.as_strided((flat.numel(),), (1,))
    if flat.dtype is torch.bool:
        return flat.view(torch.uint8)
    flat = flat.to(_WIRE_DTYPES.get(flat.dtype, flat.dtype))
    if flat.is_complex():
        return torch.view_as_real(flat).view(-1)
    return flat ^ _SIGN_BIT if _has_flipped_sign(tensor, reduction) else flat


def _has_flipped_sign(tensor: Tensor, reduction: str) -> bool:
    """Whether the top bit is flipped: unsigned numbers then compare correctly as signed ones."""
    return tensor.dtype is torch.uint64 and reduction in ("min", "max")


def _copy_numbers(numbers: Tensor, tensor: Tensor, reduction: str) -> bool:
    """Copy reduced numbers to the tensor that they came from, unless they are its memory."""
    if numbers.data_ptr() == tensor.data_ptr():
        return False
    if tensor.is_complex():
        numbers = torch.view_as_complex(numbers.view(-1, 2))
    elif tensor.dtype is torch.bool:
        numbers = numbers.view(torch.bool)
    elif _has_flipped_sign(tensor, reduction):
        numbers = numbers ^ _SIGN_BIT
    tensor.copy_(numbers.view(tensor.shape))
    return True


def _padded(call: Call, inputs: Tensors, outputs: Tensors) -> TorchCall:
    """Return a gather of blocks of several sizes, each padded to the longest; receivers know the sizes."""
    longest = max(t.nbytes for t in (*inputs, *outputs))
    sources = [pad(as_bytes(t), (0, longest - t.nbytes)) if t.nbytes < longest else as_bytes(t) for t in inputs]
    targets = [torch.empty(longest, dtype=torch.uint8, device=t.device) for t in outputs]
    used = [row[: tensor.nbytes] for row, tensor in zip(targets, outputs, strict=True)]
    return TorchCall(call, sources, targets, lambda: copy_results(used, outputs))


def _exchange(inputs: Tensors, outputs: Tensors, uneven: bool = False) -> TorchCall:
    """Return an all-to-all of bytes, with all blocks in one tensor on each side."""
    sent, received = (tuple(t.nbytes for t in tensors) for tensors in (inputs, outputs))
    sources, targets = flat_operands(inputs), flat_operands(outputs)
    source = as_bytes(sources[0]) if len(sources) == 1 else torch.cat([as_bytes(t) for t in sources])
    if len(targets) == 1:
        target = as_bytes(targets[0])
        rows: Sequence[Tensor] = [target]
    else:
        # If a rank sends less than is expected, Gloo reports nothing, and the rest keeps its values.
        target = (
            torch.cat([as_bytes(t) for t in outputs])
            if uneven
            else torch.empty(sum(received), dtype=torch.uint8, device=outputs[0].device)
        )
        rows = target.split(received)
    call = ByteExchange(sent=sent, received=received)
    return TorchCall(call, [source], [target], lambda: copy_results(rows, targets))


def _copy_nothing() -> bool:
    """Return False: there is nothing to copy."""
    return False
