"""Steps of the workflow that publishes the site: one folder for each version, and the list for the version switcher.

Usage:
    python .ci/pages.py name REF            print the name and the address of the site of a branch or tag
    python .ci/pages.py branch FOLDER       check the branch gh-pages out into a folder; make it if there is none
    python .ci/pages.py add FOLDER NAME     put the built site there under a name, and commit

The branch keeps one commit, since a site has tens of megabytes.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HTML = ROOT / "docs" / "_build" / "html"
RELEASE = re.compile(r"\d+\.\d+\.\d+")
BRANCH = "gh-pages"


def address() -> str:
    """Return the address below which all versions lie."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: str = project["urls"]["Documentation"]
    return found.rstrip("/")


def name_of(ref: str) -> str:
    """Return the name of the version that a ref of git has.

    >>> name_of("refs/heads/main"), name_of("refs/tags/v0.1.0")
    ('dev', '0.1.0')
    """
    return ref.removeprefix("refs/tags/v") if ref.startswith("refs/tags/v") else "dev"


def git(*arguments: str, folder: Path = ROOT) -> int:
    """Run git, and return its exit code."""
    return subprocess.run(["git", *arguments], cwd=folder).returncode


def check_out(folder: Path) -> None:
    """Make a work tree of the branch, which is new if the remote has none."""
    if git("fetch", "--quiet", "origin", f"{BRANCH}:{BRANCH}") == 0:
        steps = [("worktree", "add", "--quiet", str(folder), BRANCH)]
    else:
        steps = [
            ("worktree", "add", "--quiet", "--detach", str(folder)),
            ("-C", str(folder), "checkout", "--quiet", "--orphan", BRANCH),
            ("-C", str(folder), "rm", "--quiet", "-r", "--force", "."),
        ]
    if any(git(*step) for step in steps):
        raise SystemExit(f"no work tree of {BRANCH} in {folder}")


def releases(folder: Path) -> list[str]:
    """Return the names of the published releases, newest first."""
    found = [path.name for path in folder.iterdir() if RELEASE.fullmatch(path.name)]
    return sorted(found, key=lambda name: tuple(map(int, name.split("."))), reverse=True)


def add(folder: Path, name: str, html: Path = HTML) -> None:
    """Put a built site into its folder, and write what depends on the list of versions."""
    copy(html, folder / name)
    newest = next(iter(releases(folder)), None)
    if name == newest:
        copy(html, folder / "stable")
    first = "stable" if newest else "dev"
    versions = [
        {"name": f"{each} (stable)" if each == newest else each, "version": each, "url": f"{address()}/{each}/"}
        for each in ("dev", *releases(folder))
        if (folder / each).exists()
    ]
    (folder / "switcher.json").write_text(json.dumps(versions, indent=1) + "\n", encoding="utf-8")
    (folder / "index.html").write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>torchdist_ref</title>'
        f'<meta http-equiv="refresh" content="0; url={first}/"><link rel="canonical" href="{address()}/{first}/">'
        f'<a href="{first}/">The documentation of torchdist_ref</a></html>\n',
        encoding="utf-8",
    )
    shutil.copy(folder / first / "404.html", folder / "404.html")
    (folder / ".nojekyll").touch()


def copy(source: Path, target: Path) -> None:
    """Replace a folder by a copy."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(".doctrees", ".buildinfo"))


def commit(folder: Path, name: str) -> None:
    """Replace the commit of the branch by one with the present content."""
    git("add", "--all", folder=folder)
    identity = ("-c", "user.name=pages", "-c", "user.email=pages@users.noreply.github.com")
    amend = ["--amend"] if git("rev-parse", "--quiet", "--verify", "HEAD", folder=folder) == 0 else []
    if git(*identity, "commit", "--quiet", "--allow-empty", *amend, "-m", f"Site of {name}", folder=folder):
        raise SystemExit("the site could not be committed")


def main(arguments: list[str]) -> None:
    """Do one step."""
    match arguments:
        case ["name", ref]:
            print(f"name={name_of(ref)}\nurl={address()}/{name_of(ref)}/")
        case ["branch", folder]:
            check_out(Path(folder))
        case ["add", folder, name]:
            add(Path(folder), name)
            commit(Path(folder), name)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
