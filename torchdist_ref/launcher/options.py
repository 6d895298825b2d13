"""Command line of the launcher.

Options that torchrun has too are named as there, with dashes or underscores. Do not add an option here without a test
that fails without it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

_DESCRIPTION = "Run a Python script as N ranks on this machine."
_EPILOG = """\
The environment of each rank has RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR and
MASTER_PORT, which is all that init_process_group() needs. Rank 0 reads the launcher's standard input, the others read
nothing.

When a rank fails, the launcher reports its number and exit code and stops the others. Then it restarts all ranks, if
--max-restarts allows it, or exits with that rank's code (128 plus the number of the signal that killed it).
Ctrl-C and SIGTERM are forwarded to every rank; a second one kills them. Wrong options exit with 2.

example:
  python -m torchdist_ref.launch --nproc-per-node 4 hello.py --epochs 3
"""


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """Checked command line.

    Attributes:
        nproc: Number of ranks.
        target: Path of the script, or name of the module.
        args: Arguments of the script.
        module: Whether the target is a module.
        prefix: Whether each line of output begins with its rank.
        grace: Time between asking a rank to stop and killing it, in seconds.
        master_port: Port of the store; 0 selects a free one.
        max_restarts: Number of times that all ranks are restarted when one fails.
    """

    nproc: int
    target: str
    args: tuple[str, ...] = ()
    module: bool = False
    prefix: bool = False
    grace: float = 5.0
    master_port: int = 0
    max_restarts: int = 0

    @property
    def command(self) -> list[str]:
        """Command line of a rank, the same for all."""
        return [sys.executable, *(["-m"] if self.module else []), self.target, *self.args]


def parse(argv: Sequence[str]) -> LaunchOptions:
    """Parse the command line.

    Args:
        argv: Arguments after the launcher's own name.

    Returns:
        The options. Arguments after the script's name belong to the script.

    Raises:
        SystemExit: An argument is wrong. The code is 2, and a line on standard error names the argument.

    Example:
        >>> options = parse(["--nproc-per-node", "4", "--module", "this", "--verbose"])
        >>> options.nproc, options.target, options.args, options.max_restarts
        (4, 'this', ('--verbose',), 0)
    """
    parser = _parser()
    found = vars(parser.parse_args(argv))
    options = LaunchOptions(**found | {"args": tuple(found["args"])})
    error = _module_error(options.target) if options.module else _script_error(options.target)
    if error:
        parser.error(error)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchdist_ref.launch",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--nproc-per-node",
        "--nproc_per_node",
        dest="nproc",
        type=_count,
        default=1,
        metavar="N",
        help="number of ranks (default: 1)",
    )
    add("-m", "--module", action="store_true", help="run a module, as python -m does")
    add("--prefix", action="store_true", help="begin each line of output with the rank that wrote it")
    add(
        "--grace",
        type=_seconds,
        default=5.0,
        metavar="SECONDS",
        help="between asking ranks to stop and killing them (default: 5)",
    )
    add(
        "--master-port",
        "--master_port",
        type=_port,
        default=0,
        metavar="PORT",
        help="port of the store (default: a free one)",
    )
    add(
        "--max-restarts",
        "--max_restarts",
        type=_restarts,
        default=0,
        metavar="N",
        help="restarts of all ranks when one fails (default: 0)",
    )
    add("target", metavar="script", help="the script to run, or with -m the module")
    rest = add("args", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")
    rest.required = False  # otherwise argparse reports two missing arguments
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of ranks, at least 1, got {text!r}")
    return int(text)


def _restarts(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a number of restarts, 0 or more, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds, 0 or more, got {text!r}")
    return value


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a port number from 0 to 65535 (0: any free one), got {text!r}")
    return int(text)


def _script_error(path: str) -> str:
    if os.path.isdir(path) and not os.path.isfile(os.path.join(path, "__main__.py")):
        return f"the script {path!r} is a folder without a __main__.py"
    if not os.path.exists(path):
        return f"there is no script {path!r} in {os.getcwd()} (to run a module by its name, add -m)"
    return ""


def _module_error(name: str) -> str:
    # Only the first part: a search for the others would import it, and perhaps torch with it.
    top = name.partition(".")[0]
    try:
        found = importlib.util.find_spec(top) if top else None
    except (ImportError, ValueError):
        found = None
    return "" if found else f"there is no module {name!r} on the path (to run a file, leave out -m)"
