"""IPython magics ``%%spmd``, ``%spmd_get``, ``%spmd_put`` and ``%spmd_stop``.

They parse a line, call the pool and print. Do not add other work here: it belongs to `torchdist_ref.notebook.pool`,
where it can be tested without a notebook.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import sys
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from torchdist_ref.errors import ArgumentError
from torchdist_ref.notebook.display import bundle_of
from torchdist_ref.notebook.output import Item
from torchdist_ref.notebook.pool import RankPool
from torchdist_ref.notebook.request import Progress
from torchdist_ref.notebook.server import METHODS, RankServer

_DEFAULT_WORLD = 4
_ALL = -1
"""Key of the activity of all ranks."""
PROGRESS_METADATA = {"torchdist_ref": "progress"}
"""Metadata of the output that shows what ranks are doing. It is empty in the end, and programs may remove it."""


class SpmdUsageError(ArgumentError):
    """Wrong use of a magic. Unlike IPython's own UsageError, it stops a notebook that runs unattended."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class _MagicParser(argparse.ArgumentParser):
    """Parser of a magic's line. A wrong option fails the cell and does not end the kernel."""

    def __init__(self, magic: str, description: str) -> None:
        super().__init__(prog=magic, description=description, add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise SpmdUsageError(f"{self.prog}: {message}\n{self.format_usage()}".rstrip())

    def parse(self, line: str) -> argparse.Namespace:
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


def _spmd_parser() -> _MagicParser:
    parser = _MagicParser(
        "%%spmd", "Run the cell on every rank; show the output and the value of the last line of each."
    )
    add = parser.add_argument
    add("-n", "--nproc", type=int, metavar="N", help="number of ranks to start (default: 4); optional once they run")
    add("--ranks", type=_rank_list, metavar="R,R", help="ranks whose output is shown (default: all); all run the cell")
    add("--timeout", type=float, metavar="SECONDS", help="time after which unfinished ranks are interrupted and named")
    add("--simulated", action="store_true", help="run it on simulated ranks, in virtual time; they end with the cell")
    add("--seed", type=int, metavar="S", help="order of events of simulated ranks (default: 0)")
    add("--to", metavar="NAME", help="name of the variable that gets the run of simulated ranks")
    add("--start", choices=METHODS, default="fork", help="start method: fork with torch loaded, or spawn a new Python")
    return parser


def _get_parser() -> _MagicParser:
    parser = _MagicParser("%spmd_get", "Fetch a copy of a variable from a rank into this notebook.")
    parser.add_argument("name", help="variable of the rank, or an expression in quotes")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="rank to fetch it from (default: 0)")
    parser.add_argument("--to", metavar="NAME", help="name of the variable in this notebook (default: the same)")
    return parser


def _put_parser() -> _MagicParser:
    parser = _MagicParser("%spmd_put", "Copy a variable of this notebook to every rank.")
    parser.add_argument("name", help="variable of this notebook")
    return parser


def _stop_parser() -> _MagicParser:
    return _MagicParser("%spmd_stop", "Stop the ranks, which deletes their variables; the next %%spmd starts new ones.")


