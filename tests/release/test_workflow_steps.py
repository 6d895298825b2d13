"""Shell steps of the hosted workflows `ci` and `release`, run in the order of their files on machines of their own.

What would need a network or an account is replaced by a program that records its arguments: `pip`, `nox`, `gh`, and the
tool that lists components. The steps of `pages` are in `test_published_site`.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import torchdist_ref
from tests.release.scripts import ROOT, git

RECORD = '#!/bin/sh\necho "${0##*/} $*" >>"$CALLS"\n'
# The session installs its tools and calls this script with its arguments.
MAKES_RELEASE = RECORD + 'case "$*" in "-m nox -s release -- "*) shift 5; exec "$PYTHON" .ci/release.py "$@";; esac\n'
LISTS_NOTHING = 'import sys\nopen(sys.argv[sys.argv.index("-o") + 1], "w").write("{}")\n'
MAKES_VENV = (
    '#!/bin/sh -e\n[ "$*" = "-m venv .venv" ]\nmkdir -p .venv/bin\nln -sf "$STUBS/pip" "$STUBS/nox" .venv/bin\n'
)
FAILS = RECORD + 'echo "the output of $*"\n[ "$*" != "-s $FAILING" ]\n'
SESSIONS = ("docs", "tests", "deaths", "lint types package", "mutants -- --changed", "site")


def jobs(name: str) -> dict[str, Any]:
    """Return the jobs of a workflow in the order of the file."""
    found: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8"))["jobs"]
    return found


def resolved(text: str, values: Mapping[str, str]) -> str:
    """Return a text with the values of its expressions."""
    return re.sub(r"\$\{\{ (\S+) \}\}", lambda found: values[found[1]], text)


class Hosted:
    """Machines of a workflow: what they have in common, and the artifacts that jobs leave to others.

    Args:
        folder: Folder for all of them.
        programs: Text of each program that comes before those of the system.
        variables: Environment of the steps.
    """

    def __init__(self, folder: Path, programs: Mapping[str, str], **variables: str) -> None:
        self.folder, self.artifacts, self._calls = folder, folder / "artifacts", folder / "calls"
        stubs = folder / "stubs"
        stubs.mkdir()
        for name, text in programs.items():
            (stubs / name).write_text(text)
            (stubs / name).chmod(0o755)
        path = f"{stubs}{os.pathsep}{os.environ['PATH']}"
        own = {"PATH": path, "HOME": str(folder), "CALLS": str(self._calls), "STUBS": str(stubs)}
        self._environment = {**own, "PYTHON": sys.executable, **variables}

    def calls(self) -> list[str]:
        """Return the recorded calls, and forget them."""
        found = self._calls.read_text().splitlines() if self._calls.exists() else []
        self._calls.unlink(missing_ok=True)
        return found

    def run(self, name: str, job: Mapping[str, Any], values: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """Run a job in a folder; return the result of its last shell step, or of the first that failed."""
        home = self.folder / name
        home.mkdir(exist_ok=True)
        done = None
        for step in job["steps"]:
            match step.get("uses", "").partition("@")[0]:
                case "actions/checkout":
                    # What is checked out has no history, as there.
                    git(home, "clone", "--quiet", "--depth", "1", f"file://{ROOT}", ".")
                case "actions/upload-artifact":
                    shutil.copytree(home / step["with"]["path"], self.artifacts / step["with"]["name"])
                case "actions/download-artifact":
                    shutil.copytree(self.artifacts / step["with"]["name"], home / step["with"]["path"])
            if "run" in step:
                given = {key: resolved(value, values) for key, value in step.get("env", {}).items()}
                done = subprocess.run(
                    ["bash", "-e", "-c", resolved(step["run"], values)],
                    cwd=home,
                    env={**self._environment, **given},
                    capture_output=True,
                    text=True,
                )
                if done.returncode:
                    break
        assert done is not None
        return done


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_steps_of_a_release_publish_what_they_built(tmp_path: Path) -> None:
    """Slow, 9 s of CPU: sdist and wheel are built twice."""
    version = torchdist_ref.__version__
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "cyclonedx_py.py").write_text(LISTS_NOTHING)
    variables = {"GITHUB_REF_NAME": f"v{version}", "GITHUB_REPOSITORY": "somebody/project", "PYTHONPATH": str(modules)}
    hosted = Hosted(tmp_path, {"python": MAKES_RELEASE, "gh": RECORD}, **variables)
    release = jobs("release.yml")
    assert [*release] == ["build", "publish", "announce"]
    assert [job.get("needs") for job in release.values()] == [None, "build", "publish"]
    for name, job in release.items():
        done = hosted.run(name, job, {"github.token": "a token"})
        assert done.returncode == 0, f"{name}\n{done.stdout}{done.stderr}"
    wheel, sdist, bill = (f"torchdist_ref-{version}{end}" for end in ("-py3-none-any.whl", ".tar.gz", ".cdx.json"))
    [upload] = [step for step in release["publish"]["steps"] if "pypi" in step.get("uses", "")]
    packages = {
        path.name: path.read_bytes() for path in (tmp_path / "publish" / upload["with"]["packages-dir"]).iterdir()
    }
    assert {*packages} == {wheel, sdist}
    sums = (tmp_path / "announce" / "dist" / "SHA256SUMS").read_text().splitlines()
    assert {f"{hashlib.sha256(data).hexdigest()}  {name}" for name, data in packages.items()} < {*sums}
    *python, gh = hosted.calls()
    assert python == ["python -m pip install nox", f"python -m nox -s release -- files {version}"]
    command, create, tag, *rest = gh.removeprefix("gh ").split()
    assert (command, create, tag) == ("release", "create", f"v{version}")
    files = [word for word in rest if word.startswith("dist/") and word != rest[rest.index("--notes-file") + 1]]
    assert {*files} | {"dist/NOTES.md"} == {f"dist/{name}" for name in (wheel, sdist, bill, "NOTES.md", "SHA256SUMS")}
    assert all((tmp_path / "announce" / name).stat().st_size for name in files)
    assert rest[rest.index("--repo") + 1] == "somebody/project"


@pytest.mark.parametrize("failing", ["", *SESSIONS])
def test_the_script_of_ci_runs_all_sessions_and_ends_with_the_first_that_fails(failing: str, tmp_path: Path) -> None:
    programs = {"python3": MAKES_VENV, "pip": RECORD, "nox": FAILS, "chromium": RECORD}
    hosted = Hosted(tmp_path, programs, FAILING=failing)
    for name in (".ci/run", "README.md"):
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "run" / name)
    shell = [step for step in jobs("ci.yml")["run"]["steps"] if "run" in step]
    done = hosted.run("run", {"steps": shell}, {})
    called = [call.removeprefix("nox -s ") for call in hosted.calls() if call.startswith("nox ")]
    if not failing:
        assert sorted(called) == sorted(SESSIONS) and done.returncode == 0, done.stdout + done.stderr
        return
    assert done.returncode, done.stdout
    assert f"the output of -s {failing}" in done.stdout
    # The checks are begun beside the deaths.
    later = SESSIONS[SESSIONS.index(failing) + 1 + (failing == "deaths") :]
    assert failing in called and not {*called} & {*later}


def test_each_pair_of_versions_has_a_session(tmp_path: Path) -> None:
    job = jobs("ci.yml")["versions"]
    shell = {"steps": [step for step in job["steps"] if "run" in step]}
    pairs = [*itertools.product(*job["strategy"]["matrix"].values())]
    assert len(pairs) == 8
    hosted = Hosted(tmp_path, {"python": RECORD})
    for python, torch in pairs:
        assert hosted.run(f"{python} {torch}", shell, {"matrix.python": python, "matrix.torch": torch}).returncode == 0
        session = f"python -m nox -s versions -- python{python} {torch}"
        assert hosted.calls() == ["python -m pip install nox", session]
