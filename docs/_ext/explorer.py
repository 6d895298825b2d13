"""Cost explorer: one directive, and the markup that its script fills in.

`.. explorer:: all_reduce`
    Time of every algorithm by size. Options: `:ranks: 8`, `:network: one host per rank`, `:links: NVLink, 100 Gb/s`,
    `:size: 1 GB`. Without a script, the page has the table of the size that is chosen.

The script is `docs/_static/explorer.js`; its clock is `docs/_static/schedules.js`. Its data are the player's. For 32
and 64 ranks it has files of its own, which the script loads when a reader chooses so many.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

import cost_data
import schedule_data
from collective_pictures import seconds
from docutils import nodes
from docutils.parsers.rst import directives
from player import select
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from torchdist_ref import schedules

UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
LEGEND = "Recorded runs, two ranks: ● ref, ■ Gloo, ▲ MPICH, ◆ Open MPI."


class ExplorerDirective(SphinxDirective):
    """Explorer that begins with one operation."""

    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {
        "ranks": directives.nonnegative_int,
        "network": directives.unchanged,
        "links": directives.unchanged,
        "size": directives.unchanged,
    }

    def run(self) -> list[nodes.Node]:
        """Return the explorer; its script is loaded on the pages that have one."""
        folder = "../" * self.env.docname.count("/") + "_static/"
        shown = markup(
            self.arguments[0],
            folder,
            self.options.get("ranks", 8),
            self.options.get("network", "one host per rank"),
            self.options.get("links", "NVLink, 100 Gb/s"),
            self.options.get("size", "1 GB"),
        )
        return [nodes.raw("", shown, format="html")]


def markup(operation: str, folder: str, world: int, network: str, links: str, size: str) -> str:
    """Return the whole explorer as HTML."""
    number, unit = size.split()
    large = world in schedule_data.LARGE_WORLDS
    found = (schedule_data.of_large_worlds if large else schedule_data.of_operation)(operation)
    own = {
        "operation": operation,
        "algorithms": found["algorithms"],
        "large": schedule_data.LARGE_WORLDS,
        **cost_data.of_operation(operation, [world]),
        "links": cost_data.links(),
        "measured": cost_data.MEASURED,
    }
    # Slots before and after are for the player.
    shown = found["worlds"][world]
    own["worlds"] = {world: shown if large else {**shown, "schedules": clocked(shown["schedules"])}}
    rows = table(operation, world, network, links, float(number) * UNITS[unit])
    return f"""<div class="explorer" role="group" aria-label="Cost explorer" data-folder="{folder}schedules/">
<div class="player-choices">{choices(operation, world, network, links)}
<label>Size m <input type="number" class="form-control form-control-sm" data-role="size" min="0" step="any"
 value="{number}"></label>
{select("unit", "Unit", {name: name for name in UNITS}, unit)}
{select("show", "Show", {"time": "time", "bus": "bus bandwidth"}, "time")}</div>
<p class="explorer-answer" data-role="answer" aria-live="polite"></p>
<p data-role="sum"></p>
<div class="explorer-plot" data-role="plot"></div>
<p class="explorer-legend" data-role="legend" hidden>{LEGEND}</p>
<p data-role="crossovers"></p>
<p><button type="button" class="btn btn-sm btn-primary" data-role="runs" hidden>Show recorded runs</button></p>
<noscript><p>Other choices and the plot need JavaScript.</p></noscript>
<div class="player-table" tabindex="0" role="region" aria-label="Algorithms"><table class="table"><thead><tr>
<th scope="col">algorithm</th><th scope="col">time</th><th scope="col">bus bandwidth</th>
<th scope="col">longest path</th>
</tr></thead><tbody data-role="table">{rows}</tbody></table></div>
<script type="application/json">{json.dumps(own, separators=(",", ":"))}</script>
</div>
<script defer src="{folder}explorer.js"></script>
"""


def clocked(found: dict[str, Any]) -> dict[str, Any]:
    """Return schedules with what the clock reads."""
    return {name: {key: one[key] for key in ("rounds", "share")} for name, one in found.items()}


def choices(operation: str, world: int, network: str, links: str) -> str:
    """Return the lists of choices, but for the size."""
    worlds = (*schedule_data.WORLDS, *schedule_data.LARGE_WORLDS)
    networks = (*schedule_data.NETWORKS, schedule_data.FULL_HOSTS)
    return "".join(
        (
            select("operation", "Operation", {name: name for name in schedules.operations()}, operation),
            select("ranks", "Ranks", {value: str(value) for value in worlds}, world),
            select("network", "Hosts", {name: name for name in networks}, network),
            select("links", "Links", {name: name for name in cost_data.LINKS}, links),
        )
    )


def times(operation: str, world: int, network: str, links: str, size: float) -> dict[str, float]:
    """Return the simulated seconds of each algorithm that runs on these hosts."""
    where = schedule_data.hosts(network, world)
    simulated = cost_data.network(links, where)
    names = [
        name
        for name in schedules.algorithms(operation)
        if name != "hierarchical" or (network in ("two hosts", schedule_data.FULL_HOSTS) and world > 2)
    ]
    return {
        name: schedules.simulate(schedule_data.schedule(operation, name, world, network), size, simulated).total
        for name in names
    }


def table(operation: str, world: int, network: str, links: str, size: float) -> str:
    """Return the rows of the table without a script: the fastest algorithm first."""
    found = sorted(times(operation, world, network, links, size).items(), key=lambda item: item[1])
    factor = cost_data.bus_factor(operation, world)
    rows = [
        f'<tr><th scope="row">{name}</th><td>{seconds(time)}</td>'
        f"<td>{'' if factor is None else f'{size / time * factor / 1e9:.3g} GB/s'}</td><td></td></tr>"
        for name, time in found
    ]
    return "".join(rows)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive with Sphinx."""
    app.add_directive("explorer", ExplorerDirective)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
