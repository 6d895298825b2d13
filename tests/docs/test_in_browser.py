"""The built site in Chromium: accessible, steady, playable by keyboard, and without a request to another host.

Needs Chromium or Chrome, and the site in `docs/_build/html` or in the folder that `TORCHDIST_REF_SITE` names. Run by
`nox -s site`. One page of each kind is tested in light and dark, at the width of a desktop and of a phone;
`nox -s site-check` tests every page.
"""

from __future__ import annotations

import base64
import gzip
import http.server
import importlib.resources
import json
import os
import re
from pathlib import Path
from typing import Any

import cost_data
import explorer
import hang_page
import player as player_pages
import pytest
import schedule_data
from collective_pictures import seconds

from tests.debug.test_dumps import entry, write_nccl_dumps
from tests.docs.conftest import SITE, served
from tests.docs.test_python_in_pages import FILES, LOG
from torchdist_ref import schedules
from torchdist_ref.debug.dumps import read_directory
from torchdist_ref.debug.verdict import find_verdict

pytestmark = pytest.mark.browser

HAS_PYTHON, HAS_EDITOR = (SITE / "_static/pyodide").exists(), (SITE / "_static/editor/index.js").exists()
# Milliseconds: Python takes seconds to load, on a busy machine a minute.
LOADED = 180_000
KINDS = (
    "index.html",
    "collectives/index.html",
    "collectives/all_reduce.html",
    "collectives/barrier.html",
    "collectives/workbench.html",
    "explanation/schedules.html",
    "explanation/speed.html",
    "how-to/launch.html",
    "how-to/why_does_my_job_hang.html",
    "reference/index.html",
    "reference/errors.html",
    "reference/surface_members.html",
    "tutorials/02_collectives_by_pictures.html",
    "search.html",
    "source/calls.html",
    "404.html",
    "_modules/index.html",
    "_modules/torchdist_ref/algorithms/ddp_comm_hooks/default_hooks.html",
)
# Templates with long names, which a phone has to break.
LONG_NAMES = (
    "genindex.html",
    "py-modindex.html",
    "reference/distributed/backends.html",
    "reference/launching/processes.html",
    "reference/ddp_comm_hooks.html",
)
# Pages that only send readers elsewhere, and copies of the theme's templates, are no pages of the site.
EVERY = tuple(
    str(path.relative_to(SITE)) for path in sorted(SITE.rglob("*.html")) if not path.is_relative_to(SITE / "_static")
)
PAGES = EVERY if os.environ.get("TORCHDIST_REF_EVERY_PAGE") else KINDS
LOOKS = [(1400, "light"), (1400, "dark"), (390, "light"), (390, "dark")]
# Elements that may scroll sideways: code, tables, formulas and the boxes around tables.
MAY_SCROLL = "pre, textarea, .prism-code-editor, table, .formula, .player-table, .pst-scrollable-table-container, math"


def look(page: Any, width: int, scheme: str, *, reduced: bool = True) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce" if reduced else "no-preference")


@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_nothing(page: Any, address: str, name: str) -> None:
    axe = importlib.resources.files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8")
    for width, scheme in LOOKS:
        look(page, width, scheme)
        page.goto(address + name)
        page.evaluate(axe)
        found = page.evaluate(
            """axe.run({resultTypes: ["violations"], rules: {"label-content-name-mismatch": {enabled: true}}})
                .then(result => result.violations)"""
        )
        shown = [(one["id"], [node["html"][:160] for node in one["nodes"][:3]]) for one in found]
        assert not shown, (width, scheme)


@pytest.mark.parametrize("name", tuple(dict.fromkeys((*PAGES, *LONG_NAMES))))
def test_nothing_but_code_and_tables_scrolls_sideways_on_a_phone(page: Any, address: str, name: str) -> None:
    look(page, 390, "light")
    page.goto(address + name)
    wide = page.evaluate(
        """may => [...document.querySelectorAll("body, body *")].filter(element =>
            element.scrollWidth > element.clientWidth + 1 && element.clientWidth > 1
            && ["auto", "scroll"].includes(getComputedStyle(element).overflowX)
            && element.checkVisibility() && !element.closest(may)).map(element => element.outerHTML.slice(0, 120))""",
        MAY_SCROLL,
    )
    assert not wide
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


