"""Server of the timers by which workers ask to be ended if they do not finish in time: torch's watchdog of an agent.

With TORCHELASTIC_ENABLE_FILE_TIMER=1 in its environment the launcher serves one FIFO for the workers of its host, and
TORCHELASTIC_TIMER_FILE names it to them. A worker writes a line for each timer that it sets or cancels, with torch's
`FileTimerClient`. The server signals it when a timer has expired; the launcher then sees a failed worker. Do not add
clients here: torch's serve.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from torchdist_ref.errors import ArgumentError
from torchdist_ref.processes.control import signal_name
from torchdist_ref.processes.linux_calls import pidfd_open, pidfd_send_signal

ENABLED, FILE = "TORCHELASTIC_ENABLE_FILE_TIMER", "TORCHELASTIC_TIMER_FILE"
_Key = tuple[int, str]
_MAX_WAIT_SECONDS = 86400.0


def is_enabled(environment: Mapping[str, str]) -> bool:
    """Return whether the environment of a launcher asks for a server."""
    return environment.get(ENABLED) == "1"


class TimerServer:
    """Server of timers on a thread of its own.

    Args:
        path: FIFO to create; what lies there is replaced.
        log: Function that receives a line about each timer that has expired.
        now: Function that returns the present time in seconds since 1970. Default: the system's clock.

    Raises:
        ArgumentError: The FIFO cannot be created.

    Attributes:
        path: FIFO.
    """

    def __init__(self, path: str, log: Callable[[str], None], now: Callable[[], float] = time.time) -> None:
        self.path, self._log, self._now = path, log, now
        try:
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)
            os.mkfifo(path, 0o600)
            # Open for writing too, so that the last client's end is not an end of file.
            self._pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            text = f"the launcher cannot create the pipe of timers {path}: {error.strerror}."
            cure = f"Name a path in a folder that can be written, with no folder or other user's file there, in {FILE}"
            raise ArgumentError(f"{text} {cure}, or unset that and {ENABLED}.") from error
        self._closing = os.eventfd(0, os.EFD_CLOEXEC)
        # Expiry, signal, and a descriptor of the process: another one may get its number.
        self._timers: dict[_Key, tuple[float, int, int]] = {}
        self._rest = b""
        self._thread = threading.Thread(target=self._run, name="torchdist_ref timers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and remove the FIFO."""
        os.eventfd_write(self._closing, 1)
        self._thread.join()
        for key in list(self._timers):
            self._drop(key)
        for descriptor in (self._pipe, self._closing):
            os.close(descriptor)
        with contextlib.suppress(FileNotFoundError):
            os.remove(self.path)

    def _run(self) -> None:
        poll = select.poll()
        for descriptor in (self._pipe, self._closing):
            poll.register(descriptor, select.POLLIN)
        while True:
            first = min((expires for expires, *_ in self._timers.values()), default=float("inf"))
            wait = min(max(0.0, first - self._now()), _MAX_WAIT_SECONDS)
            ready = poll.poll(wait * 1000 + 1)
            if any(descriptor == self._closing for descriptor, _ in ready):
                return
            if ready:
                self._receive()
            self._end_late_workers()

    def _receive(self) -> None:
        *lines, self._rest = (self._rest + os.read(self._pipe, 1 << 16)).split(b"\n")
        for line in lines:
            try:
                self._set(json.loads(line))
            except (ValueError, LookupError, TypeError, OverflowError, OSError):
                self._log(f"ignored a malformed request for a timer: {line[:80]!r}")

    def _set(self, request: Mapping[str, Any]) -> None:
        key = int(request["pid"]), str(request["scope_id"])
        expires = float(request["expiration_time"])
        signum = int(request["signal"])
        if signum > 0 and signum not in signal.valid_signals():
            raise ValueError("no signal has that number")
        self._drop(key)
        if expires >= 0:
            with contextlib.suppress(ProcessLookupError):
                self._timers[key] = expires, signum, pidfd_open(key[0])

    def _drop(self, key: _Key) -> None:
        if (timer := self._timers.pop(key, None)) is not None:
            os.close(timer[2])

    def _end_late_workers(self) -> None:
        now = self._now()
        late = {key: timer for key, timer in self._timers.items() if timer[0] <= now}
        for (pid, scope), (_, signum, process) in late.items():
            if signum > 0:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    pidfd_send_signal(process, signum)
                    self._log(f"the timer {scope!r} of process {pid} has expired: sent {signal_name(signum)}")
            self._drop((pid, scope))
