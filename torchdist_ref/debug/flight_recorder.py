"""Flight recorder: writes the last calls of all groups of this process to a file, one for each rank.

The calls are in the groups' recorders at all times. They are written after a failed call if a directory is set, when a
signal asks for it, and by `dump`. The signal is served by a thread of its own, because the program's thread may be
inside a function of C++ that waits for another rank. The environment variables are on the page "Environment variables".

`dumps` reads the files, `verdict` explains them. Do not add explanations here: a process that hangs has to do little.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import fields
from functools import cache
from hashlib import blake2b
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from torchdist_ref.debug.logs import configure_logging
from torchdist_ref.errors import GroupAbortedError, ReportedFailure, message_of
from torchdist_ref.membership.events import failure_by, failure_of
from torchdist_ref.membership.peer_processes import is_stopped
from torchdist_ref.processes.control import catches_signal
from torchdist_ref.processes.failure_record import (
    DIRECTORY_VARIABLE,
    LAUNCH_ID,
    PREFIX_VARIABLES,
    announce_dump_signal,
    wants_dumps,
)
from torchdist_ref.recorder import (
    FORMAT,
    STORE,
    CallRecord,
    Frame,
    RecordedGroup,
    Recorder,
    frames_of,
    groups_made,
    recorded_groups,
    report_failures_to,
)

VERSION = 1
LEFT = "the rank left the world"
"""Reason of the dump of a rank that destroyed its groups, or whose program ended."""
# Backends on which a call that differs fails on all ranks; `fake` has no other ranks.
_COMPARED_ON = ("ref", "fake", STORE)

SIGNAL_VARIABLE = "TORCHDIST_REF_FLIGHT_RECORDER_SIGNAL"
# Bounds of a file. A program of 1,000 groups still leaves 20 calls of each.
MAX_EVENTS = 20_000
MAX_GROUPS = 1_000
MAX_OPERANDS = 16
MAX_RANKS = 64
MAX_STACKS = 2_000
MAX_FRAMES = 64
MAX_THREADS = 64
MAX_TEXT = 1_000

log = logging.getLogger("torchdist_ref.debug")


_writing = threading.Lock()
_dumped_failures: dict[int, tuple[str, int]] = {}
"""The last failure that each rank has dumped, since the calls after it fail for the same reason; and the number of
groups that the rank had made by then."""


# ---- what a dump holds


def snapshot(rank: int, reason: str, error: BaseException | None = None) -> dict[str, Any]:
    """Return the dump of one rank of this process, made of plain data.

    Args:
        rank: The global rank.
        reason: Cause of the dump.
        error: The exception that caused it, if any.
    """
    # Of an earlier world, a group may have the same name and key.
    latest = {(group.name, group.key): (recorder, group) for recorder, group in of_rank(rank)}
    # Calls through the store come last, where they are kept.
    groups = sorted(latest.values(), key=lambda each: each[1].backend == STORE)[-MAX_GROUPS:]
    stacks: dict[tuple[Frame, ...], int] = {}
    wall = time.time() - time.perf_counter()
    most = max(1, MAX_EVENTS // max(1, len(groups)))
    thread = groups[0][1].thread if groups else threading.main_thread().ident
    return {
        "format": FORMAT,
        "version": VERSION,
        "rank": rank,
        "world_size": max((len(group.members) for _, group in groups), default=1),
        "attempt": _number("TORCHELASTIC_RESTART_COUNT"),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time_ns": time.time_ns(),
        "reason": reason[:MAX_TEXT],
        "has_left": reason == LEFT,
        "error": None if error is None else _error(error),
        "threads": _threads(thread),
        "groups": [
            {
                "name": group.name,
                "key": group.key[:MAX_TEXT],
                "backend": group.backend,
                "members": group.members,
                "rank": group.rank,
                "timeout": group.timeout,
                "events": [_event(event, wall, stacks) for event in recorder.events()[-most:]],
            }
            for recorder, group in groups
        ],
        "stacks": list(stacks),
    }


def calls_in_progress() -> list[tuple[RecordedGroup, CallRecord]]:
    """Return the calls of this process that have not ended, with their groups; a signal's handler may call this."""
    return [
        (group, event)
        for recorder, group in recorded_groups()
        for event in recorder.events()
        if not (event.end or event.error)
    ]


def of_rank(rank: int | None) -> list[tuple[Recorder, RecordedGroup]]:
    """Return the recorders of a rank with their groups."""
    return [(recorder, group) for recorder, group in recorded_groups() if group.global_rank == rank]


def _number(variable: str) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() and len(text) < 10 else 0


