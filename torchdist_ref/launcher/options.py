"""What the launcher can be told on its command line.

Names are torchrun's where it has the same option, and underscores are accepted for dashes as it does. An option that
is not here does not exist yet; it should come with a test that fails without it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass

_DESCRIPTION = "Run a Python script as N ranks on this machine."
_EPILOG = """\
Each rank finds RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR and MASTER_PORT in its
environment, which is all that init_process_group() needs. Rank 0 reads the launcher's standard input, the others
read nothing.

When a rank fails, the launcher says which and how, and stops the others; then it starts all of them anew, if
--max-restarts allows it, or exits with that rank's code (128 plus the number of the signal, where one killed it).
Ctrl-C and SIGTERM go to every rank; a second one kills them. Wrong options exit with 2.

example:
  python -m torchdist_ref.launch --nproc-per-node 4 hello.py --epochs 3
"""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line, checked.

    Attributes:
        nproc: How many ranks.
        target: The script's path or the module's name.
        args: What comes after it, for the script.
        module: Whether the target is a module.
        prefix: Whether each line of output begins with its rank.
        grace: Seconds between asking a rank to stop and killing it.
        master_port: The port of the store; 0 takes a free one.
        max_restarts: How often all ranks are started anew when one fails.
    """

    nproc: int
    target: str
    args: tuple[str, ...] = ()
    module: bool = False
    prefix: bool = False
    grace: float = 5.0
    master_port: int = 0
    max_restarts: int = 0


def parse(argv: Sequence[str]) -> Options:
    """Read the command line.

    Args:
        argv: The arguments after the launcher's own name.

    Returns:
        The options; what follows the script's name is the script's own.

    Raises:
        SystemExit: With code 2, after a line that says what is wrong.

    Example:
        >>> options = parse(["--nproc-per-node", "4", "--module", "this", "--verbose"])
        >>> options.nproc, options.target, options.args, options.max_restarts
        (4, 'this', ('--verbose',), 0)
    """
    parser = _parser()
    found = parser.parse_args(argv)
    args = tuple(found.args)
    options = Options(
        found.nproc_per_node,
        found.target,
        args,
        found.module,
        found.prefix,
        found.grace,
        found.master_port,
        found.max_restarts,
    )
    trouble = _module_trouble(options.target) if options.module else _script_trouble(options.target)
    if trouble:
        parser.error(trouble)
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
    add("--nproc-per-node", "--nproc_per_node", type=_count, default=1, metavar="N", help="how many ranks (default: 1)")
    add("-m", "--module", action="store_true", help="the script is a module's name, as for python -m")
    add("--prefix", action="store_true", help="begin each line of output with the rank that wrote it")
    add("--grace", type=_seconds, default=5.0, metavar="SECONDS", help="from asking to stop to killing (default: 5)")
    add("--master-port", "--master_port", type=_port, default=0, metavar="PORT", help="the store's; default: free")
    add(
        "--max-restarts",
        "--max_restarts",
        type=_restarts,
        default=0,
        metavar="N",
        help="when a rank fails (default: 0)",
    )
    add("target", metavar="script", help="the script to run, or with -m the module")
    rest = add("args", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")
    rest.required = False  # else a missing script is reported as two missing things
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


def _script_trouble(path: str) -> str:
    if os.path.isdir(path) and not os.path.isfile(os.path.join(path, "__main__.py")):
        return f"the script {path!r} is a folder without a __main__.py"
    if not os.path.exists(path):
        return f"there is no script {path!r} in {os.getcwd()} (to run a module by its name, add -m)"
    return ""


def _module_trouble(name: str) -> str:
    # Only the first part: looking for the others would import it, and torch with it perhaps.
    top = name.partition(".")[0]
    try:
        found = importlib.util.find_spec(top) if top else None
    except (ImportError, ValueError):
        found = None
    return "" if found else f"there is no module {name!r} on the path (to run a file, leave out -m)"
