"""The witness of a program: gone after `exec`, there in forked children, and without meaning when a process ends."""

from __future__ import annotations

import os
import select
import signal

import pytest

from tests.process_ends import answer_of_child
from torchdist_ref.membership import peer_processes
from torchdist_ref.processes import witness
from torchdist_ref.processes.linux_calls import memfd_create
from torchdist_ref.processes.witness import is_gone, own_witness


def test_a_forked_child_has_the_witness_of_its_parent() -> None:
    own = own_witness()
    assert answer_of_child(lambda: str(is_gone(os.getpid(), own) or own_witness() != own)) == "False"


def test_a_process_that_ends_has_not_lost_its_witness() -> None:
    pid = os.fork()
    if pid == 0:
        signal.pause()
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    zombie = is_gone(pid, own_witness())
    os.waitpid(pid, 0)
    assert [zombie, is_gone(pid, own_witness())] == [False, False]


def test_another_file_with_the_number_of_the_witness_is_none() -> None:
    descriptor = memfd_create("another")
    another = descriptor << 32 | os.fstat(descriptor).st_ino + 1
    assert is_gone(os.getpid(), another) and not is_gone(os.getpid(), another - 1)
    os.close(descriptor)
    assert is_gone(os.getpid(), another - 1)


def test_of_a_process_that_may_not_be_inspected_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> os.stat_result:
        raise PermissionError(13, "Permission denied", path)

    own = own_witness()
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", refuse)
        gone = is_gone(os.getpid(), own + 1)
    assert not gone


def test_without_a_witness_nothing_is_known() -> None:
    assert not is_gone(os.getpid(), 0)


def test_a_platform_without_proc_has_no_witness(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(witness, "is_gone", lambda pid, number: True)
    assert own_witness.__wrapped__() == 0
    assert len(os.listdir("/proc/self/fd")) == before


def test_all_users_share_a_descriptor_until_the_process_ends() -> None:
    child = os.fork()
    if child == 0:
        signal.pause()
    first, second = peer_processes.share_pidfd(child), peer_processes.share_pidfd(child)
    assert first == second
    peer_processes.release_pidfd(second)
    assert not select.select([first], [], [], 0)[0]
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    # By now the number may be another process's.
    third = peer_processes.share_pidfd(child)
    os.waitpid(child, 0)
    assert third != first
    for descriptor in (first, third):
        peer_processes.release_pidfd(descriptor)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
