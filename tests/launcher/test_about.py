"""What ``python -m torchdist_ref`` and ``--version`` print, without importing torch."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.metadata import version

import pytest

import torchdist_ref
from torchdist_ref import __main__ as package
from torchdist_ref import launch
from torchdist_ref.launcher import about


def test_versions(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    python = ".".join(map(str, sys.version_info[:3]))
    expected = f"torchdist_ref {torchdist_ref.__version__}, Python {python}, torch {version('torch')}\n"
    assert package.main(["--version"]) == 0 and capsys.readouterr().out == expected
    with pytest.raises(SystemExit) as end:
        launch.parse_args(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, expected)

    def missing(name: str) -> str:
        raise about.PackageNotFoundError(name)

    monkeypatch.setattr(about, "version", missing)
    assert about.versions().endswith(", torch is not installed")


def test_the_commands_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert package.main([]) == 0
    text = capsys.readouterr().out
    for name in package.COMMANDS:
        assert f"  python -m {name} " in text and importlib.util.find_spec(name.split()[0]) is not None


def test_an_unknown_argument(capsys: pytest.CaptureFixture[str]) -> None:
    assert package.main(["lunch"]) == 2
    assert capsys.readouterr().err.endswith("error: unknown argument 'lunch'; name one of the commands\n")


def test_torch_is_not_imported() -> None:
    program = (
        "import runpy, sys\nsys.argv = ['torchdist_ref', '--version']\n"
        "try: runpy.run_module('torchdist_ref', run_name='__main__')\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[1:] == ["0 False"], done.stderr
