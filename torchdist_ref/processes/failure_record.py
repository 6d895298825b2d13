"""Record of the exception that ended a rank, written before its group learns of it, and read by its launcher.

When one rank fails, the others fail soon after it, because of it, and may even end before it. So the order in which
processes end does not tell which failed first. A rank therefore writes its exception to the file that the variable
``TORCHELASTIC_ERROR_FILE`` names, in the format of torch's launchers, before it aborts its groups. An exception that
another rank has caused is not recorded; for our launcher an empty file marks it, and another one names the signal that
makes the rank dump its last calls. Do not add reactions to a failure here: they belong to the launcher.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

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
_CONSEQUENCE = ".consequence"
_DUMP_SIGNAL = ".dump_signal"
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
    if _is_caused_by_another_rank(error):
        if LAUNCH_ID in os.environ:
            with suppress(OSError):
                Path(name + _CONSEQUENCE).touch()
        return
    stack = "".join(traceback.format_exception(error))
    extra = {"py_callstack": stack, "timestamp": str(int(time.time()))}
    with suppress(OSError):
        # Readers see the whole record or none.
        temporary = Path(f"{name}.{os.getpid()}")
        temporary.write_text(json.dumps({"message": {"message": message_of(error), "extraInfo": extra}}), "utf-8")
        temporary.replace(name)


def _is_caused_by_another_rank(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, _CAUSED_BY_ANOTHER_RANK):
            return True
        error = error.__cause__
    return False


def announce_dump_signal(number: int) -> None:
    """Write for our launcher which signal makes this process dump its last calls; 0 if none does any more."""
    name = os.environ.get(ERROR_FILE)
    if name and LAUNCH_ID in os.environ:
        mark = Path(name + _DUMP_SIGNAL)
        with suppress(OSError):
            if number:
                mark.write_text(f"{os.getpid()} {number}", "utf-8")
            else:
                # The folder may be the user's.
                mark.unlink(missing_ok=True)


def dump_signal(path: Path) -> tuple[int, int] | None:
    """Return the process and the signal that make a rank dump its last calls.

    None if the rank does not listen, or has failed: it has dumped its calls then.

    Args:
        path: Path of the rank's record.
    """
    if path.exists() or Path(f"{path}{_CONSEQUENCE}").exists():
        return None
    try:
        pid, number = map(int, Path(f"{path}{_DUMP_SIGNAL}").read_text("utf-8").split())
    except (OSError, ValueError):
        return None
    return (pid, number) if pid > 0 and number > 0 else None


def read(path: Path) -> FailureRecord | None:
    """Return the record of a rank, or None if it has none."""
    try:
        message = json.loads(path.read_text("utf-8"))["message"]
        text, stack = str(message["message"]), str(message.get("extraInfo", {}).get("py_callstack", ""))
        return FailureRecord(text, path.stat().st_mtime_ns, stack)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def is_consequence(path: Path) -> bool:
    """Return whether the rank of a record has ended because of another rank, and remove the mark that says so."""
    mark = Path(f"{path}{_CONSEQUENCE}")
    found = mark.exists()
    mark.unlink(missing_ok=True)
    return found


def on_uncaught(tell: Callable[[BaseException], None]) -> None:
    """Record each exception that ends this program, and pass it to a function, before Python prints it.

    Not in an interactive session, which continues after an exception, and not for Ctrl-C, which reaches all ranks. A
    forked child records nothing: its end is not that of the rank.

    Args:
        tell: Function that tells the other ranks.
    """
    former, rank_process = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if isinstance(error, Exception) and not hasattr(sys, "ps1") and not sys.flags.interactive:
            if os.getpid() == rank_process:
                with suppress(Exception):
                    write(error)
            with suppress(Exception):
                tell(error)
        former(kind, error, frames)

    sys.excepthook = hook
