"""``python -m torchdist_ref.launch --nproc-per-node 4 script.py``: run a script as several ranks, as torchrun does.

The launcher serves the ranks' store, sets the environment variables of each rank and forwards output line by line. It
ends with the first rank that fails and leaves no process behind. It never imports torch. This module is the command,
also under the names ``python -m torchdist_ref.run`` and ``torchdist-run``; its parts are in `torchdist_ref.launcher`.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from shutil import rmtree

from torchdist_ref.errors import ArgumentError, DistError
from torchdist_ref.launcher.api import run_job
from torchdist_ref.launcher.local_workers import Outcome
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
from torchdist_ref.processes import redirect_to_null

__all__ = [
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

_BAD_INPUT_CODE = 2


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line.

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
    return run(parse_args(args))


def run(args: argparse.Namespace) -> int:
    """Run a parsed command line in a process whose descendants are all the job's.

    Args:
        args: Result of `parse_args`.

    Returns:
        The exit code, as of `main`.
    """
    keeps_logs = args.log_dir or args.redirects != "0" or args.tee != "0"
    with contextlib.ExitStack() as stack:
        try:
            config, entrypoint, arguments = config_from_args(args)
            if config.logs_specs and not args.log_dir:
                folder = config.logs_specs.root_log_dir
                _log(f"log files are in {folder}") if keeps_logs else stack.callback(rmtree, folder, True)
            return run_job(
                config, entrypoint, arguments, log=_log, on_end=partial(_report, keeps_logs), own_descendants=True
            ).code
        except (DistError, ArgumentError) as error:
            _log(str(error))
            return _BAD_INPUT_CODE


def launch(args: argparse.Namespace) -> int:
    """Run a parsed command line, see `run`."""
    return run(args)


def _report(keeps_logs: bool, outcome: Outcome) -> None:
    """Write the first failure, after everything else."""
    if outcome.first_failure is None:
        return
    from torchdist_ref.launcher.failures import ProcessFailure, describe, failure_of

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
    sys.exit(main())
