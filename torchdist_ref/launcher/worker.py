"""One rank as its supervisor sees it: a process in a group of its own, two pipes, and in the end a status."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from torchdist_ref.launcher.lifelines import die_with_parent, wait_without_reaping
from torchdist_ref.launcher.output import Relay, sink_of

# Windows has neither, and this package can be imported there.
with contextlib.suppress(ImportError):
    import fcntl
    import termios


class Worker:
    """A running rank.

    Its process group is its own, so that a signal reaches what it started too, and Ctrl-C reaches it only once: by way
    of the launcher. Its session is the launcher's: Linux may share out processor time by session first (sched(7),
    autogroup), and ranks that wait for one another must not be strangers to the scheduler.

    Rank 0 gets the launcher's standard input, as under mpiexec; one input cannot serve several.

    Attributes:
        rank: Which one.
        pid: Its process id.
        status: Its exit code, or the negative number of the signal that killed it; None while it runs.
        exit_descriptor: Becomes readable when it ends.
        pipes: For each open pipe, the relay for what comes out of it.
    """

    def __init__(self, rank: int, command: Sequence[str], environment: Mapping[str, str], prefix: bytes = b"") -> None:
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=None if rank == 0 else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            preexec_fn=functools.partial(_settle, os.getpid()),
        )
        self.rank = rank
        self.pid = self._process.pid
        self.status: int | None = None
        self.exit_descriptor = os.pidfd_open(self.pid)
        assert self._process.stdout and self._process.stderr
        self.pipes = {
            self._process.stdout.fileno(): Relay(sink_of(sys.stdout), prefix),
            self._process.stderr.fileno(): Relay(sink_of(sys.stderr), prefix),
        }

    def note_end(self) -> None:
        """Take down how it ended."""
        self.status = wait_without_reaping(self.pid)

    def signal(self, signum: int) -> None:
        """Signal it and all that it started. It is reaped only by `bury`, so the number is its own until then."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signum)

    def bury(self) -> None:
        """Reap it, wherever it stands: call it once it has ended or been killed."""
        self._process.wait()
        os.close(self.exit_descriptor)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


def _settle(parent: int) -> None:
    die_with_parent(parent)
    # A terminal stops whoever reads it from beside its foreground group, but not those that it does not control.
    with contextlib.suppress(OSError):
        terminal = os.open("/dev/tty", os.O_RDWR)
        fcntl.ioctl(terminal, termios.TIOCNOTTY)
        os.close(terminal)
