"""Releases: what is refused, what the notes hold, and the whole of it in a clone."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

from tests.release.scripts import ROOT, git, load

release = load("release")
CHANGELOG = "# Changelog\n\n## 0.2.0 (2027-01-01)\n\n- b\n\n### Fixed\n\n- c\n\n## 0.1.0 (2026-12-01)\n\n- a\n"


def test_the_notes_of_a_release_are_its_section() -> None:
    assert release.notes(CHANGELOG, "0.2.0") == "- b\n\n### Fixed\n\n- c\n"
    assert release.notes(CHANGELOG, "0.1.0") == "- a\n"
    with pytest.raises(SystemExit, match=r"no section of 0\.3\.0"):
        release.notes(CHANGELOG, "0.3.0")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a small repository that the script takes for this one."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch", "main")
    (folder / "torchdist_ref").mkdir()
    (folder / "torchdist_ref" / "__init__.py").write_text('__version__ = "0.1.0"\n')
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "Begin")
    monkeypatch.setattr(release, "ROOT", folder)
    monkeypatch.setattr(release.run, "__kwdefaults__", {**release.run.__kwdefaults__, "folder": folder})
    return folder


def test_what_cannot_be_released_is_refused_with_the_reason(repository: Path) -> None:
    assert release.refusal("0.1.0") == ""
    assert "'v0.1' is no version" in release.refusal("v0.1")
    git(repository, "tag", "v0.1.0")
    assert "the tag v0.1.0 exists" in release.refusal("0.1.0")
    git(repository, "checkout", "--quiet", "-b", "other")
    assert "the branch is other" in release.refusal("0.2.0")
    (repository / "new").touch()
    assert "the working tree has changes" in release.refusal("0.2.0") and "new" in release.refusal("0.2.0")
    with pytest.raises(SystemExit, match=r"the source has version 0\.1\.0, not 0\.2\.0"):
        release.make_files(repository, "0.2.0")


def test_a_command_that_fails_ends_with_its_message(repository: Path) -> None:
    with pytest.raises(SystemExit, match=r"git no-such-command failed with exit code 1:\n.*not a git command"):
        release.run("git", "no-such-command")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_one_command_makes_a_release_and_leaves_only_a_commit_a_tag_and_the_files(tmp_path: Path) -> None:
    """Slow, a minute: the tools are installed, and sdist and wheel are built twice."""
    clone, tools = tmp_path / "clone", tmp_path / "tools"
    git(tmp_path, "clone", "--quiet", str(ROOT), str(clone))
    git(clone, "checkout", "--quiet", "-B", "main")
    for key, value in (("user.name", "Somebody"), ("user.email", "somebody@example.org")):
        git(clone, "config", key, value)
    pins = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]["release"]
    subprocess.run([sys.executable, "-m", "venv", str(tools)], check=True)
    python = str(tools / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", *pins], check=True, capture_output=True)
    before = git(clone, "rev-parse", "HEAD")
    done = subprocess.run([python, ".ci/release.py", "9.8.7", "--checked"], cwd=clone, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert git(clone, "rev-parse", "v9.8.7^{commit}") == git(clone, "rev-parse", "main")
    assert git(clone, "rev-parse", "main~1") == before and not git(clone, "status", "--porcelain")
    names = {path.name for path in (clone / "dist").iterdir()}
    wheel, sdist, bill = (f"torchdist_ref-9.8.7{end}" for end in ("-py3-none-any.whl", ".tar.gz", ".cdx.json"))
    assert names == {wheel, sdist, bill, "NOTES.md", "SHA256SUMS"}
    for line in (clone / "dist" / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((clone / "dist" / name).read_bytes()).hexdigest() == digest
    components = json.loads((clone / "dist" / bill).read_text())
    assert components["metadata"]["component"]["name"] == "torchdist_ref"
    assert {each["name"] for each in components["components"]} == {"torch", "numpy"}
    with tarfile.open(clone / "dist" / sdist) as packed:
        page = packed.extractfile("torchdist_ref-9.8.7/PKG-INFO")
        assert page is not None and "](docs/" not in page.read().decode(), "a link that leads nowhere from an index"
    assert [path.name for path in (clone / "docs" / "changes").iterdir()] == ["README.md"]
    assert "version: 9.8.7" in (clone / "CITATION.cff").read_text()
    # The second form, on the tag: the same bytes again.
    sums = (clone / "dist" / "SHA256SUMS").read_text()
    subprocess.run([python, ".ci/release.py", "files", "9.8.7"], cwd=clone, check=True, capture_output=True)
    assert (clone / "dist" / "SHA256SUMS").read_text() == sums
    done = subprocess.run([python, ".ci/release.py", "9.8.7"], cwd=clone, capture_output=True, text=True)
    assert done.returncode == 1 and "the tag v9.8.7 exists" in done.stderr
