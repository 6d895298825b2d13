"""Exceptions of the library, as a tree.

::

    RuntimeError
    └── DistError                  any failure of communication
        ├── DistBackendError       a backend could not run a call
        │   ├── RankDiedError      a member of the group is gone                        (may have happened)
        │   ├── RankStalledError   a member did not arrive before the deadline          (may have happened)
        │   ├── GroupAbortedError  another rank aborted, or the group was destroyed     (may have happened)
        │   │   └── DestroyedGroupError  the group was destroyed before the call        (did not happen)
        │   ├── MismatchError      ranks made different calls; nothing was written      (did not happen)
        │   └── UnsupportedError   this backend cannot do that; names one that can       (did not happen)
        ├── DistNetworkError       a socket could not be opened, or broke
        │   └── AuthenticationError    a peer or a value is not of this job          (did not happen)
        └── DistStoreError         a store operation failed
            ├── StoreTimeoutError  a key did not appear in time
            └── QueueEmptyError    a queue was empty
    ValueError
    ├── ArgumentError              an argument has a wrong value                        (did not happen)
    │   ├── BackendArgumentError    lists, sizes, dtypes, tags, time-outs           (did not happen)
    │   ├── EntryError             a list has too few entries                       (did not happen)
    │   ├── UsageError             arguments contradict each other, or lack one     (did not happen)
    │   │   └── NotInitializedError  a call before init_process_group               (did not happen)
    │   └── RendezvousError        the URL, environment, rank or world size is wrong    (did not happen)
    TypeError
    └── ArgumentTypeError          an argument is of the wrong kind                     (did not happen)
        └── PicklingError          an object to be sent cannot be pickled               (did not happen)

The class attribute ``definite`` is true if the operation certainly did not happen and no tensor was written. If it is
false, it may have happened.

If torch has an exception type for the same kind of failure, ours is a subclass of it: ``except
torch.distributed.DistStoreError`` catches ours too. This module must not import torch, which the launcher does without,
so `adopt_torch` adds torch's types as base classes once torch is imported. Do not add a class that no caller would
catch by itself.
"""

from __future__ import annotations

import errno
import os
import pickle
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, Self, TypeVar

from torchdist_ref.error_index import PREFIX, entry_of

_LIMITS = {
    errno.EMFILE: "This process has no free file descriptor: raise its limit (ulimit -n), or close files.",
    errno.ENFILE: "This host has no free file descriptor: raise its limit (sysctl fs.file-max), or close files.",
    errno.ENOMEM: "No memory is free, or a limit on it is reached (ulimit -v, or that of the container).",
    errno.ENOBUFS: "The system has no memory for sockets: close some, or raise its limits (sysctl net.core).",
    errno.ENOSPC: "No space is left: free some on the disk or in /dev/shm.",
    errno.EFBIG: "A limit on the size of files is reached, which holds for shared memory too: raise it (ulimit -f).",
}
"""Advice on the system errors of this process alone, which do not follow from the end of another rank."""
_NAMES_LIMIT = "names_limit"
"""Attribute of errors that `at_limit` has made."""
_NO_THREAD = "can't start new thread"
_NO_THREAD_ADVICE = "No thread can be started: raise the limit on processes (ulimit -u), on memory, or the container's."
_E = TypeVar("_E", bound=BaseException)


def indexed(error: _E) -> _E:
    """Return an error with a note that names its entry of the error index; errors of this module have it already."""
    error.add_note(PREFIX + entry_of(error))
    return error


def add_note(error: BaseException, text: str) -> None:
    """Add a note to an error; the id of its entry, if it has one, stays the last line.

    >>> error = MismatchError("the ranks made different calls")
    >>> add_note(error, "It failed in the backward pass.")
    >>> error.__notes__
    ['It failed in the backward pass.', 'See: calls-differ']
    """
    notes = getattr(error, "__notes__", None) or [""]
    last = notes.pop() if notes[-1].startswith(PREFIX) else None
    error.add_note(text)
    if last is not None:
        error.add_note(last)


class _Indexed(Exception):
    """Base class of errors whose last note names their entry of the error index."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        indexed(self)


class _Root(RuntimeError):
    """Base class of the placeholders that `adopt_torch` replaces by torch's exception types."""


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


class DistError(_Indexed, _ErrorSlot):
    """Failure of communication between ranks.

    Attributes:
        operation: The operation that failed and the rank, if the text begins with them.
    """

    definite = False
    operation = ""


class ReportedFailure(Protocol):
    """Failure of ranks as a value: a `membership.events.Failure`, which this module must not import."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the culprits."""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""


class DistBackendError(_BackendSlot, DistError):
    """A backend could not run a call.

    Attributes:
        ranks: Global ranks that caused the error, as far as they are known.
        failure: The failure of ranks that this error reports, as a value; None if none is known.
    """

    ranks: tuple[int, ...] = ()
    failure: ReportedFailure | None = None

    def naming(self, ranks: Iterable[int]) -> Self:
        """Set `ranks`, and return this error."""
        self.ranks = tuple(ranks)
        return self

    def reporting(self, failure: ReportedFailure | None) -> Self:
        """Set `failure` and the ranks that it names, if there is one, and return this error."""
        if failure is not None:
            self.failure, self.ranks = failure, failure.ranks
        return self


