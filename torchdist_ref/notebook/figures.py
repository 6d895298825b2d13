"""A matplotlib backend for ranks: draws without a screen, and ``show()`` hands open figures to the notebook.

Ranks select it by ``MPLBACKEND``; matplotlib imports it when a rank imports pyplot. See "Writing your own backend" in
matplotlib's ``backend_template``. How a figure becomes a picture is in `rich`.
"""

from __future__ import annotations

import builtins

from matplotlib import pyplot
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg

FigureCanvas = FigureCanvasAgg
FigureManager = FigureManagerBase


def show(*args: object, **kwargs: object) -> None:
    """Show every open figure in the order in which they were made, and close them."""
    for number in pyplot.get_fignums():
        figure = pyplot.figure(number)
        pyplot.close(figure)
        builtins.display(figure)  # type: ignore[attr-defined]
