"""Player of schedules: one directive, the markup that works without a script, and the data files of the script.

`.. player:: all_reduce`
    The schedule that `choose` picks, drawn slot by slot, played round by round, with the same rounds as text. Options:
    `:ranks: 4`, `:size: 1048576`, `:network: one host`, `:algorithm: ring` for one that is not chosen, `:autoplay:`.

The script is `docs/_static/player.js`, its data are those of `schedule_data`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any, ClassVar

import cost_data
import schedule_data
from collective_pictures import seconds
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from torchdist_ref import schedules
from torchdist_ref.schedules.schedule import messages

KEYS = "Space plays and pauses, the arrow keys step, Home and End go to either end."
BUTTONS = (("start", "Restart"), ("back", "Back"), ("play", "Play"), ("step", "Step"))


class PlayerDirective(SphinxDirective):
    """Player of one operation."""

    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {
        "ranks": directives.nonnegative_int,
        "size": directives.nonnegative_int,
        "network": directives.unchanged,
        "algorithm": directives.unchanged,
        "autoplay": directives.flag,
    }

    def run(self) -> list[nodes.Node]:
        """Build the schedule that is shown first, and return the player."""
        up = "../" * self.env.docname.count("/")
        shown = markup(
            self.arguments[0],
            f"{up}_static/schedules/{self.arguments[0]}.js",
            self.options.get("ranks", 4),
            self.options.get("size", 1 << 20),
            self.options.get("network", schedule_data.NETWORKS[0]),
            algorithm=self.options.get("algorithm", ""),
            autoplay="autoplay" in self.options,
        )
        return [nodes.raw("", shown, format="html")]


def markup(
    operation: str, source: str, world: int, size: int, network: str, *, algorithm: str = "", autoplay: bool = False
) -> str:
    """Return the whole player as HTML; it begins with an algorithm, or with the one that is chosen for the rest."""
    everything = schedule_data.of_operation(operation)
    shown = everything["worlds"][world]
    chosen = next(name for limit, name in shown["chosen"][network] if limit is None or size <= limit)
    named = algorithm or chosen
    own = everything | {"worlds": {world: shown | {"schedules": {named: shown["schedules"][named]}}}}
    own = own | {"links": cost_data.links()}
    found = schedule_data.schedule(operation, named, world)
    counted = f"{len(found.rounds)} round" + "s" * (len(found.rounds) != 1)
    play = " data-autoplay" if autoplay else ""
    clock = cost_data.network(cost_data.MEASURED, shown["hosts"][network])
    # The height of what is drawn first, so that nothing below moves when the script draws it.
    height = 22 + world * 37
    return f"""<div class="player" role="group" aria-label="Player: {operation}" data-source="{source}"{play}>
<div class="player-choices">{choices(everything, world, size, network, chosen, algorithm)}</div>
<div class="player-stage" data-role="stage" tabindex="0" role="group" aria-label="Ranks and slots. {KEYS}"
 style="height: {height}px"></div>
<div class="player-controls">{"".join(map(button, BUTTONS))}
<input type="range" data-role="round" min="0" max="{len(found.rounds)}" value="0" aria-label="Rounds completed"></div>
<p class="player-status" data-role="status">{escape(f"{named}, {counted}")}</p>
<noscript><p>The player needs JavaScript. The table below shows the same rounds.</p></noscript>
<details class="player-text" data-role="text"><summary>The same rounds as text</summary>
<div class="player-table" tabindex="0"><table class="table"><thead><tr><th>round</th><th>messages</th>
<th>simulated time</th></tr></thead>
<tbody data-role="rounds">{rows(found, size, clock)}</tbody></table></div></details>
<script type="application/json">{json.dumps(own, separators=(",", ":"))}</script>
</div>
"""


def button(named: tuple[str, str]) -> str:
    """Return one button; those that change the round are off until the script runs."""
    return f'<button type="button" class="btn btn-sm" data-role="{named[0]}">{named[1]}</button>'


def choices(everything: dict[str, Any], world: int, size: int, network: str, chosen: str, algorithm: str) -> str:
    """Return the lists of choices."""
    sizes = {value: byte_size(value) for value in schedule_data.SIZES}
    algorithms = {"": f"chosen: {chosen}"} | {name: name for name in everything["algorithms"]}
    return "".join(
        (
            select("ranks", "Ranks", {value: str(value) for value in schedule_data.WORLDS}, world),
            select("size", "Size m", sizes, size),
            select("network", "Hosts", {name: name for name in schedule_data.NETWORKS}, network),
            select("links", "Links", {name: name for name in cost_data.LINKS}, cost_data.MEASURED),
            select("algorithm", "Algorithm", algorithms, algorithm),
        )
    )


def select(role: str, label: str, options: dict[Any, str], chosen: object) -> str:
    """Return one labeled list of choices."""
    inner = "".join(
        f'<option value="{value}"{" selected" if value == chosen else ""}>{text}</option>'
        for value, text in options.items()
    )
    return f'<label>{label} <select class="form-select form-select-sm" data-role="{role}">{inner}</select></label>'


def rows(found: schedules.Schedule, size: int, network: schedules.Network) -> str:
    """Return the rounds as rows of a table, in the words of the script, each with the time of its end."""
    return "".join(
        f"<tr><td>{number}</td><td>"
        + escape(" · ".join(f"{part.src} → {part.dst}: {part.label}" for part in messages(moves)))
        + f"</td><td>{seconds(ends(found, number, size, network))}</td></tr>"
        for number, moves in enumerate(found.rounds, 1)
    )


def ends(found: schedules.Schedule, rounds: int, size: float, network: schedules.Network) -> float:
    """Return the simulated seconds after some rounds."""
    first = replace(found, rounds=tuple(found.rounds[number] for number in range(rounds)))
    return schedules.simulate(first, size, network).total


def byte_size(size: int) -> str:
    """Return a number of bytes as text.

    >>> byte_size(4), byte_size(1 << 18)
    ('4 B', '256 KiB')
    """
    for unit, letter in ((1 << 20, "Mi"), (1 << 10, "Ki")):
        if size >= unit:
            return f"{size // unit} {letter}B"
    return f"{size} B"


def write_data(app: Sphinx, error: Exception | None) -> None:
    """Write two files for each operation, which scripts load when a reader asks for another schedule.

    The player and the explorer share the file of up to 16 ranks. The one in the folder ``large`` is the explorer's.
    """
    if error or app.builder.format != "html":
        return
    folder = Path(app.outdir, "_static", "schedules")
    (folder / "large").mkdir(parents=True, exist_ok=True)
    for operation in schedules.operations():
        for name, everything in (
            (operation, schedule_data.of_operation(operation)),
            (f"large/{operation}", schedule_data.of_large_worlds(operation)),
        ):
            everything = everything | cost_data.of_operation(operation, everything["worlds"])
            found = json.dumps(everything, separators=(",", ":"))
            (folder / f"{name}.js").write_text(f'torchdistSchedules.register("{name}", {found});\n', encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive, its script and its style with Sphinx."""
    app.add_directive("player", PlayerDirective)
    app.connect("build-finished", write_data)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
