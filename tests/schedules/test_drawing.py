"""Pictures: well-formed, complete, the same every time, readable on light and dark pages, with words for all."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from torchdist_ref.schedules import (
    Network,
    Schedule,
    Trace,
    algorithms,
    build,
    carry,
    draw,
    operations,
    simulate,
    timeline,
)
from torchdist_ref.schedules import drawing as svg
from torchdist_ref.schedules.schedule import messages

ALL = [(op, name) for op in operations() for name in algorithms(op)]
SVG = "{http://www.w3.org/2000/svg}"


def parsed(text: str) -> ElementTree.Element:
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg"
    return root


def words(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


@pytest.mark.parametrize(("op", "name"), ALL)
def test_every_message_is_an_arrow_and_every_local_move_a_dot(op: str, name: str) -> None:
    schedule = build(op, name, 5, hosts=(0, 0, 1, 1, 1))
    root = parsed(draw(schedule))
    parts = [part for moves in schedule.rounds for part in messages(moves)]
    assert len(root.findall(f".//{SVG}polygon")) == sum(part.src != part.dst for part in parts)
    assert len(root.findall(f".//{SVG}circle")) == sum(part.src == part.dst for part in parts)
    assert {f"rank {r}" for r in range(5)} | {f"round {i + 1}" for i in range(len(schedule.rounds))} <= set(words(root))
    tips = "\n".join(element.text or "" for element in root.iter(f"{SVG}title"))
    assert all(str(move) in tips for moves in schedule.rounds for move in moves)


def test_arrows_go_from_sender_to_receiver_downwards() -> None:
    root = parsed(draw(build("send", "direct", 2)))
    columns = {e.text: float(e.get("x", "")) for e in root.iter(f"{SVG}text") if (e.text or "").startswith("rank")}
    line = root.find(f"{SVG}g/{SVG}line")
    head = root.find(f"{SVG}g/{SVG}polygon")
    assert line is not None and head is not None
    tip = [float(x) for x in head.get("points", "").split()[0].split(",")]
    assert (float(line.get("x1", "")), tip[0]) == (columns["rank 0"], columns["rank 1"])
    assert float(line.get("y1", "")) < tip[1]


def test_pictures_have_a_title_and_a_description() -> None:
    root = parsed(draw(build("all_reduce", "ring", 4)))
    title, desc = root[0], root[1]
    assert (title.tag, title.text, desc.tag) == (f"{SVG}title", "ring all_reduce", f"{SVG}desc")
    assert "on 4 ranks in 6 rounds" in (desc.text or "") and root.get("role") == "img"
    assert root.get("aria-labelledby") == f"{title.get('id')} {desc.get('id')}"
    assert title.get("id") != parsed(draw(build("all_reduce", "ring", 5)))[0].get("id")


def test_equal_schedules_give_equal_bytes() -> None:
    lazy = build("all_reduce", "halving_doubling", 6)
    assert draw(lazy) == draw(Schedule(lazy.name, 6, tuple(lazy.rounds), lazy.chunks)) == lazy._repr_svg_()


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("page", ["#ffffff", "#121212"])
def test_colors_have_contrast_on_light_and_dark_pages(page: str) -> None:
    used = set(re.findall(r"#[0-9a-f]{6}", draw(build("all_reduce", "two_shot", 4))))
    assert used == {svg.GRAY, svg.BLUE, svg.ORANGE}
    for color in used:
        dark, light = sorted((luminance(color), luminance(page)))
        assert (light + 0.05) / (dark + 0.05) > 4


def test_labels_of_one_band_do_not_cover_each_other() -> None:
    root = parsed(draw(build("all_reduce", "halving_doubling", 8)))
    rows: dict[str, list[tuple[float, int]]] = {}
    for element in root.iter(f"{SVG}text"):
        if element.get("text-anchor") == "middle":
            rows.setdefault(element.get("y", ""), []).append((float(element.get("x", "")), len(element.text or "")))
    for row in rows.values():
        for (x1, n1), (x2, n2) in pairwise(sorted(row)):
            assert x2 - x1 >= 6.7 * (n1 + n2) / 2


def test_picture_notes_what_it_omits() -> None:
    root = parsed(draw(build("all_reduce", "ring", 64)))
    assert "Shown: the first 32 of 64 ranks and the first 40 of 126 rounds." in words(root)
    assert "rank 31" in words(root) and "rank 32" not in words(root)


def test_names_are_escaped() -> None:
    root = parsed(draw(Schedule("a < b & 'c'", 2, ((carry(0, 1, ("data", 0)),),))))
    assert root[0].text == "a < b & 'c'"


def test_timeline_has_a_bar_for_every_event() -> None:
    hosts = (0, 0, 1, 1)
    trace = simulate(build("all_reduce", "hierarchical", 4, hosts=hosts), 1 << 20, Network(hosts=hosts))
    root = parsed(timeline(trace))
    bars = root.findall(f"{SVG}rect")
    assert len(bars) == len([e for e in trace if e.end > e.start]) > 8
    assert max(float(b.get("x", "")) + float(b.get("width", "")) for b in bars) == pytest.approx(936, abs=1)
    assert trace._repr_svg_() == timeline(trace)
    assert "rank 0: reduce data[0-1] + of rank 1" in (bars[1][0].text or bars[2][0].text or "")


def test_timeline_notes_what_it_omits() -> None:
    many = simulate(build("all_reduce", "ring", 80), 1 << 20)
    text = timeline(many)
    assert "shown: the first 64 of 80 ranks and the first 4000 of" in text
    one = timeline(simulate(build("all_reduce", "ring", 2048), 1 << 20))
    assert "rank 0 represents all ranks in 4094 of 4094 rounds" in one and ">rank 1<" not in one


def test_an_empty_trace_can_be_drawn() -> None:
    assert "nothing, 3 ranks: 0 s" in words(parsed(timeline(Trace("nothing", 3, [], 0.0))))[0]
