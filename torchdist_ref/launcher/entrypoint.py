"""Entry point of a rank that runs a function: reads the call from a file and writes its result to another.

`torchdist_ref.launcher.api` starts it with `command`. The function's module is imported as `multiprocessing` does it:
a program that launches itself has to guard its own work by ``if __name__ == "__main__"``.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import spawn
from pathlib import Path
from string import Template
from typing import Any

from torchdist_ref import failure_record

CALL = "call"


def write_call(folder: Path, function: Callable[..., Any], args: Sequence[Any]) -> None:
    """Write a function and its arguments to the file that all ranks read.

    Raises:
        pickle.PicklingError: Another process could not import the function.
    """
    preparation = spawn.get_preparation_data("rank")
    # A secret of multiprocessing, which is not needed here and must not be written to a file.
    preparation.pop("authkey", None)
    (folder / CALL).write_bytes(pickle.dumps(preparation) + pickle.dumps((function, tuple(args))))


def command(folder: Path) -> list[str]:
    """Return the command line of a rank."""
    program = f"import sys, pathlib, {__name__} as entry; sys.exit(entry.main(pathlib.Path(sys.argv[1])))"
    return [sys.executable, "-c", program, str(folder)]


def result_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's result."""
    return folder / f"result-{rank}"


def error_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's error, which has the format of torch's launchers."""
    return folder / f"error-{rank}.json"


def main(folder: Path) -> int:
    """Call the function.

    Args:
        folder: Folder of the call and of the results.

    Returns:
        The exit code.
    """
    rank = int(os.environ["RANK"])
    try:
        with (folder / CALL).open("rb") as file:
            spawn.prepare(pickle.load(file))
            function, args = pickle.load(file)
        result = function(*(_substituted(arg) for arg in args))
        result_path(folder, rank).write_bytes(pickle.dumps(result))
    except Exception as error:
        traceback.print_exc()
        failure_record.write(error)
        return 1
    return 0


def _substituted(argument: Any) -> Any:
    if not isinstance(argument, str):
        return argument
    return Template(argument).safe_substitute(local_rank=os.environ["LOCAL_RANK"])
