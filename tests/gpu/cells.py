"""Notebook runner without Jupyter: the code cells of a tutorial in order, in one namespace, with their outputs as text.

``python -m tests.gpu.cells NOTEBOOK EVENTS [--backend NAME] [--device NAME] [--ranks N]`` runs one notebook. It writes
a line of JSON at the start and at the end of each cell, so that a crash loses no cell that has ended. ``%%spmd`` cells
go through `torchdist_ref.notebook`, which needs no IPython. A cell that needs a missing package, CPU tensors or a
skipped cell is skipped with the reason.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import faulthandler
import importlib
import importlib.util
import io
import json
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.gpu.supervise import Events
from torchdist_ref.notebook import CellError
from torchdist_ref.notebook.display import BACKEND, bundle_of, show
from torchdist_ref.notebook.rank import CellFailure, run_cell

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
CELL_SECONDS = 60.0
# Ranks of a cell are interrupted this much earlier than the whole process ends, so that the next cell can run.
SPARE_SECONDS = 15.0
OUTPUT_CHARACTERS = 20_000
LINE_MAGIC = re.compile(r"^([ \t]*)%(\w+)[ \t]*(.*)$", re.MULTILINE)
RANKS_OPTION = re.compile(r"-n\s*(\d+)")
MISSING = re.compile(r"ModuleNotFoundError: (?:No module named '|import of )([\w.]+)")
OTHER_BACKEND = re.compile(r"UnsupportedError: .*backend '(gloo|mpi)' works on tensors of ")
# Words of torch's error where NumPy could not be imported when torch was.
WITHOUT_NUMPY = "Numpy is not available"
# Words of torch's errors when tensors, or generators, of the CPU and of a device meet.
MIXED_DEVICES = (
    "device type tensor to numpy",
    "all tensors to be on the same device",
    "device type for generator but found",
    "Expected all tensors to be on",
    "draws numbers for tensors there",
)
# Run in each new rank, and in the notebook's own process. The default tensor type, which torch has for its own devices
# only, holds in the threads of autograd too.
PRELUDE = """
import torch as _torch
if {device!r} == "sim":
    __import__("importlib").import_module("torchdist_ref.testing.simulated_device").install()
if {device!r} != "cpu":
    _index = int(__import__("os").environ.get("RANK", 0)) % _torch.accelerator.device_count()
    _torch.accelerator.set_device_index(_index)
    if {device!r} == "cuda":
        _torch.set_default_tensor_type("torch.cuda.FloatTensor")
_torch.set_default_device({device!r})
class _Generator(_torch.Generator):
    def __new__(cls, device=None):
        return super().__new__(cls, device=device or {device!r})
if {device!r} != "cpu":
    _torch.Generator = _Generator