DRAWN = [
    "index.html",
    "collectives/all_reduce.html",
    "collectives/scatter.html",
    "collectives/all_to_all_single.html",
    "explanation/speed.html",
    "collectives/all_to_all.html",
    "collectives/sheet.html",
    "explanation/glossary.html",
    "explanation/topologies.html",
    "design.html",
    "explanation/schedules.html",
    "how-to/profile.html",
    "how-to/step_timeline.html",
]
if os.environ.get("TORCHDIST_REF_EVERY_PAGE"):
    # The workbench draws with the player of the other pages, once an algorithm has run.
    drawn = [name for name in EVERY if "<text" in (SITE / name).read_text(encoding="utf-8")]
    DRAWN = [name for name in drawn if name != "collectives/workbench.html"]
# Pictures of the layers and of a step are for wide screens: a phone gets a sentence instead.
WIDE = ("design.html", "how-to/profile.html", "how-to/step_timeline.html")


@pytest.mark.parametrize("name", DRAWN)
def test_text_in_drawings_is_at_least_11_pixels(page: Any, address: str, name: str) -> None:
    for width in (1400, 390):
        look(page, width, "light")
        page.goto(address + name)
        page.wait_for_selector("article svg text", state="attached")
        sizes = page.evaluate(
            """[...document.querySelectorAll("article svg text")].filter(text => text.checkVisibility()).map(text =>
                parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a)"""
        )
        assert sizes or (width == 390 and name in WIDE)
        # Chromium rounds lengths to a 64th of a pixel: a drawing at its own size reads 10.9994.
        assert min(sizes, default=11) >= 10.99


# Texts of a drawing that are cut off by its edge, or that cover more of another than a pixel of its edge.
UNREADABLE = """drawing => {
    const shown = [...drawing.querySelectorAll("text")].filter(text => text.textContent.trim()
        && (!text.checkVisibility || text.checkVisibility()) && !text.closest(".flying"));
    const boxes = shown.map(text => text.getBoundingClientRect()), found = [], all = drawing.getBoundingClientRect();
    boxes.forEach((box, n) => {
        if (Math.max(all.left - box.left, box.right - all.right, all.top - box.top, box.bottom - all.bottom) > 1)
            found.push("cut off: " + shown[n].textContent);
        for (let m = 0; m < n; m += 1) {
            const wide = Math.min(box.right, boxes[m].right) - Math.max(box.left, boxes[m].left);
            const high = Math.min(box.bottom, boxes[m].bottom) - Math.max(box.top, boxes[m].top);
            if (wide > 2 && high > 4) found.push(shown[m].textContent + " under " + shown[n].textContent);
        }
    });
    return found.slice(0, 8);
}"""


@pytest.mark.parametrize("name", DRAWN)
def test_text_in_drawings_is_whole_and_covers_no_other(page: Any, address: str, name: str) -> None:
    for width in (1400, 390):
        look(page, width, "light")
        page.goto(address + name)
        page.wait_for_selector("article svg text", state="attached")
        drawings = [one for one in page.locator("article svg:has(text)").all() if one.is_visible()]
        assert drawings or (width == 390 and name in WIDE)
        assert not [found for one in drawings if (found := one.evaluate(UNREADABLE))], width


def test_text_in_drawings_of_notebooks_is_whole_and_covers_no_other(page: Any, address: str) -> None:
    drawn = [path for path in sorted((SITE / "_images").glob("*.svg")) if "<text" in path.read_text(encoding="utf-8")]
    bad = {}
    for path in drawn:
        page.goto(f"{address}_images/{path.name}")
        if found := page.locator("svg").first.evaluate(UNREADABLE):
            bad[path.name] = found
    assert not bad


def test_the_check_of_drawings_finds_text_that_is_cut_off_or_covered(page: Any) -> None:
    """The first drawing is that of `all_reduce` as it was: its word "after" began in the last column."""
    texts = ("<text x='50' y='14'>before</text><text x='120' y='14'>after</text>", "<text x='80' y='14'>more</text>")
    style = "<style>text { font: 12px monospace }</style>"
    drawings = [f"<svg width='150' viewBox='0 0 150 40'>{shown}</svg>" for shown in (texts[0], texts[0] + texts[1])]
    whole = f"<svg width='180' viewBox='0 0 180 40'>{texts[0]}</svg>"
    page.set_content(f"{style}{drawings[0]}{drawings[1]}{whole}")
    found = [one.evaluate(UNREADABLE) for one in page.locator("svg").all()]
    assert found == [["cut off: after"], ["cut off: after", "before under more"], []]


