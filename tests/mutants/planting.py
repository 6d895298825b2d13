"""Find the place of a planted fault in the package, and put the fault there.

A fault is keyed by a pattern of tokens, not by a file and its exact text, so that reformatting a file, renaming a
local name or moving a function to another file of the folder does not lose it. See README.md for the notation.
"""

from __future__ import annotations

import functools
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

FAULTS = Path(__file__).parent / "faults"
_TOKEN = re.compile(
    r"""
    (?P<skip>\s+ | \#[^\n]*)
  | (?P<string>[rbfRBF]{0,2}(?:\"{3}.*?\"{3} | '{3}.*?'{3} | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'))
  | (?P<name>\$?[^\W\d]\w*)
  | (?P<number>\d[\w.]*)
  | (?P<operator>\*\*=|//=|>>=|<<=|\.\.\.|[-+*/%&|^@=!<>:]=|->|\*\*|//|<<|>>|.)
    """,
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True)
class Token:
    """One token of Python source.

    Attributes:
        text: The token as written.
        begin: Offset of its first character.
        end: Offset after its last character.
    """

    text: str
    begin: int
    end: int


@dataclass(frozen=True)
class Match:
    """A place where a pattern fits.

    Attributes:
        begin: Offset of the first character in the source.
        end: Offset after the last character.
        names: What each placeholder of the pattern stands for here.
    """

    begin: int
    end: int
    names: dict[str, str]


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Attributes:
        name: What is wrong, in words.
        where: File or folder of the package that has the place.
        old: Pattern of the correct code.
        new: Code that replaces it; placeholders of `old` may be used.
        tests: Arguments for pytest: tests that must fail, the quickest first.
    """

    name: str
    where: str
    old: str
    new: str
    tests: str


def planted() -> list[Fault]:
    """Read all faults from the TOML files."""
    read = (tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(FAULTS.glob("*.toml")))
    return [Fault(**row) for table in read for row in table["fault"]]


@functools.cache
def tokens(source: str) -> list[Token]:
    """Split source, or a fragment of it, into tokens; white space, comments and trailing commas are dropped."""
    found = [
        Token(match.group(), match.start(), match.end())
        for match in _TOKEN.finditer(source)
        if match.lastgroup != "skip"
    ]
    return [
        token
        for token, after in zip(found, [*found[1:], None], strict=True)
        if not (token.text == "," and after and after.text in ")]}")
    ]


def matches(source: str, pattern: str) -> list[Match]:
    """Return every place of the source where the pattern fits."""
    wanted, found = tokens(pattern), tokens(source)
    offset, word = max(enumerate(token.text for token in wanted), key=_distinctive)
    starts = [at - offset for at in _positions(source).get(word, ())] if word[0] != "$" else range(len(found))
    fits = (
        _fit(found[start : start + len(wanted)], wanted) for start in starts if 0 <= start <= len(found) - len(wanted)
    )
    return [match for match in fits if match]


def _distinctive(token: tuple[int, str]) -> tuple[bool, int]:
    """Order tokens of a pattern by how rarely they may occur: the longest is compared first, no placeholder."""
    return not token[1].startswith("$"), len(token[1])


@functools.cache
def _positions(source: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for position, token in enumerate(tokens(source)):
        found.setdefault(token.text, []).append(position)
    return found


def _fit(found: list[Token], wanted: list[Token]) -> Match | None:
    """Compare as many tokens as the pattern has; a placeholder stands for the same name wherever it occurs."""
    names: dict[str, str] = {}
    for there, here in zip(found, wanted, strict=True):
        expected = names.setdefault(here.text, there.text) if here.text.startswith("$") else here.text
        if there.text != expected or (here.text.startswith("$") and not there.text.isidentifier()):
            return None
    return Match(found[0].begin, found[-1].end, names)


def places(fault: Fault, package: Path) -> list[tuple[Path, Match]]:
    """Return every place in the package where the fault could be planted; it must be exactly one."""
    where = package / fault.where
    files = sorted(where.rglob("*.py")) if where.is_dir() else [where]
    return [(file, match) for file in files for match in matches(file.read_text(encoding="utf-8"), fault.old)]


def plant(fault: Fault, package: Path) -> Path:
    """Put the fault into the package, and return the file that has it now.

    Raises:
        LookupError: The pattern does not fit exactly one place.
    """
    found = places(fault, package)
    if len(found) != 1:
        where = ", ".join(str(file.relative_to(package)) for file, _ in found) or "none"
        raise LookupError(f"{fault.name!r}: {len(found)} places in {fault.where} ({where}); it must be one")
    file, match = found[0]
    source = file.read_text(encoding="utf-8")
    # It may be one file under several names: the others keep the correct code.
    file.unlink()
    file.write_text(source[: match.begin] + _replacement(fault, source, match) + source[match.end :], encoding="utf-8")
    return file


def _replacement(fault: Fault, source: str, match: Match) -> str:
    """Return the new code, indented as the place is."""
    line = source[source.rfind("\n", 0, match.begin) + 1 : match.begin]
    indent = line[: len(line) - len(line.lstrip())]
    first, *rest = fault.new.strip("\n").split("\n")
    text = "\n".join([first, *(indent + line for line in rest)])
    return re.sub(r"\$[^\W\d]\w*", lambda found: match.names[found.group()], text)
