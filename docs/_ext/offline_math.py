"""Formulas as MathML, made when the site is built: no script, no font and no server is needed to read them.

Sphinx's own renderers fetch a script from a server or need a LaTeX installation; browsers have read MathML by
themselves for years. Turned on by `html_math_renderer = "mathml"`.
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator


def inline(self: HTML5Translator, node: nodes.math) -> None:
    """Render a formula in a line of text."""
    self.body.append(f'<span class="formula">{convert(node.astext(), display="inline")}</span>')
    raise nodes.SkipNode


def block(self: HTML5Translator, node: nodes.math_block) -> None:
    """Render a formula on a line of its own."""
    self.body.append(f'<div class="formula" tabindex="0">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the renderer with Sphinx."""
    app.add_html_math_renderer("mathml", inline_renderers=(inline, None), block_renderers=(block, None))
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
