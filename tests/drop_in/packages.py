"""Table of the sub-packages of torch.distributed: where to import each from, and what the tests saw on our groups.

A test that compares a part of torch on our groups with torch itself takes the fixture `proof`, and calls it after its
comparisons. The record `docs/reference/torch_packages.json` has a row for each such call, and a call that finds another
row, or none, fails. ``python -m tests.drop_in.packages`` runs these tests again and writes the record and the page.
With arguments for pytest, as ``-k sharded``, it runs some of them and keeps the other rows.
"""

from __future__ import annotations

import json
import os
import pkgutil
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import torch.distributed

from torchdist_ref import torch_paths

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "torch_packages.md"
RECORD = PAGE.with_suffix(".json")
# File to which `proof` adds its rows; without it, `proof` compares them with the record.
VARIABLE = "TORCHDIST_REF_PROOFS"
OWN, TORCHS = "`torchdist_ref.{}`", "`torch.distributed.{}`"
SAME = "`torch.distributed.{0}`, or `torchdist_ref.{0}` with the same objects"
EITHER = "`torch.distributed.{0}`, or ours, `torchdist_ref.{0}`"

# Sub-package: what to know. Those that `torch_paths` does not serve whole have the entry point too.
ROWS: dict[str, str] = {
    "algorithms": "torch's communication hooks run on our DDP, ours on torch's.",
    "argparse_util": "Command-line options; it needs no group.",
    "autograd": "Distributed autograd of RPC, which has workers of its own.",
    "c10d_logger": "torch's log of its own calls.",
    "checkpoint": "`save`, `async_save` and `load`, also sharded otherwise.",
    "collective_utils": "Objects over a group.",
    "config": "Settings of torch.",
    "constants": "Default time-outs of torch.",
    "debug": "Our debugging tools; torch's module of this name serves pages about a job over HTTP.",
    "device_mesh": "Meshes of either library work in the other.",
    "distributed_c10d": "torch's functions accept our groups, ours accept torch's.",
    "elastic": "torch's agent starts our scripts, and so does ours.",
    "flight_recorder": "Analyzes dumps of torch's recorder; `python -m torchdist_ref.debug` reads them and ours.",
    "fsdp": "FSDP1 and `fully_shard`.",
    "launch": "",
    "launcher": "",
    "logging_handlers": "It needs no group.",
    "nn": "`nn.functional` is ours; RemoteModule is torch's.",
    "optim": "torch's ZeroRedundancyOptimizer runs on our groups.",
    "pipelining": "All schedules.",
    "remote_device": "Names of devices, for RPC.",
    "rendezvous": "",
    "rpc": "RPC has workers of its own, in any number. It and the default group may share MASTER_PORT.",
    "run": "`torchrun` starts our scripts.",
    "tensor": "DTensor and tensor parallelism, on meshes of either library.",
    "utils": "Helpers of torch's modules.",
}
ENTRIES = dict.fromkeys(("algorithms", "device_mesh", "elastic", "launch", "launcher", "nn", "optim", "run"), EITHER)
ENTRIES |= dict.fromkeys(("debug", "rendezvous"), OWN)
ENTRIES |= {"argparse_util": TORCHS, "distributed_c10d": EITHER}
# Other libraries and other parts of torch that find our default group.
OTHERS = {
    "_functional_collectives": ("`torch.distributed._functional_collectives`", "Compiled programs too."),
    "accelerate": ("`accelerate.Accelerator`", ""),
    "lightning": ("`lightning.Trainer`", ""),
    "nn.parallel": ("`torch.nn.parallel.DistributedDataParallel`", "torch's DDP; ours runs wherever this one does."),
    "utils.data": ("`torch.utils.data.DistributedSampler`", ""),
}


def packages() -> list[str]:
    """Return the public sub-packages of the installed torch."""
    return sorted(each.name for each in pkgutil.iter_modules(torch.distributed.__path__) if each.name[0] != "_")


