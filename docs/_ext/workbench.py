"""Workbench of algorithms: one directive, and the algorithms that a reader may start from.

`page_python` brings Python into the page, and `docs/_static/workbench.js` is the page's script.
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

import page_python
import player
import schedule_data
import workbench_run
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from torchdist_ref import schedules

# Title -> the operation, and the code of an algorithm that a reader may start from. All are right on 2 to 16 ranks.
STARTS: dict[str, tuple[str, str]] = {
    "all_reduce: ring": (
        "all_reduce",
        """from torchdist_ref.schedules import Schedule, carry


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
""",
    ),
    "all_reduce: binomial tree": (
        "all_reduce",
        """from torchdist_ref.schedules import Schedule, carry


def algorithm(world):
    up, distance = [], 1
    while distance < world:  # in each round, half of the ranks that have a sum pass it on
        up.append(tuple(
            carry(rank + distance, rank, ("data", 0), reduce=True)
            for rank in range(0, world - distance, 2 * distance)
        ))
        distance *= 2
    # The result goes back along the same edges, in the opposite order.
    down = [tuple(carry(move.dst, move.src, ("data", 0)) for move in moves) for moves in reversed(up)]
    return Schedule("my all_reduce", world, tuple(up + down))
""",
    ),
    "all_reduce: recursive doubling": (
        "all_reduce",
        """from torchdist_ref.schedules import Schedule, carry


def algorithm(world):
    data, power = ("data", 0), 1 << (world.bit_length() - 1)
    rounds = []
    if power < world:  # ranks beyond a power of two first give their values to others
        rounds.append(tuple(carry(rank, rank - power, data, reduce=True) for rank in range(power, world)))
    distance = 1
    while distance < power:  # two ranks exchange what they have, and both add
        rounds.append(tuple(carry(rank ^ distance, rank, data, reduce=True) for rank in range(power)))
        distance *= 2
    if power < world:
        rounds.append(tuple(carry(rank - power, rank, data) for rank in range(power, world)))
    return Schedule("my all_reduce", world, tuple(rounds))
""",
    ),
    "broadcast: binomial tree": (
        "broadcast",
        """from torchdist_ref.schedules import Schedule, carry


def algorithm(world):
    rounds, have = [], 1
    while have < world:  # rank 0 is the root; each rank that has the value passes it on
        rounds.append(tuple(
            carry(rank, rank + have, ("data", 0))
            for rank in range(min(have, world - have))
        ))
        have *= 2
    return Schedule("my broadcast", world, tuple(rounds))
""",
    ),
    "all_gather: ring": (
        "all_gather",
        """from torchdist_ref.schedules import Move, Schedule, carry


def algorithm(world):
    rounds = [tuple(Move(rank, rank, ("in", 0), ("out", rank)) for rank in range(world))]
    for step in range(world - 1):  # each rank passes on what it got last
        rounds.append(tuple(
            carry((rank - 1) % world, rank, ("out", (rank - step - 1) % world))
            for rank in range(world)
        ))
    return Schedule("my all_gather", world, tuple(rounds))
""",
    ),
    "all_to_all: pairwise exchange": (
        "all_to_all",
        """from torchdist_ref.schedules import Move, Schedule


def algorithm(world):
    rounds = []
    for step in range(world):  # in each round, every rank sends one block and receives one
        rounds.append(tuple(
            Move(rank, (rank + step) % world, ("in", (rank + step) % world), ("out", rank))
            for rank in range(world)
        ))
    return Schedule("my all_to_all", world, tuple(rounds))
""",
    ),
}
START = STARTS["all_reduce: ring"][1]


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
        first = player.select("start-from", "Start from", {title: title for title in STARTS}, "")
        download = page_python.download_text(self.env)
        return [nodes.raw("", markup(up, first, choices, download), format="html")]


def markup(up: str, first: str, choices: str, download: str) -> str:
    """Return the workbench as HTML."""
    buttons = "".join(map(player.button, player.BUTTONS))
    static = f"{up}_static/"
    return f"""<link rel="stylesheet" href="{static}page_python.css">
<link rel="stylesheet" href="{static}editor/layout.css">
<div class="workbench" data-base="{static}" data-starts="{escape(json.dumps(STARTS))}">
<div class="player-choices">{first}</div>
<label for="workbench-code">Algorithm, in Python</label>
<div data-role="editor">
<textarea id="workbench-code" data-role="code" spellcheck="false" rows="18">{escape(START)}</textarea></div>
<div class="player-choices">{choices}</div>
<div class="python-buttons">
<button type="button" class="btn btn-sm btn-primary" data-role="run">Verify, simulate, play</button>
<button type="button" class="btn btn-sm" data-role="stop" disabled>Stop</button></div>
<p class="python-note">{download} Ctrl+Enter runs the algorithm, too.</p>
<pre class="python-said" data-role="said" role="status" tabindex="0">Not run yet.</pre>
<div class="player" role="group" aria-label="Player of your algorithm">
<div class="player-stage" data-role="stage" tabindex="0" role="group" aria-label="Ranks and slots. {player.KEYS}"
 style="min-height: 170px"></div>
<div class="player-controls">{buttons}
<input type="range" data-role="round" min="0" max="0" value="0" aria-label="Rounds completed"></div>
<p class="player-status" data-role="status"></p></div></div>
<script defer src="{static}page_python.js"></script>
<script defer src="{static}workbench.js"></script>
"""


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive with Sphinx."""
    app.add_directive("workbench", WorkbenchDirective)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
