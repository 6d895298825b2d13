"""Registration of `ref` with torch: by the entry point, by the import, or on first use; it never breaks torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import torch.distributed as c10d

import torchdist_ref
from tests.torch_versions import needs_torch

PACKAGE = Path(torchdist_ref.__file__).parent
ASK = """
import sys
import torch
ours = sorted(name for name in sys.modules if name.startswith("torchdist_ref"))
print(hasattr(torch.distributed.Backend, "REF"), ours)
"""


# The last step of `import torch`, for an interpreter that has torch loaded without its backends.
AUTOLOAD = "import torch; torch._import_device_backends()\n"


def answer(
    program: str, path: Path, python: str = sys.executable, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in an interpreter, a fresh one by default, that finds packages in `path` first."""
    env = {**os.environ, "PYTHONPATH": str(path), **environment}
    return subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=60, env=env, cwd=path)


def installed(path: Path) -> Path:
    """A folder as an installation leaves it: the package, and the metadata with the entry point of pyproject.toml."""
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    metadata = path / "torchdist_ref-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torchdist_ref\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("\n".join([*lines, ""]))
    shutil.copytree(PACKAGE, path / "torchdist_ref")
    return path


# Over a second, as each of those without `python_with_torch`: it starts an interpreter that imports torch.
def test_importing_torch_registers_ref_and_loads_nothing_else(tmp_path: Path) -> None:
    result = answer(ASK, installed(tmp_path))
    assert (result.stdout, result.stderr) == (
        "True ['torchdist_ref', 'torchdist_ref.backends', 'torchdist_ref.processes', "
        "'torchdist_ref.processes.standard_streams', 'torchdist_ref.torch_paths']\n",
        "",
    )


def test_the_import_registers_ref_if_torch_is_imported_before(python_with_torch: str) -> None:
    program = (
        "import sys, torch; print('torchdist_ref' in sys.modules);"
        "import torchdist_ref; print(torch.distributed.Backend.REF)"
    )
    assert answer(program, PACKAGE.parent, python_with_torch).stdout == "False\nref\n"


def test_the_first_use_registers_ref_if_torch_is_imported_later() -> None:
    """One interpreter imports both, and forks a process for each kind of use."""
    program = """
import os, torchdist_ref, torch
for use in ("torchdist_ref.all_reduce", "import torchdist_ref.groups"):
    if os.fork() == 0:
        print(use, hasattr(torch.distributed.Backend, "REF"))
        exec(use)
        print(torch.distributed.Backend.REF, flush=True)
        os._exit(0)
    os.wait()
"""
    found = answer(program, PACKAGE.parent, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert found.stdout == "torchdist_ref.all_reduce False\nref\nimport torchdist_ref.groups False\nref\n"


GROUP = """
try:
    torch.distributed.init_process_group('ref', store=torch.distributed.HashStore(), rank=0, world_size=1)
    tensor = torch.ones(2)
    torch.distributed.all_reduce(tensor)
    print(tensor.tolist(), torch.distributed.get_backend())
    torch.distributed.destroy_process_group()
except ImportError as error:
    print(error)
"""


def test_a_group_on_ref_without_the_import(python_with_torch: str, tmp_path: Path) -> None:
    assert answer(AUTOLOAD + GROUP, installed(tmp_path), python_with_torch).stdout == "[1.0, 1.0] ref\n"


@needs_torch("2.14", "entry points of backends")
def test_a_group_on_ref_without_the_import_where_torch_loads_no_packages(tmp_path: Path) -> None:
    path = installed(tmp_path)
    program = "import torch; print(hasattr(torch.distributed.Backend, 'REF'))\n" + GROUP
    found = answer(program, path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert found.stdout == "False\n[1.0, 1.0] ref\n", found.stderr


def test_the_entry_point_of_the_backend_registers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.14 and later load it when a program names the backend, call it, and look for the registration."""
    points = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]["entry-points"]
    (point,) = [
        EntryPoint(name, value, "torch.distributed.backends")
        for name, value in points["torch.distributed.backends"].items()
    ]
    monkeypatch.delattr(c10d.Backend, "REF")
    monkeypatch.delitem(c10d.Backend._plugins, "REF")
    point.load()()
    assert point.name == "ref" and "REF" in c10d.Backend._plugins


@pytest.mark.parametrize("broken", ["calls.py", "backends/ref/backend.py", "backends/ref_in_torch/process_group.py"])
def test_a_broken_installation_breaks_the_group_and_not_torch(
    broken: str, python_with_torch: str, tmp_path: Path
) -> None:
    (installed(tmp_path) / "torchdist_ref" / broken).write_text("this is no Python")
    result = answer(AUTOLOAD + GROUP, tmp_path, python_with_torch)
    assert result.returncode == 0, result.stderr
    assert "torchdist_ref can't be loaded" in result.stdout and "Install it anew" in result.stdout


@pytest.mark.parametrize("text", ["this is no Python", "raise OSError('unreadable')", None])
def test_torch_starts_if_the_backends_cannot_be_loaded(
    text: str | None, python_with_torch: str, tmp_path: Path
) -> None:
    """Nothing else is loaded; what can't be caught is a package whose ``__init__`` Python can't read."""
    broken = installed(tmp_path) / "torchdist_ref" / "backends" / "__init__.py"
    shutil.rmtree(broken.parent) if text is None else broken.write_text(text)
    result = answer(AUTOLOAD + ASK, tmp_path, python_with_torch)
    assert (result.returncode, result.stdout) == (
        0,
        "False ['torchdist_ref', 'torchdist_ref.processes', 'torchdist_ref.processes.standard_streams', "
        "'torchdist_ref.torch_paths']\n",
    )
    assert "backend 'ref' cannot be registered with torch" in result.stderr


def test_a_refused_registration_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise TypeError("another signature")

    monkeypatch.delattr(c10d.Backend, "REF")
    monkeypatch.setattr(c10d.Backend, "register_backend", refuse)
    torchdist_ref._register_with_torch()
    assert "another signature" in caplog.text


def test_torchs_default_backends_are_unchanged() -> None:
    torchdist_ref.all_reduce  # noqa: B018
    assert c10d.Backend.default_device_backend_map["cpu"] == "gloo"
    # A CUDA build names its device on machines without one, too.
    assert c10d.Backend.backend_capability["ref"] == ["cpu"] + ["cuda"] * (torch.version.cuda is not None)


@pytest.mark.parametrize(("platform", "warned"), [("linux", False), ("darwin", True)])
def test_other_systems_than_linux_get_one_sentence_at_import(platform: str, warned: bool) -> None:
    program = f"import sys; sys.platform = {platform!r}; import torchdist_ref"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stderr.count("tested on Linux only") == warned
