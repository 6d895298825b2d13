"""Command `python -m torchdist_ref.debug DIRECTORY`: the verdict on the dumps of a job, a table, and a trace.

In place of a directory, a file with the log of a job gives the verdict on the log. With ``--request PID ...`` the
command asks running ranks for dumps instead. Do not add conclusions here: they belong to
`verdict`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from torchdist_ref.debug.dumps import read_directory
from torchdist_ref.debug.flight_recorder import request, write_privately
from torchdist_ref.debug.job_log import errors_of, find_verdict_in_log, read_log
from torchdist_ref.debug.report import chrome_trace, table
from torchdist_ref.debug.verdict import find_verdict
from torchdist_ref.processes.control import redirect_to_null


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status: 1 if there is no dump to read, else 0."""
    parser = argparse.ArgumentParser(
        "python -m torchdist_ref.debug", description="Explain the flight recorder dumps of a job, or ask for them."
    )
    parser.add_argument(
        "directory",
        nargs="?",
        help="directory with the dumps of all ranks, ours or torch's; or a file with the job's log",
    )
    parser.add_argument("--trace", metavar="FILE", help="file of the Chrome trace (default: DIRECTORY/trace.json)")
    parser.add_argument("--no-trace", action="store_true", help="write no trace")
    parser.add_argument("--request", metavar="PID", type=int, nargs="+", help="ask running ranks to write their dumps")
    options = parser.parse_args(arguments)
    if options.request:
        sys.stdout.writelines(f"{line}\n" for line in request(options.request))
        return 0
    if options.directory is None:
        parser.error("give a directory, or --request PID")
    if Path(options.directory).is_file():
        return explain_log(Path(options.directory))
    try:
        dumps = read_directory(options.directory)
    except OSError as error:
        parser.error(str(error))
    target = Path(options.trace) if options.trace else Path(options.directory) / "trace.json"
    skipped = {name: reason for name, reason in dumps.skipped.items() if name != target.name}
    if dumps.ranks and not options.no_trace:
        write_privately(target, json.dumps(chrome_trace(dumps)))
    sys.stdout.write(f"{find_verdict(dumps).sentence}\n\n{table(dumps)}\n")
    for name, reason in skipped.items():
        sys.stdout.write(f"\nNot read: {name}: {reason}\n")
    if not dumps.ranks:
        return 1
    if not options.no_trace:
        sys.stdout.write(f"\nTrace for https://ui.perfetto.dev: {target}\n")
    return 0


def explain_log(path: Path) -> int:
    """Write the verdict on a log and its errors; return 1 if the log has nothing to explain, else 0."""
    log = read_log(path.read_text("utf-8", errors="replace"))
    verdict = find_verdict_in_log(log)
    sys.stdout.write(f"{verdict.sentence}\n")
    for line, rank, text, where in errors_of(log):
        sys.stdout.write(f"\nline {line}{f', rank {rank}' if rank else ''}: {text}{f' ({where})' if where else ''}")
    sys.stdout.write("\n" if log.errors else "")
    return int(verdict.kind == "nothing")


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # A reader such as `head` has read enough; what Python writes at the end goes nowhere.
        redirect_to_null(sys.stdout.fileno())
        code = 0
    sys.exit(code)
