"""GPUs and processors of this host, counted and matched without torch: NVIDIA's and AMD's drivers, and Linux' sysfs.

Do not add devices that only a library can count: the launcher loads none but NVIDIA's management library.
"""

from __future__ import annotations

import ctypes
import glob
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torchdist_ref.errors import ArgumentError

BINDINGS = ("node", "socket", "exclusive", "core-complex")
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True)
class NumaOptions:
    """Binding of workers to processors; torch's class of this name serves as well.

    Attributes:
        affinity_mode: One of `BINDINGS`.
    """

    affinity_mode: str


def count_cpus() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_gpus(root: str = "/", environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of GPUs that a program of this host sees.

    Args:
        root: Folder of ``proc``, ``dev`` and ``sys``.
        environment: Environment of the program.
    """
    installed = (_count_with_nvml() if root == "/" else 0) or _count_files(root)
    for name in _VISIBLE:
        if name in environment:
            return _count_visible(environment[name], installed)
    return installed


def _count_visible(listed: str, installed: int) -> int:
    """Return how many listed devices count: those before the first that does not exist."""
    for index, device in enumerate(part.strip() for part in listed.split(",")):
        named = device.startswith(("GPU-", "MIG-"))
        if not named and not (device.isdecimal() and int(device) < installed):
            return index
    return min(len(listed.split(",")), installed) if "MIG-" not in listed else len(listed.split(","))


def _count_with_nvml() -> int:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return 0
    library.nvmlShutdown()
    return count.value


def _count_files(root: str) -> int:
    nvidia = glob.glob(os.path.join(root, "proc/driver/nvidia/gpus/*")) or glob.glob(
        os.path.join(root, "dev/nvidia[0-9]*")
    )
    amd = glob.glob(os.path.join(root, "sys/class/kfd/kfd/topology/nodes/*/gpu_id"))
    return len(nvidia) or sum(_read(Path(path)) not in ("", "0") for path in amd)


def processors_near_gpu(local_rank: int, mode: str, root: str = "/") -> tuple[int, ...]:
    """Return the processors to which the worker of a GPU is bound.

    Args:
        local_rank: Rank among the workers of this host, and index of its GPU.
        mode: One of `BINDINGS`: all of the GPU's NUMA node, all of its socket, an equal share of the node's cores, or
            the processors of one level-3 cache of the node.
        root: Folder of ``proc`` and ``sys``.

    Raises:
        ArgumentError: The GPU or its NUMA node is unknown.
    """
    gpus = sorted(Path(path).name for path in glob.glob(os.path.join(root, "proc/driver/nvidia/gpus/*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    index = int(visible[local_rank]) if local_rank < len(visible) and visible[local_rank].isdecimal() else local_rank
    if index >= len(gpus):
        raise ArgumentError(
            f"--numa-binding {mode}: local rank {local_rank} has no NVIDIA GPU on this host; leave out the option"
        )
    nodes = [_node(root, gpu) for gpu in gpus]
    processors = _processors(root, nodes[index])
    if mode == "socket":
        package = _package(root, processors[0])
        return tuple(cpu for cpu in _all_processors(root) if _package(root, cpu) == package)
    sharing = [other for other, node in enumerate(nodes) if node == nodes[index]]
    place = sharing.index(index)
    if mode == "exclusive":
        cores = _groups(root, processors, "topology/thread_siblings_list")
        first, last = (len(cores) * share // len(sharing) for share in (place, place + 1))
        return tuple(sorted(cpu for core in cores[first:last] for cpu in core)) or processors
    if mode == "core-complex":
        caches = _groups(root, processors, "cache/index3/shared_cpu_list")
        return caches[place % len(caches)]
    return processors


def _node(root: str, gpu: str) -> int:
    text = _read(Path(root, "sys/bus/pci/devices", gpu.lower(), "numa_node"))
    # A host without NUMA reports -1.
    return max(0, int(text or -1))


def _processors(root: str, node: int) -> tuple[int, ...]:
    text = _read(Path(root, f"sys/devices/system/node/node{node}/cpulist"))
    return _allowed(root, parse_list(text)) if text else _all_processors(root)


def _all_processors(root: str) -> tuple[int, ...]:
    return _allowed(root, parse_list(_read(Path(root, "sys/devices/system/cpu/online"))))


def _allowed(root: str, processors: Iterable[int]) -> tuple[int, ...]:
    own = os.sched_getaffinity(0) if root == "/" else None
    return tuple(sorted(cpu for cpu in processors if own is None or cpu in own))


def _package(root: str, cpu: int) -> str:
    return _read(Path(root, f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"))


def _groups(root: str, processors: tuple[int, ...], file: str) -> list[tuple[int, ...]]:
    """Return the processors in groups of the same text in a file of each, in order."""
    found: dict[str, list[int]] = {}
    for cpu in processors:
        found.setdefault(_read(Path(root, f"sys/devices/system/cpu/cpu{cpu}", file)) or str(cpu), []).append(cpu)
    return [tuple(group) for group in found.values()]


def parse_list(text: str) -> list[int]:
    """Return the numbers of a list in Linux' form.

    >>> parse_list("0-2,8")
    [0, 1, 2, 8]
    """
    parts = (part.partition("-") for part in text.split(",") if part)
    return [number for low, _, high in parts for number in range(int(low), int(high or low) + 1)]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