def _event(event: CallRecord, wall: float, stacks: dict[tuple[Frame, ...], int]) -> dict[str, Any]:
    """Return a call as plain data; `wall` is the time of day at which `perf_counter` was zero."""
    stack = None
    if event.frames and (event.frames in stacks or len(stacks) < MAX_STACKS):
        stack = stacks.setdefault(event.frames, len(stacks))
    inputs, outputs = ([list(shape) for _, shape in side[:MAX_OPERANDS]] for side in event.operands)
    return {
        "number": [event.sequence, event.path],
        "op": event.call.op,
        "arguments": {field.name: getattr(event.call, field.name) for field in fields(event.call)},
        "text": event.text[:MAX_TEXT],
        "compared": event.compared[:MAX_TEXT],
        "dtype": event.dtype,
        "inputs": inputs,
        "outputs": outputs,
        "nbytes": event.nbytes,
        "state": event.state,
        "start_ns": int((event.start + wall) * 1e9) if event.start else 0,
        "end_ns": int((event.end + wall) * 1e9) if event.end else 0,
        "error": event.error[:MAX_TEXT],
        "error_type": event.error_class.__name__[:MAX_TEXT] if event.error_class else "",
        "ranks": event.ranks[:MAX_RANKS],
        "failure": _failure(failure_by(event.error_class, event.ranks, event.failure)),
        "stack": stack,
    }


def _error(error: BaseException) -> dict[str, Any]:
    cause = caused_by_another_rank(error)
    return {
        "text": message_of(error)[:MAX_TEXT],
        "caused_by": "" if cause is None else message_of(cause)[:MAX_TEXT],
        "frames": frames_of_traceback(error.__traceback__),
        "ranks": getattr(error, "ranks", ())[:MAX_RANKS],
        "failure": _failure(failure_of(error)),
        "cause": None if cause is None else _failure(failure_of(cause)),
    }


def _failure(failure: ReportedFailure | None) -> dict[str, Any] | None:
    """Return the JSON form of a failure, within the bounds of a file."""
    content = {} if failure is None else failure.to_json()
    for name, value in content.items():
        if isinstance(value, str | list):
            content[name] = value[: MAX_TEXT if isinstance(value, str) else MAX_RANKS]
    return content or None


def caused_by_another_rank(error: BaseException) -> BaseException | None:
    """Return the exception that another rank caused: this one, or the nearest one that it was raised from or after."""
    seen: set[int] = set()
    following: BaseException | None = error
    # A program may have tied exceptions into a ring.
    while following is not None and id(following) not in seen:
        if failure_of(following) is not None:
            return following
        seen.add(id(following))
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)
    return None


