"""Memory of a CUDA device that another process can use where it lies (CUDA IPC), as far as torch offers it.

torch pickles a CUDA tensor for `multiprocessing` as a handle of its memory, and whoever unpickles that has a tensor in
the same memory. It counts who has: memory that is freed while others still have it stays until they let go. An export
is for one process, and one that nobody opens keeps the memory until the exporter ends; `backends.ref.one_gpu` exports
one stage a group, once for each peer, and only when all peers are known to be on that device. Sources: torch's page
"Multiprocessing package" (sharing CUDA tensors), CUDA's programming guide (interprocess communication).
Don't add knowledge of groups or calls here.
"""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Protocol

import torch

# Importing it is what teaches the pickler above about tensors.
import torch.multiprocessing  # noqa: F401
from torch import Tensor


class DeviceMemory(Protocol):
    """What it takes to share memory of a device between processes."""

    def name(self, device: torch.device) -> str:
        """The same text in two processes if and only if an export of the one can be opened in the other."""

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """Memory that can be exported, as a tensor of bytes. Raises if there is none."""

    def export(self, tensor: Tensor) -> bytes:
        """What one other process needs to open the tensor. Raises if this memory can't be exported."""

    def open(self, exported: bytes) -> Tensor:
        """The tensor that another process has exported. Raises if it can't be had here."""


class CudaIpc:
    """`DeviceMemory` of CUDA devices.

    Devices that can't do it say so by an exception at `export` or at `open`: some integrated ones, allocators other
    than torch's default one (``cudaMallocAsync``), and expandable segments where processes may not pass descriptors.
    """

    def name(self, device: torch.device) -> str:
        """The device's own number in the world, and the one that it goes by here, which torch's handles rely on."""
        return f"{torch.cuda.get_device_properties(device).uuid} as {device}"

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """See `DeviceMemory`."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def export(self, tensor: Tensor) -> bytes:
        """See `DeviceMemory`."""
        return bytes(ForkingPickler.dumps(tensor))

    def open(self, exported: bytes) -> Tensor:
        """See `DeviceMemory`."""
        opened: Tensor = pickle.loads(exported)
        return opened
