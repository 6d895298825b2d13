"""Supervisor of workers: the loop that starts them, forwards their output and performs what `supervision` decides.

It never restarts any: `restarts` does, and `elastic.roster` for several hosts.

One thread, one loop, six kinds of events: output, end of a pipe, end of a worker, a signal to the launcher, a request
to stop, a deadline. However the loop ends, no worker and no process of a worker's process group is left alive. Do not
add decisions (`supervision`) or the choice of commands (`local_workers`) here.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from torchdist_ref.launcher.supervision import Act, Action, Supervision, WorkerState
from torchdist_ref.launcher.worker import LineRelay, Sink, Worker, WorkerPlan, binary_sink
from torchdist_ref.processes.control import catches_signal, redirect_to_null, signal_socket
from torchdist_ref.processes.failure_record import discard_notes, read, read_notes, wants_dumps

READER_SECONDS = 0.5
"""Time that a reader of the launcher's output has to read something, once the job is to end."""
# Time after which a line that has not ended is shown at a terminal: it may be the prompt of a debugger.
_PROMPT_SECONDS = 0.1
# Reads that empty a pipe of the usual capacity, while a process that the worker started may write more.
_PIPE_READS = 4


class OutputInterrupted(Exception):
    """The job is to end, and nobody reads the output of its workers."""


class _WatchedSink:
    """Sink that calls a function before each write, and writes at most PIPE_BUF bytes at once.

    A pipe that is ready accepts so many bytes without blocking, and in one piece. So lines are written whole where they
    fit, and another process that writes to the same pipe cannot write into the middle of one.

    Args:
        stream: Destination, which has a descriptor.
        before_write: Function that gets the descriptor.
    """

    def __init__(self, stream: TextIO, before_write: Callable[[int], None]) -> None:
        self._stream, self._before_write = stream, before_write

    def write(self, data: bytes) -> None:
        """Write bytes, after what this process has written to the stream."""
        start = 0
        while start < len(data):
            end = start + select.PIPE_BUF
            if end < len(data):
                end = data.rfind(b"\n", start, end) + 1 or end
            self._before_write(self.fileno())
            # A descriptor that does not block may take a part, or nothing.
            with contextlib.suppress(BlockingIOError):
                self._stream.flush()
                start += os.write(self.fileno(), data[start:end])

    def flush(self) -> None:
        """Do nothing: all is written."""

    def fileno(self) -> int:
        """Return the descriptor of the destination."""
        return self._stream.fileno()


class Interrupts:
    """Signals to the launcher, from the start of a job to its end, between two attempts too.

    Only the main thread of a process receives signals: in another thread, none arrives.

    Args:
        signals: Signals to catch.
        children: Whether to report each end of a child of this process too, as SIGCHLD.

    Attributes:
        socket: Socket that becomes readable when a signal has arrived.
    """

    def __init__(self, signals: Sequence[signal.Signals], *, children: bool = False) -> None:
        self._waiting = False
        self._stack = contextlib.ExitStack()
        caught = (*signals, signal.SIGCHLD) if children else signals
        self.socket: socket.socket = self._stack.enter_context(signal_socket(caught, self._interrupt))
        self._poll = select.poll()
        self._poll.register(self.socket, select.POLLIN)

    def received(self) -> bytes:
        """Return the numbers of the signals since the last call."""
        return self.socket.recv(64) if self._poll.poll(0) else b""

    def asks_to_end(self) -> bool:
        """Return whether a signal has arrived that is not only the end of a child."""
        received = self.socket.recv(64, socket.MSG_PEEK) if self._poll.poll(0) else b""
        return any(signum != signal.SIGCHLD for signum in received)

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[bool]:
        """Let a signal that asks to end interrupt the block by `OutputInterrupted`. The end of a child does not.

        Yields:
            Whether such a signal has arrived already.
        """
        try:
            self._waiting = True
            yield self.asks_to_end()
        finally:
            self._waiting = False

    def close(self) -> None:
        """Restore the former handlers."""
        self._stack.close()

    def _interrupt(self, signum: int, frame: object) -> None:
        if self._waiting and signum != signal.SIGCHLD:
            self._waiting = False
            raise OutputInterrupted


def _descriptor(stream: TextIO) -> int | None:
    """Return the descriptor of a stream; None for a stream of a notebook or a test, which has none."""
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None


