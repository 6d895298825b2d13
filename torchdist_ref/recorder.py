"""Recorders of the last calls of this process: queued, running, completed and failed ones of each group and rank.

Every call of every backend is recorded, so the recorder must cost nearly nothing. A backend appends one list to a ring
buffer when the call is made, and writes two times into it, without a function of Python in between. Everything that
can wait is done when somebody reads: sizes in bytes, texts, durations.

Calls that meet other ranks in the store (init_process_group, new_group and the like) have no backend that could
record them, and may be the ones in which a job hangs. `StoreCalls` records them. `debug.flight_recorder` writes what is
recorded to a file. Do not add work per call here.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from math import prod
from time import perf_counter
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

from torchdist_ref.calls import AllGather, Call, Number, Scatter, signature
from torchdist_ref.errors import ReportedFailure, message_of

# The first variable that is set counts; the others are torch's names, the last one its former name.
SIZE_VARIABLES = ("TORCHDIST_REF_FLIGHT_RECORDER_SIZE", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
DEFAULT_CAPACITY = 1024
FORMAT = "torchdist_ref flight recorder"
"""Field "format" of the files that `debug.flight_recorder` writes and `debug.dumps` reads."""
MAX_CAPACITY = 1 << 20

Operands = tuple[tuple[tuple[Any, Sequence[int]], ...], tuple[tuple[Any, Sequence[int]], ...]]
"""(dtype, shape) of every input and of every output of a call. In-place calls have outputs only."""

Entry = list[Any]
"""Event in the ring buffer; the indices of its fields are the constants below."""

NUMBER, CALL, OPERANDS, START, END, ERROR, FRAMES = range(7)
"""Fields of an `Entry`. START is 0.0 until the call runs, END until it ends. FRAMES exists at debug level DETAIL.

