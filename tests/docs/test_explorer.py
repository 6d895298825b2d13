"""The cost explorer's data are the library's, and plots show the figures of their tables."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace

import collective_pictures
import cost_data
import explorer
import measured
import plots
import pytest
import schedule_data
import speed
from docutils import nodes

from tests.docs import pages
from torchdist_ref import schedules
from torchdist_ref.schedules import Network


def own(shown: str) -> dict[str, object]:
    """Return the JSON in the explorer's markup."""
    found: dict[str, object] = json.loads(shown.partition('<script type="application/json">')[2].partition("<")[0])
    return found


def test_the_links_are_presets_of_the_library() -> None:
    for name, numbers in cost_data.links().items():
        assert Network(**numbers) == Network.preset(*cost_data.LINKS[name])
    assert cost_data.network("PCIe, 25 Gb/s", (0, 1)).hosts == (0, 1)
    assert json.loads(json.dumps(cost_data.links())) == cost_data.links()


@pytest.mark.parametrize("operation", schedules.operations())
def test_the_slots_of_a_message_are_that_share_of_the_buffer(operation: str) -> None:
    found = schedule_data.of_world(operation, 5)
    for algorithm, packed in found["schedules"].items():
        assert packed["share"] == float(schedule_data.schedule(operation, algorithm, 5).share)
    assert found["hosts"] == {network: schedule_data.hosts(network, 5) for network in schedule_data.NETWORKS}


