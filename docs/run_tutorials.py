"""Execute every notebook of tutorials/ and write copies with their outputs to the folder of the site's pages.

Each notebook is packed into a zip archive, with the data that its metadata names, and runs from that archive in an
empty folder: a reader who downloads the archive has all that it needs. The notebooks in tutorials/ have no outputs. The
site shows the outputs of its own build, stamped with date, machine and versions. A cell that fails stops the build,
unless it has the tag `raises-exception` because it demonstrates the failure.

A notebook runs again only if its text, its data, or code of the library (docstrings and comments apart) has changed.

Usage: python docs/run_tutorials.py [--backend NAME] [--again | --unexecuted] [NAME...], where NAME is a notebook's name
without its ending; all of them if none is given. ``--backend gloo`` checks the notebooks that can run there, and writes
nothing. So does the environment variable TUTORIAL_DEVICE: ``sim`` or ``cuda`` is the device of tensors that cells make
without naming one. ``--unexecuted`` writes them without outputs, for a quick look at the other pages.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import hashlib
import json
import os
import platform
import re
import sys
import tempfile
import time
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError

from torchdist_ref.notebook.magic import PROGRESS_METADATA

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "tutorials"
TARGETS = ROOT / "docs" / "tutorials"
CACHE = ROOT / "docs" / "_build" / "tutorials"
PACKAGES = ("torchdist_ref", "torch")
CELL_SECONDS = 120
DEVICE_SECONDS = 600
GOOD = ("passed", "skipped")
COLORS = re.compile(r"\x1b\[[0-9;]*m")
# The same bytes for the same files.
ZIP_DATE = (2020, 1, 1, 0, 0, 0)


def main(arguments: list[str]) -> None:
    """Run the named notebooks, or all, and report progress."""
    parser = argparse.ArgumentParser(description="Execute the tutorials.")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--backend", default="ref", help="run those that can on this backend; write nothing")
    parser.add_argument("--again", action="store_true", help="run also what has not changed")
    parser.add_argument("--unexecuted", action="store_true", help="write the notebooks without outputs")
    chosen = parser.parse_args(arguments)
    sources = [SOURCES / f"{name}.ipynb" for name in chosen.names] or sorted(SOURCES.glob("*.ipynb"))
    code, device = fingerprint_of_library(), os.environ.get("TUTORIAL_DEVICE", "cpu")
    for number, source in enumerate(sources, start=1):
        print(f"  notebook {number} of {len(sources)}: {source.name}", flush=True)
        notebook = nbformat.read(source, as_version=4)
        backends = own_metadata(notebook).get("backends", ["ref", "gloo", "nccl"])
        if chosen.backend not in backends:
            report = f"about {' and '.join(backends)}, not run on {chosen.backend}"
        elif device != "cpu":
            report = on_device(source, chosen.backend, device)
        elif chosen.backend != "ref":
            report = run(notebook, source, chosen.backend)
        else:
            report = publish(notebook, source, code, chosen.again, chosen.unexecuted)
        print(f"  notebook {number} of {len(sources)}: {report}", flush=True)


def own_metadata(notebook: nbformat.NotebookNode) -> dict[str, Any]:
    """Return the notebook's metadata for this program.

    It has ``data``, paths to pack; ``backends``, those it can run on; ``on_devices``, false if it is about CPU tensors;
    and ``lesson``, which the page of the tutorials shows.
    """
    return dict(notebook.metadata.get("torchdist_ref", {}))


def publish(notebook: nbformat.NotebookNode, source: Path, code: str, again: bool, unexecuted: bool) -> str:
    """Write the notebook with its outputs, and its archive; run it only if something has changed."""
    TARGETS.mkdir(parents=True, exist_ok=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    packed = pack(source, own_metadata(notebook))
    write(TARGETS / f"{source.stem}.zip", packed)
    if unexecuted:
        notebook.metadata.language_info["pygments_lexer"] = "ipython3"
        write(TARGETS / source.name, f"{nbformat.writes(notebook)}\n".encode())
        return "without outputs"
    key = hashlib.sha256(packed + code.encode()).hexdigest()
    kept = CACHE / f"{source.stem}-{key[:16]}.ipynb"
    report = "unchanged"
    if again or not kept.exists():
        report = run(notebook, source, "ref")
        notebook.cells.append(nbformat.v4.new_markdown_cell(stamp(), id="stamp"))
        for old in CACHE.glob(f"{source.stem}-*.ipynb"):
            old.unlink()
        nbformat.write(notebook, kept)
    write(TARGETS / source.name, kept.read_bytes())
    return report


def write(path: Path, content: bytes) -> None:
    """Write a file unless it has this content: Sphinx reads again what has another time."""
    if not path.exists() or path.read_bytes() != content:
        path.write_bytes(content)


def pack(source: Path, metadata: dict[str, Any]) -> bytes:
    """Return a zip archive of a notebook and its data."""
    paths = [source]
    for name in metadata.get("data", []):
        path = SOURCES / name
        paths += sorted(path.rglob("*")) if path.is_dir() else [path]
    with tempfile.TemporaryFile() as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in paths:
                if path.is_file():
                    info = zipfile.ZipInfo(str(path.relative_to(SOURCES)), ZIP_DATE)
                    archive.writestr(info, path.read_bytes(), zipfile.ZIP_DEFLATED)
        file.seek(0)
        return file.read()


def run(notebook: nbformat.NotebookNode, source: Path, backend: str) -> str:
    """Run a notebook in its own kernel, in a folder that has nothing but its archive; return what to report."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torchdist_ref-tutorial-") as folder:
        archive = Path(folder, "packed.zip")
        archive.write_bytes(pack(source, own_metadata(notebook)))
        with zipfile.ZipFile(archive) as opened:
            opened.extractall(folder)
        archive.unlink()
        try:
            cells = execute(notebook, folder, backend)
        except CellExecutionError as error:
            sys.exit(f"{source.name} failed:\n{COLORS.sub('', str(error))}")
        except (DeadKernelError, AssertionError, KeyboardInterrupt):
            # nbclient ends the kernel on Ctrl-C, and then fails in its own clean-up.
            sys.exit(f"{source.name}: interrupted, or its kernel died; its ranks have ended too")
    return f"{cells} cells in {time.monotonic() - started:.1f} s"


