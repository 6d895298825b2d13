"""Entry point of a worker that runs a function: reads the call from a file and writes its result to another.

`torchdist_ref.launcher.local_workers` starts it. The function's module is imported as `multiprocessing` does it: a
program that launches itself has to guard its own work by ``if __name__ == "__main__"``.
"""

from __future__ import annotations

import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from torchdist_ref.processes import failure_record


def write_call(folder: Path, local_rank: int, function: Callable[..., Any], args: Sequence[Any]) -> None:
    """Write a function and its arguments to the file that the worker of a local rank reads.

    Raises:
        pickle.PicklingError: Another process could not import the function.
    """
    preparation = spawn.get_preparation_data("rank")
    # A secret of multiprocessing, which is not needed here and must not be written to a file.
    preparation.pop("authkey", None)
    call = pickle.dumps(preparation) + pickle.dumps((function, tuple(args)))
    (folder / f"call-{local_rank}").write_bytes(call)


def command(folder: Path, local_rank: int) -> list[str]:
    """Return the command line of a worker."""
    program = f"import sys, {__name__} as entry; sys.exit(entry.main(sys.argv[1], int(sys.argv[2])))"
    return [sys.executable, "-c", program, str(folder), str(local_rank)]


def result(folder: Path, local_rank: int) -> Any:
    """Return the result of a worker; None if it ended without one, as by `os._exit`."""
    with suppress(FileNotFoundError):
        return pickle.loads(_result_path(folder, local_rank).read_bytes())
    return None


def main(folder: str, local_rank: int) -> int:
    """Read the call and make it.

    Args:
        folder: Folder of the calls and of the results.
        local_rank: Rank of this worker among those of its host.

    Returns:
        The exit code.
    """
    return run(Path(folder), local_rank, partial(_read_call, Path(folder), local_rank))


def run(folder: Path, local_rank: int, read: Callable[[], tuple[Callable[..., Any], Sequence[Any]]]) -> int:
    """Make a call and write its result, or its exception's record.

    Args:
        folder: Folder of the results.
        local_rank: Rank of this worker among those of its host.
        read: Function that returns the function to call and its arguments.

    Returns:
        The exit code.
    """
    try:
        # An earlier attempt may have left one.
        _result_path(folder, local_rank).unlink(missing_ok=True)
        function, args = read()
        try:
            value = function(*args)
        except SystemExit as end:
            # A script that ends by sys.exit() has run to its end.
            if end.code:
                raise
            value = None
        _result_path(folder, local_rank).write_bytes(pickle.dumps(value))
    except Exception as error:
        traceback.print_exc()
        failure_record.write(error)
        return 1
    return 0


def _read_call(folder: Path, local_rank: int) -> tuple[Callable[..., Any], Sequence[Any]]:
    with (folder / f"call-{local_rank}").open("rb") as file:
        spawn.prepare(pickle.load(file))
        function, args = pickle.load(file)
    return function, args


def _result_path(folder: Path, local_rank: int) -> Path:
    return folder / f"result-{local_rank}"
