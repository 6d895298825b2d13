"""``python -m torchdist_ref.launch --nproc-per-node 4 script.py``: run a script as several ranks on this machine.

The launcher holds the store through which the ranks meet, tells each rank in its environment who it is, passes on what
they print line by line, and ends with the first of them that fails, leaving nothing behind. It never imports torch.
This file is the command; its parts are in `torchdist_ref.launcher`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence

from torchdist_ref.errors import DistError
from torchdist_ref.launcher.environment import command, worker_environment
from torchdist_ref.launcher.options import parse
from torchdist_ref.launcher.supervise import Supervisor
from torchdist_ref.stores import TCPStore

_ADDRESS = "127.0.0.1"


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
    try:
        with _held_store(options.master_port) as port:
            environments = [
                worker_environment(os.environ, options, rank, _ADDRESS, port) for rank in range(options.nproc)
            ]
            return Supervisor(
                command(options), environments, prefix=options.prefix, grace=options.grace, say=_say
            ).run()
    except DistError as error:
        _say(str(error))
        return 1


@contextlib.contextmanager
def _held_store(port: int) -> Iterator[int]:
    """Serve the ranks' store from before the first starts until after the last ends, so that no port is raced for."""
    store = TCPStore(_ADDRESS, port, is_master=True, wait_for_workers=False)
    try:
        yield store.port
    finally:
        store.close()


def _say(line: str) -> None:
    print(f"torchdist_ref.launch: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
