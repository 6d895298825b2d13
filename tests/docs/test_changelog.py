"""Changes that users see: one page of what a release brings, and a fragment for each change since then."""

from __future__ import annotations

import re

from tests.docs import pages

FRAGMENT = re.compile(r"[a-z0-9_]+\.(added|changed|fixed)\.md")
MOST_BYTES = 14 * 1024


def test_what_is_said_of_each_release_is_short() -> None:
    sections = (pages.ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")
    assert len(sections) > 1 and all(len(section.encode()) <= MOST_BYTES for section in sections)


def test_fragments_have_a_kind_and_at_most_two_sentences() -> None:
    for path in sorted((pages.DOCS / "changes").iterdir()):
        if path.name != "README.md":
            text = path.read_text(encoding="utf-8").strip()
            assert FRAGMENT.fullmatch(path.name), path.name
            assert text.endswith(".") and len(re.findall(r"[.!?](?:\s|$)", text)) <= 2, path.name
