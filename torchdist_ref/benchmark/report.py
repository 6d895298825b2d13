"""The report that a program can read: what was measured, where, with what, when. The form is `SCHEMA`.

All times are seconds, all sizes bytes. A change that breaks a reader gets a new number; new keys do not.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torchdist_ref.errors import ArgumentError, explain

SCHEMA = 1
_PACKAGES = ("torch", "torchdist_ref", "numpy", "mpi4py")


def report(
    benchmark: str, settings: Mapping[str, Any], results: Sequence[Mapping[str, Any]], notes: Sequence[str] = ()
) -> dict[str, Any]:
    """Put results together with all that one needs to know in order to believe them.

    Args:
        benchmark: Which command.
        settings: Its options.
        results: Flat entries.
        notes: What else to know, such as what was left out and why.

    Returns:
        A value that JSON can hold.
    """
    return {
        "schema": SCHEMA,
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "settings": dict(settings),
        "machine": machine(),
        "versions": versions(),
        "notes": list(notes),
        "results": list(results),
    }


def check_place(option: str, path: str) -> None:
    """See now, and not after minutes of measuring, whether a file can be written there.

    Raises:
        ArgumentError: It can't.
    """
    target = Path(path)
    if target.is_dir() or not os.access(target if target.exists() else target.parent, os.W_OK):
        expected = "a file that can be written, in a folder that is there"
        raise ArgumentError(explain("benchmark", option, expected, path))


def write(path: str, content: Mapping[str, Any]) -> None:
    """Write a report to a file, readable for people too."""
    Path(path).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """What the figures depend on: the processor, how much of it is ours, and how busy it is."""
    system = platform.uname()
    return {
        "system": f"{system.system} {system.release}",
        "architecture": system.machine,
        "processor": _line_of("/proc/cpuinfo", "model name") or system.processor,
        "processors": os.cpu_count(),
        "processors_for_us": len(os.sched_getaffinity(0)),
        "memory_kib": int((_line_of("/proc/meminfo", "MemTotal") or "0").split()[0]),
        "load_average": list(os.getloadavg()),
    }


def versions() -> dict[str, str]:
    """Of Python, and of the packages that take part."""
    return {"python": sys.version.split()[0], **{name: found for name in _PACKAGES if (found := _version(name))}}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _line_of(path: str, key: str) -> str:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")
