"""The pages of collectives: the player's data are the library's schedules, and every page is complete."""

from __future__ import annotations

import json
import re
from pathlib import Path

import collective_pages
import collective_pictures
import player
import pytest
import schedule_data
import workbench
import workbench_run

from tests.docs import pages
from torchdist_ref import schedules
from torchdist_ref.schedules.schedule import messages

SCRIPT = pages.DOCS / "_static" / "player.js"
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
    assert found["one host"][0] == schedules.choose("all_reduce", 4, 4, hosts=(0, 0, 0, 0))
    assert found["two hosts"][0] == "hierarchical"
    assert found["one host per rank"][-1] == schedules.choose("all_reduce", 4, 1 << 27, transport="tcp")


def test_the_table_without_a_script_lists_the_messages() -> None:
    shown = player.markup("all_reduce", "all_reduce.js", 4, 1 << 20, "one host")
    schedule = schedules.build("all_reduce", schedules.choose("all_reduce", 4, 1 << 20), 4)
    for number, moves in enumerate(schedule.rounds, 1):
        assert f"<tr><td>{number}</td><td>" in shown
        assert all(f"{part.src} → {part.dst}: {part.label}" in shown for part in messages(moves))


def test_the_script_is_short_and_asks_nobody() -> None:
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    code = [line for line in lines if line.strip() and not line.strip().startswith("//")]
    assert len(code) <= 300 and max(map(len, lines)) <= 100
    addresses = re.findall(r"https?://[^\"']+", SCRIPT.read_text(encoding="utf-8"))
    assert set(addresses) == {"http://www.w3.org/2000/svg"}


def test_there_is_a_page_for_each_operation_and_a_row_for_each_page() -> None:
    assert len(PAGES) == 16
    assert {collective_pages.data(path)["schedule"] for path in PAGES} == set(schedules.operations())
    index = (collective_pages.FOLDER / "index.md").read_text(encoding="utf-8")
    assert [*(path.stem for path in PAGES), "workbench"] == re.findall(r"^(\w+)$", index, re.MULTILINE)


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
    assert not found["right"] and "rank 0, data[0], at the end" in found["said"]
    assert {slot for slot, _ in found["wrong"]} == {f"{rank}.0.{chunk}" for rank in range(4) for chunk in range(4)}
    assert "… and 12 more" in found["said"]
    assert "line 3: ZeroDivisionError" in workbench_run.examine("\n\n1 / 0", "all_reduce", "4", "4", "one host")


@pytest.mark.parametrize("operation", schedules.operations())
def test_the_picture_shows_the_contract(operation: str) -> None:
    drawing = collective_pictures.before_after(operation, 4)
    contract = schedules.contract(operation, 4)
    slots = sum(len(list(contract.before(rank))) + len(contract.after(rank)) for rank in range(4))
    assert drawing.count("class='full'") == slots
    assert int(re.search(r"width='(\d+)'", drawing)[1]) <= 358  # type: ignore[index]


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
