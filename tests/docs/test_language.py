"""The language of the project: retired words in names and headings, openings of docstrings, terms of the glossary.

A name or a heading in a private language costs a reader a search that finds nothing. The table has, for each retired
word, the sense in which it is retired and the term that replaces it. Prose is read by a person; the tests hold what
people look for first: identifiers, test names and headings.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs import pages

PACKAGE = pages.ROOT / "torchdist_ref"
# Names of Python and torch that contain a retired word for reasons of their own.
FOREIGN = {"_execution_engine"}
# Files in which a token is one of Python's grammar, or the job token, the secret of a job.
LEXERS = {"planting.py", "test_laws.py", "notebook_pages.py", "agents.py", "test_agents_on_hosts.py", "test_meeting.py"}


class Retired(NamedTuple):
    """A word that names no longer contain.

    Attributes:
        word: Pattern of one part of a name; names are split at underscores and capitals.
        sense: In which sense.
        term: The standard term.
    """

    word: str
    sense: str
    term: str


RETIRED = (
    Retired("engines?", "implementation of a group's calls", "backend"),
    Retired("tokens?", "counter that orders two ranks", "semaphore"),
    Retired("giver", "function that posts a semaphore", "signal"),
    Retired("doing", "text that describes an operation", "description"),
    Retired("trouble", "reason why a rank does not come", "failure"),
    Retired("parcels?", "object as bytes", "payload"),
    Retired("patience|patient", "longest wait", "time-out"),
    Retired("lend|lends|lent|lending", "tensors that peers use in place", "registered, zero-copy"),
    Retired("conversations?", "connection with requests", "session, connection"),
    Retired("door", "place where peers connect", "acceptor"),
    Retired("stranger|strangers", "peer that is not authenticated", "unauthenticated peer"),
    Retired("pocket|pockets", "small buffer beside the ring", "eager buffer"),
    Retired("deed", "pid, descriptor and nonce of a segment", "handle"),
    Retired("uncut", "one tensor instead of its blocks", "flat operands"),
    Retired("unfit", "tensor that a backend cannot take", "unsupported"),
    Retired("shadow|shadows", "take part for a rank without inputs", "participate with zeros"),
    Retired("epitaph|bury|papers", "report of an ended process", "exit report, reap"),
    Retired("hear|heard|hears", "receive", "receive"),
    Retired("whoever|whom", "person", "rank, peer"),
    Retired("lay|lays|laid", "write into the staging buffer", "write"),
)
OPENING = re.compile(r"^(Who|Whoever|What|Whatever|Whom|Which|Where|That|The one)\b(?![^.!?]*\?)")
MOST_OPENINGS = 10


def words(name: str) -> list[str]:
    """Split an identifier: ``setTimeoutNow`` and ``set_timeout_now`` have three parts.

    >>> words("TCPStore_getValue")
    ['tcp', 'store', 'get', 'value']
    """
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


@cache
def names(path: Path) -> frozenset[str]:
    """Return the names that a file defines: functions, classes, parameters, attributes and variables."""
    found = {path.stem}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    lexical = {name for name in found if path.name in LEXERS and "token" in name.lower()}
    return frozenset(found - FOREIGN - lexical)


# All rows in one pattern: most names contain none, and there are 40,000.
ANY_RETIRED = re.compile("|".join(row.word for row in RETIRED))


@cache
def retired(name: str) -> Retired | None:
    parts = [part for part in words(name) if ANY_RETIRED.fullmatch(part)]
    return next((row for row in RETIRED for part in parts if re.fullmatch(row.word, part)), None)


def python_files() -> list[Path]:
    return sorted([*PACKAGE.rglob("*.py"), *(pages.ROOT / "tests").rglob("*.py"), *(pages.DOCS / "_ext").glob("*.py")])


@pytest.mark.parametrize("folder", sorted({path.parent for path in python_files()}), ids=lambda path: path.name)
def test_names_use_standard_terms(folder: Path) -> None:
    wrong = [
        f"{path.relative_to(pages.ROOT)}: {name} ({row.sense}: {row.term})"
        for path in sorted(folder.glob("*.py"))
        for name in sorted(names(path))
        if (row := retired(name))
    ]
    assert not wrong, "\n".join(wrong)


def headings() -> list[tuple[str, str]]:
    """Return all headings of the pages, with their page."""
    found = []
    for path in [*pages.DOCS.rglob("*.md"), *pages.DOCS.rglob("*.rst"), *pages.ROOT.glob("*.md")]:
        if "_build" in path.parts:
            continue
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".md":
            text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
            titles = re.findall(r"^#+ +(.+)$", text, flags=re.MULTILINE)
        else:
            titles = re.findall(r"^(\S.*)\n[=\-~^]{3,}$", text, flags=re.MULTILINE)
        found += [(path.name, title) for title in titles]
    return found


def test_headings_use_standard_terms() -> None:
    found = headings()
    assert len(found) > 100
    wrong = [(page, title) for page, title in found if any(retired(word) for word in re.findall(r"[A-Za-z]+", title))]
    assert not wrong


def sentences(text: str) -> list[str]:
    """Return the sentences of a docstring that have more than three words, without its examples."""
    prose = re.sub(r">>>.*", "", text).replace("\n", " ")
    return [part for part in re.split(r"(?<=[.!?:])\s+", prose) if len(part.split()) > 3]


def test_few_sentences_open_with_a_nominal_clause() -> None:
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                found += [f"{path.name}: {one}" for one in sentences(text) if OPENING.match(one)]
    assert len(found) <= MOST_OPENINGS, "\n".join(found)


def glossary() -> list[str]:
    text = (pages.DOCS / "explanation" / "glossary.md").read_text(encoding="utf-8")
    return re.findall(r"^(\w[\w -]*)\n  ", text, flags=re.MULTILINE)


def test_each_term_of_the_glossary_is_linked_from_a_page() -> None:
    """Sphinx checks that the roles resolve; this checks that there is one for each term."""
    texts = [path.read_text(encoding="utf-8") for end in ("md", "rst") for path in pages.DOCS.rglob(f"*.{end}")]
    linked = {
        re.sub(r".*<(.+)>", r"\1", role).lower()
        for text in texts
        for role in re.findall(r"(?:\{term\}|:term:)`([^`]+)`", text)
    }
    terms = glossary()
    assert len(terms) > 30 and terms == sorted(terms, key=str.lower)
    unlinked = [term for term in terms if term not in linked and f"{term}s" not in linked]
    assert not unlinked


def test_modules_named_on_pages_exist() -> None:
    """A page that names a file or a module which has moved sends its reader nowhere."""
    wrong = []
    for path in [*pages.DOCS.rglob("*.md"), *pages.DOCS.rglob("*.rst"), *pages.ROOT.glob("*.md")]:
        if "_build" in path.parts or path.name == "CHANGELOG.md":
            continue
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"`+((?:torchdist_ref|tests|docs|tutorials)/[\w/.\-]+\.\w+)`+", text):
            wrong += [] if (pages.ROOT / name).exists() else [f"{path.name}: {name}"]
        for name in re.findall(r"`((?:\w+/)+\w+\.py)`", text):
            wrong += [] if any((root / name).exists() for root in (PACKAGE, pages.ROOT)) else [f"{path.name}: {name}"]
    assert not wrong, "\n".join(wrong)


def test_the_check_notices() -> None:
    assert retired("TorchEngine") and retired("be_patient") and retired("take_token")
    assert not retired("tokenize") and not retired("outdoors") and not retired("backend")
