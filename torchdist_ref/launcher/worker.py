"""Worker as its supervisor sees it: a child process, and a line relay for each of its output streams.

`processes.control.die_with_parent` ends it with the launcher. A worker writes a stream without console directly to
its file. Do not add reactions to failures here: they belong to the supervisor.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, NoReturn, Protocol, TextIO

from torchdist_ref.launcher.logs import Output
from torchdist_ref.processes import control as processes

# Windows has neither, and this package can be imported there.
with contextlib.suppress(ImportError):
    import fcntl
    import termios

# Longer unfinished lines are cut, so that output without line ends cannot fill the memory.
_MAX_LINE_BYTES = 1 << 24
_CONSOLE = Output()
# Start of the traceback of an exception that Python prints.
TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class WorkerPlan:
    """Description of one process to start.

    Attributes:
        rank: Global rank.
        local_rank: Rank among the workers of this host.
        environment: Whole environment.
        command: Command line.
        function: Function to call in a fork of this process instead of a command; it returns the exit code.
        stdout: Destination of standard output.
        stderr: Destination of standard error.
        error_file: Path of the failure record; empty for none.
        cpus: Processor numbers that the worker may use; empty for all.
        start_method: ``"fork"`` or ``"spawn"`` of `multiprocessing` for the function, whose arguments it passes. Empty
            for a plain fork.
    """

    rank: int
    local_rank: int
    environment: Mapping[str, str]
    command: Sequence[str] = ()
    function: Callable[[], int] | None = None
    stdout: Output = _CONSOLE
    stderr: Output = _CONSOLE
    error_file: str = ""
    cpus: tuple[int, ...] = ()
    start_method: str = ""


class Worker:
    """Running worker.

    It leads a process group, so that a signal reaches the processes it started, and Ctrl-C reaches it only once,
    through the launcher. It stays in the launcher's session: Linux may distribute processor time by session (sched(7),
    autogroup), and workers that wait for one another should share one.

    Rank 0 reads the launcher's standard input, as under mpiexec; the other workers read nothing.

    Args:
        plan: Description.
        log: Function that receives a line if a log file cannot be written.
        sink: Function that returns the sink of a stream of this process. Default: `binary_sink`.

    Attributes:
        plan: Description.
        process: Its process.
        relays: Relay of each open pipe, by descriptor.
    """

    def __init__(
        self,
        plan: WorkerPlan,
        log: Callable[[str], None] = lambda line: None,
        sink: Callable[[TextIO], Sink] | None = None,
    ) -> None:
        self.plan = plan
        streams = ((plan.stdout, sys.stdout), (plan.stderr, sys.stderr))
        with contextlib.ExitStack() as stack:
            ends = [_open(output, stack) for output, _ in streams]
            if plan.function is None:
                self.process = self._start_command(ends[0][1], ends[1][1])
            elif plan.start_method:
                self.process = self._start_process(ends[0][1], ends[1][1])
            else:
                self.process = self._fork(ends[0][1], ends[1][1])
            stack.pop_all()
            for _, writer in ends:
                writer.close()
        self.process.pipes = [reader for reader, _ in ends if reader is not None]
        self.relays = {
            reader.fileno(): LineRelay(
                (sink or binary_sink)(stream),
                output.prefix,
                copy=LogFile(output.path, log) if output.path else None,
                filtered=LogFile(output.filtered, log) if output.filters else None,
                filters=output.filters,
            )
            for (reader, _), (output, stream) in zip(ends, streams, strict=True)
            if reader is not None
        }

    def close(self) -> None:
        """Kill the process with its group, reap it and close descriptors."""
        self.process.signal(signal.SIGKILL)
        self.process.reap()
        for relay in self.relays.values():
            relay.close()

    def _start_command(self, stdout: IO[bytes], stderr: IO[bytes]) -> processes.Child:
        return processes.spawn(
            self.plan.command,
            setup=lambda: _prepare(self.plan),
            env=self.plan.environment,
            # At a terminal, a debugger stops any rank; of other input, each rank would get some part.
            stdin=None if self.plan.rank == 0 or os.isatty(0) else subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        )

    def _fork(self, stdout: IO[bytes], stderr: IO[bytes]) -> processes.Child:
        def run() -> NoReturn:
            os._exit(_call_function(self.plan, (stdout.fileno(), stderr.fileno())))

        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with processes.held_signals():
            return processes.fork(run)

    def _start_process(self, stdout: IO[bytes], stderr: IO[bytes]) -> processes.Child:
        """Start a process by `multiprocessing`, which passes queues, locks and shared tensors among the arguments."""
        import multiprocessing
        from multiprocessing.connection import Connection

        # Connections, unlike plain descriptors, reach a new interpreter.
        ends = [Connection(os.dup(end.fileno()), readable=False) for end in (stdout, stderr)]
        context: Any = multiprocessing.get_context(self.plan.start_method)
        process = context.Process(target=_run_process, args=(os.getpid(), self.plan, *ends))
        # A new interpreter has no handlers of this one.
        with processes.held_signals() if self.plan.start_method == "fork" else contextlib.nullcontext():
            process.start()
        for end in ends:
            end.close()
        # `Child` waits and reaps; later processes of `multiprocessing` would reap this one, too.
        process._popen.returncode = 0  # noqa: SLF001 - its documented attributes only read the end
        return processes.Child(process.pid)


def _prepare(plan: WorkerPlan) -> None:
    """Bind the worker to its processors and detach it from the terminal."""
    if plan.cpus:
        os.sched_setaffinity(0, plan.cpus)
    # A terminal stops processes outside its foreground group that read from it, but only those that it controls.
    with contextlib.suppress(OSError):
        terminal = os.open("/dev/tty", os.O_RDWR)
        fcntl.ioctl(terminal, termios.TIOCNOTTY)
        os.close(terminal)


def _run_process(parent: int, plan: WorkerPlan, *ends: Any) -> NoReturn:
    """Run a worker that `multiprocessing` has started; it ends the process after its own finalizers."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    processes.die_with_parent(parent)
    sys.exit(_call_function(plan, tuple(end.fileno() for end in ends)))