"""


@dataclass
class Cell:
    """Result of one cell.

    Attributes:
        number: Number among the code cells, from 1.
        outcome: ``passed``, ``failed`` or ``skipped``.
        seconds: Time that it took.
        ranks: Number of ranks that ran it; 0 for a cell of the notebook's own process.
        output: Text that it printed, and the values that it displayed, as text.
        reason: Error or reason of the skip; empty if it passed.
    """

    number: int
    outcome: str
    seconds: float
    ranks: int
    output: str
    reason: str = ""


class Shell:
    """Part of IPython's shell that the magics use, for a program that runs the cells of one notebook.

    Args:
        device: Device of tensors that cells make without naming one.
        ranks: Largest number of ranks; a cell that asks for more gets so many.
        seconds: Time for a cell of ranks.

    Attributes:
        user_ns: Variables of the notebook.
        display_pub: This object, which has `publish`.
        device: The argument.
        asked: Number of ranks that the notebook asked for last.
        world: Number of ranks that run; 0 if none do.
    """

    def __init__(self, device: str, ranks: int, seconds: float = CELL_SECONDS) -> None:
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        self.user_ns = main.__dict__
        self.display_pub = self
        self.asked = self.world = 0
        self.device, self._limit, self._seconds = device, ranks, seconds
        self._magics: dict[str, Callable[..., None]] = {"load_ext": self._load, "writefile": self._writefile}
        builtins.display = self.display  # type: ignore[attr-defined]
        self.user_ns["get_ipython"] = lambda: self
        exec(PRELUDE.format(device=device), {"__name__": "prelude"})

    def register_magic_function(self, function: Callable[..., None], kind: str, name: str) -> None:
        """Add a magic."""
        self._magics[name] = function

    def publish(self, data: Mapping[str, Any]) -> None:
        """Show a value that has several representations: as text, with the names of the others."""
        others = ", ".join(sorted(kind for kind in data if kind != "text/plain"))
        print(data["text/plain"], f"[{others}]" if others else "", sep=" " if others else "")

    def display(self, *values: Any) -> None:
        """Show values, as a notebook does."""
        for value in values:
            self.publish(bundle_of(value))

    def run_line_magic(self, name: str, line: str) -> None:
        """Run a magic of one line."""
        self._magic(name)(line)
        if name == "spmd_stop":
            self.asked = self.world = 0

    def run(self, source: str, name: str) -> None:
        """Run the text of a cell."""
        if not source.startswith("%%"):
            # Names in braces are replaced by their values, as in IPython.
            code = LINE_MAGIC.sub(
                lambda found: f"{found[1]}get_ipython().run_line_magic({found[2]!r}, f{found[3]!r})", source
            )
            run_cell(code, name, self.user_ns, self.display)
            show()
            return
        line, _, body = source[2:].partition("\n")
        magic, _, options = line.partition(" ")
        if magic == "spmd":
            options = self._options(options)
            if not self.world:
                self.world = min(self.asked, self._limit)
                self._magic(magic)(options, PRELUDE.format(device=self.device))
        self._magic(magic)(options, body)

    def _options(self, line: str) -> str:
        """Return the line of ``%%spmd`` with at most as many ranks as there may be, and with a time-out."""
        found = RANKS_OPTION.search(line)
        if not self.world:
            self.asked = int(found[1]) if found else 4
            line = RANKS_OPTION.sub("", line) + f" -n {min(self.asked, self._limit)}"
        elif found:
            line = RANKS_OPTION.sub("", line)
        return (
            line
            if "--timeout" in line
            else f"{line} --timeout {self._seconds - min(SPARE_SECONDS, self._seconds * 3 / 4)}"
        )

    def _magic(self, name: str) -> Callable[..., None]:
        if name not in self._magics:
            raise NameError(f"this runner has no magic {name!r}")
        return self._magics[name]

    @staticmethod
    def _writefile(line: str, body: str) -> None:
        Path(line.strip()).write_text(body, encoding="utf-8")

    def _load(self, line: str) -> None:
        importlib.import_module(line.strip()).load_ipython_extension(self)


def code_cells(notebook: Path) -> list[tuple[str, list[str]]]:
    """Return the text and the tags of each code cell."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [
        ("".join(cell["source"]), cell["metadata"].get("tags", [])) for cell in cells if cell["cell_type"] == "code"
    ]


def run_notebook(notebook: Path, shell: Shell, events: Events, seconds: float = CELL_SECONDS) -> list[Cell]:
    """Run all cells in this process; the process ends if a cell takes more than so many seconds."""
    results: list[Cell] = []
    for number, (source, tags) in enumerate(code_cells(notebook), start=1):
        events.write(event="start", number=number)
        faulthandler.dump_traceback_later(seconds, exit=True)
        result = _run(number, source, tags, shell, any(each.outcome == SKIPPED for each in results))
        faulthandler.cancel_dump_traceback_later()
        events.write(event="end", **asdict(result))
        results.append(result)
    return results


