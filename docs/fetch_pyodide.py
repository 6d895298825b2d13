"""Fetch Pyodide, Python for the browser, from npm into docs/_build/pyodide; say so if that cannot be done.

Needs `npm`. The site is built without it, too: then only the workbench of algorithms does not run.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

VERSION = "314.0.7"
TARGET = Path(__file__).resolve().parent / "_build" / "pyodide"


def main() -> None:
    """Fetch it, unless it is there."""
    if (TARGET / "pyodide.mjs").exists():
        return
    npm = shutil.which("npm")
    if npm is None:
        print("Pyodide was not fetched: there is no npm. The workbench will not run.")
        return
    with tempfile.TemporaryDirectory() as scratch:
        command = [npm, "pack", f"pyodide@{VERSION}"]
        try:
            answer = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=300)
        except subprocess.TimeoutExpired:
            print("Pyodide was not fetched: npm has not ended after 300 s. The workbench will not run.")
            return
        archives = list(Path(scratch).glob("*.tgz"))
        if answer.returncode or not archives:
            print(f"Pyodide was not fetched: {answer.stderr.strip()[-300:]} The workbench will not run.")
            return
        with tarfile.open(archives[0]) as archive:
            archive.extractall(scratch, filter="data")
        TARGET.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(Path(scratch, "package"), TARGET)


if __name__ == "__main__":
    main()
