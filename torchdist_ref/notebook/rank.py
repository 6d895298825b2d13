"""Rank of a notebook: waits for a request, runs the cell, reports the result, and waits for the next request.

Its variables persist in a module called ``__main__``, as in a notebook's kernel. It ends when the kernel closes the
connection or ends. An interrupt raises KeyboardInterrupt in a running cell and has no effect on an idle rank.

Messages are tuples that begin with their kind:

==============  ================================================================================================
kernel → rank   ``run`` source, file name · ``get`` expression · ``put`` name, pickle
rank → kernel   ``begun`` · ``display`` MIME bundle · ``position`` text · ``done`` failure or None, value or None
==============  ================================================================================================

While a cell runs, the kernel asks for its position by a signal. A thread that answers would be one more in processes
that user code forks. So the main thread answers, between two instructions: while it is in C code, it does not.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import linecache
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from torchdist_ref.notebook import display
from torchdist_ref.notebook.output import MARKER
from torchdist_ref.processes import control as processes

# Two signals within this time are one interrupt: the kernel repeats a signal that may have come before a wait.
_REPEAT_SECONDS = 2.0
POSITION_SIGNAL = signal.SIGURG
"""Signal that asks a rank for its position. Processes that do not handle it ignore it, such as those of a program that
a rank has become."""
CELL = "<spmd cell "
"""Start of the file names of cells."""
_HERE = os.path.dirname(__file__)
_LIBRARY = os.path.dirname(_HERE) + os.sep


def serve(connection: int, output: int, environment: Mapping[str, str]) -> NoReturn:
    """Serve requests until the kernel ends, then exit.

    Args:
        connection: Descriptor of the connection to the kernel.
        output: Descriptor of the pipe for all output.
        environment: Whole environment.
    """
    os.environ.clear()
    os.environ.update(environment)
    processes.redirect_output(output)
    os.set_inheritable(output, False)
    rank = RankProcess(Connection(connection), output)
    signal.signal(signal.SIGINT, rank.on_interrupt)
    signal.signal(POSITION_SIGNAL, rank.on_position_request)
    try:
        while True:
            rank.handle(rank.connection.recv())
    except (EOFError, OSError):
        os._exit(0)


class RankProcess:
    """State of a rank between two requests.

    Args:
        connection: Connection to the kernel.
        output: Descriptor of the pipe for all output. Markers go there, wherever a cell has redirected its output.
    """

    def __init__(self, connection: Connection, output: int) -> None:
        self.connection = connection
        self._output = output
        # Callbacks on other threads may display values.
        self._sending = threading.Lock()
        self._pid = os.getpid()
        self._running = False
        self._interrupted_at = 0.0
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        self._namespace = main.__dict__
        # As in a notebook; in the cells' own namespace it would be among the user's variables.
        builtins.display = self.display  # type: ignore[attr-defined]

    def on_interrupt(self, signum: int, frame: object) -> None:
        """Interrupt the running cell."""
        now = time.monotonic()
        if self._running and now > self._interrupted_at + _REPEAT_SECONDS:
            self._interrupted_at = now
            raise KeyboardInterrupt

    def on_position_request(self, signum: int, frame: types.FrameType | None) -> None:
        """Send where the running cell is. Nothing is flushed: the cell may be in the middle of a write."""
        # A forked child of the cell has this handler too, and the same connection.
        if self._running and os.getpid() == self._pid and self._sending.acquire(blocking=False):
            former = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            try:
                self.connection.send_bytes(pickle.dumps(("position", position(frame))))
            finally:
                self._sending.release()
                signal.pthread_sigmask(signal.SIG_SETMASK, former)

    def handle(self, request: tuple[Any, ...]) -> None:
        """Execute a request and send its result."""
        kind, *arguments = request
        methods: dict[str, Callable[..., Any]] = {"run": self._run, "get": self._get, "put": self._put}
        failure, value = self._attempt(methods[kind], arguments)
        self._send(("done", failure, value))

    def _attempt(self, method: Callable[..., Any], arguments: list[Any]) -> tuple[CellFailure | None, bytes | None]:
        try:
            self._interrupted_at = 0.0
            self._running = True
            # The kernel sends interrupts only after this.
            self._send(("begun",))
            value = method(*arguments)
            self._running = False
            return None, value
        except BaseException as error:
            # SystemExit too: a cell cannot end the rank, which belongs to the notebook.
            self._running = False
            return CellFailure.of(error), None

    def _run(self, source: str, name: str) -> None:
        run_cell(source, name, self._namespace, self._show)
        display.show()

    def _get(self, expression: str) -> bytes:
        return pickle.dumps(eval(expression, self._namespace))

    def _put(self, name: str, value: bytes) -> None:
        self._namespace[name] = pickle.loads(value)

    def _show(self, value: Any) -> None:
        self._namespace["_"] = value
        self.display(value)

    def display(self, *values: Any) -> None:
        """Display values as the notebook displays the value of a cell."""
        for value in values:
            self._send(("display", display.bundle_of(value)))

    def _send(self, message: tuple[Any, ...]) -> None:
        # A marker without a message would be taken for that of the next one.
        data = pickle.dumps(message)
        former = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, POSITION_SIGNAL])
        try:
            with self._sending:
                for stream in (sys.stdout, sys.stderr):
                    # A cell may have closed it.
                    with contextlib.suppress(OSError, ValueError):
                        stream.flush()
                marker = MARKER
                while marker:
                    marker = marker[os.write(self._output, marker) :]
                self.connection.send_bytes(data)
        finally:
            # An interrupt inside a message, or between marker and message, would corrupt the stream.
            signal.pthread_sigmask(signal.SIG_SETMASK, former)


def position(frame: types.FrameType | None) -> str:
    """Return which line of a cell is running, and the call of this library in which it waits, in words.

    Args:
        frame: Innermost frame of the cell's thread.
    """
    line, in_library = 0, False
    while frame is not None and not line:
        name = frame.f_code.co_filename
        line = frame.f_lineno if name.startswith(CELL) else 0
        in_library = in_library or name.startswith(_LIBRARY)
        frame = frame.f_back
    where = f"line {line}" if line else "starting"
    # Not imported for this: a cell whose ranks have no group yet may be importing it.
    recorder = sys.modules.get("torchdist_ref.debug.flight_recorder")
    calls = recorder.calls_in_progress() if in_library and recorder is not None else []
    if not calls:
        return where
    group, call = calls[0]
    since = f" for {time.perf_counter() - call.start:.0f} s" if call.start else ""
    # The recorder of a call that meets others in the store is named after the call.
    of_group = "" if group.name.startswith(call.call.op) else f" of group {group.name!r}"
    return f"{where}, waits{since} in {call.call.op}{of_group}"


def run_cell(source: str, name: str, namespace: dict[str, Any], show: Callable[[Any], None]) -> None:
    r"""Run the text of a cell.

    Args:
        source: Text.
        name: File name for tracebacks, such as ``<spmd cell 3>``.
        namespace: Global variables of the cell.
        show: Function that receives the value of the last line. It is called if the line is an expression without a
            semicolon after it and its value is not None.

    Example:
        >>> space = {}
        >>> run_cell("a = 20\na + 1", "<cell 1>", space, print)
        21
        >>> run_cell("a;", "<cell 2>", space, print)
    """
    # Tracebacks read the cell's lines here.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    # Not ast.parse, which would add a frame to the traceback of every syntax error.
    body: ast.Module = compile(source, name, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)  # type: ignore[assignment]
    last = body.body.pop() if body.body and isinstance(body.body[-1], ast.Expr) else None
    exec(compile(body, name, "exec", dont_inherit=True), namespace)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), namespace)
        if value is not None and not _ends_with_semicolon(source, last):
            show(value)


def _ends_with_semicolon(source: str, last: ast.Expr) -> bool:
    line = source.splitlines()[(last.end_lineno or 1) - 1].encode()
    return line[last.end_col_offset :].lstrip().startswith(b";")


@dataclass(frozen=True, slots=True)
class CellFailure:
    """Exception of a cell as text, because the kernel may be unable to unpickle the exception itself.

    Attributes:
        kind: Name of the exception's class.
        message: First line of its message.
        trace: Traceback, without frames of this package; of the library, at most the last frame.
    """

    kind: str
    message: str
    trace: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}".removesuffix(": ")

    @classmethod
    def of(cls, error: BaseException) -> CellFailure:
        """Describe an exception that a cell raised."""
        trace = traceback.TracebackException.from_exception(error)
        _remove_library_frames(trace)
        return cls(type(error).__name__, _first_line(error), "".join(trace.format()))


def _remove_library_frames(trace: traceback.TracebackException) -> None:
    """Keep the frames of the cell and of what it calls, in the exception, its cause and its context.

    Of the frames of this library only the last is kept: readers of a cell look for the place where the cell called it.
    """
    frames = [frame for frame in trace.stack if os.path.dirname(frame.filename) != _HERE]
    kept = [frame for frame in frames[:-1] if not frame.filename.startswith(_LIBRARY)] + frames[-1:]
    trace.stack = traceback.StackSummary.from_list(kept)
    for earlier in (trace.__cause__, trace.__context__):
        if earlier is not None:
            _remove_library_frames(earlier)


def _first_line(error: BaseException) -> str:
    try:
        return str(error).partition("\n")[0]
    except Exception as second:
        return f"(its message cannot be computed: {type(second).__name__})"