def _run(number: int, source: str, tags: list[str], shell: Shell, after_skip: bool) -> Cell:
    output, started = io.StringIO(), time.monotonic()
    outcome, reason = PASSED, ""
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            shell.run(source, f"<cell {number}>")
        except BaseException as error:
            # A cell may raise SystemExit or KeyboardInterrupt too, and the next one runs all the same.
            text = trace_of(error)
            if "raises-exception" in tags:
                print(text)
            else:
                outcome, reason = judged(text, source, after_skip, shell)
                if "times" in tags and shell.device == "sim" and "AssertionError" in text:
                    outcome, reason = SKIPPED, "compares times, and a simulated device shows none"
    printed = output.getvalue()
    if len(printed) > OUTPUT_CHARACTERS:
        printed = printed[:OUTPUT_CHARACTERS] + f"\n[{len(printed) - OUTPUT_CHARACTERS} more characters]"
    ranks = shell.world if source.startswith("%%spmd") else 0
    return Cell(number, outcome, round(time.monotonic() - started, 3), ranks, printed, reason)


def trace_of(error: BaseException) -> str:
    """Return the traceback of a cell's error; of an error of ranks, their tracebacks."""
    if isinstance(error, CellError):
        return f"{error.report.traces()}{type(error).__name__}: {error}"
    return CellFailure.of(error).trace if error.__traceback__ else "".join(traceback.format_exception_only(error))


def judged(trace: str, source: str, after_skip: bool, shell: Any) -> tuple[str, str]:
    """Decide whether an error is a failure, or comes from something that this machine or run lacks.

    Args:
        trace: Traceback.
        source: Text of the cell.
        after_skip: Whether a cell before was skipped.
        shell: Shell, for the number of ranks.

    Returns:
        Outcome and reason. Mixed devices are no failure if the cell does it, and one if the library does.
    """
    missing = MISSING.search(trace)
    if missing and missing[1].split(".")[0] != "torchdist_ref":
        return SKIPPED, f"needs the package {missing[1]}"
    if WITHOUT_NUMPY in trace and not importlib.util.find_spec("numpy"):
        # A tensor's `numpy` and what uses it import nothing.
        return SKIPPED, "needs the package numpy"
    if other := OTHER_BACKEND.search(trace):
        return SKIPPED, f"backend {other[1]!r} takes no tensors of this device"
    if after_skip and "NameError" in trace:
        return SKIPPED, "needs a cell that was skipped"
    if any(words in trace for words in MIXED_DEVICES) and f"torchdist_ref{os.sep}" not in trace:
        return SKIPPED, f"needs CPU tensors\n{trace}"
    if shell.world < shell.asked and source.startswith("%%spmd"):
        return FAILED, f"written for {shell.asked} ranks, ran on {shell.world}\n{trace}"
    return FAILED, trace


def main(arguments: list[str]) -> None:
    """Run a notebook in an empty folder with its data."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.cells", description=__doc__)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("events", type=Path)
    parser.add_argument("--backend", default="ref")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--cell-seconds", type=float, default=CELL_SECONDS)
    chosen = parser.parse_args(arguments)
    notebook, events = chosen.notebook.resolve(), Events(chosen.events.resolve())
    os.environ["TUTORIAL_BACKEND"] = chosen.backend
    if importlib.util.find_spec("matplotlib"):
        os.environ["MPLBACKEND"] = BACKEND
    metadata = json.loads(notebook.read_text("utf-8"))["metadata"].get("torchdist_ref", {})
    data = metadata.get("data", [])
    # Some tutorials are about tensors of the CPU: they run there, so that their other lessons are tried too.
    device = chosen.device if metadata.get("on_devices", True) else "cpu"
    with tempfile.TemporaryDirectory(prefix="torchdist_ref-cells-") as folder:
        for name in data:
            source = notebook.parent / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, Path(folder, name))
        os.chdir(folder)
        run_notebook(notebook, Shell(device, chosen.ranks, chosen.cell_seconds), events, chosen.cell_seconds)
        os.chdir("/")


if __name__ == "__main__":
    main(sys.argv[1:])
