"""Description of each page for search engines, the page for unknown addresses, and the site map.

A description is the first paragraph of a page. `TORCHDIST_REF_SITE_URL`, the address at which the site is published,
gives pages their canonical address and the site its map; without it neither is written.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from docutils import nodes
from sphinx.application import Sphinx

MAX_DESCRIPTION = 300
NOT_FOUND = "404"
UNUSED = ("design-tabs.js", "sphinx_highlight.js")
SOURCES, LISTS = "_modules/index", re.compile(r"</?ul>")


def describe(app: Sphinx, name: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Add the description to a page, and to the page for unknown addresses the folder that its links start from."""
    text = (
        description(doctree)
        if doctree
        else f"{context.get('title', name)}: a page of the documentation of torchdist_ref."
    )
    tags = f'<meta name="description" content="{escape(text)}"/>'
    if name == NOT_FOUND:
        base = urlsplit(app.config.html_baseurl).path or "/"
        tags = f'<base href="{escape(base)}"/><meta name="robots" content="noindex"/>{tags}'
    if name == app.config.root_doc:
        # The landing has no tabs, and no search leads to words on it.
        context["script_files"] = [file for file in context["script_files"] if not str(file.filename).endswith(UNUSED)]
    if name == SOURCES:
        # Sphinx nests lists directly in lists, which HTML forbids. The dotted names show the packages.
        heading, _, items = context["body"].partition("<ul>")
        context["body"] = f"{heading}<ul>{LISTS.sub('', items)}</ul>"
    context["metatags"] = tags + context.get("metatags", "")


def description(doctree: nodes.document) -> str:
    """Return the first paragraph that says enough, on one line, cut at a word."""
    found = (" ".join(paragraph.astext().split()) for paragraph in doctree.findall(nodes.paragraph))
    text = next((text for text in found if len(text) >= 40), "")
    text = text or f"{next(iter(doctree.findall(nodes.title))).astext()}: a page of the documentation of torchdist_ref."
    return text if len(text) <= MAX_DESCRIPTION else text[: MAX_DESCRIPTION - 1].rpartition(" ")[0] + "…"


def map_site(app: Sphinx, error: Exception | None) -> None:
    """Write the site map, if the site's address is known."""
    if error or app.builder.format != "html" or not app.config.html_baseurl:
        return
    base = app.config.html_baseurl.rstrip("/")
    pages = sorted(app.env.found_docs - {NOT_FOUND})
    urls = "".join(f"<url><loc>{escape(f'{base}/{app.builder.get_target_uri(page)}')}</loc></url>" for page in pages)
    head = '<?xml version="1.0" encoding="UTF-8"?>\n<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">'
    text = f"{head}{urls}</urlset>\n"
    Path(app.outdir, "sitemap.xml").write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect to Sphinx."""
    app.connect("html-page-context", describe)
    app.connect("build-finished", map_site)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
