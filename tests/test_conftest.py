"""The checks that every test ends with."""

from __future__ import annotations

import threading

import pytest

from tests import conftest


def test_a_thread_that_is_about_to_start_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """`threading.enumerate` lists a thread from the call of `start` on, before it can be joined."""
    late = threading.Thread(target=int)
    monkeypatch.setattr(threading, "enumerate", lambda: [late] if late.ident is None or late.is_alive() else [])
    monkeypatch.setattr("os.sched_yield", late.start)
    assert conftest.still_running(set(), 60.0) == set()
    assert late.ident is not None


def test_a_thread_that_goes_on_is_returned_after_the_timeout() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    before = set(threading.enumerate())
    thread.start()
    assert conftest.still_running(before, 0.01) == {thread}
    end.set()
    assert conftest.still_running(before, 60.0) == set()
