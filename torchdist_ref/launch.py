"""``python -m torchdist_ref.launch --nproc-per-node 4 script.py``: run a script as several ranks, as torchrun does.

The launcher serves the ranks' store, sets the environment variables of each rank and forwards output line by line. It
ends with the first rank that fails and leaves no process behind. It never imports torch. This module is the command,
also under the names ``python -m torchdist_ref.run`` and ``torchdist-run``; its parts are in `torchdist_ref.launcher`.
A program calls `main` or `run`, which raise as torch's do and leave other children of the program alone.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from shutil import rmtree
from typing import Any

from torchdist_ref.elastic.attempt import AttemptOutcome
from torchdist_ref.errors import ArgumentError, DistError
from torchdist_ref.launcher.api import LaunchConfig, launch_agent, run_job
from torchdist_ref.launcher.options import (
    config_from_args,
    determine_local_world_size,
    get_args_parser,
    get_rdzv_endpoint,
    get_use_env,
    parse_args,
    parse_min_max_nnodes,
)
from torchdist_ref.launcher.target import run_script_path
from torchdist_ref.processes.control import redirect_to_null

__all__ = [
    "command_line",
    "config_from_args",
    "determine_local_world_size",
    "get_args_parser",
    "get_rdzv_endpoint",
    "get_use_env",
    "launch",
    "main",
    "parse_args",
    "parse_min_max_nnodes",
    "run",
    "run_script_path",
]

logger = logging.getLogger("torchdist_ref.launcher")

_BAD_INPUT_CODE = 2


def main(args: Sequence[str] | None = None) -> None:
    """Run a command line from a program, as torch's function does: a job that fails raises.

    Args:
        args: Arguments. Default None: those of this process.

    Raises:
        SystemExit: An option is wrong. The code is 2, and a line on standard error names the option.
        ArgumentError: A value cannot be used on this host.
        ChildFailedError: A rank failed, and no restart was left. Its `failures` has the failure by rank.
        SignalException: A signal ended the job. Both are torch's exceptions too if torch is installed.

    Example:
        >>> from torchdist_ref.launch import main
        >>> from torchdist_ref.launcher.child_failures import ChildFailedError
        >>> try:
        ...     main(["--nproc-per-node", "2", "--no-python", "false"])
        ... except ChildFailedError as error:
        ...     [failure.exitcode for failure in error.failures.values()]
        [1]
    """
    run(parse_args(args))


def run(args: argparse.Namespace) -> None:
    """Run a parsed command line from a program, as `main` does.

    Args:
        args: Result of `parse_args`.
    """
    with _job(args, logger.warning) as job:
        launch_agent(*job)


def launch(args: argparse.Namespace) -> None:
    """Run a parsed command line, see `run`."""
    run(args)


def command_line(args: Sequence[str] | None = None) -> int:
    """Run the command line in a process of its own, whose descendants are all the job's.

    Args:
        args: Arguments. Default None: those of this process.

    Returns:
        The exit code: 0, that of the first rank that failed, or 2 if an option is wrong or a rank cannot be started.

    Example:
        >>> import subprocess, sys
        >>> command = [sys.executable, "-m", "torchdist_ref.launch", "--nproc-per-node", "2", "-m", "this"]
        >>> subprocess.run(command, capture_output=True, text=True).stdout.count("Simple is better than complex.")
        2
    """
    parsed = parse_args(args)
    try:
        with _job(parsed, _log) as job:
            return run_job(*job, log=_log, on_end=partial(_report, _keeps_logs(parsed)), own_descendants=True).code
    except (DistError, ArgumentError) as error:
        _log(str(error))
        return _BAD_INPUT_CODE


@contextlib.contextmanager
def _job(
    args: argparse.Namespace, log: Callable[[str], None]
) -> Iterator[tuple[LaunchConfig, Callable[..., Any] | str, list[str]]]:
    """Yield configuration, entry point and arguments; remove a temporary folder for logs that nobody asked to keep."""
    config, entrypoint, arguments = config_from_args(args)
    with contextlib.ExitStack() as stack:
        if config.logs_specs and not args.log_dir:
            folder = config.logs_specs.root_log_dir
            log(f"log files are in {folder}") if _keeps_logs(args) else stack.callback(rmtree, folder, True)
        yield config, entrypoint, arguments


def _keeps_logs(args: argparse.Namespace) -> bool:
    return bool(args.log_dir or args.redirects != "0" or args.tee != "0")


def _report(keeps_logs: bool, outcome: AttemptOutcome) -> None:
    """Write the first failure, after everything else."""
    if outcome.first_failure is None:
        return
    from torchdist_ref.launcher.child_failures import ProcessFailure, describe, failure_of

    first = replace(outcome.first_failure, keeps_record=keeps_logs)
    failure = failure_of(first, ProcessFailure)
    _log(f"the job failed; first failure:\n{describe(first.rank, failure)}")


def _log(line: str) -> None:
    try:
        sys.stderr.write(f"torchdist_ref.launch: {line}\n")
        sys.stderr.flush()
    except OSError:
        # Its reader has ended, or its disk is full. The job goes on.
        redirect_to_null(sys.stderr.fileno())


if __name__ == "__main__":
    sys.exit(command_line())