def test_outputs_of_notebooks_fit_into_their_boxes(page: Any, address: str) -> None:
    look(page, 1400, "light")
    wide = {}
    for path in sorted((SITE / "tutorials").glob("*.html")):
        page.goto(f"{address}tutorials/{path.name}")
        found = page.evaluate(
            """[...document.querySelectorAll("div.nboutput pre")].filter(pre => pre.scrollWidth > pre.clientWidth + 1)
                .map(pre => pre.textContent.split("\\n").sort((a, b) => b.length - a.length)[0])"""
        )
        if found:
            wide[path.stem] = found
    assert not wide


@pytest.mark.parametrize("name", (*KINDS[:5], *KINDS[10:12]))
def test_the_layout_is_steady(page: Any, address: str, name: str) -> None:
    page.add_init_script(
        """window.shift = 0; window.moved = []; new PerformanceObserver(list => { for (const entry of list.getEntries())
            if (!entry.hadRecentInput) {
                window.shift += entry.value;
                window.moved.push(...entry.sources.map(source => source.node?.outerHTML?.slice(0, 100)));
            }
        }).observe({type: "layout-shift", buffered: true});"""
    )
    for width in (1400, 390):
        look(page, width, "light")
        # On a busy machine a page is painted before all of it has arrived; a layout that shifts does so in each load.
        for _ in range(8):
            page.goto(address + name)
            page.wait_for_timeout(300)
            if page.evaluate("window.shift") < 0.1:
                break
        assert page.evaluate("window.shift") < 0.1, page.evaluate("window.moved")


@pytest.mark.parametrize("name", PAGES)
def test_every_request_stays_on_the_host_and_the_page_is_small(page: Any, address: str, name: str) -> None:
    asked: list[str] = []
    problems: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(address + name, wait_until="networkidle")
    assert asked and all(url.startswith((address, "data:")) for url in asked)
    assert not problems
    limit = {"index.html": 250_000, "collectives/workbench.html": 20_000_000}.get(name, 500_000)
    files = {SITE / url.removeprefix(address).partition("?")[0] for url in asked if url.startswith(address)}
    assert sum(map(compressed, files)) <= limit, sorted((compressed(file), file.name) for file in files)


def compressed(file: Path) -> int:
    """Return the size of a file as a server sends it: text is compressed."""
    text = file.suffix in {".html", ".css", ".js", ".svg", ".json"}
    return len(gzip.compress(file.read_bytes())) if text else file.stat().st_size


def test_ranks_move_within_five_seconds_of_the_landing(page: Any, address: str) -> None:
    look(page, 1400, "light", reduced=False)
    page.goto(address + "index.html")
    page.wait_for_selector(".player-stage .flying", timeout=5000, state="attached")
    assert "round" in page.locator(".player-status").inner_text().lower()


def test_the_player_starts_by_itself_only_where_motion_is_welcome(page: Any, address: str) -> None:
    look(page, 1400, "light", reduced=True)
    page.goto(address + "index.html")
    assert page.locator('.player [data-role="play"]').inner_text() == "Play"
    assert page.locator(".player-stage .flying").count() == 0


def test_each_click_of_the_player_counts(page: Any, address: str) -> None:
    """Six clicks at once are six rounds, however long the flight of a round takes."""
    look(page, 1400, "light", reduced=False)
    page.goto(address + "index.html")
    page.wait_for_selector(".player-stage .flying", state="attached")
    page.locator('.player [data-role="round"]').evaluate(
        "range => { range.value = 3; range.dispatchEvent(new Event('input')) }"
    )
    assert page.locator(".player-status").inner_text().startswith("Round 3 of 14")
    page.locator('.player [data-role="step"]').evaluate("button => { for (let n = 0; n < 6; n += 1) button.click() }")
    page.wait_for_function("document.querySelector('.player-status').textContent.startsWith('Round 9 of 14')")


