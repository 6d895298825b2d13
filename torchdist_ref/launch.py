"""``python -m torchdist_ref.launch --nproc-per-node 4 script.py``: run a script as several ranks on this machine.

The launcher serves the ranks' store, sets the environment variables of each rank and forwards output line by line. It
ends with the first rank that fails and leaves no process behind. It never imports torch. This module is the command;
its parts are in `torchdist_ref.launcher`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torchdist_ref.errors import ArgumentError, DistError
from torchdist_ref.launcher.api import LaunchConfig, run_job
from torchdist_ref.launcher.local_workers import Outcome
from torchdist_ref.launcher.options import parse


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments. Default None: those of this process.

    Returns:
        The exit code: 0, or that of the first rank that failed.

    Example:
        >>> import subprocess, sys
        >>> command = [sys.executable, "-m", "torchdist_ref.launch", "--nproc-per-node", "2", "-m", "this"]
        >>> subprocess.run(command, capture_output=True, text=True).stdout.count("Simple is better than complex.")
        2
    """
    options = parse(sys.argv[1:] if argv is None else argv)
    config = LaunchConfig(
        1,
        1,
        options.nproc,
        rdzv_endpoint=f"localhost:{options.master_port}",
        role="default",
        max_restarts=options.max_restarts,
        log_line_prefix_template="[rank ${rank}] " if options.prefix else None,
        shutdown_timeout=options.grace,
    )
    try:
        return run_job(
            config, options.command[0], options.command[1:], log=_log, on_end=_report, own_descendants=True
        ).code
    except (DistError, ArgumentError) as error:
        _log(str(error))
        return 2


def _report(outcome: Outcome) -> None:
    """Write the first failure, after everything else."""
    if outcome.first_failure is None:
        return
    from torchdist_ref.launcher.failures import ProcessFailure, describe

    first = outcome.first_failure
    failure = ProcessFailure(first.local_rank, first.pid, first.status, first.error_file)
    _log(f"the job failed; first failure:\n{describe(first.rank, failure)}")


def _log(line: str) -> None:
    sys.stderr.write(f"torchdist_ref.launch: {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
