"""Table of the names below the top level of `torch.distributed` 2.15, beside ours, as data and as a page.

It covers methods of classes, and modules that programs import; `surface_table` covers the top level. The names are in
torch_2_15_members.json with their signatures. `python -m tests.groups.member_table` writes the signatures (under torch
2.15) and the page docs/reference/surface_members.md; a test compares both.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch

# Its default groups are those of the moment of its import, which is before any test makes one.
import torch.distributed.nn.functional
from torchdist_ref.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

import torchdist_ref as dist
from tests.groups.surface_table import VERSION, Signature, signature
from tests.torch_versions import torch_has
from torchdist_ref.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torchdist_ref.testing import run

HERE = Path(__file__).parent
SNAPSHOT = HERE / "torch_2_15_members.json"
PAGE = HERE.parents[1] / "docs" / "reference" / "surface_members.md"
THEIRS = {"DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel"}
OURS = {"DistributedDataParallel": "torchdist_ref.DistributedDataParallel"}

# Names that ours does without, by pattern, and why. The first that fits counts; each has to fit something.
ABSENT = {
    r"Backend\.backend_(list|type_map)": "Lists that torch's own code keeps. `is_backend_available` asks for one.",
    r"DistributedDataParallel\.broadcast_buffers": "Each object has it.",
    r"Work\.timeout": "A group's `timeout` is that of its calls; `wait` takes another.",
}
# Where ours takes other parameters, and why.
DIFFERENT = {
    r"Backend\.register_backend": "torch's further parameter, which begins with an underscore, is private to torch.",
    r"rendezvous\.rendezvous": "Further keyword arguments are collected under another name, which no caller sees.",
    r"device_mesh\.DeviceMesh": "torch's further parameters, which begin with an underscore, are private to torch.",
    r".*\.PowerSGDState": "Two parameters more, at the end, for what torch's does not have.",
}


def known() -> dict[str, Signature | None]:
    """Return the names below torch.distributed, with torch 2.15's signatures, as kept."""
    kept: dict[str, Signature | None] = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    return kept


def find(name: str, package: str, homes: dict[str, str]) -> Any:
    """Return what a dotted name means below a package.

    Raises:
        AttributeError: Nothing.
    """
    first, _, rest = name.partition(".")
    parts = (homes.get(first, f"{package}.{first}") + (f".{rest}" if rest else "")).split(".")
    for length in range(len(parts), 0, -1):
        with contextlib.suppress(ImportError):
            found = importlib.import_module(".".join(parts[:length]))
            for part in parts[length:]:
                found = getattr(found, part)
            return found
    raise AttributeError(name)


def has(value: Any, name: str) -> bool:
    """Return whether an object has an attribute, even if reading it raises."""
    try:
        return hasattr(value, name)
    except RuntimeError:
        return True


@cache
def objects() -> dict[str, frozenset[str]]:
    """Return the names that objects have, where classes do not show them: attributes, and what is passed on."""

    def names(rank: int) -> dict[str, frozenset[str]]:
        group = dist.group.WORLD
        work = dist.all_reduce(torch.ones(1), async_op=True)
        assert work is not None and group is not None
        work.wait()
        shown = {
            "ProcessGroup": group,
            "Work": work,
            "BuiltinCommHookType": dist.BuiltinCommHookType.ALLREDUCE,
            "algorithms.ddp_comm_hooks.powerSGD_hook.PowerSGDState": PowerSGDState(None),
            "algorithms.ddp_comm_hooks.post_localSGD_hook.PostLocalSGDState": PostLocalSGDState(None, None, 1, False),
        }
        wanted = {owner: [n.removeprefix(owner + ".") for n in known() if n.startswith(owner + ".")] for owner in shown}
        return {owner: frozenset(n for n in wanted[owner] if has(shown[owner], n)) for owner in shown}

    return run(names, 1)[0]


def row(name: str) -> tuple[str, str]:
    """Return what ours has for a name, and why."""
    theirs_is = known()[name]
    try:
        found = find(name, "torchdist_ref", OURS)
    except AttributeError:
        owner, _, last = name.rpartition(".")
        if last in objects().get(owner, ()):
            return "on objects", ""
        return "absent", reason(name, ABSENT)
    if getattr(found, "__module__", "torchdist_ref").startswith("torch."):
        return "torch's own", ""
    if theirs_is is None or signature(found) is None:
        return "same name", ""
    if signature(found) == theirs_is:
        return "as torch's", ""
    return "other parameters", reason(name, DIFFERENT)


def reason(name: str, table: dict[str, str]) -> str:
    """Return the reason of a name in a table, or nothing."""
    return next((why for pattern, why in table.items() if re.fullmatch(pattern, name)), "")


@cache
def rows() -> dict[str, tuple[str, str]]:
    """Return all rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: row(name) for name in sorted(known())}


def installed() -> dict[str, Signature | None]:
    """Return the installed torch's signatures of the names that are kept; None for what is not there or shows none."""
    found: dict[str, Signature | None] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in known():
            try:
                found[name] = lasting(signature(find(name, "torch.distributed", THEIRS)))
            except AttributeError:
                found[name] = None
    return found


