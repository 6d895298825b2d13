"""Pictures of profiled steps, from runs on two ranks while the site is built.

`.. profile-picture:: timeline`
    The drawing that the examples of the page on our timeline make.
`.. profile-picture:: profiler`
    The trace that torch.profiler writes for one step, drawn as a trace viewer shows it.

Both runs are in one process beside Sphinx, whose threads must not be forked.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from site_directives import picture, run_before_reading
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from torchdist_ref.schedules import drawing

PAGE = Path(__file__).parents[1] / "how-to" / "step_timeline.md"
CAPTIONS = {
    "timeline": "The drawing of the program above, on two ranks of the machine that built this page",
    "profiler": "The trace of one training step on rank 0 of two. Operators are above those that they call",
}
WIDTH, BAR, CHARACTER, DEPTH = 720.0, 18.0, 7.0, 3
Event = dict[str, Any]


def timeline() -> str:
    """Run the examples of the page, and return the drawing that they make."""
    names: dict[str, Any] = {"print": lambda *_: None}
    for code in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        exec(code, names)
    return str(names["drawing"])


def profiled(rank: int, folder: str) -> None:
    """Train three steps of a small model, and write the trace of the last."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    import torchdist_ref as dist

    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256) for _ in range(4)]
    model = dist.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.full((64, 256), rank + 1.0)).square().mean().backward()
        optimizer.step()

    step()
    step()
    # The first profile of a process loads the profiler in the middle of the step.
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            step()
    profiler.export_chrome_trace(f"{folder}/rank{rank}.json")


def profiler() -> str:
    """Profile a step on two ranks, and return the drawing of rank 0's trace."""
    # The profiler and the optimizer load this in each rank otherwise, which took all of the ranks' time on a busy host.
    importlib.import_module("torch._dynamo")

    from torchdist_ref.testing import run

    with tempfile.TemporaryDirectory() as folder:
        run(profiled, 2, folder, ranks="processes")
        found = json.loads(Path(folder, "rank0.json").read_text(encoding="utf-8"))["traceEvents"]
    return draw(
        [event for event in found if event.get("ph") == "X" and event.get("cat") in ("cpu_op", "user_annotation")]
    )


def rows(events: list[Event]) -> list[tuple[str, list[Event]]]:
    """Assign the events of each kind to rows by the number of events around them, the outermost first.

    >>> outer, inner = {"name": "mean", "ts": 0, "dur": 9}, {"name": "sum", "ts": 2, "dur": 3}
    >>> [(name, len(row)) for name, row in rows([inner, outer, {"name": "ref:barrier", "ts": 5, "dur": 8}])]
    [('operators', 1), ('', 1), ('calls', 1)]
    """
    found: list[tuple[str, list[Event]]] = []
    for name in ("operators", "calls"):
        levels: list[list[Event]] = []
        kind = [event for event in events if event["name"].startswith("ref:") == (name == "calls")]
        for event in sorted(kind, key=lambda event: (event["ts"], -event["dur"])):
            around = [row for row in levels if row[-1]["ts"] + row[-1]["dur"] > event["ts"]]
            if len(around) == len(levels):
                levels.append([])
            levels[len(around)].append(event)
        found += [("" if depth else name, row) for depth, row in enumerate(levels[:DEPTH])]
    return found


def draw(events: list[Event]) -> str:
    """Return the events as SVG; calls of this library have a color of their own."""
    begin = min(event["ts"] for event in events)
    total = max(event["ts"] + event["dur"] for event in events) - begin
    left, y, parts = 72.0, 8.0, []
    for name, row in rows(events):
        parts.append(drawing.text(4, y + BAR - 5, name, anchor="start"))
        for event in row:
            x, width = left + WIDTH * (event["ts"] - begin) / total, max(WIDTH * event["dur"] / total, 1.0)
            color = drawing.ORANGE if event["name"].startswith("ref:") else drawing.BLUE
            words = drawing.tip(f"{event['name']}: {event['dur']:.0f} µs")
            parts.append(drawing.element("rect", words, x=x, y=y, width=width, height=BAR - 2, fill=color, rx=2))
            short = event["name"].rpartition(":")[2].strip()
            if width >= CHARACTER * len(short):
                style = {"fill": "#fff", "font_size": "11", "pointer_events": "none"}
                parts.append(drawing.text(x + width / 2, y + BAR - 6, short, **style))
        y += BAR
    parts += drawing.time_axis(left, WIDTH, y + 4, total / 1e6, "start")
    about = "Rows of operators by depth, then the calls of this library. Operators are blue, calls orange."
    return drawing.document(left + WIDTH + 20, y + 34, "Trace of one training step", about, parts)


@cache
def drawings() -> dict[str, str]:
    """Return both drawings, from a process of their own."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "profile_pictures"]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if answer.returncode:
        raise RuntimeError(f"the profiled programs failed:\n{answer.stderr[-3000:]}")
    found: dict[str, str] = json.loads(answer.stdout.splitlines()[-1])
    return found


class ProfilePictureDirective(SphinxDirective):
    """Drawing of one profiled step."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the figure."""
        name = self.arguments[0]
        self.env.note_dependency(__file__)
        # A phone shows a sentence in place of the drawing, as for the picture of the layers.
        return [picture(drawings()[name].replace("<svg ", "<svg class='step' ", 1), CAPTIONS[name])]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive with Sphinx."""
    app.add_directive("profile-picture", ProfilePictureDirective)
    run_before_reading(app, "profile-picture", drawings)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    print(json.dumps({"timeline": timeline(), "profiler": profiler()}))
