"""The magic words: ``%%spmd``, ``%spmd_get``, ``%spmd_put``, ``%spmd_stop``.

They parse a line, call the pool, and print; whatever else a word should do belongs into `torchdist_ref.notebook.pool`, where
it can be tested without a notebook.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import publish_display_data

from torchdist_ref.errors import ArgumentError
from torchdist_ref.notebook.connection import METHODS, RankServer
from torchdist_ref.notebook.pool import RankPool
from torchdist_ref.notebook.turns import Item

_DEFAULT_WORLD = 4


def _rank_list(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be ranks with commas between them, such as 0,2, got {text!r}") from None


class SpmdUsageError(ArgumentError):
    """A magic word was used wrongly. Unlike IPython's own UsageError it stops a notebook that runs by itself."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


@magics_class
class SpmdMagics(Magics):
    """Run cells on persistent ranks; ``%load_ext torchdist_ref.notebook`` makes the words known."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._server: RankServer | None = None
        self._pool: RankPool | None = None

    @magic_arguments()
    @argument("-n", "--nproc", type=int, help="how many ranks to start (default: 4); afterwards it may be left out")
    @argument("--ranks", type=_rank_list, help="whose output to show, such as 0,2 (default: all); all run the cell")
    @argument("--timeout", type=float, help="seconds until ranks that are not through are interrupted and named")
    @argument("--start", choices=METHODS, default="fork", help="how ranks start: forked with torch loaded, or afresh")
    @cell_magic("spmd")
    def spmd(self, line: str, cell: str) -> None:
        """Run the cell on every rank, and show what each of them printed and the value of its last line."""
        options = parse_argstring(self.spmd, line)
        shown = options.ranks
        pool = self._pool_for(options.nproc, options.start)
        if shown is not None and not set(shown) <= set(range(pool.world_size)):
            raise SpmdUsageError(f"%%spmd --ranks: there are ranks 0 to {pool.world_size - 1}, got {shown}")
        pool.run(cell, timeout=options.timeout, show=lambda rank, item: _show(rank, item, shown))

    @magic_arguments()
    @argument("name", help="a variable of the rank, or an expression without spaces")
    @argument("--rank", type=int, default=0, help="the rank that has it (default: 0)")
    @argument("--to", help="what to call it here (default: the same name)")
    @line_magic("spmd_get")
    def spmd_get(self, line: str) -> None:
        """Fetch a copy of a variable from a rank into this notebook."""
        options = parse_argstring(self.spmd_get, line)
        target = options.to or options.name
        if not target.isidentifier():
            raise SpmdUsageError(f"%spmd_get: {target!r} is no name for a variable; add --to NAME")
        self.shell.user_ns[target] = self._running("%spmd_get").pull(options.name, options.rank)

    @magic_arguments()
    @argument("name", help="a variable of this notebook")
    @line_magic("spmd_put")
    def spmd_put(self, line: str) -> None:
        """Copy a variable of this notebook to every rank."""
        options = parse_argstring(self.spmd_put, line)
        if options.name not in self.shell.user_ns:
            raise SpmdUsageError(f"%spmd_put: this notebook has no variable {options.name!r}")
        self._running("%spmd_put").push(options.name, self.shell.user_ns[options.name])

    @line_magic("spmd_stop")
    def spmd_stop(self, line: str = "") -> None:
        """End the ranks and their variables; the next %%spmd starts new ones."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _running(self, word: str) -> RankPool:
        if self._pool is None:
            raise SpmdUsageError(f"{word}: there are no ranks yet; a %%spmd cell starts them")
        return self._pool

    def _pool_for(self, nproc: int | None, method: str) -> RankPool:
        if self._pool is None:
            self._pool = RankPool(_DEFAULT_WORLD if nproc is None else nproc, self._server_for(method))
        if nproc not in (None, self._pool.world_size):
            raise SpmdUsageError(
                f"%%spmd -n {nproc}: {self._pool.world_size} ranks are running. Leave out -n to use them, "
                "or end them with %spmd_stop first."
            )
        return self._pool

    def _server_for(self, method: str) -> RankServer:
        if self._server is not None and (self._server.method != method or not self._server.alive):
            self._server.close()
            self._server = None
        if self._server is None:
            self._server = RankServer(method)
        return self._server


def _show(rank: int, item: Item, shown: list[int] | None) -> None:
    if shown is not None and rank not in shown:
        return
    rich = not isinstance(item, str) and len(item) > 1
    text = "" if rich else item if isinstance(item, str) else item["text/plain"]
    for line in text.split("\n"):
        sys.stdout.write(f"[rank {rank}] {line}".rstrip(" ") + "\n")
    if rich:
        publish_display_data(item)
