"""Reads the examples out of the pages, so that tests can run what readers see.

In Markdown, the python blocks of a page are one program, in order; an ``output`` block shows what the block before it
prints. A block that is not meant to run has another language (``text``, ``sh``). In RST and docstrings, examples are
``>>>`` sessions.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```(?P<language>[\w-]+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    text: str
    line: int


def blocks(path: Path) -> list[Block]:
    """Return the fenced blocks of a Markdown page, in order."""
    page = path.read_text(encoding="utf-8")
    return [
        Block(found["language"], found["text"], page.count("\n", 0, found.start()) + 2)
        for found in FENCE.finditer(page)
    ]


def markdown_pages() -> Iterator[Path]:
    """Yield the Markdown pages of the site that hold python."""
    for path in sorted(DOCS.rglob("*.md")):
        if "_build" not in path.parts and any(block.language == "python" for block in blocks(path)):
            yield path


def run_page(path: Path) -> int:
    """Run the python blocks of a page as one program and compare what they print; return how many ran."""
    names: dict[str, Any] = {"__name__": "__page__"}
    found = blocks(path)
    for index, block in enumerate(found):
        if block.language == "python":
            printed = run_block(path, block, names)
            following = found[index + 1] if index + 1 < len(found) else None
            if following and following.language == "output":
                assert printed == following.text, (
                    f"{path.name}:{following.line} shows\n{following.text}\nbut it prints\n{printed}"
                )
    return sum(block.language == "python" for block in found)


def run_block(path: Path, block: Block, names: dict[str, Any]) -> str:
    """Run one block, with tracebacks that point into the page; return what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("\n" * (block.line - 1) + block.text, str(path), "exec"), names)
    return printed.getvalue()
