"""Ranks that are started as a program: one by ``mpiexec``, or all those of a checkout that is compared with others.

The checkout may be older than this file. So `torchdist_ref` is the package that comes first on the path, and
`torchdist_ref.benchmark` the folder of this file: all checkouts are measured by the same code, which uses the public
API alone. The ranks of a checkout are forked from one process, which has imported torch and the library.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torchdist_ref
from torchdist_ref.testing import run

TASK, ERROR = "task", "error"
DAY_SECONDS = 86_400.0


def load_benchmark() -> None:
    """Make the folder of this file the package `torchdist_ref.benchmark` of the imported library."""
    here = Path(__file__).parent
    name = "torchdist_ref.benchmark"
    spec = importlib.util.spec_from_file_location(name, here / "__init__.py", submodule_search_locations=[str(here)])
    assert spec is not None and spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


def load_task(folder: str) -> tuple[int, Callable[[int], Any]]:
    """Return the number of ranks and the function of a rank, from what the parent left in the folder."""
    from torchdist_ref.benchmark.rounds import RankContext

    checkout, address, side, program = pickle.loads(Path(folder, TASK).read_bytes())
    imported = Path(str(torchdist_ref.__file__)).resolve()
    if not imported.is_relative_to(Path(checkout).resolve()):
        raise RuntimeError(f"imported {imported}, which is not in the checkout {checkout}")
    return address.world, lambda rank: program(RankContext(address, rank, side))


def leave_error(folder: str, text: str) -> None:
    """Leave the parent the text of an error, unless another rank has left one.

    The text is whole as soon as it has its name: MPI kills the other ranks while they write theirs.
    """
    with tempfile.NamedTemporaryFile("w", dir=folder, encoding="utf-8") as own:
        own.write(text)
        own.flush()
        with suppress(FileExistsError):
            os.link(own.name, os.path.join(folder, ERROR))


def main(folder: str, mpi: bool) -> int:
    """Run the rank of this process, or fork all ranks of a checkout; leave the parent the text of an error."""
    load_benchmark()
    if mpi:
        from mpi4py.MPI import COMM_WORLD
    try:
        world, start = load_task(folder)
        start(COMM_WORLD.rank) if mpi else run(start, world, ranks="processes", init=False, timeout=DAY_SECONDS)
    except Exception as error:
        where = f" on rank {COMM_WORLD.rank}" if mpi else ""
        leave_error(folder, f"{type(error).__name__}{where}: {error}")
        if mpi:
            # The others wait for this rank, and only MPI can end them.
            COMM_WORLD.Abort(1)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], mpi=len(sys.argv) > 2))
