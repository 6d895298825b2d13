"""Table of the sub-packages of torch.distributed: where to import each from, and the tests that run it on our groups.

`python -m tests.drop_in.packages` writes the page.
"""

from __future__ import annotations

import pkgutil
from pathlib import Path

import torch.distributed

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "torch_packages.md"
MODULES = "groups/test_torchs_modules.py::test_torchs_modules_find_the_numbers_of_torchs_gloo"
DROP_IN = "drop_in/test_drop_in.py::test_a_program_of_torchs_finds_the_same_with_two_imports_changed"
SHARED = "groups/test_shared_with_torch.py"
OWN, EITHER, TORCHS = "`torchdist_ref`", "either library", "torch"

# Sub-package: where to import it from, what to know, tests.
ROWS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "algorithms": (
        EITHER,
        "torch's communication hooks run on our DDP, ours on torch's.",
        ("algorithms/test_hooks_written_for_torch.py::test_torchs_hooks_run_on_our_groups",),
    ),
    "argparse_util": (TORCHS, "Command-line options; it needs no group.", ()),
    "autograd": (TORCHS, "Distributed autograd of RPC, which has workers of its own.", ()),
    "c10d_logger": (TORCHS, "torch's log of its own calls.", ()),
    "checkpoint": (TORCHS, "save, async_save and load, also sharded otherwise.", (MODULES, DROP_IN)),
    "collective_utils": (TORCHS, "Objects over the default group.", ()),
    "config": (TORCHS, "Settings of torch.", ()),
    "constants": (TORCHS, "Default time-outs of torch.", ()),
    "debug": (OWN, "", ("groups/test_debug_detail.py::*",)),
    "device_mesh": (
        EITHER,
        "Meshes of either library work in the other.",
        (f"{SHARED}::test_dtensor_works_on_meshes_of_either_library",),
    ),
    "distributed_c10d": (
        OWN,
        "Its public functions are at the top level here; torch's accept our groups.",
        (f"{SHARED}::test_torchs_default_group_is_ours",),
    ),
    "elastic": (EITHER, "Its agent starts our scripts.", ("elastic/test_bootstrap_and_data.py::*",)),
    "flight_recorder": (
        TORCHS,
        "Analyzes dumps of torch's recorder; `python -m torchdist_ref.debug` reads them and ours.",
        (),
    ),
    "fsdp": (TORCHS, "FSDP1 and `fully_shard`, on our groups and meshes.", (MODULES, DROP_IN)),
    "launch": (EITHER, "", ("test_launch.py::*",)),
    "launcher": (EITHER, "", ()),
    "logging_handlers": (TORCHS, "It needs no group.", ()),
    "nn": (EITHER, "`nn.functional` is ours; RemoteModule is torch's.", ("nn/test_functional.py::*",)),
    "optim": (
        EITHER,
        "torch's ZeroRedundancyOptimizer runs on our groups.",
        (f"{SHARED}::test_torchs_ddp_and_zero_train_as_one_process_does", DROP_IN),
    ),
    "pipelining": (TORCHS, "All schedules.", (MODULES, DROP_IN)),
    "remote_device": (TORCHS, "Names of devices, for RPC.", ()),
    "rendezvous": (OWN, "", ("test_rendezvous.py::*",)),
    "rpc": (TORCHS, "RPC has workers of its own, not the default group.", ()),
    "run": (EITHER, "torchrun starts our scripts.", ()),
    "tensor": (TORCHS, "DTensor and tensor parallelism, on meshes of either library.", (MODULES, DROP_IN)),
    "utils": (TORCHS, "Helpers of torch's modules.", ()),
}


def packages() -> list[str]:
    """Return the public sub-packages of the installed torch."""
    return sorted(each.name for each in pkgutil.iter_modules(torch.distributed.__path__) if each.name[0] != "_")


def page() -> str:
    """Return the page."""
    lines = [HEAD.strip(), "", "| torch.distributed. | import it from | remark | tests |", "|---|---|---|---|"]
    for name, (source, remark, tests) in sorted(ROWS.items()):
        shown = "<br>".join(f"`tests/{test.removesuffix('::*')}`" for test in tests) or "none here"
        lines.append(f"| `{name}` | {source} | {remark} | {shown} |")
    return "\n".join([*lines, ""])


HEAD = """
# Sub-packages of torch.distributed

From `init_process_group` on, torch's modules use our default group ({doc}`../how-to/use_torchs_modules`). For each
public sub-package of torch 2.13 the table says where to import it from, and which tests run it on our groups. They
compare values with torch's Gloo or with one process, on `ref` and `gloo`, with 2 to 4 ranks. *None here* means that it
communicates over no process group of ours, or that no test runs it.
"""

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
