"""The branch with the published sites: a folder for each version, and the list that the version switcher reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.release.scripts import git, load

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