def test_a_hidden_player_draws_nothing_of_negative_width(page: Any, address: str) -> None:
    logged: list[str] = []
    page.on("console", lambda message: logged.append(message.text))
    page.goto(address + "collectives/all_reduce.html")
    page.wait_for_selector(".player-stage svg")
    page.evaluate("document.querySelector('.player').style.display = 'none'")
    page.locator('.player [data-role="step"]').evaluate("button => button.click()")
    page.evaluate("document.querySelector('.player').style.display = ''")
    page.wait_for_function("document.querySelector('.player-stage rect').width.baseVal.value > 15")
    assert [text for text in logged if "negative" in text] == []


def test_the_player_works_by_keyboard(page: Any, address: str) -> None:
    look(page, 1400, "light")
    page.goto(address + "collectives/all_reduce.html")
    player, status = page.locator(".player"), page.locator(".player-status")
    player.locator('[data-role="stage"]').focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("document.querySelector('.player-status').textContent.startsWith('Round 1 of 2')")
    assert page.url.endswith("all_reduce.html"), "the arrow keys turned the page"
    page.keyboard.press("End")
    assert status.inner_text().startswith("Round 2 of 2")
    assert player.locator(".result").count() == 16
    sums = {"+".join(sorted(text.split("+"))) for text in player.locator(".result text").all_text_contents()}
    assert sums == {f"a{i}+b{i}+c{i}+d{i}" for i in range(4)}
    page.keyboard.press("ArrowLeft")
    assert status.inner_text().startswith("Round 1 of 2")
    page.keyboard.press("Home")
    assert status.inner_text().startswith("Before round 1 of 2")
    page.keyboard.press("Space")
    assert player.locator('[data-role="play"]').inner_text() == "Pause"
    page.keyboard.press("Space")
    assert player.locator('[data-role="play"]').inner_text() == "Play"


def test_the_player_shows_other_ranks_networks_and_algorithms(page: Any, address: str) -> None:
    look(page, 1400, "light")
    page.goto(address + "collectives/all_reduce.html")
    player, status = page.locator(".player"), page.locator(".player-status")
    player.locator('[data-role="ranks"]').select_option("16")
    page.wait_for_function("document.querySelectorAll('.player-stage .rank').length === 16")
    player.locator('[data-role="network"]').select_option("one host per rank")
    player.locator('[data-role="size"]').select_option(str(1 << 27))
    assert "two_shot: 2 steps" in status.inner_text()
    player.locator('[data-role="algorithm"]').select_option("tree")
    assert "tree: 8 steps" in status.inner_text()
    page.locator(".player-text summary").click()
    page.wait_for_function("document.querySelectorAll('.player-text tbody tr').length === 8")


def test_the_player_says_the_simulated_time_and_the_load_of_the_links(page: Any, address: str) -> None:
    look(page, 1400, "light")
    page.goto(address + "collectives/all_reduce.html")
    player, status = page.locator(".player"), page.locator(".player-status")
    player.locator('[data-role="network"]').select_option("one host per rank")
    player.locator('[data-role="links"]').select_option("PCIe, 25 Gb/s")
    player.locator('[data-role="algorithm"]').select_option("ring")
    page.wait_for_function("document.querySelector('.player-status').textContent.includes('ring: 6 steps')")
    network = cost_data.network("PCIe, 25 Gb/s", (0, 1, 2, 3))
    ring = schedules.build("all_reduce", "ring", 4)
    ends = [player_pages.ends(ring, number, 1 << 20, network) for number in range(1, 7)]
    assert f"Simulated time: {seconds(ends[-1])}." in status.inner_text()
    player.locator('[data-role="stage"]').focus()
    page.keyboard.press("End")
    assert f"Simulated time: {seconds(ends[-1])} of {seconds(ends[-1])}." in status.inner_text()
    # Six messages of a quarter of the buffer.
    busy = round(100 * 1.5 * (1 << 20) * network.beta / ends[-1])
    load = f"card of host 0, sending (and 3 alike), 1.57 MB so far, moving bytes {busy} % of the time."
    assert load in status.inner_text()
    page.locator(".player-text summary").click()
    times = player.locator(".player-text tbody td:last-child")
    times.nth(5).wait_for()
    assert times.all_text_contents() == [seconds(end) for end in ends]


