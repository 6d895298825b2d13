"""Files that a host of repositories or a reader of the package reads: they agree with pyproject.toml and noxfile.py."""

from __future__ import annotations

import itertools
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import yaml

from tests.release.scripts import ROOT
from torchdist_ref.acid import report

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def workflow(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8"))
    return found


def test_the_place_of_the_project_is_one() -> None:
    source, site = PROJECT["urls"]["Source"], PROJECT["urls"]["Documentation"]
    owner_and_name = source.removeprefix("https://github.com/")
    assert PROJECT["urls"]["Issues"].startswith(source) and PROJECT["urls"]["Changelog"].startswith(site)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["repository-code"], citation["url"]) == (source, site)
    assert workflow("release.yml")["jobs"]["publish"]["if"] == f"github.repository == '{owner_and_name}'"
    recipe = (ROOT / ".github" / "conda" / "recipe.yaml").read_text(encoding="utf-8")
    assert f"repository: {source}" in recipe and f"documentation: {site}" in recipe
    assert (ROOT / "pyproject.toml").read_text(encoding="utf-8").count(f"{source}/blob/main/") == 2
    # Links of other files are relative, or lead to other projects.
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob(".github/**/*.md")]:
        assert not re.search(r"torchdist-ref/(?!torchdist_ref)", path.read_text(encoding="utf-8")), path


def test_version_and_licence_are_stated_alike() -> None:
    import torchdist_ref

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert str(citation["version"]) == torchdist_ref.__version__ and citation["license"] == PROJECT["license"]


def test_hosted_jobs_call_sessions_and_scripts_that_exist() -> None:
    sessions = set(re.findall(r"@nox\.session\([^)]*\)\ndef (\w+)", (ROOT / "noxfile.py").read_text(encoding="utf-8")))
    called = set()
    for path in WORKFLOWS:
        for job in workflow(path.name)["jobs"].values():
            assert "timeout-minutes" in job, path.name
            for step in job["steps"]:
                words = shlex.split(step.get("run", ""), comments=False)
                called |= {after for word, after in itertools.pairwise(words) if word == "-s"}
                assert all((ROOT / word).exists() for word in words if word.startswith(".ci/")), step
    assert called == {"docs", "nightly", "release", "versions"} and called <= sessions


def test_hosted_tests_cover_the_supported_pythons() -> None:
    matrix = workflow("ci.yml")["jobs"]["versions"]["strategy"]["matrix"]
    classified = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)]
    assert matrix["python"] == classified and matrix["torch"] == ["oldest", "newest"]
    names = ", ".join(f'"python{each}"' for each in classified)
    assert f"PYTHONS = ({names})" in (ROOT / "noxfile.py").read_text(encoding="utf-8")


def test_only_jobs_that_publish_may_write() -> None:
    writing = {
        f"{path.name} {name}"
        for path in WORKFLOWS
        for name, job in workflow(path.name)["jobs"].items()
        if "write" in job.get("permissions", {}).values()
    }
    assert all(workflow(path.name)["permissions"] == {"contents": "read"} for path in WORKFLOWS)
    assert writing == {"pages.yml publish", "release.yml publish", "release.yml announce"}


def test_badges_of_readme_show_what_was_recorded() -> None:
    import json

    shown = re.findall(r"!\[([^\]]+)\]\((docs/acid/[a-z_]+\.svg)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert shown
    for text, name in shown:
        record = json.loads((ROOT / Path(name).with_suffix(".json")).read_text(encoding="utf-8"))
        badge = (ROOT / name).read_text(encoding="utf-8")
        assert badge == report.badge(record["checks"]) and f'aria-label="{text}"' in badge
