"""Failures of child processes, with torch's names: the errors that report them, and the lines that describe them.

`ChildFailedError` and `SignalException` are raised as subclasses of torch's classes where those are imported: a job
that fails in a program calls `import_torchs` before. `record` and `error_handler` write what is read here.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from torchdist_ref.errors import indexed
from torchdist_ref.launcher import error_handler
from torchdist_ref.launcher.worker import TRACEBACK
from torchdist_ref.processes.control import signal_name
from torchdist_ref.processes.failure_record import NO_FILE

logger = logging.getLogger("torchdist_ref.launcher")

TORCH = "torch.distributed.elastic.multiprocessing"
_NO_TRACEBACK = "decorate the main function with torchdist_ref.elastic.multiprocessing.errors.record"
# Of a log file, in a report.
_MAX_TAIL_LINES, _MAX_TAIL_BYTES = 20, 8192


@dataclass
class ProcessFailure:
    """Failure of one worker. Message and time come from its failure record if it has written one.

    Args:
        local_rank: Rank among the workers of its host.
        pid: Process id.
        exitcode: Exit code, or the negative number of the signal that killed it.
        error_file: Path of its failure record, which need not exist.

    Attributes:
        error_file_data: Content of the record.
        message: The record's message: a text, or a dict of torch's layout. Without a record, a sentence on the end.
        timestamp: Time of the failure in seconds since the epoch.
    """

    local_rank: int
    pid: int
    exitcode: int
    error_file: str
    error_file_data: dict[str, Any] = field(init=False)
    message: Any = field(init=False)
    timestamp: int = field(init=False)

    def __post_init__(self) -> None:
        self.error_file_data, self.message, self.timestamp = {"message": "<NONE>"}, "", int(time.time())
        try:
            content = json.loads(Path(self.error_file).read_text("utf-8"))
            message = content["message"]
            extra = content if isinstance(message, str) else message["extraInfo"]
            self.error_file_data, self.message, self.timestamp = content, message, int(extra.get("timestamp", 0))
        except (OSError, ValueError, LookupError, TypeError):
            # None was written, or only a part, as on a full disk.
            self.error_file = NO_FILE
        if not self.message and self.exitcode < 0:
            self.message = f"Signal {-self.exitcode} ({self.signal_name()}) received by PID {self.pid}"
        elif not self.message:
            self.error_file_data["errorTraits"] = {"category": "system_terminated_error", "retryability": "False"}
            self.message = f"To enable traceback: {_NO_TRACEBACK}"

    def signal_name(self) -> str:
        """Return the name of the signal that killed the worker, or ``<N/A>``."""
        return signal_name(-self.exitcode) if self.exitcode < 0 else NO_FILE

    def timestamp_isoformat(self) -> str:
        """Return the time of the failure, in the local time zone."""
        return datetime.fromtimestamp(self.timestamp).isoformat(sep="_")


def failure_of(worker: Any, kind: Any) -> Any:
    """Return the failure of a worker: with the content of its record, and with the path if the record remains.

    Without a record, its message has the last lines of the worker's log file, if standard error goes to one.

    Args:
        worker: Its `Exit`.
        kind: Class of the failure.
    """
    failure = kind(worker.local_rank, worker.pid, worker.status, worker.error_file)
    failure.stderr_file = worker.stderr_file
    if failure.error_file == NO_FILE:
        failure.message = _message_without_record(worker, failure.message)
    if not worker.keeps_record:
        failure.error_file = NO_FILE
    return failure


def _message_without_record(worker: Any, message: str) -> str:
    last = "" if worker.printed_traceback else _last_lines(worker.stderr_file)
    lines = [message]
    if worker.status >= 0 and worker.printed_traceback:
        lines = ["printed above, in the output of this rank"]
    elif worker.status >= 0 and TRACEBACK in last:
        lines = []
    lines += [worker.memory] if worker.memory else []
    lines += ["the last lines of its standard error:", last] if last else []
    return "\n".join(lines)


def _last_lines(path: str) -> str:
    """Return the end of a log file; empty if there is none or nothing has been written."""
    if not path:
        return ""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _MAX_TAIL_BYTES))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-_MAX_TAIL_LINES:])
    except OSError:
        return ""


class ChildFailedError(Exception):
    """Workers failed.

    Args:
        name: Name of the job's function or command.
        failures: Failure of each failed worker by global rank; one or more.
    """

    def __init__(self, name: str, failures: dict[int, Any]) -> None:
        self.name = name
        self.failures = failures
        assert failures, "a ChildFailedError describes one failure or more"
        Exception.__init__(self, self.format_msg())
        indexed(self)

    def get_first_failure(self) -> tuple[int, Any]:
        """Return the global rank that failed first, and its failure."""
        return min(self.failures.items(), key=lambda item: item[1].timestamp)

    def format_msg(self, boarder_delim: str = "=", section_delim: str = "-") -> str:
        """Return the message: a block for each failure, the first failure last.

        Args:
            boarder_delim: Character of the first and the last line.
            section_delim: Character of the lines between.
        """
        root, _ = self.get_first_failure()
        blocks = {rank: describe(rank, failure) for rank, failure in self.failures.items()}
        others = [block for rank, block in blocks.items() if rank != root] or ["  <NO_OTHER_FAILURES>"]
        width = min(60, max(len(line) for block in blocks.values() for line in block.splitlines()))
        border, section = boarder_delim * width, section_delim * width
        title = f"{self.name} FAILED"
        root_title = "Root Cause (first observed failure):"
        return "\n".join(["", border, title, section, "Failures:", *others, section, root_title, blocks[root], border])


def describe(rank: int, failure: Any, host: str = "") -> str:
    """Return the block of lines that describes a failure.

    Args:
        rank: Global rank.
        failure: `ProcessFailure`, or torch's.
        host: Name of its host. Default: this host.
    """
    killed = failure.exitcode < 0
    ended = f"killed by {failure.signal_name()} ({failure.exitcode})" if killed else f"{failure.exitcode}"
    text = _enriched(_traceback(failure.message), failure.error_file) if killed else _traceback(failure.message)
    rows = (
        ("time", failure.timestamp_isoformat()),
        ("host", host or socket.gethostname()),
        ("rank", f"{rank} (local_rank: {failure.local_rank})"),
        ("exitcode", f"{ended} (pid: {failure.pid})"),
        ("error_file", failure.error_file),
        *([("stderr", stderr_file)] if (stderr_file := getattr(failure, "stderr_file", "")) else []),
        ("traceback", text.replace("\n", "\n  ")),
    )
    return "\n".join(f"  {name:<10}: {value}" for name, value in rows)


def _enriched(text: str, error_file: str) -> str:
    """Return the text for a worker that a signal has killed, with what the error handler adds."""
    try:
        return error_handler.get_error_handler().maybe_enrich_signal_failure_message(text, error_file)
    except Exception:
        logger.warning("the error handler cannot add to the message for a killed worker", exc_info=True)
        return text


def describe_remote(report: Mapping[str, Any]) -> str:
    """Return the block of lines that describes a failure on another host.

    Args:
        report: Failure as that host's agent reports it, see `torchdist_ref.elastic.host_agent.JobEnd`.
    """
    # The path is that of a file on the other host.
    failure = ProcessFailure(report["local_rank"], report["pid"], report["status"], "")
    failure.timestamp = int(report["time"])
    if "stack" in report:
        failure.error_file, failure.message = report["error_file"], report["stack"].rstrip("\n")
    return describe(report["rank"], failure, report["host"])


def _traceback(message: Any) -> str:
    if isinstance(message, str):
        return message
    stack = message.get("extraInfo", {}).get("py_callstack") or message.get("message", NO_FILE)
    return str(stack).rstrip("\n")


class SignalException(Exception):
    """A signal ended the launcher's job.

    Args:
        msg: Message.
        sigval: Signal.
    """

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        Exception.__init__(self, msg)
        indexed(self)
        self.sigval = sigval


def import_torchs() -> None:
    """Import torch's classes if torch is installed, so that a program can catch an error by their names."""
    with suppress(Exception):
        importlib.import_module(f"{TORCH}.api")


def as_torchs(kind: Any, module: str) -> Any:
    """Return a class, or its subclass that derives from torch's class of the same name too, if torch's is imported.

    Args:
        kind: Class of this module.
        module: Module of torch's class, below torch.distributed.elastic.multiprocessing.
    """
    return as_subclass_of_torchs(kind, f"{TORCH}.{module}")


def as_subclass_of_torchs(kind: Any, module: str) -> Any:
    """Return what `as_torchs` does, for a class of any module of torch.

    Args:
        kind: Class.
        module: Name of torch's module.
    """
    return _subclass(kind, getattr(sys.modules.get(module), kind.__name__, None))


@functools.cache
def _subclass(kind: Any, torchs: Any) -> Any:
    return kind if torchs is None else type(kind.__name__, (kind, torchs), {"__module__": kind.__module__})
