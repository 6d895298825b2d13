"""Errors of the shared-memory transport where it is not available, and liveness of processes."""

from __future__ import annotations

import errno
import os
import sys

import pytest

from torchdist_ref.errors import DistBackendError, UnsupportedError
from torchdist_ref.membership import peer_processes
from torchdist_ref.membership.peer_processes import PeerProcesses
from torchdist_ref.processes import linux_calls
from torchdist_ref.stores import HashStore
from torchdist_ref.testing import RankError, run
from torchdist_ref.transports import segment, selection


def test_other_platforms_are_named_with_an_alternative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UnsupportedError, match=r"needs Linux.*darwin.*gloo"):
        selection.connect_shared_memory(HashStore(), 0, [0, 1], "world", 1.0)


def test_a_segment_of_an_inaccessible_process_is_explained() -> None:
    def program(rank: int, store: HashStore) -> None:
        if rank == 1:
            store.set("segment", b"999999999 3 00")
            selection.connect_shared_memory(store, 1, [0, 1], "world", 1.0)

    with pytest.raises(RankError, match=r"process 999999999.*not accessible.*namespaces.*gloo"):
        run(program, 2, HashStore(), init=False)


def test_a_descriptor_of_another_file_is_not_taken_for_the_segment() -> None:
    layout = segment.layout_for(2)
    with segment.created_segment(layout) as (_, handle):
        pid, fd, nonce = handle.decode().split()
        wrong = f"{pid} {fd} {bytes.fromhex(nonce)[::-1].hex()}".encode()
        with pytest.raises(DistBackendError, match=rf"descriptor {fd} of process {pid} is not the group's segment"):
            segment.attach(wrong, layout)


def test_an_ended_process_is_dead_and_a_running_one_is_not() -> None:
    end, begin = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(begin)
        os.read(end, 1)
        os._exit(0)
    peers = PeerProcesses({3: child, 5: os.getpid()})
    try:
        assert peers.dead() == []
        os.close(begin)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert peers.dead() == [3]
    finally:
        peers.close()
        os.close(end)
        os.waitpid(child, 0)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def at_the_limit(*_: object) -> None:
    raise OSError(errno.EMFILE, "Too many open files")


def test_a_segment_that_this_process_cannot_map_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = segment.layout_for(2)
    with segment.created_segment(layout) as (_, handle):
        monkeypatch.setattr(segment, "SharedMemorySegment", at_the_limit)
        before = open_descriptors()
        with pytest.raises(OSError, match="Too many open files"):
            segment.attach(handle, layout)
        assert open_descriptors() == before


def test_a_process_without_descriptors_does_not_blame_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "open_peer_descriptor", at_the_limit)
    with pytest.raises(OSError, match="Too many open files") as caught:
        segment.attach(b"1 3 00", segment.layout_for(2))
    assert not isinstance(caught.value, UnsupportedError)


def test_processes_that_cannot_all_be_watched_leave_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, original = [], linux_calls.pidfd_open

    def open_one(pid: int) -> int:
        opened.append(original(pid) if not opened else at_the_limit())
        return opened[-1]

    monkeypatch.setattr(peer_processes, "pidfd_open", open_one)
    before = open_descriptors()
    with pytest.raises(OSError, match="Too many open files"):
        PeerProcesses({0: os.getpid(), 1: os.getppid()})
    assert len(opened) == 1 and open_descriptors() == before
