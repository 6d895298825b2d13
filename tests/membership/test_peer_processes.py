"""Processes of other ranks: who has ended, and who closes the descriptors."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import closing

import pytest

from torchdist_ref.membership import peer_processes
from torchdist_ref.membership.peer_processes import PeerProcesses


@pytest.mark.parametrize("place", ["this thread", "another thread"])
def test_processes_that_are_closed_during_a_look_are_released_after_it(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a signal handler that destroyed the group waited for the look that it had interrupted, for ever."""
    processes, watched = PeerProcesses({0: os.getpid(), 1: os.getppid()}), []

    def close(*_: object) -> bool:
        closing = threading.Thread(target=processes.close)
        if place == "this thread":
            processes.close()
        else:
            closing.start()
            closing.join()
        watched.append(len(processes._fds))
        return False

    monkeypatch.setattr(peer_processes, "is_gone", close)
    looking = threading.Thread(target=processes.dead, daemon=True)
    looking.start()
    looking.join(10.0)
    assert not looking.is_alive() and watched == [2, 2] and processes._fds == []
    assert processes.dead() == []


def test_a_thread_is_no_process() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    assert thread.native_id is not None
    with closing(PeerProcesses({1: thread.native_id})) as peers:
        assert peers.dead() == [1]
    done.set()
    thread.join()


def test_ranks_in_one_process_end_with_it_for_all_who_watch_it() -> None:
    child = os.fork()
    if child == 0:
        signal.pause()
    with closing(PeerProcesses({1: child})), closing(PeerProcesses({1: child, 2: child})) as peers:
        assert peers.dead() == []
        os.kill(child, signal.SIGKILL)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert peers.dead() == [1, 2]
    os.waitpid(child, 0)
