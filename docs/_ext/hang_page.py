"""Page "Why does my job hang?": one directive, and the example that the page offers."""

from __future__ import annotations

import json
import shutil
from html import escape
from pathlib import Path
from typing import Any

import error_index
import page_python
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

# Dumps of four ranks: each waits for the next one, and the last one is in other code.
EXAMPLE = Path(__file__).parents[2] / "tests/debug/recorded/test_the_end_of_a_chain_of_waits_is_named.json"


class HangDirective(SphinxDirective):
    """Drop zone, text field and result of the page."""

    def run(self) -> list[nodes.Node]:
        """Return the tool; its scripts are loaded on this page only."""
        up = "../" * self.env.docname.count("/")
        return [nodes.raw("", markup(up, page_python.download_text(self.env)), format="html")]


def markup(up: str, download: str) -> str:
    """Return the tool as HTML."""
    static = f"{up}_static/"
    areas = {found["id"]: found["area"] for found in error_index.entries()}
    return f"""<link rel="stylesheet" href="{static}page_python.css">
<div class="hang" data-base="{static}" data-errors="{up}reference/errors_index"
 data-entries="{escape(json.dumps(areas))}">
<div class="hang-drop" data-role="drop"><label for="hang-files">Drop the dumps of all ranks here, or choose them</label>
<input type="file" id="hang-files" data-role="files" multiple>
<p data-role="chosen">No file yet.</p></div>
<label for="hang-log">Or paste the log of the job</label>
<textarea id="hang-log" data-role="log" spellcheck="false" rows="8"
 placeholder="[rank0]: Traceback (most recent call last): …"></textarea>
<div class="python-buttons">
<button type="button" class="btn btn-sm btn-primary" data-role="explain">Explain</button>
<button type="button" class="btn btn-sm" data-role="stop" disabled>Stop</button>
<button type="button" class="btn btn-sm" data-role="clear">Clear</button>
<button type="button" class="btn btn-sm" data-role="example">Try an example</button></div>
<p class="python-note">{download} Nothing leaves your browser.</p>
<p class="python-said" data-role="said" role="status" tabindex="0">No verdict yet.</p>
<div data-role="found" hidden><p data-role="entries"></p>
<div data-role="timeline"></div>
<div class="hang-table" data-role="table" tabindex="0" role="group" aria-label="Table of the verdict"></div>
<div data-role="skipped"></div></div></div>
<script defer src="{static}page_python.js"></script>
<script defer src="{static}hang.js"></script>
"""


def copy_example(app: Sphinx, error: Exception | None) -> None:
    """Copy the example's dumps to where the page finds them."""
    if error is None and app.builder.format == "html":
        folder = Path(app.outdir, "_static", "hang")
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(EXAMPLE, folder / "example.json")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive with Sphinx."""
    app.add_directive("hang", HangDirective)
    app.connect("build-finished", copy_example)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
