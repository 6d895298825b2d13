"""Ranks in a notebook: ``%load_ext torchdist_ref.notebook``, then ``%%spmd -n 4`` runs a cell on four of them.

`RankPool` is what is behind the magic words, and works without IPython. The ranks are processes that stay, with their
variables, until they are stopped or the kernel ends. From the outside in: `magic` (the words), `pool` (what a user can
ask), `conversation` (one request and its answers), `connection` and `server` (the process that starts ranks), `rank`
and `cell` (the other side).
"""

from typing import Any

from torchdist_ref.notebook.connection import RankServer
from torchdist_ref.notebook.pool import RankPool
from torchdist_ref.notebook.report import CellError, CellInterrupted, PoolError, Report

__all__ = ["CellError", "CellInterrupted", "PoolError", "RankPool", "RankServer", "Report", "load_ipython_extension"]


def load_ipython_extension(shell: Any) -> None:
    """Register the magic words; IPython calls this on ``%load_ext torchdist_ref.notebook``.

    Args:
        shell: The running IPython shell.
    """
    from torchdist_ref.notebook.magic import SpmdMagics

    SpmdMagics(shell)
