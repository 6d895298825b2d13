"""A few words of SVG: text in, text out, the same bytes every time.

Colours are middle tones with enough contrast on white and on black, so that a picture can be read on any page
without knowing the reader's theme. Every picture has a title and a description for those who cannot see it,
and whatever is drawn small has a tooltip.

Do not add here: what a schedule or a trace looks like (`draw`, `timeline`).
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from html import escape

GREY, BLUE, ORANGE = "#767676", "#2b7bb9", "#c2571a"
FONT = "font-family='ui-monospace,Menlo,Consolas,monospace' font-size='11'"


def number(value: float) -> str:
    """A coordinate, short.

    >>> number(2.0), number(1 / 3)
    ('2', '0.33')
    """
    return f"{value:.2f}".rstrip("0").rstrip(".")


def element(name: str, *inner: str, **attributes: object) -> str:
    """One element; underscores in attribute names become hyphens.

    >>> element("line", x1=0, stroke_width=2.5)
    "<line x1='0' stroke-width='2.5'/>"
    """
    parts = [name, *(f"{key.replace('_', '-')}='{_value(value)}'" for key, value in attributes.items())]
    return f"<{' '.join(parts)}>{''.join(inner)}</{name}>" if inner else f"<{' '.join(parts)}/>"


def _value(value: object) -> str:
    return number(value) if isinstance(value, float) else escape(str(value))


def tip(text: str) -> str:
    """A tooltip, to put inside an element."""
    return element("title", escape(text))


def text(x: float, y: float, words: str, anchor: str = "middle", fill: str = GREY, **attributes: object) -> str:
    """A line of text whose baseline is at ``y``."""
    return element("text", escape(words), x=x, y=y, text_anchor=anchor, fill=fill, **attributes)


def arrow(x1: float, y1: float, x2: float, y2: float, colour: str, tooltip: str) -> str:
    """A line with a head at its end."""
    length = max(((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5, 1e-9)
    ux, uy = (x2 - x1) / length, (y2 - y1) / length
    bx, by = x2 - 8 * ux, y2 - 8 * uy
    corners = ((x2, y2), (bx - 3 * uy, by + 3 * ux), (bx + 3 * uy, by - 3 * ux))
    head = element("polygon", points=" ".join(f"{number(x)},{number(y)}" for x, y in corners), fill=colour)
    line = element("line", x1=x1, y1=y1, x2=bx, y2=by, stroke=colour, stroke_width=1.5)
    return element("g", tip(tooltip), line, head)


def document(width: float, height: float, title: str, description: str, parts: Iterable[str]) -> str:
    """A whole picture, as one string.

    Args:
        width: in pixels; pictures shrink with the page but do not grow.
        height: in pixels.
        title: its name, for screen readers and as a tooltip.
        description: what it shows, in a sentence or two.
        parts: elements.
    """
    body = "\n".join(parts)
    # Several pictures may share one page, so that ids must differ: they are made from the content.
    mark = sha256((title + description + body).encode()).hexdigest()[:8]
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {number(width)} {number(height)}' "
        f"width='{number(width)}' style='max-width:100%;height:auto' role='img' "
        f"aria-labelledby='t{mark} d{mark}' {FONT}>"
    )
    named = f"<title id='t{mark}'>{escape(title)}</title>\n<desc id='d{mark}'>{escape(description)}</desc>"
    return f"{head}\n{named}\n{body}\n</svg>\n"
