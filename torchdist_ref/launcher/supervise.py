"""Watch ranks until the last one ends: pass on their output, and when one fails, stop the others.

One thread, one loop, five kinds of events: output, the end of a pipe, the end of a rank, a signal to us, a deadline.
When the loop is left, by whatever way, no rank and nothing in a rank's process group is alive. What to run is for
`torchdist_ref.launch` to say; restarting belongs into a loop around this one.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from torchdist_ref.launcher.lifelines import how_it_ended, signal_name
from torchdist_ref.launcher.output import Relay
from torchdist_ref.launcher.signals import caught_signals
from torchdist_ref.launcher.worker import Worker

# How long to read on when all ranks have ended but something that they started still holds their output.
_LINGER = 2.0
_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Supervisor:
    """Starts one process per environment and looks after them.

    Args:
        commands: The command line of each rank, in rank order.
        environments: The environment of each rank.
        prefix: Whether each line of output begins with its rank.
        grace: Seconds from asking ranks to stop to killing them.
        say: Takes the supervisor's own lines.
        signals: The signals that are passed on to the ranks.

    Attributes:
        first_failure: The rank that failed by itself, before any other; None while all is well, or when a signal ended
            the job.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        environments: Sequence[Mapping[str, str]],
        *,
        prefix: bool,
        grace: float,
        say: Callable[[str], None],
        signals: Sequence[signal.Signals] = _CAUGHT,
    ) -> None:
        self._commands = commands
        self._environments = environments
        self._prefix = prefix
        self._grace = grace
        self._say = say
        self._signals = signals
        self.first_failure: Worker | None = None
        self._workers: list[Worker] = []
        self._selector = selectors.DefaultSelector()
        self._deadline: float | None = None
        self._code: int | None = None

    def run(self) -> int:
        """Run all ranks to their end.

        Returns:
            0 if all exited with 0; else the code of the first that did not, or 128 plus the number of the signal that
            ended it, or that was sent to us.
        """
        with caught_signals(self._signals) as signals, self._selector:
            self._selector.register(signals, selectors.EVENT_READ, self._on_signal)
            try:
                self._start()
                # More than the signals' socket: some rank or some pipe is not at its end.
                while len(self._selector.get_map()) > 1:
                    self._step()
            finally:
                self._end()
        return self.code

    @property
    def code(self) -> int:
        """What `run` returns."""
        return self._code or 0

    def _start(self) -> None:
        for rank, (command, environment) in enumerate(zip(self._commands, self._environments, strict=True)):
            worker = Worker(rank, command, environment, f"[rank {rank}] ".encode() if self._prefix else b"")
            self._workers.append(worker)
            self._selector.register(worker.exit_descriptor, selectors.EVENT_READ, worker)
            for pipe, relay in worker.pipes.items():
                self._selector.register(pipe, selectors.EVENT_READ, relay)

    def _end(self) -> None:
        for worker in self._workers:
            worker.signal(signal.SIGKILL)
        for worker in self._workers:
            worker.bury()

    def _step(self) -> None:
        timeout = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        events = [(key.fileobj, key.data) for key, _ in self._selector.select(timeout)]
        for source, data in events:
            if isinstance(data, Relay):
                self._on_output(int(source), data)  # type: ignore[arg-type]
            elif data == self._on_signal:
                self._on_signal(source)  # type: ignore[arg-type]
        self._on_ends([data for _, data in events if isinstance(data, Worker)])
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._on_deadline()

    def _on_output(self, pipe: int, relay: Relay) -> None:
        data = os.read(pipe, 1 << 16)
        try:
            relay.feed(data) if data else relay.finish()
        except BrokenPipeError:
            self._on_closed_output()
        if not data:
            self._selector.unregister(pipe)

    def _on_closed_output(self) -> None:
        """Nobody reads us any more (``| head``): end quietly, as other filters do."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        self._stop(signal.SIGTERM, 128 + signal.SIGPIPE)

    def _on_signal(self, signals: socket.socket) -> None:
        for signum in signals.recv(64):
            if self._code is None:
                self._say(f"got {signal_name(signum)}: passing it on to {self._running_names()}")
                self._stop(signum, 128 + signum)
            else:
                self._kill()

    def _on_ends(self, ended: Sequence[Worker]) -> None:
        for worker in ended:
            worker.note_end()
            self._selector.unregister(worker.exit_descriptor)
        # Ranks that follow a killed one into death may be seen in the same instant.
        failed = sorted((worker for worker in ended if worker.status), key=lambda worker: (worker.status or 0) > 0)
        if failed and self._code is None:
            self._on_failure(failed[0])
        if ended and not self._running():
            self._deadline = time.monotonic() + _LINGER

    def _on_failure(self, worker: Worker) -> None:
        assert worker.status
        self.first_failure = worker
        others = f"; stopping {self._running_names()}" if self._running() else ""
        self._say(f"rank {worker.rank} (process {worker.pid}) {how_it_ended(worker.status)}{others}")
        self._stop(signal.SIGTERM, worker.status if worker.status > 0 else 128 - worker.status)

    def _on_deadline(self) -> None:
        self._deadline = None
        if self._running():
            self._say(f"{self._running_names()} did not stop within {self._grace:g} s: killing")
            self._kill()
        else:
            for pipe in (pipe for worker in self._workers for pipe in worker.pipes):
                if pipe in self._selector.get_map():
                    self._selector.unregister(pipe)

    def _stop(self, signum: int, code: int) -> None:
        self._code = code if self._code is None else self._code
        self._deadline = time.monotonic() + self._grace
        for worker in self._running():
            worker.signal(signum)

    def _kill(self) -> None:
        for worker in self._running():
            worker.signal(signal.SIGKILL)

    def _running(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.status is None]

    def _running_names(self) -> str:
        return names(worker.rank for worker in self._running())


def names(ranks: Iterable[int]) -> str:
    """Name ranks in a sentence.

    >>> names([2]), names([0, 1, 3])
    ('rank 2', 'ranks 0, 1, 3')
    """
    listed = [str(rank) for rank in ranks]
    return f"rank{'s' * (len(listed) != 1)} {', '.join(listed)}"
