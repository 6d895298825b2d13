"""A rank whose program ends while its group exists: the others are told so, and not that it destroyed the group."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import torchdist_ref as dist
from tests.backends.failing_ranks import CULPRIT, SURVIVORS, WORLD, errors_of_survivors
from torchdist_ref import program_end
from torchdist_ref.stores import FileStore

ENDED = "the program of rank 1 ended without destroying the group"
PASSED_ON = "rank 1 aborted: its program ended without destroying the group"

# Rank 0 calls once the process of rank 1 has ended, and its parent has not collected its exit code.
EXIT = """
import os, sys, torch
import torchdist_ref as dist
rank = int(sys.argv[2])
dist.init_process_group("ref", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
pids = [None, None]
dist.all_gather_object(pids, os.getpid())
if rank == 1:
    %s
import select
poll = select.poll()
poll.register(os.pidfd_open(pids[1]), select.POLLIN)
assert poll.poll(30_000)
try:
    dist.barrier()
except dist.DistError as error:
    print(error)
"""


def join(rank: int, folder: Path, hosts: str) -> None:
    os.environ["TORCHDIST_REF_HOST_ID"] = hosts[rank]
    store = FileStore(str(folder / "store"), WORLD)
    dist.init_process_group("ref", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=20))
    dist.barrier()


@pytest.mark.parametrize("hosts", ["aaa", "aab", "abc"])
def test_the_end_of_a_program_is_not_taken_for_a_destroyed_group(hosts: str, tmp_path: Path) -> None:
    def program(rank: int) -> None:
        join(rank, tmp_path, hosts)
        if rank == CULPRIT:
            program_end._exit_all()
            return
        dist.all_reduce(torch.ones(2))

    found = errors_of_survivors(program)
    texts = [found[rank].text for rank in SURVIVORS]
    assert [found[rank].kind for rank in SURVIVORS] == ["GroupAbortedError"] * 2
    assert all(ENDED in text or PASSED_ON in text for text in texts) and any(ENDED in text for text in texts), texts
    assert not any("destroyed the group" in text for text in texts), texts


def test_a_program_that_destroys_its_group_first_has_destroyed_it(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        join(rank, tmp_path, "aaa")
        if rank == CULPRIT:
            dist.destroy_process_group()
            program_end._exit_all()
            return
        dist.all_reduce(torch.ones(2))

    found = errors_of_survivors(program)
    texts = [found[rank].text for rank in SURVIVORS]
    assert any("rank 1 destroyed the group" in text for text in texts) and not any("program" in text for text in texts)


# Two seconds each: processes of their own start torch.
@pytest.mark.parametrize(("ends", "code"), [("sys.exit(3)", 3), ("sys.exit('no data')", 1), ("raise SystemExit", 0)])
def test_the_exit_code_is_named_once_the_process_has_ended(ends: str, code: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", EXIT % ends, str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    text, _ = ranks[0].communicate(timeout=60)
    ranks[1].communicate(timeout=60)
    assert f"{ENDED} (pid {ranks[1].pid} on {os.uname().nodename} exited with code {code})" in text, text