def on_device(source: Path, backend: str, device: str) -> str:
    """Run a notebook's cells on tensors of a device, without Jupyter; return what to report."""
    sys.path.append(str(ROOT))
    from tests.gpu.parts import Setting, executed

    started = time.monotonic()
    cells = executed(source, backend, device, Setting(device, 0).ranks, CELL_SECONDS, DEVICE_SECONDS)
    bad = [f"{cell['name']}: {cell['outcome']}\n{cell['reason']}" for cell in cells if cell["outcome"] not in GOOD]
    if bad:
        sys.exit("\n".join(bad))
    skipped = [cell for cell in cells if cell["outcome"] == "skipped"]
    lines = [f"    {cell['name']}: {cell['reason'].splitlines()[0]}" for cell in skipped]
    return "\n".join([f"{len(cells)} cells on {device} in {time.monotonic() - started:.1f} s", *lines])


def execute(notebook: nbformat.NotebookNode, folder: str, backend: str) -> int:
    """Run the cells, which adds their outputs; return the number of cells that ran."""
    codes = [index for index, cell in enumerate(notebook.cells) if cell.cell_type == "code"]

    def report(cell: nbformat.NotebookNode, cell_index: int) -> None:
        print(f"    cell {codes.index(cell_index) + 1} of {len(codes)}", flush=True)

    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        # Outputs come apart from the end of a cell, on a busy machine later than the 4 s after which they are given up.
        iopub_timeout=CELL_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": folder}},
        on_cell_start=lambda cell, cell_index: report(cell, cell_index) if cell_index in codes else None,
        record_timing=False,
        # Without this the kernel logs that it listens on this machine only.
        extra_arguments=["--log-level=CRITICAL"],
    )
    client.execute(env={**os.environ, "TUTORIAL_BACKEND": backend})
    for index in codes:
        notebook.cells[index].outputs = without_progress(notebook.cells[index].outputs)
    return len(codes)


def without_progress(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Return a cell's outputs without that which showed what the ranks were doing, and the text around it in one."""
    kept: list[nbformat.NotebookNode] = []
    for output in outputs:
        if output.get("metadata", {}) == PROGRESS_METADATA:
            continue
        last = kept[-1] if kept else None
        if last is not None and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            kept.append(output)
    return kept


def stamp() -> str:
    """Return a line of Markdown: when, where and with which versions a notebook ran."""
    today = datetime.datetime.now(datetime.UTC).date()
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    machine = f"{platform.system()} on {platform.machine()} with {os.cpu_count()} cores"
    return f"---\n*Ran on {today.isoformat()}, {machine}, Python {platform.python_version()}, {versions}.*"


def fingerprint_of_library() -> str:
    """Return a text that changes when the library's code changes, or Python's or torch's version, but no docstring."""
    digest = hashlib.sha256(f"{sys.version} {version('torch')} {Path(__file__).read_text('utf-8')}".encode())
    for path in sorted((ROOT / "torchdist_ref").rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                if ast.get_docstring(node, clean=False) is not None:
                    node.body = node.body[1:]
        digest.update(json.dumps([str(path.relative_to(ROOT)), ast.dump(tree)]).encode())
    return digest.hexdigest()


if __name__ == "__main__":
    main(sys.argv[1:])
