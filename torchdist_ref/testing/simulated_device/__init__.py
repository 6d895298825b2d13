"""A simulated accelerator: device `sim` with streams, events and memory of its own, computed by the CPU."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import backend_registration

from torchdist_ref.testing.simulated_device import torch_sim
from torchdist_ref.testing.simulated_device.building import BuildError, build

__all__ = ["BuildError", "delay", "install"]

MOST_DEVICES = 64
installed: dict[str, Any] = {}


def install(devices: int = 4, delay: str | int = "late", memory: int = 16 << 30) -> types.ModuleType:
    """Register the simulated accelerator with torch, as devices ``sim:0``, ``sim:1`` …, and return ``torch.sim``.

    Args:
        devices: number of devices, 1 to 64.
        delay: when operations run. "late": not before something waits for them. "none": at once. A number: at random
            times, which the number seeds.
        memory: size of each device's memory in bytes. Pages that are not touched cost nothing.
    """
    if not 1 <= devices <= MOST_DEVICES:
        raise ValueError(f"devices must be 1 to {MOST_DEVICES}, not {devices}")
    wanted = {"devices": devices, "memory": memory}
    if installed and installed != wanted:
        raise RuntimeError(
            f"the simulated device is installed with {installed['devices']} devices of {installed['memory']} bytes in "
            f"this process, which can't be changed to {devices} of {memory}: use another process"
        )
    if not installed:
        name = torch._C._get_privateuse1_backend_name()  # noqa: SLF001
        if name != "privateuseone":
            raise RuntimeError(f"torch takes one additional device type for each process, and it is {name}")
        torch.ops.load_library(str(build()))
        torch.ops.simulated_device.configure(devices, memory)
        backend_registration.rename_privateuse1_backend("sim")
        torch._register_device_module("sim", torch_sim)  # noqa: SLF001
        backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
        sys.modules["torch.sim"] = torch_sim
        installed.update(wanted)
    set_delay(delay)
    return torch_sim


def set_delay(delay: str | int) -> None:
    """Choose when operations run from now on: see `install`."""
    if delay not in ("late", "none") and not (isinstance(delay, int) and not isinstance(delay, bool)):
        raise ValueError(f"delay must be 'late', 'none' or a seed, not {delay!r}")
    seed = delay if isinstance(delay, int) else 0
    torch.ops.simulated_device.set_delay(delay == "late", isinstance(delay, int), seed)


@contextlib.contextmanager
def delay(delay: str | int) -> Iterator[None]:
    """Choose when operations run in a block."""
    set_delay(delay)
    try:
        yield
    finally:
        set_delay("late")