@pytest.mark.parametrize("operation", schedules.operations())
@pytest.mark.parametrize("world", schedule_data.LARGE_WORLDS)
def test_a_large_schedule_takes_the_time_of_the_librarys(operation: str, world: int) -> None:
    """Its moves have no slots, but each rank sends and reduces as much, to the same ranks, in the same order."""
    found = schedule_data.of_large_worlds(operation)["worlds"][world]
    names = []
    for network, where in found["hosts"].items():
        assert where == schedule_data.hosts(network, world)
        clock = Network.preset("nvlink", "100gbps", hosts=where)
        for algorithm, packed in (found["schedules"] | found["by_hosts"].get(network, {})).items():
            names.append(algorithm)
            library = schedules.build(operation, algorithm, world, hosts=where)
            rounds = tuple(schedule_data.unpack(moves) for moves in packed["rounds"])
            read = replace(library, rounds=rounds)
            assert packed["share"] == float(library.share)
            assert schedules.simulate(read, 1e9, clock).total == schedules.simulate(library, 1e9, clock).total
    assert {*names} == {*schedules.algorithms(operation)}
    assert found["hosts"]["8 ranks per host"] == tuple(rank // 8 for rank in range(world))


def test_a_reader_may_begin_with_eight_hosts_of_eight_ranks() -> None:
    shown = explorer.markup("all_reduce", "", 64, "8 ranks per host", "NVLink, 400 Gb/s", "1 GB")
    network = Network.preset("nvlink", "400gbps", hosts=tuple(rank // 8 for rank in range(64)))
    rows = dict(re.findall(r'<th scope="row">(\w+)</th><td>([^<]+)</td>', shown))
    hierarchical = schedules.build("all_reduce", "hierarchical", 64, hosts=network.hosts)
    assert rows["hierarchical"] == collective_pictures.seconds(schedules.simulate(hierarchical, 1e9, network).total)
    assert {*rows} == {*schedules.algorithms("all_reduce")}
    assert '<option value="64" selected>' in shown and '<option value="8 ranks per host" selected>' in shown
    assert [*own(shown)["worlds"]] == ["64"]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("operation", "world", "network", "links"),
    [
        ("all_reduce", 8, "one host per rank", "NVLink, 100 Gb/s"),
        ("all_gather", 5, "two hosts", "shared memory, TCP"),
        ("barrier", 4, "one host", "PCIe, 25 Gb/s"),
    ],
)
def test_the_table_without_a_script_has_simulated_times(operation: str, world: int, network: str, links: str) -> None:
    shown = explorer.markup(operation, "", world, network, links, "1 GB")
    hosts = schedule_data.hosts(network, world)
    simulated = Network.preset(*cost_data.LINKS[links], hosts=hosts)
    rows = dict(re.findall(r'<th scope="row">(\w+)</th><td>([^<]+)</td>', shown))
    assert ("hierarchical" in rows) == (network == "two hosts")
    for algorithm, time in rows.items():
        schedule = schedules.build(operation, algorithm, world, hosts=hosts)
        assert time == collective_pictures.seconds(schedules.simulate(schedule, 1e9, simulated).total)
    inline = own(shown)
    assert inline["links"] == cost_data.links() and inline["operation"] == operation
    assert [*inline["worlds"]] == [str(world)]  # type: ignore[misc]


def test_the_answer_on_the_landing_page_is_that_of_its_sum() -> None:
    """1 GB, 8 hosts, 100 Gb/s: two rounds of seven messages of an eighth each, and the last of them is reduced."""
    times = explorer.times("all_reduce", 8, "one host per rank", "NVLink, 100 Gb/s", 1e9)
    network = asdict(cost_data.network("NVLink, 100 Gb/s"))
    total = 14 * network["alpha"] + 1.75e9 * network["beta"] + 0.125e9 * network["gamma"]
    assert times["two_shot"] == pytest.approx(total, rel=1e-12) and min(times, key=times.get) == "two_shot"  # type: ignore[arg-type]
    assert "{explorer} all_reduce\n:ranks: 8\n" in (pages.DOCS / "index.md").read_text(encoding="utf-8")


def test_recorded_runs_are_those_of_the_record() -> None:
    cells = json.loads(speed.RECORDED.read_text(encoding="utf-8"))["cells"]
    for operation in schedules.operations():
        found = cost_data.recorded(operation)
        for network, rows in found.items():
            for row in rows:
                key = (cost_data.benchmark(operation), network == "two hosts", row["bytes"])
                (cell,) = (cell for cell in cells if (cell["op"], cell["namespaces"], cell["bytes"]) == key)
                assert row["ref"] * (2 if operation == "send" else 1) == pytest.approx(cell["seconds"])
                assert row["gloo"] / row["ref"] == pytest.approx(cell["gloo"])
    assert len(cost_data.recorded("all_reduce")["one host"]) == 5 and not cost_data.recorded("barrier")["one host"]


def test_a_plot_has_a_mark_for_each_figure_and_a_bar_for_each_range() -> None:
    rows = [("first", ("1.5", "2 to 4")), ("second", ("", "up to 8"))]
    table = [(name, *cells) for name, cells in rows]
    drawing, kept, end = speed.plotted(("what", "a", "b"), table, "time, in ms", even=True)
    svg = drawing.astext()
    assert svg.count("class='mark s0'") == 1 + 1 and svg.count("class='mark s1'") == 2 + 1 + 1
    assert svg.count("class='series s1'") == 2 and "grid even" in svg
    assert "time, in ms</text>" in svg and "<summary>Figures: time, in ms</summary>" in svg
    assert isinstance(kept, nodes.table) and end.astext() == "</details>"
    # 2 to 4 ends where 4 is, at half of the way from 2 to 8 on the logarithmic axis.
    (low, high), (_, most) = (
        [float(x) for x in re.findall(r"x[12]='([\d.]+)'", line)]
        for line in re.findall(r"<line class='series s1'[^>]*>", svg)
    )
    assert 2 * high == pytest.approx(low + most, abs=0.2)


def test_every_figure_of_the_page_on_performance_is_drawn() -> None:
    page = (pages.DOCS / "explanation" / "speed.md").read_text(encoding="utf-8")
    found = re.findall(r"```\{measured\} (\w+)\n:plot: (.+)\n", page)
    assert len(found) == page.count("```{measured}") == 11 and page.count("```{speed}") == 6
    for name, axis in found:
        entry = measured.recorded(name)
        svg = speed.plotted(tuple(entry["header"]), [tuple(row) for row in entry["rows"]], axis, even=False)[0].astext()
        cells = [plots.span(cell) for row in entry["rows"] for cell in row[len(row) - shown(entry) :]]
        assert len(re.findall("<(?:circle|polygon) class='mark", svg)) - legend(entry) == sum(
            1 if low in (None, high) else 2 for low, high in filter(None, cells)
        )
        assert all(cells), name


def shown(entry: dict[str, list[list[str]]]) -> int:
    """Return how many columns of a table hold figures."""
    return sum(all(plots.span(row[at]) for row in entry["rows"]) for at in range(1, len(entry["header"])))


def legend(entry: dict[str, list[list[str]]]) -> int:
    """Return how many marks the legend of a table's plot has."""
    return shown(entry) if shown(entry) > 1 else 0
