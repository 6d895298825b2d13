"""Type checkers: what a user may write passes them, each of forty mistakes is an error, and the stub is up to date."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.typed.stub import STUB, text

PROGRAMS = Path(__file__).with_name("programs")
ROOT = STUB.parents[1]
FIRST_WRONG = "# Each line from here on is wrong."


NAMES = ("right.py", "wrong.py")


# A checker reads the library and torch first, which takes much longer than the programs: both are given to one run.
@cache
def mypys_errors() -> dict[str, set[int]]:
    """Return the lines of mypy's errors in each program."""
    options = ["--strict", f"--config-file={ROOT / 'pyproject.toml'}", "--no-color-output"]
    command = [sys.executable, "-m", "mypy", *options, *(str(PROGRAMS / name) for name in NAMES)]
    report = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    assert re.search(r"checked 2 source files|no issues found in 2 source files", report), report
    return {name: {int(line) for line in re.findall(rf"{name}:(\d+): error", report)} for name in NAMES}


@cache
def pyrights_errors() -> dict[str, set[int]]:
    """Return the lines of pyright's errors in each program."""
    checker = shutil.which("basedpyright", path=str(Path(sys.executable).parent))
    if checker is None:
        pytest.skip("the type checker is installed with the extra `lint` only")
    command = [checker, "--outputjson", "--level", "error", "--project", PROGRAMS / "pyrightconfig.json"]
    report = json.loads(
        subprocess.run([*command, "--pythonpath", sys.executable], capture_output=True, text=True).stdout
    )
    assert report["summary"]["filesAnalyzed"] == 2
    found: dict[str, set[int]] = {name: set() for name in NAMES}
    for diagnostic in report["generalDiagnostics"]:
        if diagnostic["severity"] == "error":
            found[Path(diagnostic["file"]).name].add(1 + diagnostic["range"]["start"]["line"])
    return found


CHECKERS = pytest.mark.parametrize("errors", [mypys_errors, pyrights_errors])


def wrong_lines() -> set[int]:
    lines = (PROGRAMS / "wrong.py").read_text().splitlines()
    first = lines.index(FIRST_WRONG) + 2
    assert len(lines) - first >= 40
    return set(range(first, len(lines) + 1))


def test_the_stub_is_what_the_signatures_say() -> None:
    """`python -m tests.typed` writes it anew; it is formatted there, so trees are compared."""
    written = ast.parse(STUB.read_text())
    imports = (ast.Import, ast.ImportFrom)

    def parts(tree: ast.Module) -> tuple[set[str], list[str]]:
        names = {
            f"{getattr(node, 'module', None)}.{name.name} as {name.asname}"
            for node in tree.body
            if isinstance(node, imports)
            for name in node.names
        }
        return names, [ast.dump(node) for node in tree.body if not isinstance(node, imports)]

    assert parts(written) == parts(ast.parse(text()))


@CHECKERS
def test_what_a_user_may_write_passes(errors) -> None:  # type: ignore[no-untyped-def]
    assert errors()["right.py"] == set()


@CHECKERS
def test_each_mistake_is_seen(errors) -> None:  # type: ignore[no-untyped-def]
    assert errors()["wrong.py"] == wrong_lines()
