"""Virtual clock: its waits jump, events happen in the order of their times, and a wait for nothing is an error."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from torchdist_ref.testing.virtual_clock import VirtualClock
from torchdist_ref.timeouts import Clock, Deadline, readable


@pytest.fixture
def event() -> Iterator[int]:
    descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    yield descriptor
    os.close(descriptor)


def test_events_happen_during_waits_in_the_order_of_their_times() -> None:
    clock, found = VirtualClock(7.0), list[tuple[str, float]]()
    for name, time in (("b", 9.5), ("a", 7.25), ("c", 9.5), ("never", 31.5)):
        clock.at(time, lambda name=name: found.append((name, clock.now())))
    clock.sleep(2.0)
    assert found == [("a", 7.25)] and clock.now() == 9.0
    clock.sleep(22.0)
    assert found == [("a", 7.25), ("b", 9.5), ("c", 9.5)] and clock.now() == 31.0


def test_an_event_may_plan_another_one() -> None:
    clock, found = VirtualClock(), list[float]()
    clock.at(1.5, lambda: clock.at(2.25, lambda: found.append(clock.now())))
    clock.sleep(2.25)
    assert found == [2.25]


def test_a_wait_ends_when_an_event_makes_a_descriptor_ready(event: int) -> None:
    clock = VirtualClock()
    clock.at(3.5, lambda: os.eventfd_write(event, 1))
    assert clock.wait([event], 3.0) == [] and clock.now() == 3.0
    assert clock.wait(readable([event]), 300.0) == [event] and clock.now() == 3.5
    assert clock.wait([event]) == [event] and clock.now() == 3.5


def test_a_wait_that_would_never_end_is_an_error(event: int) -> None:
    with pytest.raises(RuntimeError, match="at 4 s a wait without limit begins"):
        VirtualClock(4.0).wait([event])


def test_the_clocks_agree_on_what_is_ready(event: int) -> None:
    for clock in (Clock(), VirtualClock()):
        assert clock.wait([event], 0.0) == clock.wait([event], -1.0) == []
    os.eventfd_write(event, 1)
    for clock in (Clock(), VirtualClock()):
        assert clock.wait([event]) == clock.wait(readable([event]), 0.0) == [event]


def test_a_deadline_counts_on_its_clock() -> None:
    clock = VirtualClock(50.0)
    deadline = Deadline(8.0, clock)
    clock.sleep(5.0)
    assert deadline.at == 58.0 and deadline.remaining() == 3.0 and not deadline.passed()
    later = deadline.extended(4.5)
    clock.sleep(3.0)
    assert deadline.passed() and (later.remaining(), later.passed()) == (4.5, False)
