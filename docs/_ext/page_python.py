"""Python in the browser: the files that pages with Python need, and how large they are.

Python is Pyodide, which `docs/fetch_npm.py` puts into `docs/_build/pyodide`. Without it the site is built all the
same, and the pages say that Python is not there. Each page has a package: modules of the library, unchanged, and
modules of this folder that call them. `docs/_static/page_python.js` runs it in a worker.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

DOCS = Path(__file__).parents[1]
PYODIDE = DOCS / "_build" / "pyodide"
EDITOR = DOCS / "_build" / "prism-code-editor" / "dist"
# Modules of the editor that the workbench imports, and its layout.
EDITOR_MODULES = ("index.js", "prism/languages/python.js")
EDITOR_LAYOUT = "layout.css"
_IMPORTED = re.compile(r'(?:from|import)\s*"(\.[^"]+)"')
NEEDED = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'wasm-unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; object-src 'none'; "
    "base-uri 'self'; form-action 'self'"
)
# Name -> the modules of the library that it imports, and the modules of this folder; its last one has the function.
PACKAGES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "workbench": (("schedules",), ("schedule_data", "workbench_run")),
    "hang": (("debug.verdict", "debug.job_log", "debug.report"), ("hang_run",)),
}


def package_files(modules: Iterable[str]) -> dict[str, str]:
    """Return the source of each module of the library that some modules consist of and import, by its path.

    A new process imports them, below an empty package as in the browser: without the library's own `__init__`, which
    imports torch. The `__init__` of every other package is there, since frames of stacks are recognized by the names.
    """
    imports = "; ".join(f"import torchdist_ref.{module}" for module in modules)
    script = (
        "import sys, types; package = sys.modules['torchdist_ref'] = types.ModuleType('torchdist_ref'); "
        f"package.__path__ = ['torchdist_ref']; {imports}; assert 'torch' not in sys.modules; "
        "print(*(name for name in sys.modules if name.startswith('torchdist_ref.')))"
    )
    command = [sys.executable, "-c", script]
    imported = subprocess.run(command, cwd=DOCS.parent, capture_output=True, text=True, check=True).stdout.split()
    package = DOCS.parent / "torchdist_ref"
    found = {DOCS.parent / Path(*name.split(".")).with_suffix(".py") for name in imported}
    found |= {*package.glob("*/__init__.py")} | {*(package / "schedules").glob("*.py")}
    return {str(path.relative_to(DOCS.parent)): path.read_text("utf-8") for path in sorted(found) if path.exists()}


def package(name: str) -> str:
    """Return the files of a page as JSON: path -> text."""
    modules, own = PACKAGES[name]
    files = package_files(modules)
    files |= {f"{module}.py": (Path(__file__).parent / f"{module}.py").read_text("utf-8") for module in own}
    return json.dumps(files)


def download_text(env: BuildEnvironment) -> str:
    """Return what a page says of the download before it starts."""
    env.note_dependency(str(PYODIDE / NEEDED[0]))
    if not PYODIDE.exists():
        return "This build of the site has no Python for the browser: docs/fetch_npm.py has not fetched it."
    size = sum((PYODIDE / name).stat().st_size for name in NEEDED)
    return f"The first run loads Python into this page: {size / 1e6:.0f} MB, from this site."


def editor_files() -> Iterator[Path]:
    """Yield the modules of the editor that are needed, with all that they import."""
    pending, seen = [EDITOR / name for name in EDITOR_MODULES], set[Path]()
    while pending:
        path = pending.pop()
        if path not in seen:
            seen.add(path)
            yield path
            pending.extend((path.parent / name).resolve() for name in _IMPORTED.findall(path.read_text("utf-8")))


def write_files(app: Sphinx, error: Exception | None) -> None:
    """Write the packages that run in the browser, and copy Pyodide if it was fetched."""
    if error or app.builder.format != "html":
        return
    for name in PACKAGES:
        folder = Path(app.outdir, "_static", name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text(package(name), encoding="utf-8")
    target = Path(app.outdir, "_static", "editor")
    target.mkdir(parents=True, exist_ok=True)
    (target / EDITOR_LAYOUT).write_text("")
    for path in (*editor_files(), EDITOR / EDITOR_LAYOUT) if EDITOR.exists() else ():
        (target / path.relative_to(EDITOR)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target / path.relative_to(EDITOR))
    if PYODIDE.exists():
        target = Path(app.outdir, "_static", "pyodide")
        target.mkdir(parents=True, exist_ok=True)
        for name in NEEDED:
            shutil.copy(PYODIDE / name, target)
    else:
        print("No page has Python: docs/fetch_npm.py has not fetched Pyodide.")


def restrict(app: Sphinx, name: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Let a page with Python send requests to this site alone; the worker that runs Python inherits the rule."""
    if doctree is not None and any('src="' in node and "page_python.js" in node for node in raw_html(doctree)):
        context["metatags"] = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"/>' + context["metatags"]


def raw_html(doctree: nodes.document) -> list[str]:
    """Return the HTML that directives have put into a page."""
    return [node.astext() for node in doctree.findall(nodes.raw)]


def setup(app: Sphinx) -> dict[str, Any]:
    """Write the files when the site is built."""
    app.connect("build-finished", write_files)
    app.connect("html-page-context", restrict)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
