"""Table of torch 2.15's top level beside ours, as data and as a page.

torch_2_15.json keeps the signatures of torch 2.15, so that any torch can be compared with them.
`python -m tests.groups.surface_table` writes that file (under a CUDA build of torch 2.15) and the page
docs/reference/surface_table.md; a test compares both.
"""

from __future__ import annotations

import enum
import inspect
import json
import warnings
from pathlib import Path
from typing import Any, NewType

import torch
import torch.distributed as theirs
from torch.distributed import distributed_c10d

import torchdist_ref as dist

HERE = Path(__file__).parent
SNAPSHOT = HERE / "torch_2_15.json"
PAGE = HERE.parents[1] / "docs" / "reference" / "surface_table.md"
VERSION = "2.15"
Signature = list[list[str | None]]

# Where ours takes other parameters than torch's, and why.
DIFFERENT = {
    "DeviceMesh": "torch's further parameters, which begin with an underscore, are private to torch.",
    "rendezvous": "Further keyword arguments are collected under another name, which no caller sees.",
}

OPTIONS = "An argument of methods of torch's C++ groups. Calls are plain values here; see the page Design."
INSIDE = "Not documented by torch; it serves torch's own modules."
# Names of torch's top level that lead to torch's own, and what they are.
TORCHS_OWN = {
    **{
        f"{name}Options": OPTIONS
        for name in (
            "AllToAll",
            "Allreduce",
            "AllreduceCoalesced",
            "Barrier",
            "Broadcast",
            "Gather",
            "Reduce",
            "ReduceScatter",
            "Scatter",
        )
    },
    "BackendConfig": "Backends by device type. Here `get_backend` returns them, for example `cpu:gloo,cuda:nccl`.",
    "GroupName": INSIDE,
    "Logger": "torch's C++ statistics of its DDP. A group's `recorder` has the calls.",
    "ProcessGroupGloo": 'torch\'s class works as before beside this library; by name, its backend is `"gloo"`.',
    **dict.fromkeys(
        ["ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy"],
        'torch\'s class, in its CUDA builds only; the last two since torch 2.15. By name, the backends are `"nccl"`, '
        '`"nccl2"` and `"nccl-lazy"`.',
    ),
    "RankType": INSIDE,
    "Reducer": "torch's DDP in C++. `torchdist_ref.parallel` has a reducer in Python.",
    "breakpoint": "Stops one rank in a debugger while the others wait. Thread ranks can be stopped with Python's own.",
    "record_comm": INSIDE,
}
# Names that ours has beside torch's.
OWN = {
    "DistributedDataParallel": "torch has it in `torch.nn.parallel`.",
    **dict.fromkeys(
        [
            "all_gather_multigpu",
            "all_reduce_multigpu",
            "broadcast_multigpu",
            "reduce_multigpu",
            "reduce_scatter_multigpu",
        ],
        "torch had it until version 2.1.",
    ),
    "empty_registered": "Memory that the ranks of a host share; see the how-to page on registered buffers.",
    **dict.fromkeys(
        [
            "ArgumentError",
            "ArgumentTypeError",
            "AuthenticationError",
            "BackendArgumentError",
            "DestroyedGroupError",
            "EntryError",
            "GroupAbortedError",
            "MismatchError",
            "NotInitializedError",
            "PicklingError",
            "RankDiedError",
            "RankStalledError",
            "RendezvousError",
            "StoreTimeoutError",
            "UnsupportedError",
            "UsageError",
        ],
        "A subclass of the type that torch raises; see the page Errors.",
    ),
}
# Modules and helpers that torch's package shows at its top level without meaning them.
NOT_MEANT = {"timedelta", "log"}


def signature(value: Any) -> Signature | None:
    """Return name, kind and default of each parameter; None where Python cannot inspect them.

    What Python shows for classes of enumerations and new types depends on its version. Of the former the members are
    listed instead, of the latter nothing.
    """
    if isinstance(value, enum.EnumType):
        return [[name, "MEMBER", None] for name in value.__members__]
    if isinstance(value, NewType):
        return None
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return None
    return [[p.name, p.kind.name, None if p.default is p.empty else shown(p.default)] for p in parameters]


def shown(default: Any) -> str:
    """Return the `repr` of a default; of enum members the same in each version of Python."""
    if isinstance(default, enum.Enum):
        return f"<{type(default).__name__}.{default.name}: {default.value!r}>"
    return repr(default)


def without(one: Signature, other: Signature | None) -> Signature:
    """Return the parameters of a signature that another one lacks, or has with another kind or default."""
    return [parameter for parameter in one if parameter not in (other or [])]


def torchs_names() -> dict[str, Signature | None]:
    """Return the public names of the installed torch's top level, with the signatures of functions and classes."""
    names = {name for name in {*dir(theirs), *distributed_c10d.__all__} if not name.startswith("_")} - NOT_MEANT
    values = {name: getattr(theirs, name, getattr(distributed_c10d, name, None)) for name in sorted(names)}
    with warnings.catch_warnings():
        # Only looking at torch's reduce_op makes it warn.
        warnings.simplefilter("ignore", FutureWarning)
        return {name: signature(value) for name, value in values.items() if not inspect.ismodule(value)}


def known() -> dict[str, Signature | None]:
    """Return torch 2.13's names and signatures, as kept."""
    kept: dict[str, Signature | None] = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    return kept


def differences() -> dict[str, tuple[Signature, Signature | None]]:
    """Return, for names that both have, the signatures of torch's and ours where they differ."""
    found = {}
    for name, theirs_is in known().items():
        if name in dist.__all__ and theirs_is is not None:
            ours = signature(getattr(dist, name))
            if ours != theirs_is:
                found[name] = (theirs_is, ours)
    return found


def page() -> str:
    """Return the page that shows the table."""
    shared = {name: theirs_is for name, theirs_is in known().items() if name in dist.__all__ and name not in DIFFERENT}
    rows = [(f"`{name}`", "same name" if theirs_is is None else "as torch's", "") for name, theirs_is in shared.items()]
    rows += [(f"`{name}`", "other parameters", why) for name, why in DIFFERENT.items()]
    rows += [(f"`{name}`", "torch's own", why) for name, why in TORCHS_OWN.items()]
    rows += [(f"`{name}`", "ours only", why) for name, why in OWN.items()]
    lines = [f"| {name} | {state} | {why} |" for name, state, why in sorted(rows)]
    return "\n".join([HEAD.strip(), "", "| name | here | why |", "| --- | --- | --- |", *lines, ""])


HEAD = """
# Names beside torch's

This page lists every public name at the top level of `torch.distributed` in torch 2.15, and its counterpart here. *As
torch's* means the same parameters with the same names, kinds and defaults. *Same name* means that torch's object is in
C++ and shows no parameters. *torch's own* means that the name is torch's object, which works on this library's groups.
A test compares the names one by one, and this page is generated from the test's table.
"""


def main() -> None:
    """Write the page, and the signatures if this is the right torch."""
    if torch.__version__.startswith(VERSION):
        SNAPSHOT.write_text(json.dumps(torchs_names(), indent=0) + "\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
