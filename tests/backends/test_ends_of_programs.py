"""A rank whose program ends while its group exists: the others are told so, and not that it destroyed the group."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import torchdist_ref as dist
from tests.backends.failing_ranks import CULPRIT, SURVIVORS, WORLD, errors_of_survivors
from torchdist_ref.processes import program_end
from torchdist_ref.stores import FileStore

ENDED = "the program of rank 1 ended without destroying the group"

# Forks two ranks for each end, so that torch is loaded once; a rank ends as a program does, with what Python does then.
# Rank 0 calls once the process of rank 1 has ended, and its parent has not collected its exit code.
EXIT = """
import json, os, select, sys, torch
import torchdist_ref as dist
from torchdist_ref.processes.linux_calls import pidfd_open
dist.init_process_group

def program(rank, number, end):
    dist.init_process_group("ref", init_method=f"file://{sys.argv[1]}/store{number}", rank=rank, world_size=2)
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        exec(end)
    poll = select.poll()
    poll.register(pidfd_open(pids[1]), select.POLLIN)
    assert poll.poll(30_000)
    try:
        dist.barrier()
    except dist.DistError as error:
        print(json.dumps([end, pids[1], str(error)]))
    sys.exit()

for number, end in enumerate(sys.argv[2:]):
    ranks = []
    for rank in range(2):
        ranks.append(os.fork())
        if not ranks[rank]:
            program(rank, number, end)
    for pid in ranks:
        os.waitpid(pid, 0)
"""
ENDS = {"sys.exit(3)": 3, "sys.exit('no data')": 1, "raise SystemExit": 0}


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
    assert all(ENDED in text for text in texts), texts
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


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Return the process id of rank 1 and the error of rank 0, by what ended the program of rank 1."""
    # Two seconds: the process loads torch.
    command = [sys.executable, "-c", EXIT, str(tmp_path_factory.mktemp("ends")), *ENDS]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    lines = [json.loads(line) for line in answer.stdout.splitlines()]
    assert [end for end, _, _ in lines] == [*ENDS], answer
    return {end: (pid, text) for end, pid, text in lines}


@pytest.mark.parametrize(("ends", "code"), ENDS.items())
def test_the_exit_code_is_named_once_the_process_has_ended(
    ends: str, code: int, reported: dict[str, tuple[int, str]]
) -> None:
    pid, text = reported[ends]
    assert f"{ENDED} (pid {pid} on {os.uname().nodename} exited with code {code})" in text, text
