"""Fewer elements in a page: spans that change nothing about their text are dropped, so that browsers lay it out sooner.

Sphinx wraps each word of inline code, and Pygments each name, so that styles can tell them apart. The styles of this
site give names, punctuation and blanks the color of the code around them. A word that a browser may break stays
wrapped, since the wrapper forbids it.

Do not change text here.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

# A word without a character after which a line may break: hyphen, slash, bar, question mark, or a letter beyond ASCII.
WORD = re.compile(r'<span class="pre">([^<>/|?!\-\x80-\U0010ffff]*)</span>')
# Names, punctuation, blanks, and spans without a class; not the empty one that Pygments begins a block with.
PLAIN = re.compile(r'<span(?: class="[npw]")?>([^<>]+)</span>')
# Runs last, when the other extensions have added their parts to the page.
PRIORITY = 900


def lean(html: str) -> str:
    """Return a page without the spans that have no effect.

    >>> lean('<code><span class="pre">a.b</span> <span class="pre">--c</span></code>')
    '<code>a.b <span class="pre">--c</span></code>'
    >>> lean('<pre><span></span><span class="n">x</span><span class="o">=</span></pre>')
    '<pre><span></span>x<span class="o">=</span></pre>'
    """
    return PLAIN.sub(r"\1", WORD.sub(r"\1", html))


def on_page(app: Sphinx, name: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Make the body of a page and its table of contents lean."""
    for part in ("body", "toc"):
        if part in context:
            context[part] = lean(context[part])


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect to Sphinx."""
    app.connect("html-page-context", on_page, priority=PRIORITY)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
