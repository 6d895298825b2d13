"""Type checkers: what a user may write passes them, each of forty mistakes is an error, and the stub is up to date."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.typed.stub import STUB, text

PROGRAMS = Path(__file__).with_name("programs")
ROOT = STUB.parents[1]
FIRST_WRONG = "# Each line from here on is wrong."


def mypys_errors(program: str) -> set[int]:
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        f"--config-file={ROOT / 'pyproject.toml'}",
        "--no-color-output",
    ]
    report = subprocess.run([*command, PROGRAMS / program], cwd=ROOT, capture_output=True, text=True).stdout
    assert "Found" in report or "Success" in report, report
    return {int(line) for line in re.findall(rf"{program}:(\d+): error", report)}


def pyrights_errors(program: str) -> set[int]:
    checker = shutil.which("basedpyright", path=str(Path(sys.executable).parent))
    if checker is None:
        pytest.skip("the type checker is installed with the extra `lint` only")
    command = [checker, "--outputjson", "--level", "error", "--project", PROGRAMS / "pyrightconfig.json"]
    report = json.loads(
        subprocess.run([*command, "--pythonpath", sys.executable], capture_output=True, text=True).stdout
    )
    assert report["summary"]["filesAnalyzed"] == 2
    found = [diagnostic for diagnostic in report["generalDiagnostics"] if diagnostic["file"].endswith(program)]
    return {1 + diagnostic["range"]["start"]["line"] for diagnostic in found if diagnostic["severity"] == "error"}


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
    assert errors("right.py") == set()


@CHECKERS
def test_each_mistake_is_seen(errors) -> None:  # type: ignore[no-untyped-def]
    assert errors("wrong.py") == wrong_lines()
