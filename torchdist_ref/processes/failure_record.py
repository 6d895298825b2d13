"""Record of the exception that ended a rank, written before its group learns of it, and read by its launcher.

When one rank fails, the others fail soon after it, because of it, and may even end before it. So the order in which
processes end does not tell which failed first. A rank therefore writes its exception to the file that the variable
``TORCHELASTIC_ERROR_FILE`` names, in the format of torch's launchers, before it aborts its groups. An exception that
another rank has caused is not recorded. Our launcher learns of it by the rank's `Notes`, a file beside that of the
record. Do not add reactions to a failure here: they belong to the launcher.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from torchdist_ref.errors import GroupAbortedError, RankDiedError, message_of

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
NO_FILE = "<N/A>"
"""What torch's reports show in place of a file or a name that does not exist."""
LAUNCH_ID = "TORCHDIST_REF_LAUNCH_ID"
"""Variable that our launcher sets in the environment of its workers."""
DIRECTORY_VARIABLE = "TORCHDIST_REF_FLIGHT_RECORDER_DIR"
"""Variable that names the directory of the flight recorder's dumps."""
# torch's names: a prefix of the file, to which the rank is appended, and whether failures are dumped.
PREFIX_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
ON_FAILURE_VARIABLES = ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT")
_NOTES = ".notes"
_CAUSED_BY_ANOTHER_RANK = (GroupAbortedError, RankDiedError)


@dataclass(frozen=True)
class FailureRecord:
    """Record of a rank.

    Attributes:
        message: Type and text of the exception.
        time_ns: Time at which it was written, in nanoseconds.
        stack: Traceback; empty if the record has none.
    """

    message: str
    time_ns: int
    stack: str = ""


@dataclass(frozen=True)
class Notes:
    """Notes of a rank to our launcher, which removes them when the rank has ended.

    Attributes:
        pid: Process that dumps its last calls when it receives a signal; 0 for none.
        dump_signal: Number of that signal.
        is_consequence: Whether the rank fails because of a failure of another one, which that one records.
    """

    pid: int = 0
    dump_signal: int = 0
    is_consequence: bool = False


def wants_dumps(environment: Mapping[str, str]) -> bool:
    """Return whether ranks dump failures: a place is set or torch's variable asks, and it does not forbid it."""
    asked = next((environment[name].lower() for name in ON_FAILURE_VARIABLES if name in environment), None)
    if asked is not None and asked not in ("1", "true", "y", "yes", "t"):
        return False
    return asked is not None or any(map(environment.get, (DIRECTORY_VARIABLE, *PREFIX_VARIABLES)))


def write(error: BaseException) -> None:
    """Record an exception of this rank, unless another rank caused it, an earlier one is recorded, or nobody asked."""
    name = os.environ.get(ERROR_FILE)
    if not name or Path(name).exists():
        return
    if is_caused_by_another_rank(error):
        _note(is_consequence=True)
        return
    with suppress(OSError):
        write_whole(Path(name), content_of(error))


def content_of(error: BaseException) -> dict[str, Any]:
    """Return the content of the record of an exception, in the layout of torch's launchers."""
    stack = "".join(traceback.format_exception(error))
    extra = {"py_callstack": stack, "timestamp": str(int(time.time()))}
    return {"message": {"message": message_of(error), "extraInfo": extra}}


def write_whole(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file of which readers see all or nothing."""
    temporary = Path(f"{path}.{os.getpid()}")
    temporary.write_text(json.dumps(content), "utf-8")
    temporary.replace(path)


def is_caused_by_another_rank(error: BaseException | None) -> bool:
    """Return whether an exception names the failure of another rank as its cause."""
    while error is not None:
        if isinstance(error, _CAUSED_BY_ANOTHER_RANK):
            return True
        error = error.__cause__
    return False


def announce_dump_signal(number: int) -> None:
    """Note for our launcher which signal makes this process dump its last calls; 0 if none does any more."""
    _note(pid=os.getpid() if number else 0, dump_signal=number)


def _note(**facts: Any) -> None:
    name = os.environ.get(ERROR_FILE)
    if not name or LAUNCH_ID not in os.environ:
        return
    notes, path = replace(read_notes(Path(name)), **facts), Path(name + _NOTES)
    with suppress(OSError):
        if notes == Notes():
            # The folder may be the user's.
            path.unlink(missing_ok=True)
        else:
            write_whole(path, asdict(notes))


def read_notes(path: Path) -> Notes:
    """Return the notes of a rank.

    Args:
        path: Path of the rank's record.
    """
    try:
        content = json.loads(Path(f"{path}{_NOTES}").read_text("utf-8"))
        return Notes(int(content["pid"]), int(content["dump_signal"]), bool(content["is_consequence"]))
    except (OSError, ValueError, LookupError, TypeError):
        return Notes()


def discard_notes(path: Path) -> None:
    """Remove the notes of a rank that has ended."""
    with suppress(OSError):
        Path(f"{path}{_NOTES}").unlink()


def read(path: Path) -> FailureRecord | None:
    """Return the record of a rank, or None if it has none."""
    try:
        message = json.loads(path.read_text("utf-8"))["message"]
        text, stack = str(message["message"]), str(message.get("extraInfo", {}).get("py_callstack", ""))
        return FailureRecord(text, path.stat().st_mtime_ns, stack)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def on_uncaught(notify: Callable[[BaseException], None]) -> None:
    """Record each exception that ends this program, and pass it to a function, before Python prints it.

    Not in an interactive session, which continues after an exception, and not for Ctrl-C, which reaches all ranks. A
    forked child records nothing: its end is not that of the rank.

    Args:
        notify: Function that notifies the other ranks.
    """
    former, rank_process = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if isinstance(error, Exception) and not hasattr(sys, "ps1") and not sys.flags.interactive:
            if os.getpid() == rank_process:
                with suppress(Exception):
                    write(error)
            with suppress(Exception):
                notify(error)
        former(kind, error, frames)

    sys.excepthook = hook
