"""The pages of collectives: the player's data are the library's schedules, and every page is complete."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import collective_pages
import collective_pictures
import cost_data
import player
import pytest
import schedule_data
import workbench
import workbench_run

from tests.docs import pages
from tests.schedules import formulas
from torchdist_ref import schedules
from torchdist_ref.schedules import Network
from torchdist_ref.schedules.schedule import messages
from torchdist_ref.testing import run

PAGES = collective_pages.sources()


@pytest.mark.parametrize("operation", schedules.operations())
def test_the_player_has_every_move_of_every_schedule(operation: str) -> None:
    everything = json.loads(json.dumps(schedule_data.of_operation(operation)))
    for world, found in everything["worlds"].items():
        assert list(found["schedules"]) == list(schedules.algorithms(operation))
        for algorithm, packed in found["schedules"].items():
            schedule = schedule_data.schedule(operation, algorithm, int(world))
            assert [schedule_data.unpack(moves) for moves in packed["rounds"]] == list(schedule.rounds)


def test_the_choices_are_those_of_choose() -> None:
    found = schedule_data.of_operation("all_reduce")["worlds"][4]["chosen"]
    assert found["two hosts"] == [(None, "hierarchical")]
    for network, rows in found.items():
        hosts = schedule_data.hosts(network, 4)
        for size in (1, 4, 65536, 65537, 262144, 262145, 1 << 20, (1 << 20) + 1, 1 << 27):
            row = next(name for limit, name in rows if limit is None or size <= limit)
            assert row == schedules.choose("all_reduce", 4, size, hosts=hosts)


def test_the_table_without_a_script_lists_the_messages() -> None:
    shown = player.markup("all_reduce", "all_reduce.js", 4, 1 << 20, "one host")
    schedule = schedules.build("all_reduce", schedules.choose("all_reduce", 4, 1 << 20), 4)
    for number, moves in enumerate(schedule.rounds, 1):
        assert f"<tr><td>{number}</td><td>" in shown
        end = player.ends(schedule, number, 1 << 20, cost_data.network(cost_data.MEASURED, (0,) * 4))
        assert f"</td><td>{collective_pictures.seconds(end)}</td></tr>" in shown
        assert all(f"{part.src} → {part.dst}: {part.label}" in shown for part in messages(moves))


@pytest.mark.parametrize(("name", "most"), [("player.js", 320), ("explorer.js", 260), ("schedules.js", 140)])
def test_the_scripts_are_short_and_ask_nobody(name: str, most: int) -> None:
    script = (pages.DOCS / "_static" / name).read_text(encoding="utf-8")
    lines = script.splitlines()
    code = [line for line in lines if line.strip() and not line.strip().startswith("//")]
    assert len(code) <= most and max(map(len, lines)) <= 100
    assert set(re.findall(r"https?://[^\"']+", script)) <= {"http://www.w3.org/2000/svg"}


def test_there_is_a_page_for_each_operation_and_a_row_for_each_page() -> None:
    assert len(PAGES) == 16
    assert {collective_pages.data(path)["schedule"] for path in PAGES} == set(schedules.operations())
    index = (collective_pages.FOLDER / "index.md").read_text(encoding="utf-8")
    assert [*(path.stem for path in PAGES), "sheet", "workbench"] == re.findall(r"^(\w+)$", index, re.MULTILINE)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_precondition_raises_and_every_example_runs(path: Path) -> None:
    page = collective_pages.data(path)
    assert page["preconditions"] and page["mistakes"]
    assert {"torch", "MPI", "NCCL", "JAX"} <= page["names"].keys()
    for breach in page["preconditions"]:
        assert re.match(r"rank [01] raises \w+Error: ", collective_pages.error(breach["code"]))
    for world in (2, 4):
        assert len(collective_pages.outputs(page["example"], world)) == world


def test_an_accepted_call_is_no_precondition() -> None:
    with pytest.raises(RuntimeError, match="raises no error"):
        collective_pages.error("dist.barrier()")


def test_the_workbench_accepts_a_ring_and_times_it() -> None:
    found = json.loads(workbench_run.examine(workbench.START, "all_reduce", "4", "1048576", "10 Gbit/s Ethernet"))
    assert found["right"] and not found["wrong"]
    times = dict(reversed(line.split(" µs  ")) for line in found["said"].splitlines()[1:])  # type: ignore[misc]
    assert times["yours"] == times["ring (catalogue)"]


def test_the_workbench_names_the_wrong_slot() -> None:
    wrong = workbench.START.replace("reduce=True", "reduce=step > 0")
    found = json.loads(workbench_run.examine(wrong, "all_reduce", "4", "4", "one host"))
    assert not found["right"] and "result: rank 0, data[0]: round 1, move 1.data[0]" in found["said"]
    assert {slot for slot, _ in found["wrong"]} == {f"{rank}.0.{chunk}" for rank in range(4) for chunk in range(4)}
    assert "… and 12 more" in found["said"]
    assert "line 3: ZeroDivisionError" in workbench_run.examine("\n\n1 / 0", "all_reduce", "4", "4", "one host")


def test_the_workbench_names_round_and_move_of_a_barrier_that_is_too_early() -> None:
    code = """from torchdist_ref.schedules import Schedule, carry

