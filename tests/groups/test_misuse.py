"""Misuse raises torch's exception type or a subclass: hundreds of wrong calls, on torch's Gloo and on ours."""

from __future__ import annotations

import re
import resource
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as oracle

import torchdist_ref as dist
from tests.groups.misuse import MESSAGES, Misuse, Site, more, of_stores, substitutions
from tests.torch_versions import torch_has
from tests.torchs_world import start_torch
from torchdist_ref.testing import run

# Calls for which torch raises an internal error, or none although something is wrong.
INTENDED = {
    "er .*_list: a tensor": "torch asks whether a tensor is true (RuntimeError).",
    "broadcast destroyed group": "torch looks for the root in a table that has forgotten the group (ValueError).",
    "get_process_group_ranks .* group": "torch looks it up in a table of its own (KeyError).",
    "shrink_group": "torch has it on NCCL only.",
    "new_group unknown backend": "an assertion of torch's.",
    r"coalesced .*: nothing": "torch's dispatcher has no tensor to look at (NotImplementedError).",
}
if torch_has("2.14"):
    INTENDED |= {"monitored_barrier group": "torch 2.14 takes it for a group.", "new_group ranks none": "an assertion."}
# torch waits for a rank that does not exist, until its time-out; a reduce_scatter of other sizes ends its
# process, and so may a multi_set that reads values that are not there.
NOT_ASKED = re.compile(
    rf"({'|'.join(MESSAGES)}) \w+: (too large|negative|None)|send outside|multi_set one value"
    r"|reduce_scatter input_list: other sizes"
)
if not torch_has("2.13"):
    # Older versions lack two functions, and wait for a rank that is listed twice until the time-out.
    NOT_ASKED = re.compile(rf"{NOT_ASKED.pattern}|(all_gather|reduce_scatter)_single\b|new_group ranks twice")
# None for a root is rank 0, for the source of a receive any rank, here for objects too; a list may have any length.
RIGHT = re.compile(
    r"recv_object_list src: None|i?recv src: None|(gather|scatter|broadcast)(_object|_object_list)? (src|dst): None"
    r"|all_reduce_coalesced tensors: (a tensor|one tensor|one too|other)"
)
# One call waits for it. A busy machine needs some of it for each group.
TIMEOUT = timedelta(seconds=8)


def outcome(misuse: Misuse, site: Site) -> tuple[list[str], str]:
    """Make the call; return the class names of its exception (none without one) and its text."""
    try:
        got = misuse.call(site)
        if isinstance(got, oracle.Work | dist.Work):
            got.wait()
    except Exception as error:
        return [kind.__name__ for kind in type(error).__mro__], str(error)
    return [], repr(got)


def program(rank: int, path: str) -> list[tuple[str, list[str] | None, list[str], str]]:
    """Make every wrong call on torch's Gloo and on ours, and then use our group."""
    warnings.simplefilter("ignore")
    # torch keeps the connections of every group, and most systems give a user 1,024 descriptors to begin with.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    store = oracle.FileStore(path, 2)
    start_torch(store=store, rank=rank, world_size=2, timeout=TIMEOUT)
    ours = dist.new_group(timeout=TIMEOUT)
    found = []
    for misuse in [*substitutions(), *more(), *of_stores()]:
        if RIGHT.match(misuse.name):
            continue
        kinds = None
        if not NOT_ASKED.match(misuse.name):
            # An error inside Gloo may surface in the next call on the group: each call gets its own.
            kinds, _ = outcome(misuse, Site(oracle, rank, oracle.new_group(timeout=TIMEOUT)))
        found.append((misuse.name, kinds, *outcome(misuse, Site(dist, rank, ours))))
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor, group=ours)
    assert tensor.item() == 3.0
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """Some seconds: about four hundred wrong calls on two libraries, each of which may open connections anew."""
    path = str(tmp_path_factory.mktemp("misuse") / "store")
    return run(program, 2, path, ranks="processes", timeout=100.0)


def test_misuse_raises_what_torch_raises(answers: list[list[Any]]) -> None:
    wrong = [
        f"rank {rank}, {name}: torch raises {kinds[0]}, ours {ours[:1] or 'nothing'}: {words[:200]}"
        for rank, found in enumerate(answers)
        for name, kinds, ours, words in found
        if kinds and kinds[0] not in ours and not any(re.search(what, name) for what in INTENDED)
    ]
    assert not wrong, "\n".join(wrong)


def test_errors_name_the_function_and_the_rank(answers: list[list[Any]]) -> None:
    silent = [
        f"{name}: {words!r}"
        for rank, found in enumerate(answers)
        for name, _, ours, words in found
        if not ours or name.split(" ")[0] not in words or f"rank {rank}" not in words
    ]
    assert not silent, "\n".join(silent)
