"""Every sentence of the pages that states what torch does is listed with the test that holds it on the pinned torch."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.docs import pages

LISTED = tomllib.loads(Path(__file__).with_name("torch_sentences.toml").read_text(encoding="utf-8"))
# Pages that are generated from tests, or that are data of generated pages; `test_upstream.py` holds upstream.md.
GENERATED = (
    "upstream.md",
    "surface_table.md",
    "surface_members.md",
    "compatibility.md",
    "torch_packages.md",
    "changelog.md",
)
VERBS = """accepts adds aborts broadcasts calls checks compares connects continues copies crashes creates detects does
documents ends fails finds had hangs has ignores implements keeps leaves locks logs makes marks may names needs never
passes prints raises reads recomputes rejects refuses removed repeats reports requires returns rounds says sends sets
stays supports takes treats uses waits warns writes"""
STATES = re.compile(
    rf"\b(?:On|In) (?:torch|Gloo|NCCL)\b|\b(?:torch|Gloo|NCCL)(?:'s (?:own )?\w+)? (?:{'|'.join(VERBS.split())})\b"
)


def sentences(path: Path) -> Iterator[str]:
    """Yield the sentences of a page, without code and tables."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^\s*(?:>>>|\.\.\.) .*$|^\|.*$", "", text, flags=re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*[*-] )", text):
        yield from re.split(r"(?<=[.:;!?)]) +(?=[A-Z`(t])", " ".join(paragraph.split()))


def stated() -> Iterator[tuple[str, str]]:
    """Yield page and sentence of everything that the pages state of torch."""
    for path in sorted([*pages.DOCS.rglob("*.md"), *pages.DOCS.rglob("*.rst")]):
        if "_build" not in path.parts and path.name not in GENERATED:
            for sentence in sentences(path):
                if STATES.search(sentence):
                    yield str(path.relative_to(pages.DOCS)), sentence


@cache
def functions_of(file: str) -> set[str]:
    """Return the names of the test functions of a file."""
    tree = ast.parse((pages.ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name[:5] == "test_"}


def test_each_sentence_on_torch_is_listed() -> None:
    listed = {page: [row["text"] for row in rows] for page, rows in LISTED.items()}
    missing = [
        f"{page}: {sentence}"
        for page, sentence in stated()
        if not any(text in sentence or sentence in text for text in listed.get(page, []))
    ]
    assert not missing, "add to torch_sentences.toml, with a test:\n" + "\n".join(missing)


@pytest.mark.parametrize("page", LISTED)
def test_each_listed_sentence_is_on_its_page_and_has_a_test(page: str) -> None:
    text = " ".join((pages.DOCS / page).read_text(encoding="utf-8").split())
    for row in LISTED[page]:
        assert row["text"] in text
        assert row.keys() & {"test", "why"} and row.keys() <= {"text", "test", "why"}
        file, _, name = row.get("test", "").partition("::")
        assert "why" in row or name in functions_of(file), row
