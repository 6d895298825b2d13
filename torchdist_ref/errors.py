"""The exception tree: one look and you know what to catch.

::

    RuntimeError
    └── DistError                  anything this library raises about communication
        ├── DistBackendError       a backend could not carry out a call
        │   ├── RankDiedError      a member of the group is gone                        (may have happened)
        │   ├── RankStalledError   a member did not show up before the deadline         (may have happened)
        │   ├── GroupAbortedError  another rank gave up, or the group was destroyed     (may have happened)
        │   ├── MismatchError      ranks called different things; nothing was written   (did not happen)
        │   └── UnsupportedError   this backend cannot do that; names one that can       (did not happen)
        ├── DistNetworkError       a socket could not be opened, or broke
        └── DistStoreError         a store operation failed
            ├── StoreTimeoutError  a key did not appear in time
            └── QueueEmptyError    a queue had nothing to give
    ValueError
    ├── ArgumentError              an argument has a wrong value                        (did not happen)
    │   ├── BackendArgumentError    lists, sizes, dtypes, tags, time-outs           (did not happen)
    │   ├── EntryError             a list has too few entries                       (did not happen)
    │   ├── UsageError             arguments contradict each other, or lack one     (did not happen)
    │   │   └── NotInitializedError  a call before init_process_group               (did not happen)
    │   └── RendezvousError        the URL, environment, rank or world size is wrong    (did not happen)
    TypeError
    └── ArgumentTypeError          an argument is of the wrong kind                     (did not happen)
        └── PicklingError          an object that is to be sent can't be pickled        (did not happen)

``definite`` on each class answers the question that a caller has after a failure: when it is true,
the operation surely did not happen and no tensor was written; when it is false, it may have.

Where torch has an exception type for the same kind of failure, ours is a subclass of it, so that
``except torch.distributed.DistStoreError`` catches ours too. This module must not import torch
(the launcher uses it and should not pay for torch), so `adopt_torch` puts torch's types under ours
once torch is there. Add a class here only where a caller would want to catch it by itself.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any


class _Root(RuntimeError):
    """Placeholders stand where torch's own exception types go: see `adopt_torch`."""


class _ErrorSlot(_Root):
    pass


class _BackendSlot(_Root):
    pass


class _NetworkSlot(_Root):
    pass


class _StoreSlot(_Root):
    pass


class _QueueSlot(_Root):
    pass


class DistError(_ErrorSlot):
    """Anything that went wrong while ranks talked to each other."""

    definite = False


class DistBackendError(_BackendSlot, DistError):
    """A backend could not carry out a call."""


class DistNetworkError(_NetworkSlot, DistError):
    """A socket could not be opened, or broke."""


class DistStoreError(_StoreSlot, DistError):
    """A store operation failed."""


class StoreTimeoutError(DistStoreError):
    """A key did not appear before the time-out."""


class QueueEmptyError(_QueueSlot, DistStoreError):
    """A queue had nothing to give."""


class RankDiedError(DistBackendError):
    """A member of the group is gone: killed, crashed, or left without taking part."""


class RankStalledError(DistBackendError):
    """A member of the group is alive but did not show up before the deadline."""


class GroupAbortedError(DistBackendError):
    """Another rank gave up on the group, or the group was destroyed under the call."""


class MismatchError(DistBackendError):
    """Ranks made different calls at the same place. Nothing was written; the group stays usable."""

    definite = True


class UnsupportedError(DistBackendError, NotImplementedError):
    """This backend cannot do what was asked; the message names what can. It is a NotImplementedError too."""

    definite = True


class ArgumentError(ValueError):
    """An argument has a value that the call cannot take."""

    definite = True


class BackendArgumentError(ArgumentError, RuntimeError):
    """What torch leaves to its backends to refuse: lists, sizes, dtypes, tags, time-outs. It is a RuntimeError too."""


class EntryError(ArgumentError, IndexError):
    """A list has fewer entries than there are things to put in it, or none at all. torch raises an IndexError."""


class UsageError(ArgumentError, AssertionError):
    """Arguments of `init_process_group` that contradict each other, or lack one. torch asserts that they don't."""


class NotInitializedError(UsageError):
    """A function that needs a process group was called before `init_process_group`."""


class RendezvousError(ArgumentError):
    """Ranks could not agree how to meet: the URL, the environment, the rank or the world size."""


class ArgumentTypeError(TypeError):
    """An argument is of a kind that the call cannot take."""

    definite = True


class PicklingError(ArgumentTypeError, pickle.PicklingError, AttributeError):
    """An object that is to be sent to other ranks can't be pickled.

    Pickle itself raises one of three types, by what it met: a function of no name is a PicklingError, something local
    an AttributeError, a lock a TypeError. This is all three, so that whatever was caught before is caught still.
    """


def adopt_torch() -> None:
    """Put torch's exception types under ours. Called once by the modules that import torch anyway."""
    import torch.distributed as theirs

    DistError.__bases__ = (theirs.DistError,)
    DistBackendError.__bases__ = (theirs.DistBackendError, DistError)
    DistNetworkError.__bases__ = (theirs.DistNetworkError, DistError)
    DistStoreError.__bases__ = (theirs.DistStoreError, DistError)
    QueueEmptyError.__bases__ = (theirs.QueueEmptyError, DistStoreError)


def _nowhere() -> int | None:
    return None


_rank_here: Callable[[], int | None] = _nowhere


def find_rank_with(ask: Callable[[], int | None]) -> None:
    """Say how messages learn which rank they come from. Called once by the module that knows; None: not yet known."""
    global _rank_here
    _rank_here = ask


def on_rank() -> str:
    """Where a message comes from, to stand behind it; empty where there is no group yet."""
    rank = _rank_here()
    return "" if rank is None else f" (on rank {rank})"


def explain(operation: str, argument: str, expected: str, got: Any, *, rank: int | None = None, hint: str = "") -> str:
    """The one form in which this library says that an argument is wrong.

    The rank is the global one of the current world, unless another is given.

    >>> print(explain("broadcast", "src", "a rank from 0 to 3", 7, rank=1, hint="Ranks count from 0."))
    broadcast: argument 'src' must be a rank from 0 to 3, got 7 (on rank 1). Ranks count from 0.
    """
    where = on_rank() if rank is None else f" (on rank {rank})"
    return f"{operation}: argument {argument!r} must be {expected}, got {got!r}{where}.{' ' + hint if hint else ''}"


# Names of earlier releases: kept for one release, with a warning.
_RENAMED = {"EngineArgumentError": "BackendArgumentError"}


def __getattr__(name: str) -> type[ArgumentError]:
    new = _RENAMED.get(name)
    if new is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{name} is now called {new}", DeprecationWarning, stacklevel=2)
    found: type[ArgumentError] = globals()[new]
    return found