class DistNetworkError(_NetworkSlot, DistError):
    """A socket could not be opened, or broke."""


class AuthenticationError(DistNetworkError):
    """A peer, or a value in the store, did not prove that it belongs to this job."""

    definite = True


class DistStoreError(_StoreSlot, DistError):
    """A store operation failed."""


class StoreTimeoutError(DistStoreError):
    """A key did not appear before the time-out."""


class QueueEmptyError(_QueueSlot, DistStoreError):
    """A queue was empty."""


class RankDiedError(DistBackendError):
    """A member of the group has ended: it was killed, crashed, or exited before it made the call."""


class RankStalledError(DistBackendError):
    """A member of the group is alive but did not arrive before the deadline."""


class GroupAbortedError(DistBackendError):
    """Another rank aborted the group, or the group was destroyed during the call.

    Attributes:
        culprit: The rank that aborted first, such as ``rank 3``; empty if none did.
        reason: The reason that it gave, which is the same on all ranks.
    """

    culprit = reason = ""


class MismatchError(DistBackendError):
    """Ranks made different calls where all must make the same. Nothing was written; the group remains usable."""

    definite = True


class UnsupportedError(DistBackendError, NotImplementedError):
    """The backend does not support the call; the message names one that does. Also a NotImplementedError."""

    definite = True


class ArgumentError(_Indexed, ValueError):
    """An argument has a value that the call cannot take."""

    definite = True


class BackendArgumentError(ArgumentError, RuntimeError):
    """An argument that torch's backends refuse: lists, sizes, dtypes, tags, time-outs. Also a RuntimeError."""


class EntryError(ArgumentError, IndexError):
    """A list has too few entries for the results, or none. torch raises an IndexError."""


class UsageError(ArgumentError, AssertionError):
    """Arguments of `init_process_group` that are contradictory or incomplete. torch raises an AssertionError."""


class NotInitializedError(UsageError):
    """A function that needs a process group was called before `init_process_group`."""


class RendezvousError(ArgumentError):
    """Ranks cannot find each other: the URL, the environment, the rank or the world size is wrong."""


class ArgumentTypeError(_Indexed, TypeError):
    """An argument has a type that the call cannot take."""

    definite = True


class DestroyedGroupError(GroupAbortedError, ArgumentError):
    """Use of a destroyed group, or communication of a forked process in a group of its parent's.

    Calls made before the destruction of a group raise the base class `GroupAbortedError`. torch raises a ValueError
    here, or uses the group as if nothing had happened.
    """

    definite = True


class PicklingError(ArgumentTypeError, pickle.PicklingError, pickle.UnpicklingError, AttributeError):
    """An object to be sent to other ranks cannot be pickled, or is not plain data in a call with ``weights_only=True``.

    Pickle itself raises one of three types: PicklingError for a lambda, AttributeError for a local class, TypeError for
    a lock. torch's loader of plain data raises UnpicklingError. This class is a subclass of all four, so handlers
    written for any of them still work.
    """


def text_of(error: BaseException) -> str:
    r"""Return the text of an exception, in characters that UTF-8 can encode; it never raises.

    Other ranks must learn of an error in any case. But a path in its text may hold bytes that are not text, and the
    ``__str__`` of a user's exception may raise.

    >>> print(text_of(ValueError("cannot read \udce9.pt")))
    cannot read \udce9.pt
    """
    try:
        return str(error).encode(errors="backslashreplace").decode()
    except Exception as failure:
        return f"its text cannot be read: {type(failure).__name__}"


def message_of(error: BaseException) -> str:
    """Return type and text of an exception, or its type if it has no text; as `text_of`, it never raises.

    >>> message_of(ValueError("no such file"))
    'ValueError: no such file'
    >>> message_of(AssertionError())
    'AssertionError'
    """
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def in_context(text: str, error: BaseException) -> DistError:
    """Return an error with another text, of the same class if that is one of ours, so that handlers still catch it.

    The operation that fails may have done a part of its work, so the new error is never definite.

    >>> in_context("hook: rank 1 ended", RankDiedError("rank 1 ended").naming([1])).ranks
    (1,)
    """
    made = (type(error) if isinstance(error, DistError) else DistError)(text)
    vars(made).update({name: value for name, value in vars(error).items() if name != "__notes__"}, definite=False)
    return made


def of_operation(place: str, error: DistError) -> DistError:
    """Return an error of communication whose text begins with the operation that failed; see `DistError.operation`.

    Args:
        place: The operation and the rank.
        error: The error, which names no operation yet.

    >>> of_operation("new_group on rank 1", DistNetworkError("the server is gone"))
    DistNetworkError('new_group on rank 1: the server is gone')
    """
    made = in_context(f"{place}: {text_of(error)}", error)
    made.operation = place
    return made


