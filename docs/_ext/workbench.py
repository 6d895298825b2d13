"""Workbench of algorithms: one directive, and the files that the page needs to run Python in the browser.

Python is Pyodide, which `docs/fetch_pyodide.py` puts into `docs/_build/pyodide`. Without it the site is built all the
same, and the page says that Python is not there.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from html import escape
from pathlib import Path
from typing import Any

import player
import schedule_data
import workbench_run
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from torchdist_ref import schedules

DOCS = Path(__file__).parents[1]
PYODIDE = DOCS / "_build" / "pyodide"
NEEDED = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
START = """from torchdist_ref.schedules import Schedule, carry


def algorithm(world):
    rounds = []
    for step in range(world - 1):  # sums travel around the ring
        rounds.append(tuple(
            carry((rank - 1) % world, rank, ("data", (rank - step - 2) % world), reduce=True)
            for rank in range(world)
        ))
    for step in range(world - 1):  # copies travel around the ring
        rounds.append(tuple(
            carry((rank - 1) % world, rank, ("data", (rank - step - 1) % world))
            for rank in range(world)
        ))
    return Schedule("my all_reduce", world, tuple(rounds), chunks=world)
"""


class WorkbenchDirective(SphinxDirective):
    """Editor, choices and player of the workbench."""

    def run(self) -> list[nodes.Node]:
        """Return the workbench; its script is loaded on this page only."""
        up = "../" * self.env.docname.count("/")
        same = {name: name for name in (*schedules.operations(), *workbench_run.NETWORKS)}
        choices = "".join(
            (
                player.select("operation", "Operation", {name: same[name] for name in schedules.operations()}, ""),
                player.select("ranks", "Ranks", {world: str(world) for world in schedule_data.WORLDS}, 4),
                player.select("size", "Size m", {n: player.byte_size(n) for n in schedule_data.SIZES}, 1 << 20),
                player.select("network", "Network", {name: same[name] for name in workbench_run.NETWORKS}, ""),
            )
        )
        return [nodes.raw("", markup(up, choices), format="html")]


def markup(up: str, choices: str) -> str:
    """Return the workbench as HTML."""
    buttons = "".join(map(player.button, player.BUTTONS))
    return f"""<div class="workbench" data-base="{up}_static/">
<label for="workbench-code">Algorithm, in Python</label>
<textarea id="workbench-code" data-role="code" spellcheck="false" rows="18">{escape(START)}</textarea>
<div class="player-choices">{choices}
<button type="button" class="btn btn-sm btn-primary" data-role="run">Verify, simulate, play</button></div>
<pre class="workbench-said" data-role="said" role="status" tabindex="0">Not run yet. Ctrl+Enter runs it, too.</pre>
<div class="player" role="group" aria-label="Player of your algorithm">
<div class="player-stage" data-role="stage" tabindex="0" role="group" aria-label="Ranks and slots. {player.KEYS}"
 style="min-height: 170px"></div>
<div class="player-controls">{buttons}
<input type="range" data-role="round" min="0" max="0" value="0" aria-label="Rounds completed"></div>
<p class="player-status" data-role="status"></p></div></div>
<script defer src="{up}_static/workbench.js"></script>
"""


def package_files() -> list[Path]:
    """Return the modules of the library that `schedules` consists of and imports, without the library's own `__init__`.

    A new process imports them, below an empty package as in the browser.
    """
    script = (
        "import sys, types; package = sys.modules['torchdist_ref'] = types.ModuleType('torchdist_ref'); "
        "package.__path__ = ['torchdist_ref']; import torchdist_ref.schedules; "
        "print(*(name for name in sys.modules if name.startswith('torchdist_ref.')))"
    )
    command = [sys.executable, "-c", script]
    imported = subprocess.run(command, cwd=DOCS.parent, capture_output=True, text=True, check=True).stdout.split()
    package = DOCS.parent / "torchdist_ref"
    found = {DOCS.parent / Path(*name.split(".")).with_suffix(".py") for name in imported}
    return sorted({path for path in found if path.exists()} | {*(package / "schedules").glob("*.py")})


def write_files(app: Sphinx, error: Exception | None) -> None:
    """Write the package that runs in the browser, and copy Pyodide if it was fetched."""
    if error or app.builder.format != "html":
        return
    extensions = Path(__file__).parent
    files = {str(path.relative_to(DOCS.parent)): path.read_text(encoding="utf-8") for path in package_files()}
    files |= {name: (extensions / name).read_text("utf-8") for name in ("schedule_data.py", "workbench_run.py")}
    folder = Path(app.outdir, "_static", "workbench")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "package.json").write_text(json.dumps(files), encoding="utf-8")
    if PYODIDE.exists():
        target = Path(app.outdir, "_static", "pyodide")
        target.mkdir(parents=True, exist_ok=True)
        for name in NEEDED:
            shutil.copy(PYODIDE / name, target)
    else:
        print("The workbench has no Python: docs/fetch_pyodide.py has not fetched Pyodide.")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive with Sphinx."""
    app.add_directive("workbench", WorkbenchDirective)
    app.connect("build-finished", write_files)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
