"""Command line of the benchmarks: the commands and their options, and the exit code of errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torchdist_ref.benchmark import calls, collectives, ddp, faults, fit, hooks, predict, simulation, start, store
from torchdist_ref.benchmark.harness import Harness, add_common_options, failures

MODULES = (calls, collectives, ddp, faults, fit, hooks, predict, simulation, start, store)
COMMANDS = {module.__name__.rpartition(".")[2]: module for module in MODULES}


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Descriptions as they are written, and the default of each option."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    try:
        settings = parse(sys.argv[1:] if argv is None else argv)
        Harness(COMMANDS[settings.benchmark], settings).measure()
        return 0
    except failures(argparse.ArgumentError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the settings for a command line; without a command, of `collectives`."""
    parser = argparse.ArgumentParser("python -m torchdist_ref.benchmark", description=__doc__, exit_on_error=False)
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, module in COMMANDS.items():
        text = (module.__doc__ or "").partition("\n")[0].partition(": ")[2]
        command = commands.add_parser(name, help=text, description=module.__doc__, exit_on_error=False)
        command.formatter_class = HelpFormatter
        add_options(name, command)
    named = bool(arguments) and arguments[0] in {*COMMANDS, "-h", "--help"}
    return parser.parse_args(arguments if named else ["collectives", *arguments])


def add_options(name: str, parser: argparse.ArgumentParser) -> None:
    """Add all options of a command to its parser."""
    COMMANDS[name].add_options(parser.add_argument)
    add_common_options(name, parser.add_argument)


if __name__ == "__main__":
    sys.exit(main())