def newer() -> set[str]:
    """Return the names that are absent here because the installed torch, older than the table, lacks them too."""
    if torch_has(VERSION):
        return set()
    return {name for name, (state, _) in rows().items() if state == "absent" and not torch_shows(name)}


def torch_shows(name: str) -> bool:
    """Return whether the installed torch has a name."""
    try:
        find(name, "torch.distributed", THEIRS)
    except AttributeError:
        return False
    return True


def lasting(found: Signature | None) -> Signature | None:
    """Take out where in memory a default value happens to be."""
    return found and [[part and re.sub(" at 0x[0-9a-f]+", "", part) for part in parameter] for parameter in found]


def page() -> str:
    """Return the page that shows the table."""
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for name, (state, why) in rows().items():
        owner, _, last = name.rpartition(".")
        grouped.setdefault((owner, state, why), []).append(last)
    # Names of the package itself have no owner.
    lines = [
        f"| `{key[0] or 'torch.distributed'}` | `{' '.join(names)}` | {key[1]} | {key[2]} |"
        for key, names in grouped.items()
    ]
    head = ["| class or module | names | here | why |", "| --- | --- | --- | --- |"]
    return "\n".join([HEAD.strip(), "", *head, *lines, "", TAIL.strip(), ""])


HEAD = """
# Names below the top level

This page lists the methods of classes, and the modules below `torch.distributed`, in torch 2.15, and those of 1.13
that torch has removed. *As torch's* means the same parameters with the same names, kinds and defaults. *Same name*
means that torch's method shows no parameters, or no longer exists. *On objects* means that objects of the class have
the attribute, but the class does not show it. *torch's own* means that the name is torch's object. A `ProcessGroup`
is of torch's type, so torch's functions accept it, and torch's C++ calls its methods. A test compares the names one
by one, and this page is generated from the test's table.
"""
TAIL = """
## Names that are not Python names of torch.distributed

| name | here | why |
| --- | --- | --- |
| `c10d::ProcessGroup` | torch's own | The base class of backends in C++; registered ones work here by name. |
| `torch.nn.parallel.DistributedDataParallel` | ours | `torchdist_ref.DistributedDataParallel`; torch's runs on `ref`. |
| `torch.nn.DataParallel` | torch's own | Threads of one process and no ranks. |
| backends `nccl2`, `nccl-lazy`, `nccl-legacy` | torch's own | Of torch 2.15; there `nccl` is `nccl2`, here too. |
| backend `nccl4py` | torch's own | NCCL from Python, with its own watchdog; needs a GPU and `nccl4py`. |
| `c10d::Window` | absent | One-sided transfers, an experiment on NCCL; `supports_window` is False here. |
| `_reconfigure` | absent | An experiment; `supports_reconfigure` is False here. See `shrink_group`. |
| `c10d::NanCheckHook` | absent | Checks inputs on NCCL. Here a hook of `register_pre_hook` can. |
| `c10d::HealthCheckHook` | absent | Its threads watch torch's NCCL. Here ranks watch each other on every backend. |
| `c10d::FlightRecorderHook` | absent | Every backend here records its calls in the flight recorder. |
| entry points `torch.distributed.backends` | ours | `"ref"` has one, so torch 2.14 finds it without an import. |
| `torch.multiprocessing.spawn` | ours | `torchdist_ref.multiprocessing.spawn`; torch's processes can be ranks, too. |
| `torch.profiler` | torch's own | Calls of every backend are ranges in it. |

| variable | here |
| --- | --- |
| `TORCHELASTIC_USE_AGENT_STORE`, `LOCAL_RANK` | read |
| `TORCHELASTIC_RUN_ID` | read by `is_torchelastic_launched`; set by the launcher |
| `TORCHELASTIC_RESTART_COUNT`, `LOCAL_WORLD_SIZE`, `GROUP_RANK` | set by the launcher |
| `TORCH_NCCL_BLOCKING_WAIT`, `TORCH_NCCL_ASYNC_ERROR_HANDLING` | read by torch's backend |
| `TORCH_DIST_INIT_BARRIER` | not read: initialization always ends when all ranks are there |
| `USE_LIBUV` | not read: there is one kind of store server |
| `PYTORCH_DDP_USE_SIDE_STREAM` | not read: DDP moves inputs on the current stream |
| `TORCH_DIST_USE_NCCL2` | read by torch 2.15: `0` makes `nccl` its older class |
| `TORCH_DIST_NAN_CHECK`, `TORCH_DIST_HEALTH_CHECK_PORT` | not read: they are about torch's own groups |
| `TORCH_DISTRIBUTED_USE_TORCHCOMMS` | not read: it chooses among torch's own backends |
"""


def main() -> None:
    """Write the page, and the signatures if this is the right torch."""
    if torch.__version__.startswith(VERSION):
        SNAPSHOT.write_text(json.dumps(installed(), indent=0) + "\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
