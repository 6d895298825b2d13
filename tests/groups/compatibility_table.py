"""What published programs use beside the documented names: private names of torch, and phrases of its errors.

Two tables, as data and as a page. A test finds each name, and provokes each error. `python -m
tests.groups.compatibility_table` writes docs/reference/compatibility.md. Add what another published program uses.
"""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "compatibility.md"

# Private names below torch.distributed; the programs in which a search of their source found them; what is here.
OURS = "our group"
NAMES = {
    "_all_gather_base": ("Megatron-LM, DeepSpeed, fairscale", "torch's own, on our groups"),
    "_broadcast_coalesced": ("fairscale", "torch's own, on our groups"),
    "_coalescing_manager": ("Megatron-LM, DeepSpeed", "torch's own; calls of torch's functions are coalesced"),
    "_compute_bucket_assignment_by_size": ("tests of DDP", "torch's own"),
    "_make_nccl_premul_sum": ("Megatron-LM, Lightning", "torch's own; the reduction works on every backend here"),
    "_rank_not_in_group": ("mmengine", "torch's own, on our groups"),
    "_reduce_scatter_base": ("Megatron-LM, DeepSpeed, fairscale", "torch's own, on our groups"),
    "_verify_params_across_processes": ("tests of DDP", "torch's own, on our groups"),
    "distributed_c10d._coalescing_manager": ("DeepSpeed", "torch's own"),
    "distributed_c10d._get_default_group": ("Megatron-LM, Lightning, mmengine", "torch's own; it returns our group"),
    "distributed_c10d._rank_not_in_group": ("mmengine", "torch's own, on our groups"),
    "distributed_c10d._set_pg_timeout": ("Megatron-LM", "torch's own; it does not change the time-out of our groups"),
    "distributed_c10d._world": ("Megatron-LM", "torch's own; our groups are in its tables"),
    "distributed_c10d._get_global_rank": ("DeepSpeed, fairscale", "torch's own, on our groups"),
    "distributed_c10d._pg_map": ("Lightning", "torch's own; our groups are in it"),
    "_tensor": ("Megatron-LM, Lightning", "torch's own module"),
    "_shard": ("Megatron-LM, Lightning", "torch's own module"),
    "_composable": ("Lightning", "torch's own module"),
    "_functional_collectives": ("Megatron-LM", "torch's own module"),
    "_symmetric_memory": ("Megatron-LM", "torch's own module; it needs an accelerator"),
    "_checkpointable": ("Megatron-LM", "torch's own module"),
    "ProcessGroup._get_sequence_number_for_group": ("tests of torch", "number of collectives that have ended"),
}

# Phrases of torch's errors; who has them.
DOCUMENTED, TESTS = "torch's documentation", "torch's tests"
PHRASES = {
    "Default process group has not been initialized": f"{DOCUMENTED}, {TESTS}, programs of the forum",
    "trying to initialize the default process group twice": TESTS,
    "failed to pass monitoredBarrier in": f"{DOCUMENTED}, {TESTS}",
    "successfully reached monitoredBarrier, but received errors while waiting": TESTS,
    "timed out in monitoredBarrier": TESTS,
    "Invalid function argument": TESTS,
    "Invalid usage of tensors with different dtypes": TESTS,
    "which does not belong to the given group": TESTS,
    "destination rank should not be the same as the rank of the current process": TESTS,
    "wait timeout after": TESTS,
    "Expected to have finished reduction in the prior iteration before starting a new one": f"{DOCUMENTED}, {TESTS}",
    "parameters that were not used in producing loss": f"{DOCUMENTED}, {TESTS}",
    "Expected to mark a variable ready only once": f"{TESTS}, programs of the forum",
    "Your training graph has changed in this iteration": TESTS,
    "does not support": TESTS,
    "module must be nn.Sequential to be partitioned": TESTS,
    "checkpoint is not one of 'always', 'except_last', or 'never'": TESTS,
    "module with duplicate children is not supported": TESTS,
}


def page() -> str:
    """Return the page that shows the tables."""
    names = [f"| `{name}` | {users} | {here} |" for name, (users, here) in NAMES.items()]
    phrases = [f"| {phrase} | {use} |" for phrase, use in PHRASES.items()]
    head = ["| name | users | here |", "| --- | --- | --- |"]
    return "\n".join(
        [HEAD.strip(), "", *head, *names, "", MIDDLE.strip(), "", "| phrase | use |", "| --- | --- |", *phrases, ""]
    )


HEAD = """
# Compatibility

Published programs use names and error texts that torch does not document. This page lists those that work with this
library; it is generated from tables that a test checks.

## Private names

The table has private names below `torch.distributed` that the source of DeepSpeed, Megatron-LM, fairscale, Lightning or
mmengine uses. The same paths work below `torchdist_ref`. torch's functions work on our groups, because torch's default
group is ours.
"""
MIDDLE = """
## Phrases of errors

Some programs recognize an error by its text. The messages of this library contain torch's phrase, and more information.
"""

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
