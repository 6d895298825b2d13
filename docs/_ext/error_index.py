"""The error index: pages that are made from the recorded table of wrong calls, `docs/reference/errors_index.json`.

A page `reference/errors_index/AREA.md` holds only its title; the entries of its area follow when Sphinx reads it. On
`reference/errors_index.md` the line ``<!-- messages -->`` becomes a table of messages, ``<!-- errors -->`` one of the
exception classes. `python -m tests.wrong_calls` writes the record, and the tests hold it to what is raised.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from torchdist_ref import error_index, errors

INDEX = "reference/errors_index"
RECORD = Path(__file__).parents[1] / f"{INDEX}.json"
HANG_PAGE = "how-to/my_job_hangs"
HANG = (
    "**Which rank?** {doc}`/how-to/why_does_my_job_hang` names the rank and the line, from the dumps of the ranks or "
    "the log of the job, in your browser."
)
WORLDS = {
    "alone": "Runs in one process.",
    "threads": "Runs on two ranks, as shown at the top of the index.",
    "processes": 'Runs on two ranks that are processes: `run(program, 2, ranks="processes")`.',
}


def entries() -> list[dict[str, Any]]:
    """Return the recorded kinds of errors."""
    found: list[dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def of_area(area: str) -> str:
    """Return the entries of an area in Markdown."""
    return "\n".join(_entry(found) for found in entries() if found["area"] == area)


def messages() -> str:
    """Return a table from messages that users search to the entries that explain them."""
    by_text: dict[str, list[dict[str, Any]]] = {}
    for found in entries():
        for text in found["searches"]:
            by_text.setdefault(text, []).append(found)
    lines = [f"| {_code(text)} | {', '.join(map(_link, group))} |" for text, group in sorted(by_text.items())]
    return "\n".join(["| message | entry |", "|---|---|", *lines])


def classes() -> str:
    """Return a table of the exception classes: their general entries, and the entries that they appear in."""
    by_class: dict[str, list[dict[str, Any]]] = {}
    for found in entries():
        # A message may quote the error of another rank.
        for name in {found["error"], *re.findall(r"\b(?:Rank|Group)[A-Z]\w*Error\b", found["message"])}:
            by_class.setdefault(name, []).append(found)
    general = {name: cls for name, cls in vars(errors).items() if _is_public_error(cls)}
    lines = []
    for name in sorted({*general, *by_class}):
        entry, meaning = error_index.general_entry(name), ""
        if name in general:
            meaning = (general[name].__doc__ or "").partition("\n")[0]
        links = ", ".join(map(_link, by_class.get(name, ())))
        lines.append(f'| <span id="{entry}"></span>`{entry}` | `{name}` | {meaning} | {links} |')
    return "\n".join(["| id | exception | meaning | entries |", "|---|---|---|---|", *lines])


def _is_public_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Exception) and not value.__name__.startswith("_")


def _entry(found: dict[str, Any]) -> str:
    first, *others = found["calls"]
    lines = [
        f"({found['id']})=",
        f"## {found['title']}",
        "",
        f"**Id** `{found['id']}` · **raises** `{found['error']}` · **names** {found['culprit']}.",
        "",
        f"**Cause.** {found['cause']}",
        "",
        f"**Cure.** {found['cure']}" + (f" See {{doc}}`/{found['page']}`." if found["page"] else ""),
        "",
        *([HANG, ""] if found["page"] == HANG_PAGE else []),
        WORLDS[found["world"]],
        "",
        _block("python", first),
        "",
        _block("text", f"{found['error']}: {found['message']}"),
        "",
    ]
    if others:
        summary = f"{len(others)} more calls with this error" if len(others) > 1 else "Another call with this error"
        lines += [f":::{{dropdown}} {summary}", _block("text", "\n\n".join(others)), ":::", ""]
    if found["searches"]:
        lines += [f"Messages elsewhere: {'; '.join(map(_code, found['searches']))}.", ""]
    return "\n".join(lines)


def _block(language: str, text: str) -> str:
    # Messages and calls are long lines: they are shown wrapped.
    return f"````{{code-block}} {language}\n:class: error-text\n\n{text.strip()}\n````"


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _link(found: dict[str, Any]) -> str:
    return f"{{ref}}`{found['title']} <{found['id']}>`"


def fill_in(app: Sphinx, docname: str, content: list[str]) -> None:
    """Add the entries to a page of the index, and the tables to the index."""
    if docname == INDEX or docname.startswith(f"{INDEX}/"):
        app.env.note_dependency(str(RECORD), docname=docname)
    if docname == INDEX:
        content[0] = content[0].replace("<!-- messages -->", messages()).replace("<!-- errors -->", classes())
    elif docname.startswith(f"{INDEX}/"):
        content[0] += "\n" + of_area(docname.rpartition("/")[2])


def setup(app: Sphinx) -> dict[str, Any]:
    """Fill the pages in when they are read."""
    app.connect("source-read", fill_in)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
