"""Ranks of a notebook: after ``%load_ext torchdist_ref.notebook``, ``%%spmd -n 4`` runs a cell on four ranks.

`RankPool` does the work behind the magics and needs no IPython. Ranks are processes that keep their variables until
they are stopped or the kernel ends. From the outside in: `magic` (the magics), `pool` (the Python interface), `request`
(one request and its responses), `server` (the process that starts ranks) and `rank` (the process that runs cells).
`pictures` draws boxes, arrows and timelines for tutorials.
"""

from typing import Any

from torchdist_ref.notebook.pictures import Bar, Drawing, timelines
from torchdist_ref.notebook.pool import RankPool
from torchdist_ref.notebook.report import CellError, CellInterrupted, PoolError, Report
from torchdist_ref.notebook.server import RankServer

__all__ = [
    "Bar",
    "CellError",
    "CellInterrupted",
    "Drawing",
    "PoolError",
    "RankPool",
    "RankServer",
    "Report",
    "load_ipython_extension",
    "timelines",
]


def load_ipython_extension(shell: Any) -> None:
    """Register the magics; IPython calls this on ``%load_ext torchdist_ref.notebook``.

    Args:
        shell: Running IPython shell.
    """
    from torchdist_ref.notebook.magic import SpmdMagics

    SpmdMagics(shell)
