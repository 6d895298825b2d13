"""Stand-ins for devices, on the CPU: streams that run no task before a wait, and tensors of them.

No device delays tasks longer, so code that forgets to wait reads old values for sure. Code that uses an address of the
device on the host, or computes with tensors of both, gets an error, as with a device.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from torchdist_ref.backends import operands
from torchdist_ref.backends.ref import contiguous, one_gpu
from torchdist_ref.groups import arguments
from torchdist_ref.torch_internals import accelerators
from torchdist_ref.transports import registered_memory

HOST = torch.device("cpu")


class Stream:
    """Queue of tasks that run when something waits for them."""

    def __init__(self, device: torch.device = HOST) -> None:
        self.device = device
        self._tasks: list[Callable[[], object]] = []
        self._running = threading.RLock()

    @property
    def idle(self) -> bool:
        return not self._tasks

    def put(self, task: Callable[[], object]) -> None:
        self._tasks.append(task)

    def run_until(self, over: Callable[[], bool]) -> None:
        with self._running, torch._C.DisableTorchFunctionSubclass():
            while not over():
                self._tasks.pop(0)()

    def synchronize(self) -> None:
        self.run_until(lambda: self.idle)

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.put(event.synchronize)


class Event:
    """Position in the queue of a stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._over = stream, threading.Event()
        stream.put(self._over.set)

    def synchronize(self) -> None:
        self._stream.run_until(self._over.is_set)

    def query(self) -> bool:
        """Run the tasks before this event: whoever asks again and again waits for it."""
        self.synchronize()
        return True


_of_thread = threading.local()


def current_stream(device: object = None) -> Stream:
    """Return the stream of this thread; waits of other threads run none of its tasks."""
    if not hasattr(_of_thread, "stream"):
        _of_thread.stream = Stream()
    found: Stream = _of_thread.stream
    return found


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    before, _of_thread.stream = current_stream(), stream
    try:
        yield
    finally:
        _of_thread.stream = before


class OnDevice(Tensor):
    """Tensor of the simulated device: all computations with it are queued."""

    is_cpu = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if func is Tensor.data_ptr:
            # Addresses may be compared, to see whether tensors overlap. Two modules and a function do that, and read
            # no memory.
            callers = sys._getframe(1).f_code, sys._getframe(2).f_code
            compared = any(
                code.co_filename in (operands.__file__, arguments.__file__) or code.co_name == "submit_repeated"
                for code in callers
            )
            assert compared, "an address of the device is none of the host's"
        into = kwargs.get("out", args[0] if name.endswith("_") and not name.endswith("__") else None)
        if into is not None:
            _together(name, (*args, *kwargs.values()))
            current_stream().put(lambda: func(*args, **kwargs))
            if name == "copy_" and not (kwargs.get("non_blocking") or args[2:]) and not _all_here(args[:2]):
                current_stream().synchronize()
            return into
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, Tensor) and not any(_views(result, arg) for arg in args):
            _together(name, args)
            current_stream().put(lambda: result.copy_(func(*args, **kwargs)))
        return result


def _tensors(operands: Any) -> list[Tensor]:
    return [operand for operand in operands if isinstance(operand, Tensor) and operand.dim()]


def _all_here(operands: Any) -> bool:
    return len({type(tensor) for tensor in _tensors(operands)}) < 2


def _together(name: str, operands: Any) -> None:
    assert name == "copy_" or _all_here(operands), f"{name} of tensors of the device and of the host"


def _views(result: Tensor, operand: Any) -> bool:
    if not isinstance(operand, Tensor):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return result.untyped_storage().data_ptr() == operand.untyped_storage().data_ptr()


def on_device(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(OnDevice)


def to_be_doubled(tensor: Tensor) -> Tensor:
    """Queue the doubling of a tensor on the caller's stream."""
    return tensor.mul_(2)


def seen_by_host(tensor: Tensor) -> Tensor:
    """Return the present values, whatever tasks are queued."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor).clone()


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the device to this process and those forked from it; its memory cannot be shared by ranks."""
    monkeypatch.setattr(accelerators, "is_accelerator", lambda device: True)
    monkeypatch.setattr(accelerators, "current_stream", current_stream)
    monkeypatch.setattr(accelerators, "on_stream", on_stream)
    monkeypatch.setattr(accelerators, "side_stream", Stream)
    monkeypatch.setattr(contiguous, "pinned", lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
    share_memory_by(Nameless(), monkeypatch)


def share_memory_by(memory: SharedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(one_gpu.MEMORIES, HOST.type, memory)


class SharedDevice:
    """`DeviceMemory` of the stand-in, which is registered memory of the host."""

    collected = 0

    def name(self, device: torch.device) -> str:
        return "the one device"

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        return on_device(registered_memory.empty((nbytes,), torch.uint8))

    def export(self, tensor: Tensor) -> bytes:
        with torch._C.DisableTorchFunctionSubclass():
            return pickle.dumps((os.getpid(), registered_memory.handle_of(tensor)))

    def open(self, exported: bytes) -> Tensor:
        pid, handle = pickle.loads(exported)
        return on_device(registered_memory.PeerMemory(pid).view(handle, torch.uint8, handle.end - handle.begin))

    def collect(self) -> None:
        self.collected += 1


class Separate(SharedDevice):
    """Device whose memory no other process can map."""

    def export(self, tensor: Tensor) -> bytes:
        raise RuntimeError("not exported")


class Nameless(SharedDevice):
    """Device without an identity."""

    def name(self, device: torch.device) -> str:
        raise AttributeError("uuid")
