"""``python3 -m tests.gpu --report FILE`` runs all that needs a GPU; ``--land FILE`` makes the site's data of a report.

The report is written after each part, so that an interrupted run leaves what it has. Without a CUDA device every part
is reported as skipped, and the exit code is 0. ``--device sim`` runs all on simulated devices, on any machine with a
C++ compiler. ``--device cpu`` runs the tutorials and the collectives on CPU tensors, which tests the runner and shows
nothing about a GPU. The exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path

from tests.gpu import land, parts, report

# Under the ten minutes for which such a machine is often lent.
SECONDS = 540.0


def main(arguments: list[str]) -> int:
    """Run, or land."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.gpu", description=__doc__)
    parser.add_argument("--report", type=Path, metavar="FILE", help="run, and write the report here")
    parser.add_argument("--land", type=Path, metavar="FILE", help="make the site's data of this report")
    parser.add_argument(
        "--device", choices=("cuda", "sim", "cpu"), default="cuda", help="device of tensors (%(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time for everything (%(default)s)")
    parser.add_argument("--parts", default=",".join(parts.PARTS), help="parts to run (%(default)s)")
    parser.add_argument("--tests", default="", metavar="A,B", help="files of tests to run (all with tests on devices)")
    parser.add_argument("--tutorials", default="", metavar="A,B", help="names of tutorials to run (all)")
    parser.add_argument("--ranks", type=int, default=16, help="most ranks of a tutorial on ref (as it asks)")
    chosen = parser.parse_args(arguments)
    if (chosen.report is None) == (chosen.land is None):
        parser.error("give --report FILE or --land FILE")
    if unknown := set(chosen.parts.split(",")) - set(parts.PARTS):
        parser.error(f"--parts: {', '.join(unknown)} is not among {', '.join(parts.PARTS)}")
    if chosen.land:
        return land.main(chosen.land)
    return run(chosen)


def run(chosen: argparse.Namespace) -> int:
    """Run the parts, and write the report after each."""
    started = time.monotonic()
    path = chosen.report.resolve()
    content = report.begun(chosen.device)
    gpus = len(content["machine"]["devices"])
    setting = parts.Setting(chosen.device if gpus or chosen.device != "cuda" else "", gpus, ranks=chosen.ranks)
    if chosen.device == "sim":
        # Times on simulated devices show nothing, so a few calls are enough.
        setting.operations, setting.sizes = "all_reduce,barrier", "1K"
    if chosen.tests:
        setting.tests = chosen.tests.split(",")
    if chosen.tutorials:
        setting.tutorials = [parts.TUTORIALS / f"{name}.ipynb" for name in chosen.tutorials.split(",")]
    names = chosen.parts.split(",")
    report.write(content, path)
    for number, name in enumerate(names):
        function, share = parts.PARTS[name]
        remaining = chosen.seconds - (time.monotonic() - started)
        shares = sum(parts.PARTS[each][1] for each in names[number:])
        print(f"[{number + 1}/{len(names)}] {name}: at most {remaining * share / shares:.0f} s", flush=True)
        began = time.monotonic()
        try:
            part = function(setting, began + remaining * share / shares)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            part = report.part(name, [parts.item(name, "failed", 0.0, reason)], time.monotonic() - began, reason)
        content["parts"].append(part)
        content["seconds"] = round(time.monotonic() - started, 3)
        report.write(content, path)
        counts = Counter(item["outcome"] for item in part["items"])
        shown = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        print(
            f"[{number + 1}/{len(names)}] {part['name']}: {part['outcome']} in {part['seconds']:.0f} s ({shown})",
            flush=True,
        )
    content["complete"] = True
    report.write(content, path)
    print(f"wrote {os.path.relpath(path)}")
    return int(any(part["outcome"] == "failed" for part in content["parts"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
