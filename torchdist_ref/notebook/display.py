"""Display of values: the MIME bundle of a value, computed in the rank, and a matplotlib backend for ranks.

An object may describe itself by IPython's methods, ``_repr_svg_`` and others, see
https://ipython.readthedocs.io/en/stable/config/integrating.html. Ranks run without IPython, so the table is here.
"""

from __future__ import annotations

import base64
import builtins
import io
import sys
from typing import Any

Bundle = dict[str, Any]

# Name of this module as a matplotlib backend, for the environment variable MPLBACKEND.
BACKEND = f"module://{__name__}"
_METHODS = {
    "image/svg+xml": "_repr_svg_",
    "image/png": "_repr_png_",
    "image/jpeg": "_repr_jpeg_",
    "text/html": "_repr_html_",
    "text/markdown": "_repr_markdown_",
    "text/latex": "_repr_latex_",
}


def bundle_of(value: Any) -> Bundle:
    """Return all representations that a value offers.

    Args:
        value: Any object. A matplotlib figure becomes an SVG picture; equal figures give equal bytes.

    Returns:
        Representations by MIME type, bytes in base64. ``text/plain`` is always among them.

    Example:
        >>> bundle_of([1, 2])
        {'text/plain': '[1, 2]'}
    """
    own = getattr(type(value), "_repr_mimebundle_", None)
    found = own(value, include=None, exclude=None) if own else _by_method(value)
    bundle = dict(found[0] if isinstance(found, tuple) else found)
    return {"text/plain": repr(value)} | {mime: _text(data) for mime, data in bundle.items()}


def _by_method(value: Any) -> Bundle:
    figure = sys.modules.get("matplotlib.figure")
    if figure is not None and isinstance(value, figure.Figure):
        return {"image/svg+xml": _figure_svg(value)}
    found = {mime: _call(value, method) for mime, method in _METHODS.items()}
    return {mime: data for mime, data in found.items() if data is not None}


def _call(value: Any, method: str) -> Any:
    # Looked up on the class: a class itself, or an object with every attribute, must not be asked.
    found = getattr(type(value), method, None)
    return found(value) if callable(found) else None


def _text(data: Any) -> Any:
    return base64.b64encode(data).decode("ascii") if isinstance(data, bytes) else data


def _figure_svg(figure: Any) -> str:
    import matplotlib

    picture = io.StringIO()
    # Without the salt and the date, every run would give other bytes, and a saved notebook would change.
    with matplotlib.rc_context({"svg.hashsalt": "torchdist_ref"}):
        figure.savefig(picture, format="svg", bbox_inches="tight", metadata={"Date": None})
    return picture.getvalue()


def __getattr__(name: str) -> Any:
    # matplotlib looks this class up when a rank imports pyplot. See "Writing your own backend" in backend_template.
    if name != "FigureCanvas":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    # Stored, because matplotlib also copies the namespace of this module.
    return globals().setdefault(name, FigureCanvasAgg)


def show(*args: object, **kwargs: object) -> None:
    """Display every open figure in the order of creation and close it; ``pyplot.show`` of this backend."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None or pyplot.get_backend() != BACKEND:
        return
    for number in pyplot.get_fignums():
        figure = pyplot.figure(number)
        pyplot.close(figure)
        builtins.display(figure)  # type: ignore[attr-defined]
