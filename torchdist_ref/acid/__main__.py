"""Command ``python -m torchdist_ref.acid``: run all checks on a backend, and say what it passes."""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from torchdist_ref.acid import modules, report
from torchdist_ref.acid.checks import CHECKS, DOCUMENTATION, INIT, Check
from torchdist_ref.acid.launched import LaunchedRanks
from torchdist_ref.acid.runs import NOT_RUN, PASSED, CheckOutcome, ProgramEnds, Setting, run_check, try_import
from torchdist_ref.launcher.about import versions

APIS = {"torch": "torch.distributed", "torchdist_ref": "torchdist_ref"}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="python -m torchdist_ref.acid",
        description="Run checks of a backend of torch.distributed, each on ranks of its own.",
        epilog="The exit status is 0 if each check that was chosen ran and none failed, crashed or hung; else 1.",
    )
    parser.add_argument("--backend", required=True, help="name, such as gloo, or one that --import registers")
    parser.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="module that registers the backend; may be given several times",
    )
    parser.add_argument("--world", type=int, default=3, help="number of ranks (default: 3)")
    parser.add_argument("--api", choices=APIS, default="torch", help="whose functions to call (default: torch)")
    parser.add_argument("--device", default="cpu", help="type of the tensors' device (default: cpu)")
    parser.add_argument("--only", default="", metavar="TEXT", help="run the checks whose name has this text")
    parser.add_argument("--large", action="store_true", help="run also the checks of tensors of more than 2 GiB")
    parser.add_argument(
        "--launcher",
        default="",
        metavar="COMMAND",
        help="command that starts Python as all ranks, such as 'mpiexec -n {world} python' (default: ranks are forked)",
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="time after which a check hangs (default: 30)")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="write report.json, report.html and badge.svg")
    parser.add_argument("--list", action="store_true", help="list the checks with what they demand, and run none")
    options = parser.parse_args(arguments)
    if options.world < 1:
        parser.error(f"--world must be at least 1, got {options.world}")
    return options


def row(check: Check, outcome: CheckOutcome) -> dict[str, object]:
    """Return what the report has of a check."""
    return {
        "name": check.name,
        "area": check.area,
        "demand": check.demand,
        "source": check.source,
        "outcome": outcome.kind,
        "detail": outcome.detail,
        "seconds": outcome.seconds,
        "code": check.code,
    }


def import_all(names: Sequence[str]) -> list[dict[str, object]]:
    """Import modules, each first in a process of its own; return the row of the first that cannot be imported."""
    for name in names:
        outcome = try_import(name)
        if outcome.kind != PASSED:
            text = f"import {name}"
            check = Check(text, "import", lambda ranks: None, "The module can be imported.", DOCUMENTATION)
            failed = {**row(check, outcome), "code": f"{text}\n"}
            sys.stdout.write(report.line(failed) + "\n")
            return [failed]
        import_module(name)
    return []


def run_all(checks: Sequence[Check], setting: Setting) -> list[dict[str, object]]:
    """Run checks one after the other, print a line for each, and return the rows; none after a failed first one."""
    rows: list[dict[str, object]] = []
    usable = True
    start = LaunchedRanks if setting.launcher else None
    for check in checks:
        outcome = run_check(check, setting, start) if usable else CheckOutcome(NOT_RUN, "no group could be made")
        usable = usable and (check.name != INIT or outcome.kind == PASSED)
        rows.append(row(check, outcome))
        sys.stdout.write(report.line(rows[-1]) + "\n")
        sys.stdout.flush()
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status."""
    options = parse(arguments)
    checks = [
        check
        for check in CHECKS
        if (options.only in check.name or check.name == INIT) and (options.large or options.list or not check.large)
    ]
    if options.list:
        sys.stdout.writelines(f"{check.area:<9} {check.name}: {check.demand}\n" for check in checks)
        return 0
    setting = Setting(
        options.backend,
        APIS[options.api],
        options.world,
        options.device,
        options.seconds,
        options.modules,
        options.launcher,
    )
    rows = import_all((*options.modules, setting.api))
    if not rows:
        if any(check.area == modules.__name__.rpartition(".")[2] for check in checks):
            for module in modules.SLOW_IMPORTS:
                import_module(module)
        rows = run_all(checks, setting)
    sys.stdout.write(f"{options.backend}, {options.world} ranks: {report.counted(rows)}\n")
    if options.report:
        about = {
            "backend": options.backend,
            "functions of": setting.api,
            "imported": ", ".join(options.modules) or "nothing",
            "ranks": str(options.world),
            "device": options.device,
            **({"launcher": options.launcher} if options.launcher else {}),
            "versions": versions(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        }
        report.write(options.report, about, rows)
    return int(any(each["outcome"] in (*report.WRONG, NOT_RUN) for each in rows))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ProgramEnds as end:
        # A rank of a check that has to end as a program does.
        sys.exit(end.code)