def _call_function(plan: WorkerPlan, descriptors: tuple[int, ...]) -> int:
    """Become the worker, call its function and return the exit code."""
    _prepare(plan)
    _become_worker(plan, descriptors)
    assert plan.function is not None
    try:
        return plan.function()
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            sys.stderr.write(f"{end.code}\n")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _open(output: Output, stack: contextlib.ExitStack) -> tuple[IO[bytes] | None, IO[bytes]]:
    """Open the reader of a stream that this process relays, None for others, and the worker's end."""
    if output.path and not output.tee:
        return None, stack.enter_context(open(output.path, "wb", 0))
    reader, writer = os.pipe()
    return stack.enter_context(open(reader, "rb", 0)), stack.enter_context(open(writer, "wb", 0))


def _become_worker(plan: WorkerPlan, descriptors: tuple[int, ...]) -> None:
    """Turn a fork of the launcher into a worker: environment, default signals, output and input."""
    processes.default_signals()
    os.environ.clear()
    os.environ.update(plan.environment)
    for standard, descriptor in zip((1, 2), descriptors, strict=True):
        os.dup2(descriptor, standard)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    if plan.rank != 0:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)


class Sink(Protocol):
    """Destination of a relay."""

    def write(self, data: bytes, /) -> object:
        """Write bytes."""

    def flush(self) -> None:
        """Flush the destination."""


