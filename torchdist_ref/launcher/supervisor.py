"""Supervisor of ranks: forwards their output until the last one ends, and stops the others when one fails.

One thread, one loop, five kinds of events: output, end of a pipe, end of a rank, a signal to the launcher, a deadline.
However the loop ends, no rank and no process of a rank's process group is left alive. Do not add the choice of commands
here: it belongs to `torchdist_ref.launch` and `torchdist_ref.launcher.api`.
"""

from __future__ import annotations

import os
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torchdist_ref.failure_record import FailureRecord, read
from torchdist_ref.launcher.worker import LineRelay, Worker
from torchdist_ref.processes import describe_exit, name_ranks, signal_name, signal_socket

# Time to continue reading after all ranks have ended, while processes that they started hold their output open.
_DRAIN_SECONDS = 2.0
# Time that a reader of the launcher's output has to read something, once the job is to end.
_READER_SECONDS = 0.5
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_with_restarts(attempt: Callable[[int], Supervisor], limit: int, log: Callable[[str], None]) -> Supervisor:
    """Run all ranks; when one fails, restart all of them while restarts are left.

    A single restarted rank would meet the others in the middle of a collective. So all are stopped, and all start again
    with an empty store. State that they have not saved is lost.

    Args:
        attempt: Function that runs all ranks once. It receives the number of restarts so far and returns the
            supervisor.
        limit: Largest number of restarts.
        log: Function that receives a line about each restart.

    Returns:
        The supervisor of the last attempt.
    """
    for restarts in range(limit):
        supervisor = attempt(restarts)
        if supervisor.first_failure is None:
            return supervisor
        log(f"restarting all ranks ({restarts + 1} of {limit})")
    return attempt(limit)


class OutputInterrupted(Exception):
    """A signal arrived while the launcher wrote output."""


