"""Namespaces, so that a module with skip connections can be used several times in a model."""

from __future__ import annotations

import uuid
from functools import total_ordering

__all__ = ["Namespace"]


@total_ordering
class Namespace:
    """A place for names of its own. A copy of a namespace is the same namespace.

    Example:
        >>> from copy import deepcopy
        >>> from torchdist_ref.pipeline.sync.skip import Namespace
        >>> first, second = Namespace(), Namespace()
        >>> first == second, first == deepcopy(first)
        (False, True)
    """

    __slots__ = ("_id",)

    def __init__(self) -> None:
        self._id = uuid.uuid4()

    def __repr__(self) -> str:
        return f"<Namespace {str(self._id)[:8]}>"

    def __hash__(self) -> int:
        return hash(self._id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self._id == other._id

    def __lt__(self, other: object) -> bool:
        # None stands for the namespace that names are in when nothing is said.
        return isinstance(other, Namespace) and self._id < other._id
