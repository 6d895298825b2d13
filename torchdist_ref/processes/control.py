"""Child processes: none outlives its parent, each is watched by a descriptor, signalled with its group and reaped last.

The launcher, `torchdist_ref.testing`, the notebook and the benchmark start their ranks with this module. So no end of
a parent, ``kill -9`` included, leaves ranks behind. Messages between such processes are framed by
`multiprocessing.connection`. Do not add reactions to failures here: they belong to the caller. This module never
imports torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import IO, Any, NoReturn

from torchdist_ref.processes.linux_calls import pidfd_open

_PR_SET_PDEATHSIG = 1
# Looked up before any fork: the child of a multi-threaded process should do as little as possible.
_PRCTL = ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else None


def catches_signal(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal, which does not end it then.

    Raises:
        OSError: There is no such process.
    """
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        caught = next((line.split()[1] for line in file if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> number - 1 & 1)


class Child:
    """A direct child process that leads a process group.

    Only `reap` collects its exit status. Until then the kernel cannot reuse its number, so signals never hit another
    process.

    Args:
        pid: Process id of the child.
        pipes: Parent's ends of its pipes; `reap` closes them.

    Attributes:
        pid: Process id and process group id.
        pipes: Parent's ends of its pipes.
        status: Exit code, or the negative number of the signal that killed it. None until `wait` has seen the end.
    """

    def __init__(self, pid: int, pipes: Sequence[IO[bytes]] = ()) -> None:
        self.pid = pid
        self.pipes = pipes
        self.status: int | None = None

    @cached_property
    def descriptor(self) -> int:
        """Pidfd of the process: readable once the process has ended."""
        return pidfd_open(self.pid)

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end of the process without reaping it, unless it has been reaped.

        Args:
            timeout: Longest time to wait, in seconds. Default None: no limit.

        Returns:
            The exit status; None after a time-out.
        """
        if self.status is not None:
            return self.status
        if timeout is not None:
            poll = select.poll()
            poll.register(self.descriptor, select.POLLIN)
            if not poll.poll(timeout * 1000):
                return None
        info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert info is not None  # only WNOHANG returns None
        self.status = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        return self.status

    def signal(self, signum: int) -> None:
        """Send a signal to the process and to the processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            try:
                os.killpg(self.pid, signum)
            except ProcessLookupError:
                # A process that `multiprocessing` starts makes its group itself, and may not have done so yet.
                if self.status is None:
                    os.kill(self.pid, signum)

    def reap(self) -> None:
        """Wait for the end of the process, collect its status and close descriptors."""
        with contextlib.suppress(ChildProcessError):
            self.wait()
            os.waitpid(self.pid, 0)
        if "descriptor" in self.__dict__:
            os.close(self.descriptor)
        for pipe in self.pipes:
            pipe.close()

    def terminate(self, timeout: float) -> None:
        """Send SIGTERM, after a time-out SIGKILL, and reap the process."""
        self.signal(signal.SIGTERM)
        self.wait(timeout)
        self.signal(signal.SIGKILL)
        self.reap()


@contextlib.contextmanager
def named_process_limit() -> Iterator[None]:
    """Name the limit, and what to do, in the error of a process that cannot be started in the block."""
    try:
        yield
    except BlockingIOError as error:
        cure = "Raise the limit on processes (ulimit -u) or that of the container, or start fewer."
        raise BlockingIOError(error.errno, f"no process can be started: {error.strerror}. {cure}") from error


def spawn(
    command: Sequence[str], *, setup: Callable[[], object] | None = None, new_session: bool = False, **options: Any
) -> Child:
    """Start a command as a child process that is killed when this process ends.

    Args:
        command: Command line.
        setup: Function to call in the child before the command starts.
        new_session: Start a session instead of a process group, and do not kill the child with this process. The
            child then has to notice the end of this process and to stop its own children.
        **options: Further arguments of `subprocess.Popen`.

    Returns:
        The child.
    """
    with named_process_limit():
        process = subprocess.Popen(
            command,
            process_group=None if new_session else 0,
            start_new_session=new_session,
            preexec_fn=None if new_session else functools.partial(_prepare, os.getpid(), setup),
            **options,
        )
    # `Child` waits and reaps by process id.
    process.returncode = 0
    return Child(process.pid, [pipe for pipe in (process.stdin, process.stdout, process.stderr) if pipe])


def _prepare(parent: int, setup: Callable[[], object] | None) -> None:
    die_with_parent(parent)
    if setup is not None:
        setup()


def fork(run: Callable[[], NoReturn]) -> Child:
    """Fork a child process that is killed when this process ends.

    Args:
        run: Function to call in the child. It ends the process by `os._exit`; if it raises, the exit code is 1.

    Returns:
        The child, in the parent. The call never returns in the child.
    """
    parent = os.getpid()
    pid = fork_without_garbage()
    if pid == 0:
        try:
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
            die_with_parent(parent)
            run()
        finally:
            os._exit(1)
    with contextlib.suppress(OSError):
        # The child makes the same call. The group exists as soon as either has returned.
        os.setpgid(pid, pid)
    return Child(pid)


def fork_without_garbage() -> int:
    """Fork this process so that the child never finalizes what was garbage in this process.

    A finalizer may wait for a thread, and the threads of the parent do not exist in the child, which would then wait
    for ever. So no collection runs between the fork and the moment when the child has put all objects of the parent
    out of the collector's reach. A collection is due at any allocation, also at those that end the call of `os.fork`:
    to stop the collector in the child would be too late.

    Returns:
        Process id of the child in the parent, 0 in the child.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        with named_process_limit(), warnings.catch_warnings():
            # Python 3.12 warns when a multi-threaded process forks.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            gc.freeze()
        return pid
    finally:
        if collecting:
            gc.enable()


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when the thread that started it ends (Linux; no effect elsewhere).

    Call it first in a forked child or as ``preexec_fn``: the setting survives ``exec``. See prctl(2),
    PR_SET_PDEATHSIG.

    Args:
        parent: Process id of the parent. This process exits at once if the parent has already ended.
        signum: Signal to receive.
    """
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def redirect_output(descriptor: int) -> None:
    """Write standard output and standard error of this process to a file or pipe, line by line.

    Args:
        descriptor: Open descriptor. The caller keeps it.
    """
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    # The parent's sys.stdout may be any object, pytest's or Jupyter's for instance.
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """Hold the signals to this thread, and to processes that it forks, until the end of the block.

    Python drops what reaches a forked process before its first instruction, and a handler of the parent may swallow
    what follows. The child calls `default_signals` to receive them.
    """
    former = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def default_signals() -> None:
    """Give a forked process Python's default handlers, and the signals that were held."""
    signal.set_wakeup_fd(-1)
    for signum in signal.valid_signals():
        if callable(signal.getsignal(signum)) and signum != signal.SIGINT:
            signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block: the hooks that Python runs around a fork would swallow it.

    Only the main thread of a process receives interrupts; in other threads this has no effect.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    former = signal.signal(signal.SIGINT, lambda signum, frame: received.append(signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
    if received:
        signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def signal_socket(
    signals: Sequence[signal.Signals], handler: Callable[[int, Any], object] | None = None
) -> Iterator[socket.socket]:
    """Receive signals through a socket, so that an event loop handles them between two events.

    Outside the main thread, which alone receives signals, the socket stays empty.

    Args:
        signals: Signals to catch until the end of the block.
        handler: Function to call too, on the main thread; what it raises interrupts a system call that blocks.

    Yields:
        A non-blocking socket. Each signal adds one byte, its number.
    """
    reader, writer = socket.socketpair()
    with reader, writer:
        if threading.current_thread() is not threading.main_thread():
            yield reader
            return
        reader.setblocking(False)
        writer.setblocking(False)
        former_descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        called = handler or _ignore
        former = {signum: signal.signal(signum, called) for signum in signals if not _from_nohup(signum)}
        try:
            yield reader
        finally:
            for signum, previous in former.items():
                signal.signal(signum, previous)
            signal.set_wakeup_fd(former_descriptor)


def _ignore(signum: int, frame: object) -> None:
    """Do nothing: without a Python handler the signal would end the process and write no byte."""


def _from_nohup(signum: signal.Signals) -> bool:
    # nohup asks the job to continue when the terminal closes.
    return signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN


def describe_exit(status: int) -> str:
    """Describe an exit status.

    Args:
        status: Exit code, or the negative number of the signal that killed the process.

    Returns:
        A phrase to follow the name of the process.

    Example:
        >>> describe_exit(3)
        'exited with code 3'
        >>> describe_exit(-9)
        'was killed by SIGKILL'
    """
    return f"exited with code {status}" if status >= 0 else f"was killed by {signal_name(-status)}"


def signal_name(signum: int) -> str:
    """Return the name of a signal, or its number if Python has no name for it.

    >>> signal_name(15), signal_name(40)
    ('SIGTERM', 'signal 40')
    """
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def name_ranks(ranks: Iterable[int]) -> str:
    """Name ranks in a sentence, in ascending order.

    >>> name_ranks([2]), name_ranks({3, 0, 1}), name_ranks([])
    ('rank 2', 'ranks 0, 1, 3', '')
    """
    listed = [str(rank) for rank in sorted(ranks)]
    return f"rank{'s' * (len(listed) > 1)} {', '.join(listed)}" if listed else ""


def redirect_to_null(descriptor: int) -> None:
    """Discard what this process writes to a descriptor from now on."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