def cells() -> list[tuple[str, int, str, str, str, float]]:
    """Return cells of the explorer: every operation and algorithm, each on another network and size."""
    found = []
    for operation in schedules.operations():
        for algorithm in schedules.algorithms(operation):
            for world in (2, 5, 16, 64):
                at = len(found)
                full = world in schedule_data.LARGE_WORLDS and (algorithm == "hierarchical" or at % 4 == 3)
                network = schedule_data.NETWORKS[1 if algorithm == "hierarchical" else at % 3]
                network = schedule_data.FULL_HOSTS if full else network
                links = list(cost_data.LINKS)[at % 5]
                found.append((operation, world, algorithm, network, links, (4.0, 8e6, 1e9)[at % 7 % 3]))
    return found


def test_times_of_the_explorer_are_those_of_python(page: Any, address: str) -> None:
    """To the last bit; and the sum of the longest path is the time."""
    page.goto(address + "collectives/index.html")
    asked = cells()
    times = page.evaluate(
        """async ([cells, folder]) => {
            const { links } = document.querySelector(".explorer").explorer.own;
            const load = (name) => new Promise((use) => torchdistSchedules.load(name, `${folder}${name}.js`, use));
            const file = (operation, world) => (world > 16 ? `large/${operation}` : operation);
            for (const name of new Set(cells.map(([operation, world]) => file(operation, world)))) await load(name);
            return cells.map(([operation, world, algorithm, network, between, size]) => {
                const known = torchdistSchedules.of(file(operation, world)).worlds[world], { hosts } = known;
                const schedule = known.by_hosts?.[network]?.[algorithm] || known.schedules[algorithm];
                const run = torchdistSchedules.simulate(schedule, size, links[between], hosts[network]);
                const parts = Object.entries(torchdistSchedules.parts(run.total));
                const sum = parts.reduce((sum, [part, count]) => sum + count * run.rates[part], 0);
                return [run.total.t, links[between].overhead + sum];
            });
        }""",
        [asked, address + "_static/schedules/"],
    )
    for (operation, world, algorithm, network, links, size), (total, by_parts) in zip(asked, times, strict=True):
        schedule = schedule_data.schedule(operation, algorithm, world, network)
        expected = schedules.simulate(
            schedule, size, cost_data.network(links, schedule_data.hosts(network, world))
        ).total
        assert total == expected, (operation, world, algorithm, network, links, size)
        assert by_parts == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_the_landing_page_answers_how_long_a_gigabyte_takes(page: Any, address: str) -> None:
    look(page, 1400, "light")
    page.goto(address + "index.html")
    answer, table = page.locator('.explorer [data-role="answer"]'), page.locator(".explorer tbody tr")
    assert answer.inner_text() == (
        "all_reduce of 1 GB, 8 ranks, one host per rank, NVLink, 100 Gb/s: 140 ms by two_shot."
    )
    assert page.locator('.explorer [data-role="sum"]').inner_text() == (
        "140 ms = 14 × 9.6 µs (messages) + 1.75 GB ÷ 12.5 GB/s (between hosts) + 125 MB ÷ 1.12 TB/s (reduced)."
    )
    # The table that a reader without a script has.
    shown = {
        row.locator("th").inner_text().strip().removesuffix(" (chosen)"): row.locator("td").first.inner_text()
        for row in table.all()
    }
    times = explorer.times("all_reduce", 8, "one host per rank", "NVLink, 100 Gb/s", 1e9)
    assert shown == {name: seconds(time) for name, time in times.items()}


def test_the_explorer_answers_for_eight_hosts_of_eight_ranks(page: Any, address: str) -> None:
    """A choice of 64 ranks loads a file of its own; with fewer ranks, hosts of eight cannot be chosen."""
    look(page, 1400, "light")
    page.goto(address + "index.html")
    part = lambda role: page.locator(f'.explorer [data-role="{role}"]')  # noqa: E731
    assert part("network").locator("option:disabled").all_inner_texts() == [schedule_data.FULL_HOSTS]
    part("ranks").select_option("64")
    page.wait_for_function("document.querySelector('.explorer-answer').textContent.includes('64 ranks')")
    part("network").select_option(schedule_data.FULL_HOSTS)
    times = explorer.times("all_reduce", 64, schedule_data.FULL_HOSTS, "NVLink, 100 Gb/s", 1e9)
    best = min(times, key=times.__getitem__)
    assert part("answer").inner_text() == (
        f"all_reduce of 1 GB, 64 ranks, 8 ranks per host, NVLink, 100 Gb/s: {seconds(times[best])} by {best}."
    )
    part("ranks").select_option("4")
    page.wait_for_function("document.querySelector('.explorer-answer').textContent.includes('4 ranks, two hosts')")
    folder = SITE / "_static" / "schedules" / "large"
    assert len([*folder.iterdir()]) == len(schedules.operations())
    assert all(compressed(file) <= 250_000 for file in folder.iterdir())