def frames_of_traceback(trace: TracebackType | None) -> list[Frame]:
    """Return the frames of a traceback, innermost first."""
    frames: list[Frame] = []
    while trace is not None:
        frames.append((trace.tb_frame.f_code.co_name, trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    return frames[::-1][:MAX_FRAMES]


def _threads(program: int | None) -> list[dict[str, Any]]:
    """Return the stacks of all threads, that of the rank's program first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    running = sys._current_frames()  # noqa: SLF001, the documented way to other threads' stacks
    idents = sorted(running, key=lambda ident: ident != program)[:MAX_THREADS]
    return [
        {
            "name": names.get(ident, "unknown")[:MAX_TEXT],
            "program": ident == program,
            "frames": frames_of(running[ident], MAX_FRAMES),
        }
        for ident in idents
        if names.get(ident) != listener.name
    ]


# ---- where dumps go


def dump(directory: str | os.PathLike[str] | None = None, *, reason: str = "dump() was called") -> list[Path]:
    """Write the flight recorder of each rank of this process to a file.

    Args:
        directory: Directory of the files, which is created if need be. None: as the environment variables say.
        reason: Cause of the dump, for readers.

    Returns:
        The files. `python -m torchdist_ref.debug DIRECTORY` explains them.

    Raises:
        OSError: A file cannot be written, or another user owns the default directory.

    Example:
        >>> import tempfile, torch, torchdist_ref as dist
        >>> from torchdist_ref.debug.flight_recorder import dump
        >>> from torchdist_ref.testing import run
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     def program(rank):
        ...         dist.all_reduce(torch.ones(3))
        ...         return [path.name for path in dump(folder)]
        ...     run(program, 2, ranks="processes")
        [['rank0.json'], ['rank1.json']]
    """
    ranks = sorted({group.global_rank for _, group in recorded_groups()})
    for rank in ranks:
        # If a failure ends the program, its dump is to be the last one.
        _dumped_failures.pop(rank, None)
    return [_write(rank, reason, None, directory) for rank in ranks]


def dump_failure(error: BaseException, rank: int | None = None) -> None:
    """Write the flight recorder after an exception, if the environment asks for that.

    Args:
        error: The exception.
        rank: The rank that failed. None: all ranks of this process.
    """
    if not wants_dumps(os.environ):
        return
    text = message_of(error)
    ranks = [rank] if rank is not None else sorted({group.global_rank for _, group in recorded_groups()})
    for each in ranks:
        dumped, groups = _dumped_failures.get(each, ("", -1))
        if groups == groups_made(each) and (dumped == text or isinstance(error, GroupAbortedError)):
            continue
        _dumped_failures[each] = text, groups_made(each)
        try:
            path = _write(each, text, error)
        except Exception as failure:
            # The call's own error must reach the program.
            log.warning("flight recorder of rank %d: %r", each, failure)
        else:
            log.warning("flight recorder of rank %d after %s: %s", each, type(error).__name__, path)


def path_of(rank: int, directory: str | os.PathLike[str] | None = None) -> Path:
    """Return the file of a rank, and create its directory.

    Raises:
        PermissionError: The default directory is another user's, or a link.
    """
    chosen = directory or os.environ.get(DIRECTORY_VARIABLE)
    if chosen:
        Path(chosen).mkdir(0o700, parents=True, exist_ok=True)
        return Path(chosen) / f"rank{rank}.json"
    prefix = next(filter(None, map(os.environ.get, PREFIX_VARIABLES)), None)
    if prefix:
        return Path(f"{prefix}{rank}")
    folder = Path(tempfile.gettempdir()) / f"torchdist_ref_flight_recorder_{os.getuid()}"
    folder.mkdir(0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{folder} is not a directory of this user alone; set {DIRECTORY_VARIABLE}")
    variables = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    job = repr([*map(os.environ.get, variables), *([] if "MASTER_PORT" in os.environ else [os.getppid()])])
    (folder / blake2b(job.encode(), digest_size=4).hexdigest()).mkdir(0o700, exist_ok=True)
    return folder / blake2b(job.encode(), digest_size=4).hexdigest() / f"rank{rank}.json"


def _write(
    rank: int, reason: str, error: BaseException | None, directory: str | os.PathLike[str] | None = None
) -> Path:
    """Write a rank's dump, and return its file."""
    with _writing:
        path = path_of(rank, directory)
        write_privately(path, json.dumps(snapshot(rank, reason, error), separators=(",", ":"), default=str))
    return path


def write_privately(path: Path, text: str) -> None:
    """Write a file that only this user can read; readers see the whole text or the former file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    with suppress(FileNotFoundError):
        temporary.unlink()
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            temporary.unlink()
        raise


# ---- requests from outside


class SignalListener:
    """Thread that writes a dump when this process gets the signal.

    Attributes:
        name: Name of the thread.
    """

    name = "torchdist_ref flight recorder"

    def __init__(self) -> None:
        self._users = 0
        self._number: int | None = None
        self._pipe: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        # Whether our launcher has started this process, which wants to know the signal.
        self._launched = False

    def start(self) -> None:
        """Listen until `stop`, if the signal is free and this is the main thread, the only one that may."""
        self._users += 1
        number = signal_number()
        if self._pipe is not None or number is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(number) is not signal.SIG_DFL:
            name = signal.Signals(number).name
            log.info("flight recorder: the program uses %s itself; set %s to another", name, SIGNAL_VARIABLE)
            return
        try:
            self._pipe = self._open(number)
        except (OSError, RuntimeError) as error:
            # At such a limit, ranks that need no further thread or descriptor still work.
            log.warning("flight recorder: no answer to %s: %s", signal.Signals(number).name, error)
            return
        self._number = number
        former = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        if former != -1:
            # An event loop of the program needs the bytes; `_on_signal` passes on requests then.
            signal.set_wakeup_fd(former)
        signal.signal(number, self._on_signal)
        self._launched = LAUNCH_ID in os.environ
        if self._launched:
            announce_dump_signal(number)

    def _open(self, number: int) -> tuple[int, int]:
        """Return a pipe for the numbers of signals, and start the thread that reads it."""
        read_end, write_end = os.pipe()
        try:
            os.set_blocking(write_end, False)
            thread = threading.Thread(target=self._listen, args=(read_end, number), name=self.name, daemon=True)
            thread.start()
        except BaseException:
            os.close(read_end)
            os.close(write_end)
            raise
        self._thread = thread
        return read_end, write_end

    def stop(self) -> None:
        """End the thread when all who started it have stopped it, and give the signal back; on the main thread."""
        self._users = max(0, self._users - 1)
        if self._users or self._pipe is None or threading.current_thread() is not threading.main_thread():
            return
        if self._launched:
            announce_dump_signal(0)
        if self._number is not None and signal.getsignal(self._number) == self._on_signal:
            signal.signal(self._number, signal.SIG_DFL)
        self._replace_wakeup(-1)
        (read_end, write_end), self._pipe = self._pipe, None
        os.close(write_end)
        if self._thread is not None:
            self._thread.join()
        os.close(read_end)

    def _replace_wakeup(self, descriptor: int) -> bool:
        """Set the descriptor that C writes signals to, if it is the pipe's, and return whether it was."""
        current = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
        if self._pipe is not None and current == self._pipe[1]:
            return True
        signal.set_wakeup_fd(current, warn_on_full_buffer=False)
        return False

    def _listen(self, read_end: int, number: int) -> None:
        """Write a dump for each byte that is the signal's number; C writes them, whatever the main thread does."""
        while received := os.read(read_end, 64):
            if number in received:
                self._serve(number)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Have the thread write a dump, if an event loop has replaced the descriptor that C writes signals to.

        Not here: this may have interrupted a dump of the main thread, and would wait for it.
        """
        if self._pipe is not None and not self._replace_wakeup(self._pipe[1]):
            # A full pipe holds enough requests.
            with suppress(BlockingIOError):
                os.write(self._pipe[1], bytes([number]))

    def _serve(self, number: int) -> None:
        try:
            for path in dump(reason=f"signal {signal.Signals(number).name}"):
                log.warning("flight recorder: %s", path)
        except Exception as error:
            log.warning("flight recorder: %r", error)

    def forget(self) -> None:
        """Leave the parent's thread and pipe to the parent; for a forked child."""
        pipe, number = self._pipe, self._number
        if pipe is not None and number is not None:
            with suppress(ValueError):
                self._replace_wakeup(-1)
                signal.signal(number, signal.SIG_DFL)
            for descriptor in pipe:
                os.close(descriptor)
        self._users, self._number, self._pipe, self._thread = 0, None, None, None


listener = SignalListener()


def observe_process() -> Callable[[], None]:
    """Configure logging, and do what `answer_requests` does."""
    configure_logging()
    return answer_requests()


def answer_requests() -> Callable[[], None]:
    """Answer the signal, and dump uncaught exceptions; return the function to call when this rank leaves the world."""
    _dump_uncaught()
    listener.start()
    return _leave


def _leave() -> None:
    """Dump the calls that no backend has compared, which may have made other ranks fail, and stop listening."""
    ranks = {group.global_rank for _, group in recorded_groups() if group.backend not in _COMPARED_ON}
    dumped = {rank for rank, (_, groups) in _dumped_failures.items() if groups == groups_made(rank)}
    for rank in sorted(ranks - dumped):
        if not wants_dumps(os.environ):
            break
        try:
            _write(rank, LEFT, None)
        except Exception as error:
            log.warning("flight recorder of rank %d: %r", rank, error)
    listener.stop()


@cache
def _dump_uncaught() -> None:
    former = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if isinstance(error, Exception):
            dump_failure(error)
        former(kind, error, frames)

    sys.excepthook = hook


def _after_fork_in_child() -> None:
    global _writing
    _writing = threading.Lock()
    _dumped_failures.clear()
    listener.forget()


report_failures_to(dump_failure)
os.register_at_fork(after_in_child=_after_fork_in_child)


def signal_number() -> int | None:
    """Return the number of the signal that asks for a dump: SIGUSR2 by default; None if the variable is ``0``.

    >>> signal_number() == signal.SIGUSR2
    True
    """
    text = os.environ.get(SIGNAL_VARIABLE, "SIGUSR2").strip().upper()
    if text.isdecimal():
        return int(text) if 0 < int(text) < signal.NSIG else None
    return getattr(signal, text if text.startswith("SIG") else f"SIG{text}", None)


_STOPPED = ", but it is stopped and answers once 'kill -CONT {pid}' has continued it"


def request(pids: Iterable[int]) -> Iterator[str]:
    """Ask running ranks for dumps, and yield a line on each.

    The signal is not sent to a process that it would end.

    Args:
        pids: Process ids of ranks on this host.
    """
    number = signal_number()
    for pid in pids:
        try:
            if number is None or not catches_signal(pid, number):
                yield f"{pid}: this process does not listen for dump requests"
                continue
            os.kill(pid, number)
        except (OSError, OverflowError) as error:
            yield f"{pid}: {error}"
        else:
            yield f"{pid}: asked{_STOPPED.format(pid=pid) if is_stopped(pid) else ''}"
