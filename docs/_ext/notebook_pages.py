"""Pages made of notebooks: colors of cells with magics, and alternative texts of pictures.

A cell that begins with ``%%spmd`` is Python after its first line; IPython's lexer takes it for plain text. A picture
without a text gets the title and the description of its drawing, the comment `# Picture: ...` of its cell, or the
heading.
"""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from pygments.lexer import bygroups
from pygments.lexers.python import PythonLexer
from pygments.token import Comment, Keyword
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

MAX_ALT = 300


class NotebookLexer(PythonLexer):
    """Python with the magics of IPython: ``%%magic`` in the first line, ``%magic`` in any."""

    name = "Python with magics"
    aliases: ClassVar = ["ipython3"]
    tokens: ClassVar = {
        **PythonLexer.tokens,
        "root": [(r"(?m)^(%%?\w+)([^\n]*\n?)", bygroups(Keyword, Comment.Special)), *PythonLexer.tokens["root"]],
    }


class DescribePictures(SphinxTransform):
    """Give pictures of notebooks a text for readers who cannot see them."""

    default_priority = 400

    def apply(self, **kwargs: Any) -> None:
        """Visit the pictures of a page below tutorials/."""
        if self.env.docname.startswith("tutorials/"):
            code = ""
            for node in self.document.findall():
                if isinstance(node, nodes.literal_block):
                    code = node.astext()
                elif isinstance(node, nodes.image) and (not node.get("alt") or node["alt"].endswith((".svg", ".png"))):
                    path = Path(self.env.srcdir, node["uri"].lstrip("/"))
                    node["alt"] = described(path) or said_in(code) or heading(node)


def described(path: Path) -> str:
    """Return the title and the description that a drawing has in itself."""
    if path.suffix != ".svg" or not path.exists():
        return ""
    text = path.read_text(encoding="utf-8")
    found = [re.search(rf"<{name}[^>]*>([^<]+)</{name}>", text) for name in ("title", "desc")]
    return " ".join(": ".join(unescape(each[1]) for each in found if each).split())[:MAX_ALT]


def said_in(code: str) -> str:
    """Return the text of a comment that describes the picture of a cell.

    >>> said_in("import math\\n# Picture: two lines that cross.\\nplt.show()")
    'two lines that cross.'
    """
    found = re.search(r"^# Picture: (.+)$", code, re.MULTILINE)
    return found[1] if found else ""


def heading(image: nodes.image) -> str:
    """Return the heading of a picture's section, but not the text above the picture, which readers have just heard."""
    section: nodes.Node | None = image
    while section is not None and not isinstance(section, nodes.section):
        section = section.parent
    return f"Picture: {section[0].astext()}" if section is not None else "Output of the cell above"


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the lexer and the transform with Sphinx."""
    app.add_lexer("ipython3", NotebookLexer)
    app.add_transform(DescribePictures)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