def adopt_torch() -> None:
    """Make torch's exception types base classes of ours. Called once by modules that import torch."""
    import torch.distributed as theirs

    DistError.__bases__ = (_Indexed, theirs.DistError)
    DistBackendError.__bases__ = (theirs.DistBackendError, DistError)
    DistNetworkError.__bases__ = (theirs.DistNetworkError, DistError)
    DistStoreError.__bases__ = (theirs.DistStoreError, DistError)
    QueueEmptyError.__bases__ = (theirs.QueueEmptyError, DistStoreError)


def _unknown_rank() -> int | None:
    return None


_get_rank: Callable[[], int | None] = _unknown_rank


def find_rank_with(function: Callable[[], int | None]) -> None:
    """Set the function that returns the rank for error messages, or None if it is not yet known."""
    global _get_rank
    _get_rank = function


def known_rank() -> int | None:
    """Return the global rank in the current world, or None if there is no group yet."""
    return _get_rank()


def on_rank() -> str:
    """Return the rank as a suffix of an error message; an empty string if there is no group yet."""
    rank = _get_rank()
    return "" if rank is None else f" (on rank {rank})"


def advice_on_limit(error: BaseException) -> str:
    """Return advice on a system error that names a limit of this process or host; empty for any other error.

    >>> advice_on_limit(OSError(errno.ENFILE, "Too many open files in system")).partition(":")[0]
    'This host has no free file descriptor'
    >>> advice_on_limit(RuntimeError("can't start new thread")).partition(":")[0]
    'No thread can be started'
    """
    if isinstance(error, MemoryError):
        return _LIMITS[errno.ENOMEM]
    if isinstance(error, RuntimeError):
        return _NO_THREAD_ADVICE if text_of(error).startswith(_NO_THREAD) else ""
    return _LIMITS.get(getattr(error, "errno", None) or 0, "")


def at_limit(operation: str, error: BaseException) -> BaseException | None:
    """Return an error of the same type that names the operation and the limit which ended it.

    None if there was no limit, or if the error names it already.

    >>> print(at_limit("new_group on rank 1", OSError(errno.EMFILE, "")))
    [Errno 24] new_group on rank 1: Too many open files. This process has no free file descriptor: raise its limit...
    """
    if not (advice := lacking_advice(error)):
        return None
    made: MemoryError | RuntimeError | OSError
    if isinstance(error, MemoryError):
        made = MemoryError(f"{operation}: out of memory. {advice}")
    elif isinstance(error, RuntimeError):
        made = RuntimeError(f"{_NO_THREAD} in {operation}. {advice}")
    else:
        number = getattr(error, "errno", 0)
        made = OSError(number, f"{operation}: {os.strerror(number)}. {advice}")
    vars(made)[_NAMES_LIMIT] = True
    return made


def lacking_advice(error: BaseException) -> str:
    """Return `advice_on_limit` unless `at_limit` has made the error, whose text has the advice.

    >>> lacking_advice(MemoryError())
    'No memory is free, or a limit on it is reached (ulimit -v, or that of the container).'
    >>> lacking_advice(at_limit("new_group on rank 1", MemoryError()))
    ''
    """
    return "" if getattr(error, _NAMES_LIMIT, False) else advice_on_limit(error)


def rank_names(ranks: Iterable[int], members: Sequence[int] | None = None) -> str:
    """Return group ranks as text, with the global ranks of `members` where they differ.

    >>> rank_names([0, 1], [0, 4]), rank_names([2])
    ('ranks 0, 1 (global 4)', 'rank 2')
    """
    names = [f"{r}" if members is None or members[r] == r else f"{r} (global {members[r]})" for r in ranks]
    return ("rank " if len(names) == 1 else "ranks ") + ", ".join(names)


def explain(operation: str, argument: str, expected: str, got: Any, *, rank: int | None = None, hint: str = "") -> str:
    """Return the error message for a wrong argument.

    The rank is the global rank in the current world by default.

    >>> print(explain("broadcast", "src", "a rank from 0 to 3", 7, rank=1, hint="Ranks count from 0."))
    broadcast: argument 'src' must be a rank from 0 to 3, got 7 (on rank 1). Ranks count from 0.
    """
    where = on_rank() if rank is None else f" (on rank {rank})"
    return f"{operation}: argument {argument!r} must be {expected}, got {got!r}{where}.{' ' + hint if hint else ''}"


def explain_type(operation: str, argument: str, expected: str, got: str) -> str:
    """Return the error message for an argument of a wrong type, in the words that users of torch search for."""
    return (
        f"{operation}: Invalid function argument. Expected parameter `{argument}` of type {expected}\n"
        f"             but got {got} instead{on_rank()}."
    )


# Names of earlier releases: kept for one release, with a warning.
_RENAMED = {"EngineArgumentError": "BackendArgumentError"}


def __getattr__(name: str) -> type[ArgumentError]:
    new = _RENAMED.get(name)
    if new is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{name} is now called {new}", DeprecationWarning, stacklevel=2)
    found: type[ArgumentError] = globals()[new]
    return found
