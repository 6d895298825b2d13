"""Pages made of notebooks: colors of cells with magics, and alternative texts of pictures.

A cell that begins with ``%%spmd`` is Python after its first line; IPython's lexer takes it for plain text. A picture
without a text gets the title of its drawing, or the heading and the sentence above it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from pygments.lexer import bygroups
from pygments.lexers.python import PythonLexer
from pygments.token import Comment, Keyword
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

MAX_ALT = 160


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
            for image in self.document.findall(nodes.image):
                if not image.get("alt") or image["alt"].endswith((".svg", ".png")):
                    image["alt"] = title_of(Path(self.env.srcdir, image["uri"].lstrip("/"))) or sentence_above(image)


def title_of(path: Path) -> str:
    """Return the title that a drawing has in itself."""
    if path.suffix != ".svg" or not path.exists():
        return ""
    found = re.search(r"<title[^>]*>([^<]+)</title>", path.read_text(encoding="utf-8"))
    return " ".join(found[1].split()) if found else ""


def sentence_above(image: nodes.image) -> str:
    """Return the heading of a picture's section and the end of the text above the picture."""
    section: nodes.Node | None = image
    while section is not None and not isinstance(section, nodes.section):
        section = section.parent
    if section is None:
        return "Output of the cell above"
    title = section[0].astext()
    above = [node.astext() for node in section.children if isinstance(node, nodes.paragraph)]
    text = " ".join(f"{title}. {above[-1] if above else ''}".split())
    return f"Picture: {text}"[:MAX_ALT]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the lexer and the transform with Sphinx."""
    app.add_lexer("ipython3", NotebookLexer)
    app.add_transform(DescribePictures)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