def test_the_explorer_shows_other_operations_crossovers_and_recorded_runs(page: Any, address: str) -> None:
    look(page, 390, "dark")
    page.goto(address + "index.html")
    part = lambda role: page.locator(f'.explorer [data-role="{role}"]')  # noqa: E731
    part("operation").select_option("all_gather")
    page.wait_for_function("document.querySelector('.explorer-answer').textContent.startsWith('all_gather')")
    part("ranks").select_option("4")
    part("size").fill("64")
    part("unit").select_option("KiB")
    assert part("answer").inner_text().startswith("all_gather of 65.5 kB, 4 ranks, one host per rank")
    part("operation").select_option("all_reduce")
    page.wait_for_function("document.querySelector('.explorer-answer').textContent.startsWith('all_reduce')")
    # Each size of a crossover is one from which the named algorithm is the fastest.
    words = part("crossovers").inner_text().removeprefix("Fastest by size: ").removesuffix(".")
    first, *later = [item.split(" from ") for item in words.split(", ")]
    assert first == ["recursive_doubling"] and later
    before = first[0]
    for name, size in later:
        least = float(size.split()[0]) * explorer.UNITS[size.split()[1]]
        below, above = (
            explorer.times("all_reduce", 4, "one host per rank", "NVLink, 100 Gb/s", least * by) for by in (0.98, 1.02)
        )
        assert below[before] == min(below.values()) and above[name] == min(above.values())
        before = name
    part("runs").click()
    assert page.locator(".explorer-plot .run").count() == sum(
        len(row) - 1 for row in cost_data.recorded("all_reduce")["two hosts"]
    )
    part("show").select_option("bus")
    assert page.locator(".explorer-plot text", has_text="bus bandwidth").count() == 1


