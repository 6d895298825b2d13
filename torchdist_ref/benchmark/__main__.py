"""Command line of the benchmarks: the command, and the exit code of errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torchdist_ref.benchmark import calls, checkouts, collectives, ddp, faults, hooks, start, store
from torchdist_ref.benchmark.harness import Harness, Option, checked, file
from torchdist_ref.errors import ArgumentError, DistError
from torchdist_ref.testing import RankError

COMMANDS = {
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
    if not arguments or (arguments[0] not in COMMANDS and arguments[0] not in ("-h", "--help")):
        arguments.insert(0, "collectives")
    typed = _parser().parse_args(arguments)
    try:
        settings = checked(options_of(typed.benchmark), typed)
        compares = getattr(settings, "against_checkout", None)
        harness = checkouts.CheckoutHarness if compares else Harness
        harness(COMMANDS[typed.benchmark][0], settings).measure()
        return 0
    except (ArgumentError, DistError, RankError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def options_of(name: str) -> dict[str, Option]:
    """Return all options of a command."""
    options: dict[str, Option] = dict(COMMANDS[name][0].OPTIONS)
    if name in checkouts.COMMANDS:
        options["against-checkout"] = checkouts.OPTION
    return options | {"json": Option(None, "write all samples, with the machine, versions and date", file, "FILE")}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m torchdist_ref.benchmark", description=__doc__)
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, (module, description) in COMMANDS.items():
        command = commands.add_parser(name, help=description, description=module.__doc__)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        for option_name, option in options_of(name).items():
            option.add_to(command, option_name)
    return parser


if __name__ == "__main__":
    sys.exit(main())
