"""Steps of `nox -s release`: check, write the version and the changelog, build twice, list the components, tag.

Usage: python .ci/release.py VERSION [--checked], or python .ci/release.py files VERSION

The first form works in a fresh clone, so that a step that fails leaves this repository as it was. Only when the files
exist are the commit and the tag brought here. `--checked` leaves `.ci/run` out: for a commit that has passed it.
The second form builds the files of a commit that has that version; the hosted workflow calls it on the tag.

Nothing is uploaded or pushed: `docs/explanation/releasing.md` says how a person does that.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")
# Two environments that differ in what has changed builds of others: folder, umask, zone, language, order of sets.
BUILDS = (
    ("first", 0o022, {"TZ": "UTC", "LC_ALL": "C", "PYTHONHASHSEED": "1"}),
    ("the_second_one", 0o077, {"TZ": "Asia/Tokyo", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "2"}),
)


def run(*command: str, folder: Path = ROOT, umask: int = -1, **environment: str) -> str:
    """Run a command and return what it prints; end with its message if it fails."""
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, umask=umask, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def version_of(folder: Path) -> str:
    """Return the version that the source in a folder has."""
    found = re.search(r'^__version__ = "(.+)"$', (folder / "torchdist_ref" / "__init__.py").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def refusal(version: str) -> str:
    """Return why this repository cannot be released as a version; an empty string if it can."""
    if not VERSION.fullmatch(version):
        return f"{version!r} is no version: give numbers such as 0.1.0, or 0.2.0rc1"
    if changed := run("git", "status", "--porcelain"):
        return f"the working tree has changes; commit or remove them first:\n{changed}"
    if (branch := run("git", "rev-parse", "--abbrev-ref", "HEAD")) != "main":
        return f"the branch is {branch}; a release is made on main"
    if run("git", "tag", "--list", f"v{version}"):
        return f"the tag v{version} exists; a version is released once"
    return ""


def write_version(folder: Path, version: str) -> None:
    """Write the version and the date where they are stated, make the changelog of its fragments, and commit."""
    today = datetime.now(UTC).date().isoformat()
    source, citation, changelog = (
        folder / name for name in ("torchdist_ref/__init__.py", "CITATION.cff", "CHANGELOG.md")
    )
    source.write_text(re.sub(r'(?m)^__version__ = ".+"$', f'__version__ = "{version}"', source.read_text()))
    lines = [line for line in citation.read_text().splitlines() if not line.startswith("date-released:")]
    place = next(number for number, line in enumerate(lines) if line.startswith("version:"))
    lines[place : place + 1] = [f"version: {version}", f'date-released: "{today}"']
    citation.write_text("\n".join(lines) + "\n")
    run(sys.executable, "-m", "towncrier", "build", "--yes", "--version", version, "--date", today, folder=folder)
    # A section that was begun by hand goes under the heading that towncrier has written.
    changelog.write_text(changelog.read_text().replace(f"## {version} (unreleased)\n\n", ""))
    run("git", "add", "--all", folder=folder)
    run("git", "commit", "--quiet", "-m", f"Release {version}", folder=folder)


def build_twice(folder: Path, out: Path) -> None:
    """Build sdist and wheel of a commit in two clones, and keep them if all bytes are equal."""
    results = []
    for name, umask, environment in BUILDS:
        clone, built = out.parent / name, out.parent / f"{name}_dist"
        run("git", "clone", "--quiet", str(folder), str(clone), umask=umask)
        command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", str(built))
        run(*command, folder=clone, umask=umask, **environment)
        results.append({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(built.iterdir())})
    if results[0] != results[1] or len(results[0]) != 2:
        raise SystemExit(f"two builds of one commit differ:\n{results[0]}\n{results[1]}")
    shutil.copytree(out.parent / f"{BUILDS[0][0]}_dist", out)


def list_components(folder: Path, out: Path, version: str) -> None:
    """Write the software bill of materials: the package, and what it declares to need."""
    declared = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["dependencies"]
    requirements = out.parent / "requirements.txt"
    requirements.write_text("".join(f"{each}\n" for each in declared))
    options = ("--pyproject", str(folder / "pyproject.toml"), "--mc-type", "library", "--output-reproducible")
    target = out / f"torchdist_ref-{version}.cdx.json"
    run(sys.executable, "-m", "cyclonedx_py", "requirements", *options, "-o", str(target), str(requirements))


def notes(changelog: str, version: str) -> str:
    """Return the section of a version, without its heading."""
    found = re.search(rf"^## {re.escape(version)} .*?\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None:
        raise SystemExit(f"CHANGELOG.md has no section of {version}")
    return found[1].strip() + "\n"


def make_files(folder: Path, version: str) -> None:
    """Build all files of a release into `dist` of this repository, and print their hashes."""
    if (found := version_of(folder)) != version:
        raise SystemExit(f"the source has version {found}, not {version}")
    with tempfile.TemporaryDirectory(prefix="torchdist_ref-release-") as scratch:
        out = Path(scratch, "dist")
        build_twice(folder, out)
        list_components(folder, out, version)
        (out / "NOTES.md").write_text(notes((folder / "CHANGELOG.md").read_text(), version))
        sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in sorted(out.iterdir())]
        (out / "SHA256SUMS").write_text("\n".join(sums) + "\n")
        shutil.rmtree(ROOT / "dist", ignore_errors=True)
        shutil.copytree(out, ROOT / "dist")
    print("\n".join(sums))


def release(version: str, checked: bool) -> None:
    """Make a release: the files in `dist`, one commit, and the tag."""
    if why := refusal(version):
        raise SystemExit(f"no release: {why}")
    with tempfile.TemporaryDirectory(prefix="torchdist_ref-release-") as scratch:
        clone = Path(scratch, "clone")
        run("git", "clone", "--quiet", "--branch", "main", str(ROOT), str(clone))
        for key in ("user.name", "user.email"):
            run("git", "config", key, run("git", "config", key), folder=clone)
        if not checked:
            print("running .ci/run in a fresh clone: 20 minutes on 2 cores", flush=True)
            run("bash", ".ci/run", folder=clone)
            run("git", "checkout", "--quiet", "--", ".", folder=clone)
        write_version(clone, version)
        make_files(clone, version)
        run("git", "tag", "-a", f"v{version}", "-m", f"torchdist_ref {version}", folder=clone)
        run("git", "pull", "--quiet", "--ff-only", str(clone), "main")
        run("git", "fetch", "--quiet", str(clone), f"refs/tags/v{version}:refs/tags/v{version}")
    print(f"v{version} is tagged, its files are in dist. To publish it: git push origin main v{version}")


def main(arguments: list[str]) -> None:
    """Do what the arguments ask."""
    checked = "--checked" in arguments
    match [each for each in arguments if each != "--checked"]:
        case ["files", version]:
            make_files(ROOT, version)
        case [version]:
            release(version, checked)
        case _:
            raise SystemExit("usage: nox -s release -- VERSION [--checked], or nox -s release -- files VERSION")


if __name__ == "__main__":
    main(sys.argv[1:])
