"""Simulated accelerator: device `sim` with streams, events and memory of its own, computed by the CPU.

`install` registers it with torch; from then on ``torch.ones(2, device="sim:1")`` works, and `torch.accelerator` and
`torch.sim` have the functions that `torch.cuda` has for CUDA. It shows mistakes in the order of operations: a stream
holds its operations back until something waits for them, so code that forgot to wait gives wrong numbers, every time.
`device.cpp` explains how.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils import backend_registration

from torchdist_ref.backends import register_with_torch
from torchdist_ref.testing.simulated_device import ipc, layers, torch_sim
from torchdist_ref.testing.simulated_device.building import BuildError, build

__all__ = ["BuildError", "StreamSpan", "delay", "install", "timeline"]

MOST_DEVICES = 64
# What this process has installed: torch keeps a device type until the process ends.
installed: dict[str, Any] = {}


class StreamSpan(NamedTuple):
    """Operation of a stream, in virtual microseconds since the timeline began.

    An operation begins once it was submitted, the operation before it in the stream has ended, and the events that the
    stream waits for have passed. It lasts 5 microseconds, and one more for each 10,000 bytes of its result. So the
    times follow from the program's order alone, and are the same in each run.

    Attributes:
        device: index of the device.
        stream: id of the stream; 0 is the device's default stream.
        name: kind of operation, such as "add" or "copy to host".
        submitted: time at which the program submitted it; negative if that was before the timeline began.
        begin: time at which it began.
        end: time at which it ended.
    """

    device: int
    stream: int
    name: str
    submitted: float
    begin: float
    end: float


def install(devices: int = 4, delay: str | int = "late", memory: int = 16 << 30) -> types.ModuleType:
    """Register the simulated accelerator with torch, as devices ``sim:0``, ``sim:1`` …, and return ``torch.sim``.

    The first call on a machine compiles the device, which takes half a minute. A process keeps it until it ends: a
    second call may change `delay` only.

    Args:
        devices: number of devices, 1 to 64.
        delay: when operations run. "late": not before something waits for them. "none": at once, or as soon as what
            they wait for has run. A number: at random times, drawn with this seed.
        memory: size of each device's memory, in bytes. Pages that are never touched cost nothing.

    Raises:
        BuildError: there is no C++ compiler, it fails, or this version of torch is not known.
        RuntimeError: the process has the device with other numbers, or a device of another package in its place.
    """
    if not 1 <= devices <= MOST_DEVICES:
        raise ValueError(f"devices must be 1 to {MOST_DEVICES}, not {devices}")
    check_delay(delay)
    wanted = {"devices": devices, "memory": memory}
    if installed and {name: installed[name] for name in wanted} != wanted:
        raise RuntimeError(
            f"this process has {installed['devices']} simulated devices of {installed['memory']} bytes, which can't be "
            f"changed to {devices} of {memory}: use another process"
        )
    if not installed:
        name = torch._C._get_privateuse1_backend_name()  # noqa: SLF001
        if name != "privateuseone":
            raise RuntimeError(
                f"torch takes one additional type of device per process, and {name} is registered already"
            )
        torch.ops.load_library(str(build()))
        torch.ops.simulated_device.configure(devices, memory)
        backend_registration.rename_privateuse1_backend("sim")
        torch._register_device_module("sim", torch_sim)  # noqa: SLF001
        backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
        sys.modules["torch.sim"] = torch_sim
        ipc.register()
        layers.register()
        installed.update(wanted)
        # torch's own groups on `ref` use it for the new type of device from now on.
        register_with_torch()
    set_delay(delay)
    return torch_sim


def check_delay(delay: str | int) -> None:
    """Raise ValueError for a delay that is none."""
    if delay not in ("late", "none") and (isinstance(delay, bool) or not isinstance(delay, int)):
        raise ValueError(f"delay must be 'late', 'none' or a seed, not {delay!r}")


def set_delay(delay: str | int) -> None:
    """Choose when operations run from now on."""
    check_delay(delay)
    drawn = isinstance(delay, int)
    torch.ops.simulated_device.set_delay(delay == "late", drawn, delay if drawn else 0)
    installed["delay"] = delay


@contextlib.contextmanager
def delay(delay: str | int) -> Iterator[None]:
    """Choose when operations run in a block: see `install`."""
    before = installed["delay"]
    set_delay(delay)
    try:
        yield
    finally:
        set_delay(before)


@contextlib.contextmanager
def timeline() -> Iterator[list[StreamSpan]]:
    """Record the operations that run in a block; the list is filled at its end, in the order of their beginnings.

    Operations that nothing has waited for at the end of the block are missing: synchronize the devices in the block.
    """
    spans: list[StreamSpan] = []
    torch.ops.simulated_device.start_timeline()
    try:
        yield spans
    finally:
        recorded = [StreamSpan(*each) for each in torch.ops.simulated_device.stop_timeline()]
        spans.extend(sorted(recorded, key=lambda span: (span.begin, span.submitted)))
