"""Objects as long as they live: looked through while other threads add some."""

from __future__ import annotations

import sys
import threading
from weakref import WeakSet

from torchdist_ref.processes.living_objects import LivingObjects


class Group:
    """Any object."""


def looks_that_fail(objects: LivingObjects[Group] | WeakSet[Group]) -> int:
    """Look through 500 objects 300 times while another thread adds and drops some; return how many looks failed."""
    kept, failed, over = [Group() for _ in range(500)], 0, threading.Event()
    for each in kept:
        objects.add(each)

    def add() -> None:
        while not over.is_set():
            objects.add(Group())

    adding, interval = threading.Thread(target=add), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    adding.start()
    try:
        for _ in range(300):
            try:
                found = list(objects) if isinstance(objects, WeakSet) else objects.all()
            except RuntimeError:
                failed += 1
            else:
                assert set(kept) <= set(found)
    finally:
        over.set()
        adding.join()
        sys.setswitchinterval(interval)
    return failed


def test_they_are_looked_through_while_another_thread_adds_some() -> None:
    assert looks_that_fail(LivingObjects()) == 0


def test_they_are_in_the_order_of_addition_until_discarded_or_gone() -> None:
    objects, three = LivingObjects[Group](), [Group() for _ in range(3)]
    for each in (*three, three[0]):
        objects.add(each)
    assert objects.all() == three
    objects.discard(three[1])
    objects.discard(Group())
    assert objects.all() == [three[0], three[2]]
    del three[0], each
    assert objects.all() == three[1:]
