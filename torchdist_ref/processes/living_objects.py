"""Objects as long as they live, which one thread may look through while another adds to them or drops one.

A ``WeakSet`` is looked through in Python, and raises "Set changed size during iteration" then. Do not add what is done
with the objects.
"""

from __future__ import annotations

from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class LivingObjects(Generic[T]):
    """Objects that something else keeps alive.

    >>> class Group:
    ...     pass
    >>> groups, first = LivingObjects[Group](), Group()
    >>> groups.add(first)
    >>> groups.all() == [first]
    True
    >>> del first
    >>> groups.all()
    []
    """

    def __init__(self) -> None:
        self._objects: WeakKeyDictionary[T, None] = WeakKeyDictionary()

    def add(self, each: T) -> None:
        """Add an object."""
        self._objects[each] = None

    def discard(self, each: T) -> None:
        """Remove an object if it is there."""
        self._objects.pop(each, None)

    def all(self) -> list[T]:
        """Return the objects that live now, in the order in which they were added."""
        # The references are copied in one step of C.
        return [each for reference in self._objects.keyrefs() if (each := reference()) is not None]