def algorithm(world):
    signal = ("tmp", 0)
    down = tuple(carry(0, rank, signal) for rank in range(1, world))
    up = tuple(carry(rank, 0, signal) for rank in range(1, world))
    return Schedule("down before up", world, (down, up), chunks=0)
"""
    said = json.loads(workbench_run.examine(code, "barrier", "3", "4", "one host"))["said"]
    assert "at the end" not in said
    assert "result: rank 1, tmp[0]: round 1, move 0.tmp[0] -> 1.tmp[0]: rank 0 sends before rank 2" in said
    assert "    expected a notification from every rank, got none from [2]" in said


@pytest.mark.parametrize("operation", schedules.operations())
def test_the_picture_shows_the_contract(operation: str) -> None:
    drawing = collective_pictures.before_after(operation, 4)
    contract = schedules.contract(operation, 4)
    slots = sum(len(list(contract.before(rank))) + len(contract.after(rank)) for rank in range(4))
    assert drawing.count("class='full'") == slots
    assert int(re.search(r"width='(\d+)'", drawing)[1]) <= 358  # type: ignore[index]


@pytest.mark.parametrize("operation", schedules.operations())
def test_the_words_above_the_columns_are_not_cut_off(operation: str) -> None:
    drawing = collective_pictures.before_after(operation, 4)
    width = int(re.search(r"width='(\d+)'", drawing)[1])  # type: ignore[index]
    before, after = (int(x) for x in re.findall(r"<text class='buffer' x='(\d+)' y='14'>", drawing))
    # A monospaced letter of 12.5 pixels is 7.6 wide.
    assert before + 6 * 7.6 < after and after + 5 * 7.6 < width


def test_the_example_with_splits_returns_the_rows_of_the_picture() -> None:
    page = collective_pages.data(collective_pages.FOLDER / "all_to_all_single.md")
    splits = [[int(size) for size in row.split()] for row in page["splits"].split("/")]
    assert len({tuple(row) for row in splits}) == 4 and splits != [list(column) for column in zip(*splits, strict=True)]
    drawn = re.findall(r"text-anchor='middle'>(\w\d)<", collective_pictures.splits_picture(splits))
    ((code, (world,)),) = collective_pages.examples(page)[1:]
    names: dict[str, Any] = {}
    exec(code, names)
    outputs = run(names["program"], world)
    assert names["SPLITS"] == splits
    assert drawn[sum(map(sum, splits)) :] == [row for rows in outputs for row in rows]


@pytest.mark.parametrize("operation", schedules.operations())
def test_the_formulas_hold_where_the_page_says(operation: str) -> None:
    assert formulas.G < formulas.B
    for algorithm in schedules.algorithms(operation):
        if algorithm == "hierarchical":
            continue  # It has no formula, but a sentence.
        expected = formulas.formula(schedules.entry(operation, algorithm).cost, 8)
        near = Network(9.0, 9.0, formulas.G, hosts=(0,) * 8, local_alpha=formulas.A, local_beta=formulas.B)
        far = Network(formulas.A, formulas.B, formulas.G)
        schedule = schedules.build(operation, algorithm, 8)
        times = [schedules.simulate(schedule, formulas.M, network).total for network in (near, far)]
        holds = [time == pytest.approx(expected, rel=1e-9) for time in times]
        said = collective_pictures.conditions(operation)
        assert holds == [True, not (algorithm == "direct" and "direct holds on one host only" in said)], algorithm


def test_predicted_times_of_messages_are_the_recorded_ones_at_both_ends() -> None:
    rows = collective_pictures.times("sendrecv", apart=False)
    for row in (rows[0], next(row for row in rows if row["bytes"] == 1 << 24)):
        assert row["predicted"] == pytest.approx(row["ref"], rel=0.01)


@pytest.mark.parametrize("apart", [False, True], ids=["one host", "two hosts"])
@pytest.mark.parametrize("operation", ["all_reduce", "reduce", "all_to_all", "sendrecv"])
def test_each_time_far_from_its_prediction_is_explained_below_the_plot(operation: str, apart: bool) -> None:
    note = collective_pictures.note(operation, apart)
    for row in collective_pictures.times(operation, apart):
        factor = max(row["ref"] / row["predicted"], row["predicted"] / row["ref"])
        shown = f"{collective_pictures.named(int(row['bytes']))} ({factor:.1f} times)"
        assert (shown in note) == (factor > 2), row
        direction = "longer" if row["ref"] > row["predicted"] else "shorter"
        assert factor <= 2 or re.search(rf"{direction} than predicted at [^:]*{re.escape(shown)}[^:]*: \w+", note)
    assert note.count("The measured time is") == note.count(": ")


def test_the_constants_of_the_page_are_those_of_the_prediction() -> None:
    text = collective_pictures.constants_text()
    for apart, where in ((False, "On one host"), (True, "Between two hosts over TCP")):
        network = collective_pictures.fitted(apart)
        assert f"{where}, a is {collective_pictures.seconds(network.alpha)} and b is " in text
        assert f"{network.beta * 1e9:.2g} ns/B" in text and f"g is {network.gamma * 1e9:.2g} ns/B" in text