ERROR is the empty string, or of an exception: its text and class, the global ranks that it names, and its failure.
"""

Frame = tuple[str, str, int]
"""Function, file and line."""


def capacity_from_environment() -> int:
    """Return the number of calls that a recorder keeps: at least 1, and the default if a value is not a number.

    >>> capacity_from_environment()
    1024
    """
    for variable in SIZE_VARIABLES:
        text = os.environ.get(variable, "").strip()
        if text.isdecimal():
            return min(max(1, int(text)), MAX_CAPACITY)
    return DEFAULT_CAPACITY


@dataclass(frozen=True, slots=True)
class CallRecord:
    """Call of one rank, as recorded.

    Attributes:
        sequence: Number of the call in its group, from 0; -1 for point-to-point calls.
        call: The call.
        operands: Dtypes and shapes of inputs and outputs on this rank.
        start: Time at which the backend began, in seconds of `time.perf_counter`; 0.0 if it has not.
        end: Time at which it ended; 0.0 if it has not.
        error: Type and message of the exception that ended it, or the empty string.
        error_class: Its class; None if there is none.
        ranks: Global ranks that the exception names because they did not do their part.
        failure: The failure of ranks that the exception has as its attribute; None if it has none.
        path: Number below `sequence` of a call that a completion callback made; else 0.
        frames: The caller's stack, innermost frame first; recorded at debug level DETAIL only.
    """

    sequence: int
    call: Call
    operands: Operands
    start: float
    end: float
    error: str = ""
    path: int = 0
    frames: tuple[Frame, ...] = ()
    ranks: tuple[int, ...] = ()
    error_class: type[BaseException] | None = None
    failure: ReportedFailure | None = None

    @property
    def nbytes(self) -> int:
        """Size of the largest operand on this rank, in bytes. A list of tensors is one operand."""
        sizes: list[int] = [sum(dtype.itemsize * prod(shape) for dtype, shape in side) for side in self.operands]
        return max(sizes)

    @property
    def dtype(self) -> str:
        """Name of the dtype of the first operand, or the empty string."""
        return next((str(dtype).removeprefix("torch.") for side in self.operands for dtype, _ in side), "")

    @property
    def text(self) -> str:
        """The call in words, with the shapes of the operands that all ranks pass; see `calls.signature`."""
        return signature(self.call, self.dtype, [tuple(shape) for _, shape in self._common])

    @property
    def compared(self) -> str:
        """Everything in the call that all ranks must agree on: shapes may differ where sizes do not."""
        return signature(self.call, self.dtype, [(sum(prod(shape) for _, shape in self._common),)])

    @property
    def _common(self) -> Sequence[tuple[Any, Sequence[int]]]:
        if getattr(self.call, "uneven", False):
            return ()
        return alike(self.call, *self.operands, lambda operand: operand[1])

    @property
    def state(self) -> str:
        """State of the call: ``"scheduled"``, ``"started"``, ``"completed"`` or ``"failed"``."""
        if self.error:
            return "failed"
        return "completed" if self.end else "started" if self.start else "scheduled"

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.end - self.start


def alike(
    call: Call, inputs: Sequence[Any], outputs: Sequence[Any], shape_of: Callable[[Any], Sequence[int]]
) -> Sequence[Any]:
    """Return the operands, inputs or outputs, whose sizes all ranks must agree on."""
    if isinstance(call, Scatter) or not inputs:
        return outputs
    # Ranks may contribute different sizes, which each of them knows.
    gathers_uneven = isinstance(call, AllGather) and len({prod(shape_of(each)) for each in outputs}) > 1
    return outputs if gathers_uneven else inputs


class Recorder:
    """Ring buffer of the last calls of one group on one rank, oldest first.

    Iteration yields the calls that have ended, as they were made; `events` has those in progress too.

    Args:
        capacity: Number of calls to keep; by default `capacity_from_environment`.

    Attributes:
        record: Function that appends an `Entry`.
        before_reading: Function that is called before calls are read, for a backend that must ask which have ended.
        on_failure: Function that is called with the exception of each failed call, in place of the one that
            `report_failures_to` has set; None by default.

    >>> from torchdist_ref.calls import Barrier
    >>> recorder = Recorder(capacity=2)
    >>> for sequence in range(3):
    ...     entry = [(sequence, 0), Barrier(), ((), ()), perf_counter(), 0.0, ""]
    ...     recorder.record(entry)
    ...     if sequence < 2:
    ...         entry[END] = perf_counter()
    >>> [(event.sequence, event.state) for event in recorder.events()], len(recorder)
    ([(1, 'completed'), (2, 'started')], 1)
    """

    def __init__(self, capacity: int | None = None) -> None:
        self._ring: deque[Entry] = deque(maxlen=capacity_from_environment() if capacity is None else capacity)
        self.record: Callable[[Entry], None] = self._ring.append
        self.before_reading: Callable[[], None] | None = None
        self.on_failure: Callable[[BaseException], None] | None = None

    def begin(self, number: Number, call: Call, operands: Operands) -> Entry:
        """Record a call that begins now, and return its entry; for backends that are not in a hurry."""
        entry: Entry = [number, call, operands, perf_counter(), 0.0, ""]
        self.record(entry)
        return entry

    def fail(self, entry: Entry, error: BaseException) -> None:
        """Record that a call has ended with an exception, and report that."""
        ranks, failure = getattr(error, "ranks", ()), getattr(error, "failure", None)
        entry[END], entry[ERROR] = perf_counter(), (message_of(error), type(error), ranks, failure)
        group = _groups.get(self)
        if self.on_failure is not None:
            self.on_failure(error)
        elif group is not None and _report_failure is not None:
            _report_failure(error, group.global_rank)

    def drop(self, entry: Entry) -> None:
        """Forget a call, which the backend records again; takes as long as the buffer is."""
        # Calls of other threads may have pushed it out of the buffer, or do so now.
        with suppress(ValueError, IndexError):
            self._ring.remove(entry)

    def find(self, number: Number) -> CallRecord | None:
        """Return the call with a number, or None if it is not kept."""
        return next((_record_of(entry) for entry in reversed(self._entries()) if entry[NUMBER] == number), None)

    def _entries(self) -> list[Entry]:
        if self.before_reading is not None:
            self.before_reading()
        return list(self._ring)

    def events(self) -> list[CallRecord]:
        """Return all calls that are kept, oldest first, those in progress included."""
        return [_record_of(entry) for entry in self._entries()]

    def __iter__(self) -> Iterator[CallRecord]:
        return (record for record in self.events() if record.end)

    def __len__(self) -> int:
        return sum(1 for entry in self._entries() if entry[END])


def _record_of(entry: Entry) -> CallRecord:
    (sequence, path), call, operands, start, end, failure, *frames = entry
    error, error_class, ranks, reported = failure or ("", None, (), None)
    stack = frames[0] if frames else ()
    return CallRecord(sequence, call, operands, start, end, error, path, stack, ranks, error_class, reported)


# ---- the recorders of this process

STORE = "store"
"""What a `RecordedGroup` has in place of a backend if its calls meet in the store."""


@dataclass(frozen=True)
class RecordedGroup:
    """Facts of a group whose calls are recorded.

    Attributes:
        name: The group's name.
        backend: Name of its backend.
        members: Global ranks, in group order.
        rank: This rank in the group.
        timeout: Time-out of its calls in seconds.
        key: Text that tells the group from others of its name, the same on all ranks.
        thread: The thread that created it, on which the rank's program runs.
    """

    name: str
    backend: str
    members: tuple[int, ...]
    rank: int
    timeout: float
    key: str = ""
    thread: int = field(default_factory=threading.get_ident)

    @property
    def global_rank(self) -> int:
        """This rank in the world."""
        return self.members[self.rank]


_groups: WeakKeyDictionary[Recorder, RecordedGroup] = WeakKeyDictionary()
_groups_made: Counter[int] = Counter()
# A group may be included while another thread, or a signal's handler on this one, writes a dump.
_lock = threading.RLock()
_report_failure: Callable[[BaseException, int], None] | None = None


def include(recorder: Recorder, group: RecordedGroup) -> Recorder:
    """Include calls in this process's dumps, as long as their recorder exists; return the recorder."""
    with _lock:
        _groups[recorder] = group
        _groups_made[group.global_rank] += group.backend != STORE
    return recorder