def entry(name: str) -> str:
    """Return where to import a sub-package from."""
    served = torch_paths.PATHS.get(name) == {"*": f"{torch_paths.TORCH}.{name}"}
    return (SAME if served else ENTRIES[name]).format(name)


def record() -> dict[str, Any]:
    """Return what the tests saw, with the versions on which they ran."""
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def publish(test: str, names: Iterable[str], backends: Iterable[str], world: int, equal_to: str) -> None:
    """Compare what a test saw with the record, or write it down for a new one.

    Args:
        test: Node id of the test.
        names: Sub-packages, keys of `ROWS` or `OTHERS`.
        backends: Backends of our groups; empty if no group was used.
        world: Number of ranks; 0 if no group was used.
        equal_to: Origin of the values that the test found equal.
    """
    row = {"packages": sorted(names), "backends": sorted(backends), "ranks": world, "equal_to": equal_to}
    assert set(names) <= ROWS.keys() | OTHERS.keys()
    if path := os.environ.get(VARIABLE):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps([test, row]) + "\n")
        return
    assert record()["tests"].get(test) == row, "run `python -m tests.drop_in.packages`"


def files() -> list[Path]:
    """Return the files of tests that take the fixture."""
    found = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if "proof: " in path.read_text("utf-8"))
    return [path for path in found if path.name != "test_packages.py"]


def page() -> str:
    """Return the page."""
    seen = record()
    lines = [HEAD.format(**seen).strip(), "", *_table({name: (entry(name), ROWS[name]) for name in ROWS}, seen)]
    lines += ["", "## Other parts of torch, and other libraries", "", *_table(OTHERS, seen)]
    return "\n".join([*lines, ""])


def _table(rows: dict[str, tuple[str, str]], seen: dict[str, Any]) -> list[str]:
    """Return a table of the rows."""
    lines = ["| part | import it from | remark | tests: backends, ranks, equal to |", "|---|---|---|---|"]
    for name, (source, remark) in sorted(rows.items()):
        lines.append(f"| `{name}` | {source} | {remark} | {_proofs(name, seen['tests']) or 'none here'} |")
    return lines


def _proofs(name: str, tests: dict[str, Any]) -> str:
    """Return the tests of a sub-package, one line for all cases of a test that are equal to the same values."""
    cases: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for test, row in tests.items():
        if name in row["packages"]:
            cases.setdefault((test.partition("[")[0], row["equal_to"]), []).append(row)
    lines = []
    for (test, equal_to), found in sorted(cases.items()):
        backends = [f"`{each}`" for each in sorted({backend for row in found for backend in row["backends"]})]
        ranks = sorted({str(row["ranks"]) for row in found if row["ranks"]})
        where = [", ".join(backends), f"{', '.join(ranks)} ranks"] if ranks else []
        lines.append(f"`{test}`: {'; '.join([*where, equal_to])}")
    return "<br>".join(lines)


HEAD = """
# Sub-packages of torch.distributed

From `init_process_group` on, torch's modules use our default group ({{doc}}`../how-to/use_torchs_modules`). For each
public sub-package of torch the table says where to import it from, and which tests check its results on our groups,
against which values. These tests recorded the table, on torch {torch} and Python {python}, {date}. They fail if a
result differs from the record. *None here* means that the part needs no process group, or that no test compares it
with torch.
"""


def main(arguments: list[str]) -> int:
    """Run the tests that have something to record, and write the rows of those that pass, and the page."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "proofs")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.drop_in.only_proofs", *map(str, files())]
        code = subprocess.run([*command, *arguments], cwd=ROOT, env={**os.environ, VARIABLE: str(path)}).returncode
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    tests = (record()["tests"] if arguments else {}) | dict(json.loads(line) for line in lines)
    versions = {"torch": torch.__version__, "python": platform.python_version(), "date": date.today().isoformat()}
    text = json.dumps({**versions, "tests": dict(sorted(tests.items()))}, indent=1)
    RECORD.write_text(text + "\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
