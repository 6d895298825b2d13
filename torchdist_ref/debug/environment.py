"""Report of the machine and the process that ranks run in: the answer of ``python -m torchdist_ref env``.

A report of a defect needs the same twenty facts each time: versions, how torch was built, cores, memory, shared memory,
limits, devices, backends, and the variables that change what the library does. Values of secrets are not shown.

Do not add what a running job does: that is in the dumps of the flight recorder.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as c10d

from torchdist_ref.processes.identity import has_no_proc, host_identity
from torchdist_ref.schedules import choose
from torchdist_ref.torch_internals.accelerators import current_type
from torchdist_ref.transports import registered_memory

Report = dict[str, dict[str, str]]
"""Facts by section and name, in the order in which they are printed."""
_VARIABLES = re.compile(
    r"((TORCHDIST_REF|TORCH|NCCL|GLOO|UCC|MASTER|GROUP|ROLE|LOCAL)_\w+|RANK|WORLD_SIZE|(OMP|MKL)_NUM_THREADS"
    r"|\w+_VISIBLE_DEVICES)$"
)
_SECRETS = ("TOKEN", "SECRET", "PASSWORD")
_MIB = 1 << 20
_LIMITS = {
    "open files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
    "address space": resource.RLIMIT_AS,
}
_SIZES = {"4 B": 4, "64 KiB": 64 << 10, "1 MiB": _MIB, "16 MiB": 16 * _MIB}


def report(root: str = "/", environment: Mapping[str, str] | None = None) -> Report:
    """Return what this machine and this process offer to ranks.

    Args:
        root: Folder that has the system's ``proc``, ``sys`` and ``dev``. Default: the real ones.
        environment: Variables. Default: those of this process.

    Example:
        >>> from torchdist_ref.debug.environment import report
        >>> list(report())
        ['versions', 'machine', 'limits', 'devices', 'backends', 'choice of ref', 'variables']
    """
    given = os.environ if environment is None else environment
    return {
        "versions": _versions(),
        "machine": _machine(Path(root)),
        "limits": {name: _limit(which) for name, which in _LIMITS.items()},
        "devices": _devices(),
        "backends": _backends(),
        "choice of ref": _choice(),
        "variables": {
            name: "(set; not shown)" if any(secret in name for secret in _SECRETS) else value
            for name, value in sorted(given.items())
            if _VARIABLES.match(name)
        },
    }


def text(found: Report) -> str:
    """Return a report as lines, with a heading for each section.

    >>> print(text({"limits": {"open files": "1024"}, "variables": {}}))
    limits
      open files  1024
    variables
      (none)
    """
    lines = []
    for section, facts in found.items():
        width = max(map(len, facts), default=0)
        lines += [section, *(f"  {name:<{width}}  {value}" for name, value in facts.items())]
        if not facts:
            lines.append("  (none)")
    return "\n".join(lines)


def _versions() -> dict[str, str]:
    # Besides versions of toolkits the module has these.
    others = ("git_version", "debug", "annotations")
    kinds = {
        name: value
        for name, value in vars(torch.version).items()
        if isinstance(value, str) and not name.startswith("_") and name not in others
    }
    built = ", ".join(f"{kind} {value}" for kind, value in kinds.items()) or "the CPU"
    return {
        "torchdist_ref": sys.modules["torchdist_ref"].__version__,
        "Python": f"{platform.python_version()}, {platform.python_implementation()}",
        "torch": f"{torch.__version__}, built for {built}",
        "C library": " ".join(platform.libc_ver()).strip() or "unknown",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
    }


def _machine(root: Path) -> dict[str, str]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    identity = host_identity()
    return {
        "cores": f"{usable} usable of {os.cpu_count()}",
        "threads of torch": str(torch.get_num_threads()),
        "memory": _read(root / "proc/meminfo", lambda content: f"{_kib(content, 'MemTotal')} MiB"),
        "free memory": _read(root / "proc/meminfo", lambda content: f"{_kib(content, 'MemAvailable')} MiB"),
        "limit of the container": _read(root / "sys/fs/cgroup/memory.max", _container_limit),
        "free in /dev/shm": _free(root / "dev/shm"),
        "shared memory of ranks": "anonymous files (memfd)" if registered_memory.available() else "not available",
        "huge pages": _read(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled", _chosen),
        "tracing of processes": _read(
            root / "proc/sys/kernel/yama/ptrace_scope", lambda level: f"ptrace_scope {level}"
        ),
        "ranks of this host share memory": "no: there is no /proc of this namespace"
        if has_no_proc(identity)
        else "yes",
    }


def _devices() -> dict[str, str]:
    kind = current_type()
    if kind is None:
        return {}
    module = getattr(torch, kind)
    name: Callable[[int], str] = getattr(module, "get_device_name", lambda number: kind)
    return {f"{kind}:{number}": str(name(number)) for number in range(torch.accelerator.device_count())}


def _backends() -> dict[str, str]:
    mpi = "torch's" if c10d.is_mpi_available() else "by mpi4py" if _has_module("mpi4py") else "no"
    return {
        "ref": "yes",
        "gloo": "yes" if c10d.is_gloo_available() else "no",
        "nccl": "yes" if c10d.is_nccl_available() else "no",
        "mpi": mpi,
    }


def _choice() -> dict[str, str]:
    """Return the algorithms of an all_reduce of four ranks, on one host and on two."""
    found = {}
    for place, hosts in (("one host", (0, 0, 0, 0)), ("two hosts", (0, 0, 1, 1))):
        chosen = ", ".join(f"{label}: {choose('all_reduce', 4, size, hosts=hosts)}" for label, size in _SIZES.items())
        found[f"all_reduce, 4 ranks, {place}"] = chosen
    return found


def _limit(which: int) -> str:
    soft, hard = resource.getrlimit(which)
    shown = ["unlimited" if value == resource.RLIM_INFINITY else str(value) for value in (soft, hard)]
    return f"{shown[0]} (at most {shown[1]})"


def _read(path: Path, say: Callable[[str], str]) -> str:
    try:
        return say(path.read_text(encoding="utf-8").strip())
    except (OSError, ValueError):
        return "unknown"


def _kib(content: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", content, re.MULTILINE)
    if found is None:
        raise ValueError(name)
    return int(found[1]) >> 10


def _container_limit(content: str) -> str:
    return "none" if content == "max" else f"{int(content) // _MIB} MiB"


def _chosen(content: str) -> str:
    found = re.search(r"\[(\w+)\]", content)
    return found[1] if found else content


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free // _MIB} MiB"
    except OSError:
        return "there is none"


def _has_module(name: str) -> bool:
    # Only to look: an import of mpi4py starts MPI.
    return find_spec(name) is not None


def main() -> int:
    """Print the report of this machine and process."""
    sys.stdout.write(text(report()) + "\n")
    return 0