class SpmdMagics:
    """Magics of one notebook, and the ranks that they use.

    Args:
        shell: IPython shell to register them with, or an object with its `register_magic_function`, `user_ns` and
            `display_pub`.
        server: Running rank server. Default None: the first cell starts one.
    """

    def __init__(self, shell: Any, server: RankServer | None = None) -> None:
        self._shell = shell
        self._server = server
        self._pool: RankPool | None = None
        self._displays = itertools.count(1)
        for parser, kind, action in (
            (_spmd_parser(), "cell", self.spmd),
            (_get_parser(), "line", self.get),
            (_put_parser(), "line", self.put),
            (_stop_parser(), "line", self.stop),
        ):
            shell.register_magic_function(_magic(parser, action), kind, parser.prog.lstrip("%"))

    def spmd(self, options: argparse.Namespace, cell: str) -> None:
        """Run a cell."""
        if options.simulated:
            return self._simulate(options, cell)
        for name in ("seed", "to"):
            if getattr(options, name) is not None:
                raise SpmdUsageError(f"%%spmd --{name}: it is for simulated ranks; add --simulated")
        pool = self._pool_for(options.nproc, options.start)
        shown = self._shown(options.ranks, pool.world_size)
        pool.run(
            cell,
            timeout=options.timeout,
            show=lambda rank, item: self._show(rank, item) if rank in shown else None,
            progress=self._progress_display(),
        )

    def _simulate(self, options: argparse.Namespace, cell: str) -> None:
        """Run a cell on simulated ranks, and draw the run."""
        # It loads torch, which a kernel without simulated ranks never does.
        from torchdist_ref.notebook.simulated import run_on_simulated_ranks

        size = _DEFAULT_WORLD if options.nproc is None else options.nproc
        shown = self._shown(options.ranks, size)
        show_progress = self._progress_display()

        def progress(now: float, returned: int) -> None:
            if show_progress is not None:
                show_progress({_ALL: f"virtual time {now:g} s, {returned} of {size} ranks have returned"})

        try:
            run = run_on_simulated_ranks(
                cell,
                size,
                self._shell.user_ns,
                lambda rank, item: self._show(rank, item) if rank in shown else None,
                options.seed or 0,
                options.timeout,
                progress,
            )
        finally:
            if show_progress is not None:
                show_progress({})
        if options.to is not None:
            self._shell.user_ns[options.to] = run
        self._shell.display_pub.publish(data={**bundle_of(run), "text/plain": str(run)})

    def _shown(self, chosen: list[int] | None, size: int) -> Collection[int]:
        """Return the ranks whose output is shown."""
        shown = range(size) if chosen is None else chosen
        if not set(shown) <= set(range(size)):
            raise SpmdUsageError(f"%%spmd --ranks: there are ranks 0 to {size - 1}, got {shown}")
        return shown

    def get(self, options: argparse.Namespace) -> None:
        """Fetch a variable."""
        target = options.to or options.name
        if not target.isidentifier():
            raise SpmdUsageError(f"%spmd_get: {target!r} is not a name for a variable; add --to NAME")
        self._shell.user_ns[target] = self._running("%spmd_get").pull(options.name, options.rank)

    def put(self, options: argparse.Namespace) -> None:
        """Copy a variable to the ranks."""
        if options.name not in self._shell.user_ns:
            raise SpmdUsageError(f"%spmd_put: this notebook has no variable {options.name!r}")
        self._running("%spmd_put").push(options.name, self._shell.user_ns[options.name])

    def stop(self, options: argparse.Namespace | None = None) -> None:
        """Stop the ranks. The server continues, so that the next start is fast."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def close(self) -> None:
        """Stop the ranks and the server."""
        self.stop()
        if self._server is not None:
            self._server.close()
            self._server = None

    def _show(self, rank: int, item: Item) -> None:
        rich = not isinstance(item, str) and len(item) > 1
        text = "" if rich else item if isinstance(item, str) else item["text/plain"]
        for line in text.split("\n"):
            sys.stdout.write(f"[rank {rank}] {line}".rstrip(" ") + "\n")
        if rich:
            self._shell.display_pub.publish(data=item)

    def _progress_display(self) -> Progress | None:
        """Return a function that keeps one output of the cell up to date; None in a terminal, which would repeat it."""
        if getattr(self._shell, "kernel", None) is None:
            return None
        # Updates replace the text of the output that was published first.
        transient, published = {"display_id": f"torchdist_ref-{next(self._displays)}"}, False

        def show(activities: dict[int, str]) -> None:
            nonlocal published
            prefixes = {rank: "" if rank == _ALL else f"[rank {rank}] " for rank in activities}
            text = "\n".join(f"{prefixes[rank]}{activity}" for rank, activity in activities.items())
            sys.stdout.flush()
            self._shell.display_pub.publish(
                data={"text/plain": text}, metadata=PROGRESS_METADATA, transient=transient, update=published
            )
            published = True

        return show

    def _running(self, magic: str) -> RankPool:
        if self._pool is None:
            raise SpmdUsageError(f"{magic}: there are no ranks yet; a %%spmd cell starts them")
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


def _magic(parser: _MagicParser, action: Callable[..., None]) -> Callable[..., None]:
    def magic(text: str, *cell: str) -> None:
        action(parser.parse(text), *cell)

    # IPython shows this for ``%%spmd?``.
    magic.__doc__ = parser.format_help()
    return magic