def recorded_groups() -> list[tuple[Recorder, RecordedGroup]]:
    """Return the recorders that exist, with their groups; a signal's handler may call this."""
    with _lock:
        return list(_groups.items())


def groups_made(rank: int) -> int:
    """Return how many groups with a backend a global rank of this process has made so far."""
    return _groups_made[rank]


def report_failures_to(function: Callable[[BaseException, int], None]) -> None:
    """Have a function called with the exception of each failed call of a group, and with the global rank."""
    global _report_failure
    _report_failure = function


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.RLock()
    _groups.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)

MAX_FRAMES = 32


def frames_of(frame: FrameType | None, most: int = MAX_FRAMES) -> tuple[Frame, ...]:
    """Return the frames of a stack, innermost first."""
    frames: list[Frame] = []
    while frame is not None and len(frames) < most:
        frames.append((frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(frames)


# ---- calls that meet in the store

_STORE_CALLS = 64
"""Calls that are kept of each kind and group: each has a stack."""


@dataclass(frozen=True, slots=True)
class StoreCall(Call):
    """Call that meets other ranks in the store.

    Attributes:
        op: Name of the operation.
        arguments: The arguments that all ranks must agree on, as text.
        awaited: Global ranks that this rank waits for.

    >>> str(StoreCall("new_group", "ranks=[0, 2]", (0, 2)))
    'new_group(ranks=[0, 2])'
    """

    op: str  # type: ignore[misc]
    arguments: str
    awaited: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.op}({self.arguments})"


class StoreCalls:
    """Calls of one rank that meet in the store, in a recorder for each operation and group.

    Each recorder has its own numbers, so that ranks agree on the number whatever else they call. The flight recorder
    shows it as a group, whose name is that of the operation and the group. The calls take milliseconds, so the caller's
    stack is recorded with each.

    >>> calls = StoreCalls()
    >>> with calls.recorded(StoreCall("new_group", "ranks=[0]", (0,)), "new_group", (0,), 0, 1.0):
    ...     [event.state for event in calls.recorder("new_group", (0,)).events()]
    ['started']
    >>> [event.state for event in calls.recorder("new_group", (0,)).events()]
    ['completed']
    """

    def __init__(self) -> None:
        self._recorders: dict[tuple[str, tuple[int, ...]], tuple[Recorder, list[int]]] = {}

    def recorder(self, name: str, members: Sequence[int]) -> Recorder:
        """Return the recorder of the calls of some name that some ranks make."""
        return self._recorders[name, tuple(members)][0]

    def initialization(self, rank: int, size: int, timeout: float) -> AbstractContextManager[None]:
        """Return a context in which init_process_group is recorded, as `recorded` does."""
        members = tuple(range(size))
        call = StoreCall("init_process_group", f"world_size={size}", members)
        return self.recorded(call, call.op, members, rank, timeout)

    @contextmanager
    def recorded(self, call: StoreCall, name: str, members: Sequence[int], rank: int, timeout: float) -> Iterator[None]:
        """Record a call while the context is open, and its failure if an exception ends the context.

        Args:
            call: The call.
            name: Name of the calls that are numbered together, for readers of the dump.
            members: Global ranks that make them.
            rank: Position of this rank among the members.
            timeout: Time-out of the call in seconds.
        """
        key = name, tuple(members)
        if key not in self._recorders:
            group = RecordedGroup(name, STORE, key[1], rank, timeout)
            self._recorders[key] = include(Recorder(_STORE_CALLS), group), [0]
        recorder, count = self._recorders[key]
        frames = frames_of(sys._getframe(1))  # noqa: SLF001, the documented way to the caller's frame
        entry: Entry = [(count[0], 0), call, ((), ()), perf_counter(), 0.0, "", frames]
        count[0] += 1
        recorder.record(entry)
        try:
            yield
        except BaseException as failure:
            recorder.fail(entry, failure)
            raise
        entry[END] = perf_counter()
