"""Command line of the benchmarks: the command, and the exit code of errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torchdist_ref.benchmark import calls, checkouts, collectives, ddp, faults, hooks, report, start, store
from torchdist_ref.errors import ArgumentError, DistError
from torchdist_ref.testing import RankError

_COMMANDS = {
    "calls": (calls, "cost of a call and an import besides the backend"),
    "collectives": (collectives, "time of each operation, by size, on each backend (the default command)"),
    "ddp": (ddp, "a step of training under our DistributedDataParallel and torch's, by model and hook"),
    "faults": (faults, "from a death, a mismatch or a Ctrl-C to the error"),
    "hooks": (hooks, "bytes, errors and times of DDP's communication hooks, on fast and on slow links"),
    "start": (start, "from nothing to a group, and back"),
    "store": (store, "sets, gets and adds a second, and barriers, beside torch's store and a bare echo"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or (arguments[0] not in _COMMANDS and arguments[0] not in ("-h", "--help")):
        arguments.insert(0, "collectives")
    options = _parser().parse_args(arguments)
    try:
        report.check_rich()
        for option in ("json", "plot"):
            if path := getattr(options, option, None):
                report.check_target(f"--{option}", path)
        if getattr(options, "against_checkout", None):
            return checkouts.main(options)
        return int(_COMMANDS[options.benchmark][0].main(options))
    except (ArgumentError, DistError, RankError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m torchdist_ref.benchmark", description=__doc__)
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, (module, description) in _COMMANDS.items():
        command = commands.add_parser(name, help=description, description=module.__doc__)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        module.arguments(command)
        if name in checkouts.PLANS:
            checkouts.arguments(command)
        command.add_argument("--json", metavar="FILE", help="write all samples, with the machine, versions and date")
    return parser


if __name__ == "__main__":
    sys.exit(main())
