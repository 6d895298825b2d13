"""The branch with the published sites: a folder for each version, and the list that the version switcher reads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.release.scripts import ROOT, git, load

site = load("pages")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a clone of a small repository with a remote, which the script takes for this one."""
    folder, remote = tmp_path / "repository", tmp_path / "remote.git"
    git(tmp_path, "init", "--quiet", "--bare", "--initial-branch", "main", str(remote))
    git(tmp_path, "clone", "--quiet", str(remote), str(folder))
    (folder / "pyproject.toml").write_text('[project]\nurls = { Documentation = "https://example.org/docs/" }\n')
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "Begin")
    monkeypatch.setattr(site, "ROOT", folder)
    monkeypatch.setattr(site.git, "__kwdefaults__", {"folder": folder})
    return folder


def built(tmp_path: Path, text: str) -> Path:
    html = tmp_path / "html"
    html.mkdir(exist_ok=True)
    for name in ("index.html", "404.html"):
        (html / name).write_text(f"{name} of {text}")
    return html


def test_refs_have_names_and_addresses(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site.main(["name", "refs/tags/v0.1.0"])
    site.main(["name", "refs/heads/main"])
    assert capsys.readouterr().out.splitlines() == [
        *("name=0.1.0", "url=https://example.org/docs/0.1.0/"),
        *("name=dev", "url=https://example.org/docs/dev/"),
    ]


def test_versions_lie_side_by_side_and_the_newest_release_is_stable(repository: Path, tmp_path: Path) -> None:
    target = tmp_path / "pages"
    site.check_out(target)
    assert [path.name for path in target.iterdir()] == [".git"]
    for name, first in (("dev", "dev"), ("0.9.0", "stable"), ("0.10.0", "stable"), ("dev", "stable")):
        site.add(target, name, built(tmp_path, name))
        site.commit(target, name)
        assert f'url={first}/"' in (target / "index.html").read_text()
    assert (target / "stable" / "index.html").read_text() == "index.html of 0.10.0"
    assert (target / "404.html").read_text() == "404.html of 0.10.0"
    listed = json.loads((target / "switcher.json").read_text())
    assert [each["name"] for each in listed] == ["dev", "0.10.0 (stable)", "0.9.0"]
    assert listed[1]["url"] == "https://example.org/docs/0.10.0/"
    # A fix of an old release does not become the stable one.
    site.add(target, "0.9.1", built(tmp_path, "0.9.1"))
    assert (target / "stable" / "index.html").read_text() == "index.html of 0.10.0"
    assert git(target, "rev-list", "--count", "HEAD") == "1"
    git(target, "push", "--quiet", "--force", "origin", "gh-pages")


def test_the_next_run_continues_what_the_remote_has(repository: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    site.check_out(first)
    site.add(first, "0.1.0", built(tmp_path, "0.1.0"))
    site.commit(first, "0.1.0")
    git(first, "push", "--quiet", "--force", "origin", "gh-pages")
    git(repository, "worktree", "remove", "--force", str(first))
    git(repository, "branch", "--quiet", "-D", "gh-pages")
    site.check_out(second)
    site.add(second, "dev", built(tmp_path, "dev"))
    assert {path.name for path in second.iterdir()} >= {"dev", "0.1.0", "stable", "switcher.json"}


def test_the_steps_of_the_workflow_publish_a_version(tmp_path: Path) -> None:
    """All shell steps but the one that builds the site, in the order of the file, as a hosted runner runs them."""
    folder, remote, output = tmp_path / "repository", tmp_path / "remote.git", tmp_path / "output"
    git(tmp_path, "init", "--quiet", "--bare", "--initial-branch", "main", str(remote))
    git(tmp_path, "clone", "--quiet", str(remote), str(folder))
    for name in (".ci/pages.py", "pyproject.toml"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "Begin")
    html = folder / "docs" / "_build" / "html"
    html.mkdir(parents=True)
    for page in ("index.html", "404.html"):
        (html / page).write_text(f"{page} of 0.1.0")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # A runner has no name and no address for commits.
    outside = {"HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1", "PATH": path}
    environment = {**outside, "GITHUB_REF": "refs/tags/v0.1.0", "GITHUB_OUTPUT": str(output), "NAME": "0.1.0"}
    steps = yaml.safe_load((ROOT / ".github" / "workflows" / "pages.yml").read_text())["jobs"]["publish"]["steps"]
    commands = [step["run"] for step in steps if "nox" not in step.get("run", "nox")]
    assert len(commands) == 4 and "push" in commands[-1]
    for command in commands:
        shell = ["bash", "-e", "-c", command]
        done = subprocess.run(shell, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    address = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Documentation"]
    assert output.read_text().splitlines() == ["name=0.1.0", f"url={address}0.1.0/"]
    published = git(remote, "ls-tree", "-r", "--name-only", "gh-pages").splitlines()
    assert {"0.1.0/index.html", "stable/index.html", "404.html", "index.html", "switcher.json"} <= {*published}
