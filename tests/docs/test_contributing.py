"""CONTRIBUTING names files, names and sessions that exist, so that its reader finds what a step is about."""

import re

from tests.docs import pages

# A line may break anywhere.
TEXT = " ".join((pages.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split())
PATH = r"(?:torchdist_ref|tests|docs|\.ci)/[\w/.-]+"


def test_its_folders_and_links_exist() -> None:
    """Files are tested for all pages in `test_language`."""
    folders = set(re.findall(r"`((?:torchdist_ref|tests|docs)/[\w/-]+)`", TEXT))
    linked = {target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", TEXT)}
    assert len(folders) > 10 and len(linked) > 5
    assert not [path for path in folders | linked if not (pages.ROOT / path).exists()]


def test_names_are_defined_in_the_files_that_it_gives() -> None:
    given = [
        (name, path)
        for names, path in re.findall(rf"((?:`\w+(?:\(\))?`(?: and )?)+) (?:of|in) `({PATH}\.py)`", TEXT)
        for name in re.findall(r"\w+", names.replace(" and ", " "))
    ]
    assert len(given) > 10
    for name, path in given:
        defined = rf"^\s*(?:(?:def|class) {name}\b|{name}\b[^=\n]*=)"
        assert re.search(defined, (pages.ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), f"{name} in {path}"


def test_its_sessions_exist() -> None:
    asked = set(re.findall(r"nox -s ([\w-]+)", TEXT))
    source = (pages.ROOT / "noxfile.py").read_text(encoding="utf-8")
    defined = re.findall(r'@nox\.session\((?:[^)]*name="([\w-]+)")?[^)]*\)\ndef (\w+)', source)
    assert asked and asked <= {name or function for name, function in defined}
