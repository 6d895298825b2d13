"""Fetch what pages with Python need from npm into docs/_build; say so if that cannot be done.

Pyodide is Python for the browser, prism-code-editor the text field with line numbers and colors. Needs `npm`. The site
is built without them, too: then Python does not run in pages, and code is edited in a plain text field.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

VERSIONS = {"pyodide": "314.0.7", "prism-code-editor": "5.4.0"}
BUILD = Path(__file__).resolve().parent / "_build"


def main() -> None:
    """Fetch each package, unless it is there."""
    for name, version in VERSIONS.items():
        if not (BUILD / name / "package.json").exists():
            fetch(name, version)


def fetch(name: str, version: str) -> None:
    """Fetch one package."""
    npm = shutil.which("npm")
    if npm is None:
        print(f"{name} was not fetched: there is no npm. Pages with Python will lack it.")
        return
    with tempfile.TemporaryDirectory() as scratch:
        command = [npm, "pack", f"{name}@{version}"]
        try:
            answer = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=300)
        except subprocess.TimeoutExpired:
            print(f"{name} was not fetched: npm has not ended after 300 s. Pages with Python will lack it.")
            return
        archives = list(Path(scratch).glob("*.tgz"))
        if answer.returncode or not archives:
            print(f"{name} was not fetched: {answer.stderr.strip()[-300:]} Pages with Python will lack it.")
            return
        with tarfile.open(archives[0]) as archive:
            archive.extractall(scratch, filter="data")
        BUILD.mkdir(parents=True, exist_ok=True)
        shutil.move(Path(scratch, "package"), BUILD / name)


if __name__ == "__main__":
    main()
