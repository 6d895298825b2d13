"""Signals as something to select on, so that a supervisor handles them between two events and never inside one."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator, Sequence


def _heard(signum: int, frame: object) -> None:
    """Let the wake-up descriptor speak: a signal without a handler would end the process instead."""


def _wanted(signum: signal.Signals) -> bool:
    # nohup means that the job should go on when the terminal goes away.
    return not (signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN)


@contextlib.contextmanager
def caught_signals(signals: Sequence[signal.Signals]) -> Iterator[socket.socket]:
    """Catch some signals for a while. Outside the main thread, which alone gets signals, none comes.

    Args:
        signals: Which.

    Yields:
        A non-blocking socket that gives one byte for each signal: its number.
    """
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    if threading.current_thread() is not threading.main_thread():
        with reader, writer:
            yield reader
        return
    former_descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    former = {signum: signal.signal(signum, _heard) for signum in signals if _wanted(signum)}
    try:
        yield reader
    finally:
        for signum, handler in former.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(former_descriptor)
        reader.close()
        writer.close()
