"""The magic words: ``%%spmd``, ``%spmd_get``, ``%spmd_put``, ``%spmd_stop``.

They read a line, call the pool, and print; whatever else a word should do belongs into `torchdist_ref.notebook.pool`,
where it can be tested without a notebook.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from torchdist_ref.errors import ArgumentError
from torchdist_ref.notebook.connection import METHODS, RankServer
from torchdist_ref.notebook.pool import RankPool
from torchdist_ref.notebook.turns import Item

_DEFAULT_WORLD = 4


class SpmdUsageError(ArgumentError):
    """A magic word was used wrongly. Unlike IPython's own UsageError it stops a notebook that runs by itself."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class _Line(argparse.ArgumentParser):
    """The options of a magic word. A wrong one is an error of the cell, not the end of the kernel."""

    def __init__(self, word: str, description: str) -> None:
        super().__init__(prog=word, description=description, add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise SpmdUsageError(f"{self.prog}: {message}\n{self.format_usage()}".rstrip())

    def read(self, line: str) -> argparse.Namespace:
        try:
            words = shlex.split(line)
        except ValueError as error:
            self.error(str(error))
        return self.parse_args(words)


def _rank_list(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"must be ranks with commas between them, such as 0,2, got {text!r}")
    return [int(part) for part in parts]


def _spmd_line() -> _Line:
    line = _Line("%%spmd", "Run the cell on every rank, and show what each printed and the value of its last line.")
    add = line.add_argument
    add("-n", "--nproc", type=int, metavar="N", help="how many ranks to start (default: 4); later it may be left out")
    add("--ranks", type=_rank_list, metavar="R,R", help="whose output to show (default: all); all of them run the cell")
    add("--timeout", type=float, metavar="SECONDS", help="until ranks that are not through are interrupted and named")
    add("--start", choices=METHODS, default="fork", help="how ranks start: forked with torch loaded, or afresh")
    return line


def _get_line() -> _Line:
    line = _Line("%spmd_get", "Fetch a copy of a variable from a rank into this notebook.")
    line.add_argument("name", help="a variable of the rank, or an expression in quotes")
    line.add_argument("--rank", type=int, default=0, metavar="R", help="the rank that has it (default: 0)")
    line.add_argument("--to", metavar="NAME", help="what to call it here (default: the same name)")
    return line


def _put_line() -> _Line:
    line = _Line("%spmd_put", "Copy a variable of this notebook to every rank.")
    line.add_argument("name", help="a variable of this notebook")
    return line


def _stop_line() -> _Line:
    return _Line("%spmd_stop", "End the ranks and with them their variables; the next %%spmd starts new ones.")


class SpmdMagics:
    """The magic words, and the ranks that they speak of.

    Args:
        shell: The IPython shell that they are registered with.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._server: RankServer | None = None
        self._pool: RankPool | None = None
        for line, kind, do in (
            (_spmd_line(), "cell", self.spmd),
            (_get_line(), "line", self.get),
            (_put_line(), "line", self.put),
            (_stop_line(), "line", self.stop),
        ):
            shell.register_magic_function(_word(line, do), kind, line.prog.lstrip("%"))

    def spmd(self, options: argparse.Namespace, cell: str) -> None:
        """Run a cell."""
        pool = self._pool_for(options.nproc, options.start)
        shown = range(pool.world_size) if options.ranks is None else options.ranks
        if not set(shown) <= set(range(pool.world_size)):
            raise SpmdUsageError(f"%%spmd --ranks: there are ranks 0 to {pool.world_size - 1}, got {shown}")
        pool.run(cell, timeout=options.timeout, show=lambda rank, item: _show(rank, item) if rank in shown else None)

    def get(self, options: argparse.Namespace) -> None:
        """Fetch a variable."""
        target = options.to or options.name
        if not target.isidentifier():
            raise SpmdUsageError(f"%spmd_get: {target!r} is no name for a variable; add --to NAME")
        self._shell.user_ns[target] = self._running("%spmd_get").pull(options.name, options.rank)

    def put(self, options: argparse.Namespace) -> None:
        """Copy a variable to the ranks."""
        if options.name not in self._shell.user_ns:
            raise SpmdUsageError(f"%spmd_put: this notebook has no variable {options.name!r}")
        self._running("%spmd_put").push(options.name, self._shell.user_ns[options.name])

    def stop(self, options: argparse.Namespace | None = None) -> None:
        """End the ranks; the server stays, so that the next start is quick."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def close(self) -> None:
        """End the ranks and the server."""
        self.stop()
        if self._server is not None:
            self._server.close()
            self._server = None

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
            self.close()
        if self._server is None:
            self._server = RankServer(method)
        return self._server


def _word(line: _Line, do: Callable[..., None]) -> Callable[..., None]:
    def word(text: str, *cell: str) -> None:
        do(line.read(text), *cell)

    # What the notebook shows for ``%%spmd?``.
    word.__doc__ = line.format_help()
    return word


def _show(rank: int, item: Item) -> None:
    rich = not isinstance(item, str) and len(item) > 1
    text = "" if rich else item if isinstance(item, str) else item["text/plain"]
    for line in text.split("\n"):
        sys.stdout.write(f"[rank {rank}] {line}".rstrip(" ") + "\n")
    if rich:
        from IPython import display

        display.display(item, raw=True)  # type: ignore[no-untyped-call]
