"""Memory of simulated devices that several processes use, as `transports.cuda_ipc` has it for CUDA.

With it, collectives of ranks whose tensors are on one simulated device take the way that they take on one GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchdist_ref.testing.simulated_device import torch_sim
from torchdist_ref.transports.cuda_ipc import MEMORIES


class SimulatedIpc:
    """`DeviceMemory` of simulated devices. A device of a number is one device for all processes of a host."""

    def name(self, device: torch.device) -> str:
        """See `DeviceMemory.name`."""
        return f"simulated device {device.index}"

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """See `DeviceMemory.empty`."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def export(self, tensor: Tensor) -> bytes:
        """See `DeviceMemory.export`."""
        return torch_sim.ipc_handle(tensor).encode()

    def open(self, exported: bytes) -> Tensor:
        """See `DeviceMemory.open`."""
        return torch_sim.open_ipc_handle(exported.decode())

    def collect(self) -> None:
        """See `DeviceMemory.collect`. A block is free as soon as its process drops it, even if others map it."""


def register() -> None:
    """Let collectives share memory of simulated devices between processes."""
    MEMORIES["sim"] = SimulatedIpc()