@pytest.mark.timeout(600)
def test_the_workbench_runs_python_in_the_page(page: Any, address: str) -> None:
    look(page, 1400, "light")
    page.goto(address + "collectives/workbench.html")
    run, stop, said = (page.locator(f'[data-role="{role}"]') for role in ("run", "stop", "said"))
    run.click()
    if not HAS_PYTHON:
        page.wait_for_selector('[data-role="said"]:has-text("could not be loaded")')
        return
    page.wait_for_selector('[data-role="said"][data-right="true"]', timeout=LOADED)
    assert "ring (catalogue)" in said.inner_text()
    # A program without end leaves the page usable, and Stop ends it.
    code = page.locator("#workbench-code")
    right = code.input_value()
    code.fill("while True:\n    pass")
    run.click()
    page.wait_for_selector('[data-role="said"]:has-text("Running")')
    stop.click()
    assert said.inner_text().startswith("Stopped.") and stop.is_disabled()
    # What runs in the page can send nothing to another host: the browser refuses it.
    arrived: list[str] = []

    class Elsewhere(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            arrived.append(self.path)
            self.send_response(200)
            self.send_header("Access-Control-Allow-Origin", "*")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Print nothing."""

    with served(Elsewhere) as other:
        sends = f"import js\nrequest = js.XMLHttpRequest.new()\nrequest.open('GET', '{other}', False)\nrequest.send()\n"
        code.fill(sends + right)
        run.click()
        page.wait_for_selector('[data-role="said"]:has-text("line 4: ")', timeout=LOADED)
    assert arrived == []
    code.fill(right.replace("reduce=True", "reduce=step > 0"))
    run.click()
    page.wait_for_selector('[data-role="said"][data-right="false"]')
    assert "round 1, move 1.data[0] -> 2.data[0]: replaces" in said.inner_text().splitlines()[1]
    page.locator('[data-role="stage"]').focus()
    page.keyboard.press("End")
    assert page.locator(".player-stage .wrong").count() > 0


def test_the_workbench_offers_algorithms_and_colors_their_code(page: Any, address: str) -> None:
    page.goto(address + "collectives/workbench.html")
    code, first = page.locator("#workbench-code"), page.locator('[data-role="start-from"]')
    assert len(first.locator("option").all()) == 6
    if HAS_EDITOR:
        page.wait_for_selector(".workbench .token.keyword")
        colors = {word.evaluate("word => getComputedStyle(word).color") for word in page.locator(".token").all()[:40]}
        assert len(colors) >= 4
        assert page.locator(".workbench .pce-line").count() == len(code.input_value().splitlines()) + 1
    first.select_option("broadcast: binomial tree")
    assert "my broadcast" in code.input_value()
    assert page.locator('[data-role="operation"]').input_value() == "broadcast"


HANG = "how-to/why_does_my_job_hang.html"


def drop(page: Any, files: dict[str, bytes]) -> None:
    """Drop files on the page, as a user does with the mouse."""
    page.evaluate(
        """files => {
            const transfer = new DataTransfer();
            for (const [name, text] of Object.entries(files))
                transfer.items.add(new File([Uint8Array.from(atob(text), c => c.charCodeAt(0))], name));
            document.querySelector("[data-role=drop]").dispatchEvent(
                new DragEvent("drop", {dataTransfer: transfer, bubbles: true, cancelable: true}));
        }""",
        {name: base64.b64encode(content).decode() for name, content in files.items()},
    )


@pytest.mark.timeout(600)
@pytest.mark.skipif(not HAS_PYTHON, reason="the site was built without Pyodide")
def test_a_dropped_dump_gets_its_verdict_and_nothing_leaves_the_page(page: Any, address: str, tmp_path: Path) -> None:
    look(page, 1400, "light")
    asked: list[tuple[str, str]] = []
    page.context.on("request", lambda request: asked.append((request.method, request.url)))
    page.goto(address + HANG)
    recorded = json.loads(hang_page.EXAMPLE.read_text())
    dumps = {name: json.dumps(content).encode() for name, content in recorded.items()}
    drop(page, dumps)
    page.wait_for_selector('[data-role="said"][data-kind="behind"]', timeout=LOADED)
    said = page.locator('[data-role="said"]')
    for name, content in dumps.items():
        (tmp_path / name).write_bytes(content)
    assert said.inner_text() == find_verdict(read_directory(tmp_path)).sentence
    assert said.get_attribute("data-ranks") == "3"
    assert page.locator(".hang-scroll .bar").count() == 5 + 5 + 5 + 4
    # torch's pickles, of NCCL and of Gloo, chosen as files.
    for folder, more in (
        ("nccl", {"state": "started"}),
        ("gloo", {"profiling_name": "gloo:all_reduce", "state": "scheduled"}),
    ):
        calls = {rank: [entry(1, "barrier"), entry(2, "all_reduce", **more)] for rank in (0, 1)}
        (tmp_path / folder).mkdir()
        write_nccl_dumps(tmp_path / folder, calls | {2: [entry(1, "barrier")]})
        page.locator("#hang-files").set_input_files(sorted((tmp_path / folder).iterdir()))
        page.wait_for_selector('[data-role="said"]:has-text("Rank 2 is behind: ranks 0 and 1 wait for it in call 2")')
    assert all(method == "GET" and url.startswith((address, "blob:", "data:")) for method, url in asked)


@pytest.mark.timeout(600)
@pytest.mark.skipif(not HAS_PYTHON, reason="the site was built without Pyodide")
def test_a_pasted_log_gets_its_verdict_and_hostile_files_one_sentence(page: Any, address: str) -> None:
    look(page, 390, "dark")
    page.goto(address + HANG)
    said = page.locator('[data-role="said"]')
    page.locator("#hang-log").fill(LOG.read_text())
    page.locator('[data-role="explain"]').click()
    page.wait_for_selector('[data-role="said"][data-kind="raised"]', timeout=LOADED)
    assert said.inner_text() == "Rank 1 raised at logged_job.py:32 in step: ValueError: bad batch 7."
    page.locator('[data-role="clear"]').click()
    for name in ("a program", "an archive that unfolds", "nested JSON", "other JSON", "names with markup"):
        page.locator("#hang-files").set_input_files(
            [{"name": "rank0.json", "mimeType": "application/json", "buffer": FILES[name]}]
        )
        page.wait_for_selector('[data-role="said"][data-kind]', timeout=LOADED)
        assert len(said.inner_text().splitlines()) == 1, name
    # Of a file that is too large nothing is read.
    page.evaluate(
        """() => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([new Uint8Array(1e8)], "rank0.json"));
            document.querySelector("[data-role=drop]").dispatchEvent(
                new DragEvent("drop", {dataTransfer: transfer, bubbles: true, cancelable: true}));
        }"""
    )
    page.wait_for_selector('[data-role="skipped"]:has-text("rank0.json: larger than")', timeout=LOADED)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_copy_buttons_copy_code_without_prompts(page: Any, address: str) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(address + "collectives/all_reduce.html")
    block = page.locator("div.highlight-python").first
    block.hover()
    block.locator("button.copybtn").click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.strip() == block.locator("pre").inner_text().strip()
    assert copied.startswith("import torch") and ">>>" not in copied


def test_copy_buttons_of_notebooks_copy_the_code_of_the_cell(page: Any, address: str) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(address + "tutorials/01_four_ranks_one_sum.html")
    assert page.locator(".prompt button.copybtn").count() == 0
    cell = page.locator("div.nbinput div.input_area").nth(1)
    cell.hover()
    cell.locator("button.copybtn").click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("%%spmd -n 4\nimport torch") and copied.strip() == cell.locator("pre").inner_text().strip()


def test_cells_with_a_magic_have_colors(page: Any, address: str) -> None:
    page.goto(address + "tutorials/01_four_ranks_one_sum.html")
    cell = page.locator("div.nbinput div.input_area pre", has_text="import torch").first
    colors = cell.evaluate("pre => new Set([...pre.querySelectorAll('span')].map(s => getComputedStyle(s).color)).size")
    assert colors >= 3
    assert cell.locator("span").first.evaluate("span => span.nextElementSibling.textContent") == "%%spmd"
    assert cell.locator("span.kn").first.inner_text() == "import"


def test_pictures_have_a_text_that_says_what_they_show(page: Any, address: str) -> None:
    page.goto(address + "tutorials/02_collectives_by_pictures.html")
    texts = [image.get_attribute("alt") or "" for image in page.locator("article img").all()]
    assert texts and all(len(text) > 10 and not text.endswith((".svg", ".png")) for text in texts)


@pytest.mark.parametrize("name", ["index.html", "collectives/all_reduce.html", "reference/distributed.html"])
def test_a_printed_page_has_the_text_alone(page: Any, address: str, name: str) -> None:
    page.set_viewport_size({"width": 800, "height": 1100})
    page.goto(address + name)
    page.emulate_media(media="print", color_scheme="light")
    for gone in (".bd-header", ".bd-sidebar-primary", ".bd-sidebar-secondary", ".bd-footer", ".copybtn"):
        assert not [one for one in page.locator(gone).all() if one.is_visible()], gone
    assert page.locator("article").bounding_box()["width"] > 700
    code = "[...document.querySelectorAll('article .highlight pre')]"
    assert page.evaluate(f"{code}.filter(pre => pre.scrollWidth > pre.clientWidth + 1).length") == 0


def test_the_sheet_of_the_collectives_prints_on_one_page(page: Any, address: str) -> None:
    page.goto(address + "collectives/sheet.html")
    for paper in ("A4", "Letter"):
        printed = page.pdf(format=paper, margin=dict.fromkeys(("top", "right", "bottom", "left"), "10mm"))
        assert len(re.findall(rb"/Type\s*/Page\b", printed)) == 1, paper


def test_an_unknown_address_gets_a_page_that_leads_back(page: Any, address: str) -> None:
    answer = page.goto(address + "no/such/page.html")
    assert answer.status == 404
    assert page.locator("h1").inner_text().startswith("Page not found")
    page.locator("article a", has_text="Start page").click()
    page.wait_for_selector(".player")  # Its data come after the page, and the page some time after the click.
    assert page.title().startswith("torch.distributed you can read")
    assert page.locator(".player").count() == 1


@pytest.mark.parametrize("name", [name for name in PAGES if name not in ("search.html", "404.html")])
def test_pages_describe_themselves(page: Any, address: str, name: str) -> None:
    page.goto(address + name)
    description = page.locator('meta[name="description"]').get_attribute("content")
    assert 40 <= len(description) <= 300
