"""Execute every notebook of tutorials/ and write copies with their outputs to the folder of the site's pages.

The notebooks in tutorials/ contain no outputs: the site shows the outputs of its own build. A cell that fails stops the
build, unless it has the tag `raises-exception` because it demonstrates the failure.

Usage: python docs/run_tutorials.py [NAME...], where NAME is a notebook's name without its ending; all of them if none
is given.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "tutorials"
TARGETS = ROOT / "docs" / "tutorials"
CELL_SECONDS = 120
COLORS = re.compile(r"\x1b\[[0-9;]*m")


def main(names: list[str]) -> None:
    """Run the named notebooks, or all, and report progress."""
    sources = [SOURCES / f"{name}.ipynb" for name in names] or sorted(SOURCES.glob("*.ipynb"))
    for number, source in enumerate(sources, start=1):
        started = time.monotonic()
        print(f"  notebook {number} of {len(sources)}: {source.name}", flush=True)
        try:
            cells = execute(source, TARGETS / source.name)
        except CellExecutionError as error:
            sys.exit(f"{source.name} failed:\n{COLORS.sub('', str(error))}")
        except (DeadKernelError, AssertionError, KeyboardInterrupt):
            # nbclient ends the kernel on Ctrl-C, and then fails in its own clean-up.
            sys.exit(f"{source.name}: interrupted, or its kernel died; its ranks have ended too")
        print(f"  notebook {number} of {len(sources)}: {cells} cells in {time.monotonic() - started:.1f} s", flush=True)


def execute(source: Path, target: Path) -> int:
    """Run one notebook in its own kernel and write it with its outputs; return the number of cells that ran."""
    notebook = nbformat.read(source, as_version=4)
    codes = [index for index, cell in enumerate(notebook.cells) if cell.cell_type == "code"]

    def report(cell: nbformat.NotebookNode, cell_index: int) -> None:
        print(f"    cell {codes.index(cell_index) + 1} of {len(codes)}", flush=True)

    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(SOURCES)}},
        on_cell_start=lambda cell, cell_index: report(cell, cell_index) if cell_index in codes else None,
        record_timing=False,
        # Without this the kernel logs that it listens on this machine only.
        extra_arguments=["--log-level=CRITICAL"],
    )
    client.execute()
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, target)
    return len(codes)


if __name__ == "__main__":
    main(sys.argv[1:])