def _redirect_to_null(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


class Supervisor:
    """Supervisor of one process per environment.

    Args:
        commands: Command line of each rank, in rank order.
        environments: Environment of each rank.
        prefix: Whether each line of output begins with its rank.
        grace: Time from asking ranks to stop to killing them, in seconds.
        log: Function that receives the supervisor's own lines.
        signals: Signals to forward to the ranks.
        records: File of each rank's failure record, in rank order. Default: none.

    Attributes:
        first_failure: First rank that failed by itself. None if all is well, or if a signal ended the job.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        environments: Sequence[Mapping[str, str]],
        *,
        prefix: bool,
        grace: float,
        log: Callable[[str], None],
        signals: Sequence[signal.Signals] = _FORWARDED,
        records: Sequence[Path] = (),
    ) -> None:
        self._commands = commands
        self._environments = environments
        self._prefix = prefix
        self._grace = grace
        self._log = log
        self._signals = signals
        self._records = records
        self.first_failure: Worker | None = None
        self._workers: list[Worker] = []
        self._selector = selectors.DefaultSelector()
        self._deadline: float | None = None
        self._code: int | None = None
        self._signal_poll = select.poll()
        self._writing = False

    def run(self) -> int:
        """Run all ranks until they have ended.

        Returns:
            0 if all exited with 0. Otherwise the code of the first that did not, or 128 plus the number of the signal
            that ended it or that the launcher received.
        """
        with signal_socket(self._signals, self._interrupt_output) as signals, self._selector:
            self._signal_poll.register(signals, select.POLLIN)
            self._selector.register(signals, selectors.EVENT_READ, self._on_signal)
            try:
                self._start()
                # While more than the signal socket is registered, a rank is running or a pipe is open.
                while len(self._selector.get_map()) > 1:
                    self._step()
            finally:
                self._end()
        return self.code

    @property
    def code(self) -> int:
        """Exit code of the job so far."""
        return self._code or 0

    def _start(self) -> None:
        for rank, (command, environment) in enumerate(zip(self._commands, self._environments, strict=True)):
            worker = Worker(rank, command, environment, f"[rank {rank}] ".encode() if self._prefix else b"")
            self._workers.append(worker)
            self._selector.register(worker.process.descriptor, selectors.EVENT_READ, worker)
            for pipe, relay in worker.relays.items():
                self._selector.register(pipe, selectors.EVENT_READ, relay)

    def _end(self) -> None:
        for worker in self._workers:
            worker.process.signal(signal.SIGKILL)
        for worker in self._workers:
            worker.process.reap()

    def _step(self) -> None:
        timeout = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        events = [(key.fileobj, key.data) for key, _ in self._selector.select(timeout)]
        for source, data in events:
            if isinstance(data, LineRelay):
                self._on_output(int(source), data)  # type: ignore[arg-type]
            elif data == self._on_signal:
                self._on_signal(source)  # type: ignore[arg-type]
        self._on_ends([data for _, data in events if isinstance(data, Worker)])
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._on_deadline()

    def _on_output(self, pipe: int, relay: LineRelay) -> None:
        data = b"-"
        try:
            self._writing = True
            if self._signal_poll.poll(0):
                # The signal first: a write may block for as long as nobody reads.
                return
            data = os.read(pipe, 1 << 16)
            relay.feed(data) if data else relay.finish()
        except OutputInterrupted:
            pass
        except BrokenPipeError:
            self._on_closed_output()
        finally:
            self._writing = False
        if not data:
            self._selector.unregister(pipe)

    def _interrupt_output(self, signum: int, frame: object) -> None:
        """Interrupt a write of output that blocks, so that the loop handles the signal."""
        if self._writing:
            self._writing = False
            raise OutputInterrupted

    def _discard_blocked_output(self) -> None:
        """Discard what the ranks still print where nobody reads, since the job is to end."""
        for stream in (sys.stdout, sys.stderr):
            try:
                descriptor = stream.fileno()
            except (OSError, ValueError):
                # A stream of a notebook or a test.
                continue
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            if not poll.poll(_READER_SECONDS * 1000):
                _redirect_to_null(descriptor)

    def _on_closed_output(self) -> None:
        """Stop the job without a message because nothing reads the launcher's output any more (``| head``)."""
        for stream in (sys.stdout, sys.stderr):
            _redirect_to_null(stream.fileno())
        self._stop(signal.SIGTERM, 128 + signal.SIGPIPE)

    def _on_signal(self, signals: socket.socket) -> None:
        self._discard_blocked_output()
        for signum in signals.recv(64):
            if self._code is None:
                self._log(f"got {signal_name(signum)}: forwarding it to {self._running_names()}")
                self._stop(signum, 128 + signum)
            else:
                self._kill()

    def _on_ends(self, ended: Sequence[Worker]) -> None:
        for worker in ended:
            worker.process.wait()
            self._selector.unregister(worker.process.descriptor)
        # A killed rank may end in the same instant as ranks whose errors follow from its death: report it first.
        failed = sorted(
            (worker for worker in ended if worker.process.status), key=lambda w: (w.process.status or 0) > 0
        )
        if failed and self._code is None:
            self._on_failure(failed[0])
        if ended and not self._running():
            self._deadline = time.monotonic() + _DRAIN_SECONDS

    def _on_failure(self, ended: Worker) -> None:
        worker, record = self._first_to_fail(ended)
        self.first_failure = worker
        others = [one for one in self._running() if one is not worker]
        status = worker.process.status
        how = describe_exit(status) if status else "failed"
        how += f" with {record.message}" if record and not status else f": {record.message}" if record else ""
        stopping = f"; stopping {name_ranks(one.rank for one in others)}" if others else ""
        self._log(f"rank {worker.rank} (process {worker.process.pid}) {how}{stopping}")
        # A rank that has recorded its failure is still printing its traceback: it ends by itself.
        self._stop(signal.SIGTERM, 1 if not status else status if status > 0 else 128 - status, others)

    def _first_to_fail(self, ended: Worker) -> tuple[Worker, FailureRecord | None]:
        """Return the rank whose failure made the others fail, and its record: it need not be the first that ended."""
        if ended.process.status and ended.process.status < 0:
            return ended, None
        records = [(worker, read(path)) for worker, path in zip(self._workers, self._records, strict=False)]
        found = [(record.time_ns, worker.rank, record) for worker, record in records if record is not None]
        if not found:
            return ended, None
        _, rank, record = min(found)
        return self._workers[rank], record

    def _on_deadline(self) -> None:
        self._deadline = None
        if self._running():
            self._log(f"{self._running_names()} did not stop within {self._grace:g} s: killing")
            self._kill()
        else:
            for pipe in (pipe for worker in self._workers for pipe in worker.relays):
                if pipe in self._selector.get_map():
                    self._selector.unregister(pipe)

    def _stop(self, signum: int, code: int, workers: Sequence[Worker] | None = None) -> None:
        self._code = code if self._code is None else self._code
        self._deadline = time.monotonic() + self._grace
        for worker in self._running() if workers is None else workers:
            worker.process.signal(signum)

    def _kill(self) -> None:
        for worker in self._running():
            worker.process.signal(signal.SIGKILL)

    def _running(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.process.status is None]

    def _running_names(self) -> str:
        return name_ranks(worker.rank for worker in self._running())