def _takes_output(descriptor: int, seconds: float) -> bool:
    """Return whether a descriptor takes output, or fails at once, within a time."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(seconds * 1000))


class Supervisor:
    """Supervisor of one process per plan.

    Args:
        plans: Descriptions of the workers.
        decisions: Decisions about them.
        log: Function that receives the supervisor's own lines.
        interrupts: Signals to the launcher, to be forwarded to the workers.
        stop: Descriptor that becomes readable when the workers shall stop. Default: none.
        on_child_end: Function to call when any child of this process has ended, which is a launcher's own process then:
            once the job is to end, output that nobody reads is discarded. Default: none.
        on_start: Function to call when all workers have been started. Default: none.

    Attributes:
        decisions: Decisions about the workers, and the end of the attempt.
        workers: Started workers, in the order of their plans.
    """

    def __init__(
        self,
        plans: Sequence[WorkerPlan],
        decisions: Supervision,
        *,
        log: Callable[[str], None],
        interrupts: Interrupts,
        stop: int | None = None,
        on_child_end: Callable[[], object] | None = None,
        on_start: Callable[[], object] | None = None,
    ) -> None:
        self._plans, self.decisions = plans, decisions
        self._log, self._interrupts, self._stop_request = log, interrupts, stop
        self._on_child_end, self._on_start = on_child_end, on_start
        self.workers: list[Worker] = []
        self._selector = selectors.DefaultSelector()
        self._at_terminal = os.isatty(0) and os.isatty(1)

    def run(self) -> None:
        """Run all workers until they have ended."""
        with self._selector:
            self._selector.register(self._interrupts.socket, selectors.EVENT_READ, self._on_signal)
            if self._stop_request is not None:
                self._selector.register(self._stop_request, selectors.EVENT_READ, self._on_stop_request)
            not_of_workers = len(self._selector.get_map())
            try:
                self._start()
                if self._on_start:
                    self._on_start()
                # While more is registered, a worker is running or a pipe is open.
                while len(self._selector.get_map()) > not_of_workers - self.decisions.stopped:
                    self._step()
            finally:
                for worker in self.workers:
                    worker.close()
                    if worker.plan.error_file:
                        discard_notes(Path(worker.plan.error_file))

    @property
    def first_failure(self) -> Worker | None:
        """First worker that failed by itself; None if none did."""
        state = self.decisions.first_failure
        return None if state is None else self._worker_of(state)

    def _worker_of(self, state: WorkerState) -> Worker:
        return self.workers[self.decisions.workers.index(state)]

    def _start(self) -> None:
        for plan in self._plans:
            worker = Worker(plan, self._report, self._sink)
            self.workers.append(worker)
            state = WorkerState(plan.rank, worker.process.pid, wants_dumps=wants_dumps(plan.environment))
            self.decisions.workers.append(state)
            self._selector.register(worker.process.descriptor, selectors.EVENT_READ, worker)
            for pipe, relay in worker.relays.items():
                self._selector.register(pipe, selectors.EVENT_READ, relay)

    def _sink(self, stream: TextIO) -> Sink:
        # A stream of a notebook or a test may accept only text, or have no descriptor.
        is_file = hasattr(stream, "buffer") and _descriptor(stream) is not None
        return _WatchedSink(stream, self._await_reader) if is_file else binary_sink(stream)

    def _await_reader(self, descriptor: int) -> None:
        """Wait until a descriptor takes output.

        Once a signal or a request to stop has arrived, a reader has a short time only: workers may print as they end,
        and the launcher must notice their end and the end of their grace time.

        Raises:
            OutputInterrupted: The reader has not read in that time, and the descriptor is that of a program. A
                launcher's own is redirected.
        """
        if _takes_output(descriptor, 0):
            return
        if not (self.decisions.signal or self.decisions.stopped):
            self._await_reader_or_end(descriptor)
        if not _takes_output(descriptor, READER_SECONDS):
            if not self._on_child_end:
                raise OutputInterrupted
            redirect_to_null(descriptor)

    def _await_reader_or_end(self, descriptor: int) -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        if self._stop_request is not None:
            poll.register(self._stop_request, select.POLLIN)
        with contextlib.suppress(OutputInterrupted), self._interrupts.interrupting() as asked:
            if not asked:
                poll.poll()

    def _step(self) -> None:
        deadline = self.decisions.deadline
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        held = [relay for _, relay in self._relays() if relay.is_held] if self._at_terminal else []
        if held:
            timeout = _PROMPT_SECONDS if timeout is None else min(timeout, _PROMPT_SECONDS)
        events = [(key.fileobj, key.data) for key, _ in self._selector.select(timeout)]
        for relay in held if not events else ():
            self._end_shown_lines(relay)
            with self._forwarding(relay):
                relay.show_rest()
        for source, data in events:
            if isinstance(data, LineRelay):
                self._on_output(int(source), data)  # type: ignore[arg-type]
            elif not isinstance(data, Worker):
                data()
        self._on_ends([data for _, data in events if isinstance(data, Worker)])
        now = time.monotonic()
        if self.decisions.deadline is not None and now >= self.decisions.deadline:
            self._read_failures()
            self.decisions.tick(now)
            self._act()

    def _on_output(self, pipe: int, relay: LineRelay) -> None:
        data = os.read(pipe, 1 << 16)
        if not data:
            self._selector.unregister(pipe)
        self._end_shown_lines(relay)
        with self._forwarding(relay):
            relay.feed(data) if data else relay.finish()

    def _end_shown_lines(self, writer: LineRelay | None = None) -> None:
        """End each unfinished line that a terminal shows, before another relay or the launcher writes into it."""
        for _, relay in self._relays() if self._at_terminal else ():
            if relay is not writer:
                with self._forwarding(relay):
                    relay.end_shown_line()

    def _report(self, line: str) -> None:
        """Write a line of the launcher."""
        self._end_shown_lines()
        self._log(line)

    @contextlib.contextmanager
    def _forwarding(self, relay: LineRelay) -> Iterator[None]:
        try:
            yield
        except OutputInterrupted:
            pass
        except BrokenPipeError:
            self._on_closed_output()
        except OSError as error:
            # A full disk ends the output, not the job.
            relay.discard()
            self._report(f"stopped forwarding output of the workers: {error.strerror}")

    def _discard_blocked_output(self) -> None:
        """Discard what the workers still print where nobody reads, since the job is to end."""
        for stream in (sys.stdout, sys.stderr):
            if (descriptor := _descriptor(stream)) is None:
                continue
            if not _takes_output(descriptor, READER_SECONDS):
                redirect_to_null(descriptor)

    def _on_closed_output(self) -> None:
        """Stop the job without a message because nothing reads the launcher's output any more (``| head``)."""
        for stream in (sys.stdout, sys.stderr):
            redirect_to_null(stream.fileno())
        self.decisions.output_closed(time.monotonic())
        self._act()

    def _on_signal(self) -> None:
        received = self._interrupts.received()
        if signal.SIGCHLD in received and self._on_child_end:
            self._on_child_end()
        for signum in received:
            if signum != signal.SIGCHLD:
                self._discard_blocked_output()
                self.decisions.signalled(time.monotonic(), signum)
                self._act()

    def _on_stop_request(self) -> None:
        assert self._stop_request is not None
        self._selector.unregister(self._stop_request)
        if self._on_child_end:
            self._discard_blocked_output()
        self.decisions.stop_requested(time.monotonic())
        self._act()

    def _on_ends(self, ended: Sequence[Worker]) -> None:
        states = dict(zip(self.workers, self.decisions.workers, strict=True)) if ended else {}
        for worker in ended:
            states[worker].status = worker.process.wait()
            self._selector.unregister(worker.process.descriptor)
        # While all is well, no record is looked for: of a thousand workers, each end would cost a thousand looks.
        if any(states[worker].status for worker in ended) or (ended and self.decisions.deadline is not None):
            self._read_failures()
        self.decisions.ended(time.monotonic(), [states[worker] for worker in ended])
        self._act()

    def _read_failures(self) -> None:
        """Read what all workers have written about their failures, unless the first one is known already."""
        for worker, state in zip(self.workers, self.decisions.workers, strict=True):
            if self.decisions.code is None and (path := worker.plan.error_file):
                state.record, state.is_consequence = read(Path(path)), read_notes(Path(path)).is_consequence

    # Actions

    def _act(self) -> None:
        """Perform what has been decided. To forward output may lead to further decisions: they come last."""
        while self.decisions.actions:
            action = self.decisions.actions.pop(0)
            if action.act is Act.REPORT:
                self._report(action.text)
            elif action.act is Act.FORWARD:
                self._forward_rest()
            elif action.act is Act.CLOSE:
                self._close_output()
            else:
                self._signal(action)

    def _signal(self, action: Action) -> None:
        for state in action.workers:
            worker = self._worker_of(state)
            if action.act is Act.SIGNAL:
                worker.process.signal(action.signum)
            else:
                _request_dump(worker.plan)

    def _forward_rest(self) -> None:
        """Forward what the workers have written, so that tracebacks precede the report of a failure.

        The worker that failed first has ended, and others may have ended with it.
        """
        for pipe, relay in self._relays():
            poll = select.poll()
            poll.register(pipe, select.POLLIN)
            for _ in range(_PIPE_READS):
                if pipe in self._selector.get_map() and poll.poll(0):
                    self._on_output(pipe, relay)

    def _close_output(self) -> None:
        """Stop reading the pipes that processes which the workers started hold open."""
        for pipe, relay in self._relays():
            if pipe in self._selector.get_map():
                self._selector.unregister(pipe)
                with self._forwarding(relay):
                    relay.finish()

    def _relays(self) -> Iterator[tuple[int, LineRelay]]:
        return (each for worker in self.workers for each in worker.relays.items())


def _request_dump(plan: WorkerPlan) -> None:
    """Ask a worker that has not failed for a dump: the others may wait for it, and its dump shows where it is."""
    if plan.error_file and not Path(plan.error_file).exists():
        notes = read_notes(Path(plan.error_file))
        if notes.dump_signal and not notes.is_consequence:
            with contextlib.suppress(OSError, OverflowError):
                if catches_signal(notes.pid, notes.dump_signal):
                    os.kill(notes.pid, notes.dump_signal)
