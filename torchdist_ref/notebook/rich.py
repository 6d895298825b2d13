"""What a value looks like in a notebook, computed in the rank that holds it, and sent as a MIME bundle.

Any object may say how it looks, by the methods that IPython looks for (``_repr_svg_`` and its kin, see
https://ipython.readthedocs.io/en/stable/config/integrating.html). Ranks do without IPython, so the table is here.
"""

from __future__ import annotations

import base64
import io
import sys
from typing import Any

Bundle = dict[str, Any]

_METHODS = {
    "image/svg+xml": "_repr_svg_",
    "image/png": "_repr_png_",
    "image/jpeg": "_repr_jpeg_",
    "text/html": "_repr_html_",
    "text/markdown": "_repr_markdown_",
    "text/latex": "_repr_latex_",
}


def bundle_of(value: Any) -> Bundle:
    """Say how a value looks, in every form that it offers.

    Args:
        value: Anything. A matplotlib figure becomes an SVG picture, the same bytes for the same figure.

    Returns:
        Texts by MIME type, with bytes in base64; ``text/plain`` is always among them.

    Example:
        >>> bundle_of([1, 2])
        {'text/plain': '[1, 2]'}
    """
    own = getattr(type(value), "_repr_mimebundle_", None)
    found = own(value, include=None, exclude=None) if own else _by_method(value)
    bundle = dict(found[0] if isinstance(found, tuple) else found)
    return {"text/plain": repr(value)} | {mime: _text(data) for mime, data in bundle.items()}


def _by_method(value: Any) -> Bundle:
    if is_figure(value):
        return {"image/svg+xml": _figure_svg(value)}
    looks = {mime: _call(value, method) for mime, method in _METHODS.items()}
    return {mime: data for mime, data in looks.items() if data is not None}


def _call(value: Any, method: str) -> Any:
    # Looked up on the class: a class, or an object that answers to every name, is not asked how it looks.
    found = getattr(type(value), method, None)
    return found(value) if callable(found) else None


def _text(data: Any) -> Any:
    return base64.b64encode(data).decode("ascii") if isinstance(data, bytes) else data


def is_figure(value: Any) -> bool:
    """Whether this is a matplotlib figure. Asking does not import matplotlib."""
    module = sys.modules.get("matplotlib.figure")
    return module is not None and isinstance(value, module.Figure)


def _figure_svg(figure: Any) -> str:
    import matplotlib

    picture = io.StringIO()
    # Without these two, the picture would differ in every run, and a saved notebook with it.
    with matplotlib.rc_context({"svg.hashsalt": "torchdist_ref"}):
        figure.savefig(picture, format="svg", bbox_inches="tight", metadata={"Date": None})
    return picture.getvalue()
