"""Deadline: its arithmetic, and how long each thread may sleep before the next check."""

from __future__ import annotations

import threading
import time

from torchdist_ref.timeouts import CHECK_SECONDS, MAX_SLEEP_SECONDS, Deadline, max_sleep


def test_deadline_of_zero_seconds_has_passed() -> None:
    deadline = Deadline(0.0)
    assert deadline.passed() and deadline.remaining() == deadline.sleep_seconds() == 0.0


def test_extended_deadline_keeps_the_moment() -> None:
    before = time.monotonic()
    deadline = Deadline(200.0)
    after = time.monotonic()
    later = deadline.extended(0.75)
    assert later.at == deadline.at + 0.75 and later.seconds == 200.75
    assert deadline.seconds == 200.0 and not deadline.passed()
    assert before + 200.0 <= deadline.at <= after + 200.0


def test_only_the_main_thread_wakes_up_to_check_for_ctrl_c() -> None:
    found: list[float] = []

    def sleep_seconds() -> None:
        found.append(max_sleep())
        found.append(Deadline(700.0).sleep_seconds())

    thread = threading.Thread(target=sleep_seconds)
    thread.start()
    thread.join()
    assert found[0] == MAX_SLEEP_SECONDS and 600.0 < found[1] <= 700.0
    assert max_sleep() == Deadline(700.0).sleep_seconds() == CHECK_SECONDS
