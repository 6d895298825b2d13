"""Accelerators: the devices beside the CPU that torch knows, their streams and events, whatever their type.

Everything here asks the module of a device type (``torch.cuda``, ``torch.xpu``, ``torch.npu``, that of a device which a
package registers), or `torch.accelerator` where a module lacks a function (``torch.mps``). So the library supports each
accelerator that has streams, and its code names none. Tested are CUDA and simulated devices; the others are untested.

CUDA alone has IPC and NCCL: see `transports.cuda_ipc` and `backends.torch_native.nccl`. Do not add knowledge of calls
and groups here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache
from time import monotonic, sleep
from typing import Any

import torch

# A task of a stream mostly ends within this number of questions, each some microseconds.
_QUESTIONS = 64
_LONGEST_SLEEP = 1e-3


def current_type() -> str | None:
    """Return the type of the accelerator that this process can use, such as ``"cuda"``; None if there is none."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else device.type


def usable_types() -> tuple[str, ...]:
    """Return the types of the devices that this process can use, the CPU's first.

    >>> usable_types()[0]
    'cpu'
    """
    found = current_type()
    return ("cpu",) if found is None else ("cpu", found)


def is_accelerator(device: torch.device) -> bool:
    """Return whether tensors of a device are in memory of its own, on which streams work.

    >>> is_accelerator(torch.device("cpu")), is_accelerator(torch.device("meta"))
    (False, False)
    """
    kind = device.type
    return kind != "cpu" and (hasattr(module_of(device), "current_stream") or kind == current_type())


def devices_of(tensors: Iterable[Any]) -> set[torch.device]:
    """Return the accelerators that some tensors are on."""
    return {tensor.device for tensor in tensors if not tensor.is_cpu and is_accelerator(tensor.device)}


def module_of(device: torch.device) -> Any:
    """Return torch's module for a type of device; None if there is none."""
    return getattr(torch, device.type, None)


def count() -> int:
    """Return the number of accelerators that this process can use."""
    return torch.accelerator.device_count()


def is_initialized() -> bool:
    """Return whether this process has started its accelerator, so that a forked child could not use it."""
    device = torch.accelerator.current_accelerator()
    started: Callable[[], bool] | None = None if device is None else getattr(module_of(device), "is_initialized", None)
    return started is not None and started()


def current_stream(device: torch.device) -> Any:
    """Return the stream of a device on which this thread's tasks run."""
    return getattr(module_of(device), "current_stream", torch.accelerator.current_stream)(device)


@cache
def side_stream(device: torch.device) -> Any:
    """Return the stream of asynchronous calls: on one of the program's own they would wait for the program's tasks."""
    return getattr(module_of(device), "Stream", torch.Stream)(device=device)


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Return a context in which this thread's tasks run on a stream."""
    found: AbstractContextManager[Any] = getattr(module_of(stream.device), "stream", lambda each: each)(stream)
    return found


def is_capturing(device: torch.device) -> bool:
    """Return whether this thread's tasks on a device are recorded in a graph, and do not run."""
    ask: Callable[[], bool] | None = getattr(module_of(device), "is_current_stream_capturing", None)
    return ask is not None and ask()


def finish(stream: Any, seconds: float) -> bool:
    """Wait until the tasks that a stream has now are over, or for so many seconds; return whether they are over.

    An event has no wait with a time-out, and ``synchronize`` ignores Ctrl-C. So this asks the event again and again.
    """
    event, end, pause = stream.record_event(), monotonic() + seconds, 0.0
    for _ in range(_QUESTIONS):
        if event.query():
            return True
    while not event.query():
        if monotonic() > end:
            return False
        pause = min(_LONGEST_SLEEP, pause * 2 or 2e-5)
        sleep(pause)
    return True
