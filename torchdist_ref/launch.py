"""``python -m torchdist_ref.launch --nproc-per-node 4 script.py``: run a script as several ranks on this machine.

The launcher holds the store through which the ranks meet, tells each rank in its environment who it is, passes on what
they print line by line, and ends with the first of them that fails, leaving nothing behind. It never imports torch.
This file is the command; its parts are in `torchdist_ref.launcher`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from torchdist_ref.errors import DistError
from torchdist_ref.launcher.environment import Job, command, worker_environment
from torchdist_ref.launcher.held_store import ADDRESS, held_store
from torchdist_ref.launcher.options import parse
from torchdist_ref.launcher.restarts import supervise
from torchdist_ref.launcher.supervise import Supervisor


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments; None takes those of this process.

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
        with held_store(options.master_port) as port:
            environments = [
                worker_environment(os.environ, options.nproc, rank, ADDRESS, port, replace(job, restarts=restarts))
                for rank in range(options.nproc)
            ]
            commands = [command(options)] * options.nproc
            supervisor = Supervisor(commands, environments, prefix=options.prefix, grace=options.grace, say=_say)
            supervisor.run()
            return supervisor

    try:
        return supervise(attempt, options.max_restarts, _say).code
    except DistError as error:
        _say(str(error))
        return 1


def _say(line: str) -> None:
    print(f"torchdist_ref.launch: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
