"""``python -m torchdist_ref.launch --nproc-per-node 4 script.py``: run a script as several ranks on this machine.

The launcher serves the ranks' store, sets the environment variables of each rank and forwards output line by line. It
ends with the first rank that fails and leaves no process behind. It never imports torch. This module is the command;
its parts are in `torchdist_ref.launcher`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torchdist_ref.authentication import new_secret
from torchdist_ref.errors import DistError
from torchdist_ref.failure_record import ERROR_FILE
from torchdist_ref.launcher.environment import STORE_ADDRESS, Job, job_store, worker_environment
from torchdist_ref.launcher.options import parse
from torchdist_ref.launcher.supervisor import Supervisor, run_with_restarts


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
    job = Job(max_restarts=options.max_restarts)

    def attempt(restarts: int) -> Supervisor:
        current = replace(job, restarts=restarts, secret=new_secret())
        with job_store(options.master_port) as port, tempfile.TemporaryDirectory(prefix="torchdist_ref") as folder:
            records = [Path(folder, f"error-{rank}.json") for rank in range(options.nproc)]
            environments = [
                worker_environment(os.environ, options.nproc, rank, STORE_ADDRESS, port, current)
                | {ERROR_FILE: str(record)}
                for rank, record in enumerate(records)
            ]
            commands = [options.command] * options.nproc
            supervisor = Supervisor(
                commands, environments, prefix=options.prefix, grace=options.grace, log=_log, records=records
            )
            supervisor.run()
            return supervisor

    try:
        return run_with_restarts(attempt, options.max_restarts, _log).code
    except DistError as error:
        _log(str(error))
        return 1


def _log(line: str) -> None:
    sys.stderr.write(f"torchdist_ref.launch: {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