class _TextSink:
    """Sink over a stream that accepts only text, such as a notebook's."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, data: bytes, /) -> object:
        return self._stream.write(data.decode(errors="replace"))

    def flush(self) -> None:
        self._stream.flush()


class LogFile:
    """Log file that the launcher writes. A full disk ends the file, not the job.

    Args:
        path: Path; bytes are appended.
        log: Function that receives a line about the first write that fails.
    """

    def __init__(self, path: str, log: Callable[[str], None]) -> None:
        self._path = path
        self._log = log
        self._file: IO[bytes] | None = open(path, "ab", 0)

    def write(self, data: bytes) -> None:
        """Append bytes."""
        if self._file is not None:
            try:
                self._file.write(data)
            except OSError as error:
                self._log(f"stopped writing the log file {self._path}: {error.strerror}")
                self.close()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def binary_sink(stream: TextIO) -> Sink:
    """Return a sink that writes bytes to a stream, without decoding them if the stream has a binary buffer."""
    binary: Sink = getattr(stream, "buffer", None) or _TextSink(stream)
    return binary


class LineRelay:
    r"""Relay that forwards the output of one pipe in whole lines.

    A carriage return also ends a line, so that a progress bar is visible while it grows.

    Args:
        sink: Destination.
        prefix: Start of each line.
        copy: Log file of all bytes, without the prefix. Default: none.
        filtered: Log file of the lines that contain a text of `filters`, with the prefix. Default: none.
        filters: Texts.

    Attributes:
        has_traceback: Whether the traceback of an exception has been forwarded.

    Example:
        >>> import io
        >>> sink = io.BytesIO()
        >>> relay = LineRelay(sink, b"[rank 1] ")
        >>> relay.feed(b"loss 0.5\n" + b"loss 0")
        >>> sink.getvalue()
        b'[rank 1] loss 0.5\n'
        >>> relay.feed(b".25")
        >>> relay.finish()
        >>> sink.getvalue()
        b'[rank 1] loss 0.5\n[rank 1] loss 0.25\n'
    """

    def __init__(
        self,
        sink: Sink,
        prefix: bytes = b"",
        *,
        copy: LogFile | None = None,
        filtered: LogFile | None = None,
        filters: Sequence[bytes] = (),
    ) -> None:
        self._sink = sink
        self._prefix = prefix
        self._copy = copy
        self._filtered = filtered
        self._filters = filters
        self._rest = bytearray()
        self._shown = 0
        self.has_traceback = False

    @property
    def is_held(self) -> bool:
        """Whether a line has begun that is not shown yet, or not all of it."""
        return bool(self._rest) and len(self._prefix) + len(self._rest) > self._shown

    def show_rest(self) -> None:
        """Forward an unfinished line as far as it is there, such as the prompt of a debugger."""
        text = self._prefix + self._rest
        self._sink.write(text[self._shown :])
        self._sink.flush()
        self._shown = len(text)

    def end_shown_line(self) -> None:
        """End the part of an unfinished line that is shown: another text follows. The line is then shown anew."""
        if self._shown:
            self._shown = 0
            self._sink.write(b"\n")
            self._sink.flush()

    def feed(self, data: bytes) -> None:
        """Accept bytes, forward the lines that they complete and keep the rest."""
        if self._copy is not None:
            self._copy.write(data)
        # The rest is not searched again: a long line arrives in many parts.
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        lines = b""
        if end:
            lines = bytes(self._rest) + data[:end]
            self._rest.clear()
        self._rest += data[end:]
        self._write(lines)
        if len(self._rest) > _MAX_LINE_BYTES:
            self.finish()

    def finish(self) -> None:
        """Complete and forward an unfinished last line."""
        if self._rest:
            lines = bytes(self._rest) + b"\n"
            self._rest.clear()
            self._write(lines)

    def discard(self) -> None:
        """Discard what any relay writes to this one's destination from now on, which cannot be written."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            processes.redirect_to_null(self._sink.fileno())  # type: ignore[attr-defined]

    def close(self) -> None:
        """Close the log files."""
        for file in (self._copy, self._filtered):
            if file is not None:
                file.close()

    def _write(self, lines: bytes) -> None:
        if not lines:
            return
        self.has_traceback |= TRACEBACK.encode() in lines
        if self._filtered is not None:
            wanted = (line for line in lines.splitlines(keepends=True) if any(text in line for text in self._filters))
            self._filtered.write(b"".join(self._prefix + line for line in wanted))
        if self._prefix:
            lines = b"".join(self._prefix + line for line in lines.splitlines(keepends=True))
        # The write may be interrupted.
        shown, self._shown = self._shown, 0
        self._sink.write(lines[shown:])
        self._sink.flush()
