"""CUDA IPC: memory of a CUDA device that several processes use.

torch pickles a CUDA tensor for `multiprocessing` as a handle of its memory, and unpickling yields a tensor in the same
memory. torch counts the processes that hold the memory: freed memory is reused only when all of them have released it,
and when the exporter next looks (`CudaIpc.collect`). An export is for one process, and an export that is never opened
holds the memory until the exporter ends. Sources: torch's page "Multiprocessing package" (sharing CUDA tensors), CUDA's
programming guide (interprocess communication).

This module and `backends.torch_native.nccl` are the only ones that use what CUDA alone has.
"""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler

import torch

# The import registers tensors with ForkingPickler.
import torch.multiprocessing  # noqa: F401
from torch import Tensor

from torchdist_ref.transports.registered_memory import DeviceMemory


class CudaIpc:
    """`DeviceMemory` of CUDA devices.

    Attributes:
        device: Type of its devices.

    `export` or `open` raises on devices and allocators without CUDA IPC: some integrated devices, allocators other than
    torch's default one (``cudaMallocAsync``), and expandable segments where processes may not pass descriptors.
    """

    device = "cuda"

    def name(self, device: torch.device) -> str:
        """See `DeviceMemory.name`. torch's handles depend on the device's index in this process."""
        return f"{torch.cuda.get_device_properties(device).uuid} as {device}"

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """See `DeviceMemory.empty`. Buffers of earlier groups are given back first, since peers release them late."""
        self.collect()
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def export(self, tensor: Tensor) -> bytes:
        """See `DeviceMemory.export`."""
        return bytes(ForkingPickler.dumps(tensor))

    def open(self, exported: bytes) -> Tensor:
        """See `DeviceMemory.open`."""
        opened: Tensor = pickle.loads(exported)
        return opened

    def collect(self) -> None:
        """See `DeviceMemory.collect`."""
        torch.cuda.ipc_collect()


MEMORIES: dict[str, DeviceMemory] = {CudaIpc.device: CudaIpc()}
"""How processes share the memory of a type of device; a package that registers a device may add its own."""
