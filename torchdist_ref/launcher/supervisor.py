"""Supervisor of workers: forwards their output until the last one ends, and stops the others when one fails.

It never restarts any: `api` does, and `elastic.roster` for several hosts.

One thread, one loop, six kinds of events: output, end of a pipe, end of a worker, a signal to the launcher, a request
to stop, a deadline. However the loop ends, no worker and no process of a worker's process group is left alive. Do not
add the choice of commands here (`local_workers`).
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

from torchdist_ref.launcher.worker import LineRelay, Sink, Worker, WorkerPlan, binary_sink
from torchdist_ref.processes.control import (
    catches_signal,
    describe_exit,
    name_ranks,
    redirect_to_null,
    signal_name,
    signal_socket,
)
from torchdist_ref.processes.failure_record import FailureRecord, dump_signal, is_consequence, read, wants_dumps

# Time to continue reading after all ranks have ended, while processes that they started hold their output open.
_DRAIN_SECONDS = 2.0
# Time that a reader of the launcher's output has to read something, once the job is to end.
_READER_SECONDS = 0.5
# Time after which a line that has not ended is shown at a terminal: it may be the prompt of a debugger.
_PROMPT_SECONDS = 0.1
# Time from the end of a worker because of another one to the end of that one.
_CAUSE_SECONDS = 0.5
# Time that workers have to write dumps of their last calls, where the environment asks for dumps.
_DUMP_SECONDS = 0.5
# Reads that empty a pipe of the usual capacity, while a process that the worker started may write more.
_PIPE_READS = 4


class OutputInterrupted(Exception):
    """The job is to end, and nobody reads the output of its workers."""


class _WatchedSink:
    """Sink that calls a function before each write, and writes no more than a pipe takes that takes anything.

    It writes whole lines as far as they fit, which a pipe takes at once: another process that writes to the same pipe
    does not write into a line.

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
    """Signals to the launcher for the time of a job, attempts and the time between them alike.

    Outside the main thread, which alone receives signals, none arrives.

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


def _ends_as_consequence(worker: Worker) -> bool:
    return bool(worker.plan.error_file) and is_consequence(Path(worker.plan.error_file))


class Supervisor:
    """Supervisor of one process per plan.

    Args:
        plans: Descriptions of the workers.
        grace: Time from asking workers to stop to killing them, in seconds.
        log: Function that receives the supervisor's own lines.
        interrupts: Signals to the launcher, to be forwarded to the workers.
        stop: Descriptor that becomes readable when the workers shall stop. Default: none.
        on_child_end: Function to call when any child of this process has ended, which is a launcher's own process then:
            once the job is to end, output that nobody reads is discarded. Default: none.
        on_start: Function to call when all workers have been started. Default: none.

    Attributes:
        grace: Time from asking workers to stop to killing them, in seconds.
        stop_signal: Signal that asks workers to stop on a request by `stop`.
        workers: Started workers, in the order of their plans.
        first_failure: First worker that failed by itself. None if all is well, or if a signal ended the job.
        signal: Number of the signal that ended the job; 0 for none.
        stopped: Whether `stop` ended the job.
    """

    def __init__(
        self,
        plans: Sequence[WorkerPlan],
        *,
        grace: float,
        log: Callable[[str], None],
        interrupts: Interrupts,
        stop: int | None = None,
        on_child_end: Callable[[], object] | None = None,
        on_start: Callable[[], object] | None = None,
    ) -> None:
        self._plans = plans
        self.grace = grace
        self.stop_signal = signal.SIGTERM
        self._log = log
        self._interrupts = interrupts
        self._stop_request = stop
        self._on_child_end = on_child_end
        self._on_start = on_start
        self.workers: list[Worker] = []
        self.first_failure: Worker | None = None
        self.signal = 0
        self.stopped = False
        self._selector = selectors.DefaultSelector()
        self._deadline: float | None = None
        self._at_terminal = os.isatty(0) and os.isatty(1)
        self._code: int | None = None
        # Signal to send at the deadline, and the workers to send it to, which may write dumps until then.
        self._postponed: tuple[int, Sequence[Worker]] | None = None
        # Workers that ended because of another one, which still runs.
        self._consequences: list[Worker] = []

    def run(self) -> int:
        """Run all workers until they have ended.

        Returns:
            0 if all exited with 0. Otherwise the code of the first that did not, or 128 plus the number of the signal
            that ended it or that the launcher received.
        """
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
                while len(self._selector.get_map()) > not_of_workers - self.stopped:
                    self._step()
            finally:
                for worker in self.workers:
                    worker.close()
                    _ends_as_consequence(worker)
        return self.code

    @property
    def code(self) -> int:
        """Exit code of the job so far."""
        return self._code or 0

    def _start(self) -> None:
        for plan in self._plans:
            worker = Worker(plan, self._report, self._sink)
            self.workers.append(worker)
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
        if not (self.signal or self.stopped):
            self._await_reader_or_end(descriptor)
        if not _takes_output(descriptor, _READER_SECONDS):
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
        timeout = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
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
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._on_deadline()

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
            if not _takes_output(descriptor, _READER_SECONDS):
                redirect_to_null(descriptor)

    def _on_closed_output(self) -> None:
        """Stop the job without a message because nothing reads the launcher's output any more (``| head``)."""
        for stream in (sys.stdout, sys.stderr):
            redirect_to_null(stream.fileno())
        self.signal = self.signal or signal.SIGPIPE
        self._stop(signal.SIGTERM, 128 + signal.SIGPIPE)

    def _on_signal(self) -> None:
        received = self._interrupts.received()
        if signal.SIGCHLD in received and self._on_child_end:
            self._on_child_end()
        for signum in received:
            if signum == signal.SIGCHLD:
                continue
            self._discard_blocked_output()
            if self._code is None:
                self.signal = signum
                self._report(f"got {signal_name(signum)}: forwarding it to {self._running_names()}")
                self._stop(signum, 128 + signum)
            else:
                self._kill()

    def _on_stop_request(self) -> None:
        assert self._stop_request is not None
        self._selector.unregister(self._stop_request)
        self.stopped = True
        if self._on_child_end:
            self._discard_blocked_output()
        if self._code is None:
            self._stop_after_dumps(self.stop_signal, 128 + self.stop_signal)
        elif self._deadline is not None:
            self._deadline = min(self._deadline, time.monotonic() + self.grace)

    def _on_ends(self, ended: Sequence[Worker]) -> None:
        for worker in ended:
            worker.process.wait()
            self._selector.unregister(worker.process.descriptor)
        # A killed rank may end in the same instant as ranks whose errors follow from its death: report it first.
        failed = sorted(
            (worker for worker in ended if worker.process.status), key=lambda w: (w.process.status or 0) > 0
        )
        if self._code is None and (failed or self._consequences):
            self._on_failed(failed)
        if ended and not self._running():
            self._deadline = time.monotonic() + _DRAIN_SECONDS

    def _on_failed(self, failed: Sequence[Worker]) -> None:
        """Report the first failure: at once if it is among these, else when the worker that caused these has ended."""
        causes = [worker for worker in failed if not self._is_consequence(worker)]
        self._consequences += [worker for worker in failed if worker not in causes]
        if causes or not self._running():
            self._on_failure((causes or self._consequences)[0])
        elif self._deadline is None:
            self._deadline = time.monotonic() + _CAUSE_SECONDS

    @property
    def cause_is_elsewhere(self) -> bool:
        """Whether the first worker that failed has ended because of a rank that this supervisor does not run."""
        return self.first_failure in self._consequences

    def _is_consequence(self, worker: Worker) -> bool:
        """Return whether a worker has ended because of one that runs: it may still print its traceback."""
        is_consequence = _ends_as_consequence(worker)
        cause, record = self._first_to_fail(worker)
        return cause.process.status is None or (is_consequence and record is None)

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

    def _on_failure(self, ended: Worker) -> None:
        self._forward_rest()
        worker, record = self._first_to_fail(ended)
        self.first_failure = worker
        others = [one for one in self._running() if one is not worker]
        status = worker.process.status
        how = describe_exit(status) if status else "failed"
        how += f" with {record.message}" if record and not status else f": {record.message}" if record else ""
        stopping = f"; stopping {name_ranks(one.plan.rank for one in others)}" if others else ""
        self._report(f"rank {worker.plan.rank} (process {worker.process.pid}) {how}{stopping}")
        # A rank that has recorded its failure is still printing its traceback: it ends by itself.
        self._stop_after_dumps(signal.SIGTERM, 1 if not status else status if status > 0 else 128 - status, others)

    def _first_to_fail(self, ended: Worker) -> tuple[Worker, FailureRecord | None]:
        """Return the worker whose failure made the others fail, and its record: it need not have ended first."""
        if ended.process.status and ended.process.status < 0:
            return ended, None
        records = [(worker, read(Path(worker.plan.error_file))) for worker in self.workers if worker.plan.error_file]
        found = [(record.time_ns, index, record) for index, (_, record) in enumerate(records) if record is not None]
        if not found:
            return ended, None
        _, index, record = min(found)
        return records[index][0], record

    def _on_deadline(self) -> None:
        self._deadline = None
        if self._code is None and self._consequences:
            self._on_failure(self._consequences[0])
        elif self._postponed and self._running():
            (signum, chosen), self._postponed = self._postponed, None
            self._stop(signum, self.code, chosen)
        elif self._running():
            self._report(f"{self._running_names()} did not stop within {self.grace:g} s: killing")
            self._kill()
        else:
            # Processes that the workers started hold these pipes open.
            for pipe, relay in self._relays():
                if pipe in self._selector.get_map():
                    self._selector.unregister(pipe)
                    with self._forwarding(relay):
                        relay.finish()

    def _stop_after_dumps(self, signum: int, code: int, workers: Sequence[Worker] | None = None) -> None:
        """Stop workers; where failures are dumped, not before they have had time for that."""
        chosen = self._running() if workers is None else workers
        if not any(wants_dumps(worker.plan.environment) for worker in chosen):
            return self._stop(signum, code, chosen)
        self._code, self._postponed, self._deadline = code, (signum, chosen), time.monotonic() + _DUMP_SECONDS
        for worker in chosen:
            _request_dump(worker.plan)

    def _stop(self, signum: int, code: int, workers: Sequence[Worker] | None = None) -> None:
        self._code = code if self._code is None else self._code
        self._deadline = time.monotonic() + self.grace
        for worker in self._running() if workers is None else workers:
            worker.process.signal(signum)

    def _kill(self) -> None:
        for worker in self._running():
            worker.process.signal(signal.SIGKILL)

    def _relays(self) -> Iterator[tuple[int, LineRelay]]:
        return (each for worker in self.workers for each in worker.relays.items())

    def _running(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.process.status is None]

    def _running_names(self) -> str:
        return name_ranks(worker.plan.rank for worker in self._running())


def _request_dump(plan: WorkerPlan) -> None:
    """Ask a worker that has not failed for a dump: the others may wait for it, and its dump shows where it is."""
    listening = dump_signal(Path(plan.error_file)) if plan.error_file else None
    if listening is not None:
        with contextlib.suppress(OSError, OverflowError):
            if catches_signal(*listening):
                os.kill(*listening)
