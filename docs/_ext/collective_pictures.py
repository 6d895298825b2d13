"""Drawings for the pages of collectives: slots before and after, and time by size.

Both are as wide as a phone at most, so that text in them is never smaller than 11 pixels; colors come from the page.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from math import log10
from typing import Any

from plots import mark
from speed import RECORDED, named

from torchdist_ref import schedules
from torchdist_ref.schedules import Network, Slot

CELL, HEIGHT, LINE, NAME, TOP = 34, 26, 32, 50, 24
# Width of the word above a column, in the widest of the fonts that the style names.
WORD = 52
Value = tuple[tuple[int, Slot], ...]


def before_after(operation: str, world: int) -> str:
    """Return an operation's contract as SVG: one line for each rank, slots at the start and at the end."""
    contract = schedules.contract(operation, world)
    starts: list[dict[Slot, Value]] = [
        {slot: ((rank, slot),) for slot in contract.before(rank)} for rank in range(world)
    ]
    ends = [dict(contract.after(rank)) for rank in range(world)]
    left, right = columns(starts), columns(ends)
    middle = NAME + max(CELL * len(left), WORD) + 36
    width, height = middle + max(CELL * len(right), WORD), TOP + LINE * world
    title = f"{operation} on {world} ranks: the slots of each rank before and after"
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' class='slots' width='{width}' viewBox='0 0 {width} {height}' "
        f"role='img' aria-label='{escape(title)}'>",
        f"<text class='buffer' x='{NAME}' y='14'>before</text><text class='buffer' x='{middle}' y='14'>after</text>",
    ]
    for rank in range(world):
        y = TOP + LINE * rank
        parts.append(f"<text x='0' y='{y + 17}'>rank {rank}</text>")
        parts.append(f"<text x='{middle - 24}' y='{y + 17}'>→</text>")
        parts += [cell(starts[rank].get(slot), world, NAME + CELL * n, y) for n, slot in enumerate(left)]
        parts += [cell(ends[rank].get(slot), world, middle + CELL * n, y) for n, slot in enumerate(right)]
    return "".join([*parts, "</svg>"])


def columns(states: Iterable[dict[Slot, Value]]) -> list[Slot]:
    """Return the slots that any rank has."""
    return sorted({slot for state in states for slot in state})


def cell(value: Value | None, world: int, x: float, y: float) -> str:
    """Return one slot: a tint for each rank whose value is in it, and its name."""
    size = f"y='{y}' height='{HEIGHT}' rx='3'"
    if not value:
        return f"<rect class='empty' x='{x}' width='{CELL - 4}' {size}/>"
    share = (CELL - 4) / (world if len(value) > 1 else 1)
    tints = "".join(
        f"<rect class='part' style='--hue:{rank * 360 // world}' width='{share:.2f}' "
        f"x='{x + (share * rank if len(value) > 1 else 0):.2f}' {size}/>"
        for rank, _ in value
    )
    (rank, (_, index)), *others = value
    name = f"Σ{index}" if others else f"{chr(ord('a') + rank)}{index}"
    text = f"<text x='{x + CELL / 2 - 2}' y='{y + 17}' text-anchor='middle'>{name}</text>"
    return f"<g><rect class='full' x='{x}' width='{CELL - 4}' {size}/>{tints}{text}</g>"


def splits_picture(splits: list[list[int]]) -> str:
    """Return an all_to_all with splits as SVG: the rows that each rank has before and after.

    Args:
        splits: For each sender, the number of rows for each receiver. Rows are numbered in order on their sender.
    """
    world = len(splits)
    firsts = [[sum(row[:peer]) for peer in range(world)] for row in splits]
    starts = [[(rank, at) for at in range(sum(splits[rank]))] for rank in range(world)]
    ends = [
        [(src, firsts[src][rank] + at) for src in range(world) for at in range(splits[src][rank])]
        for rank in range(world)
    ]
    longest = max(len(slots) for slots in (*starts, *ends))
    width, line = NAME + CELL * longest, TOP + LINE * world
    title = f"all_to_all_single with split sizes on {world} ranks: the rows of each rank before and after"
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' class='slots' width='{width}' viewBox='0 0 {width} {2 * line + 8}' "
        f"role='img' aria-label='{title}'>"
    ]
    for top, word, held in ((0, "before: input", starts), (line + 8, "after: output", ends)):
        parts.append(f"<text class='buffer' x='{NAME}' y='{top + 14}'>{word}</text>")
        for rank, slots in enumerate(held):
            y = top + TOP + LINE * rank
            parts.append(f"<text x='0' y='{y + 17}'>rank {rank}</text>")
            parts += [cell(((src, ("in", at)),), world, NAME + CELL * n, y) for n, (src, at) in enumerate(slots)]
        # A line between the parts for two receivers, or from two senders.
        for rank in range(world):
            sizes = splits[rank] if held is starts else [row[rank] for row in splits]
            for cut in {sum(sizes[:peer]) for peer in range(1, world)} - {0, sum(sizes)}:
                x, y = NAME + CELL * cut - 2, top + TOP + LINE * rank
                parts.append(f"<line class='cut' x1='{x}' x2='{x}' y1='{y - 3}' y2='{y + HEIGHT + 3}'/>")
    return "".join([*parts, "</svg>"])


SERIES = (("ref", "ref"), ("gloo", "Gloo"), ("mpich", "MPICH"), ("openmpi", "Open MPI"))
WIDTH, PLOT_HEIGHT, LEFT, TOP_LINE, BOTTOM = 350, 282, 52, 26, 220


def cells(operation: str, apart: bool) -> list[dict[str, Any]]:
    """Return the recorded figures of an operation, by size."""
    kept = json.loads(RECORDED.read_text(encoding="utf-8"))["cells"]
    found = [cell for cell in kept if (cell["op"], cell["namespaces"], cell["world"]) == (operation, apart, 2)]
    return sorted(found, key=lambda cell: int(cell["bytes"]))


def fitted(apart: bool) -> Network:
    """Return a network whose messages take the recorded times: a call there is a message each way.

    A reduction takes place in memory, so a byte reduced takes the time of a byte moved on one host.
    """
    alpha, beta = constants(apart)
    hosts = (0, 1) if apart else (0, 0)
    gamma = constants(False)[1]
    return Network(alpha=alpha, beta=beta, gamma=gamma, hosts=hosts, local_alpha=alpha, local_beta=beta)


def constants(apart: bool) -> tuple[float, float]:
    """Return the seconds for a message and for a byte moved, from recorded messages of the least size and of 16 MiB."""
    messages = cells("sendrecv", apart)
    small, large = messages[0], next(cell for cell in messages if cell["bytes"] == 1 << 24)
    return small["seconds"] / 2, (large["seconds"] - small["seconds"]) / 2 / large["bytes"]


def constants_text() -> str:
    """Return the cost constants of both networks in a sentence each, with machine and date."""
    kept = json.loads(RECORDED.read_text(encoding="utf-8"))
    said = [
        f"{where}, a is {seconds(alpha)} and b is {per_byte(beta)}"
        for where, (alpha, beta) in (("On one host", constants(False)), ("Between two hosts over TCP", constants(True)))
    ]
    machine = f"{kept['machine']['processor']}, {kept['machine']['processors']} cores"
    return (
        f"{'. '.join(said)}. g is {per_byte(constants(False)[1])}, the b of one host. a is half the time of sending "
        f"4 bytes there and back, b half of the additional time for 16 MiB. Measured on ref on {kept['date']}: "
        f"{machine}; the two hosts are network namespaces."
    )


ROOT_SENDS = ("broadcast", "scatter")
"""Operations whose algorithm `direct` is free for the root on one host only, where the others read its memory."""


def conditions(operation: str) -> str:
    """Return where the times of the catalogue's formulas are those of the simulator."""
    but = (
        " That of direct holds on one host only: elsewhere the root sends to one rank after the other."
        if operation in ROOT_SENDS
        else ""
    )
    return (
        "The formulas give the times of the simulator if n is a power of two, g is at most b, and the ranks are all on "
        f"one host or each on a host of its own.{but} The explorer on the page Collectives has the times elsewhere."
    )


def per_byte(value: float) -> str:
    """Return a time per byte, and its inverse, as text.

    >>> per_byte(4e-10)
    '0.4 ns/B (2.5 GB/s)'
    """
    return f"{value * 1e9:.2g} ns/B ({1e-9 / value:.2g} GB/s)"


FAR = 2
"""Ratio of measured and predicted time from which a page explains the difference."""
SHORT = 64 << 10
"""Largest size in bytes at which the overhead of a call exceeds the time of its bytes."""


def reason(size: float, predicted: float, measured: float, apart: bool) -> str:
    """Return why measured and predicted time differ; see the page on performance for the measurements."""
    if predicted > measured:
        return "the constant b is fitted at 16 MiB, and smaller messages stay in caches and socket buffers"
    if size <= SHORT:
        return "the prediction counts messages and bytes only, and a call also spends time in Python"
    if apart:
        return (
            "the prediction sends, receives and reduces at full speed at the same time, but both ranks share two cores"
        )
    return "the prediction omits the copies into staging buffers and of own blocks, and contention for memory"


def note(operation: str, apart: bool) -> str:
    """Return a sentence for each reason for which times are far from their prediction; nothing if none is."""
    found: dict[tuple[str, bool], list[str]] = {}
    for row in times(operation, apart):
        predicted, measured = row["predicted"], row["ref"]
        if max(predicted, measured) > FAR * min(predicted, measured):
            key = reason(row["bytes"], predicted, measured, apart), measured > predicted
            factor = max(predicted, measured) / min(predicted, measured)
            found.setdefault(key, []).append(f"{named(int(row['bytes']))} ({factor:.1f} times)")
    return " ".join(
        f"The measured time is {'longer' if longer else 'shorter'} than predicted at {', '.join(sizes)}: {why}."
        for (why, longer), sizes in found.items()
    )


def times(operation: str, apart: bool) -> list[dict[str, float]]:
    """Return for each recorded size the seconds of every library, and the predicted ones."""
    network, op = fitted(apart), "send" if operation == "sendrecv" else operation
    rows = []
    for cell in cells(operation, apart):
        size = cell["bytes"]
        algorithm = schedules.choose(op, 2, size, hosts=(0, 1) if apart else (0, 0))
        trace = schedules.simulate(schedules.build(op, algorithm, 2), size, network)
        row = {"bytes": size, "ref": cell["seconds"], "predicted": trace.total * (2 if op == "send" else 1)}
        rows.append(row | {name: cell[name] * cell["seconds"] for name, _ in SERIES[1:] if name in cell})
    return rows


def speed_plot(operation: str, apart: bool) -> str:
    """Return times by size as SVG, both logarithmic; nothing if only one size was measured."""
    rows = times(operation, apart)
    if len(rows) < 2:
        return ""
    every = [value for row in rows for name, value in row.items() if name != "bytes"]
    low, high = log10(min(every)) - 0.1, log10(max(every)) + 0.1
    first, last = log10(rows[0]["bytes"]), log10(rows[-1]["bytes"])

    def at(size: float, seconds: float) -> tuple[float, float]:
        x = LEFT + (log10(size) - first) / (last - first) * (WIDTH - LEFT - 16)
        return x, TOP_LINE + (high - log10(seconds)) / (high - low) * (BOTTOM - TOP_LINE)

    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' class='speeds' viewBox='0 0 {WIDTH} {PLOT_HEIGHT}' role='img' "
        f"aria-label='Time of {operation} by size; the table below has the same figures'>"
    ]
    for power in range(-7, 2):
        if low <= power <= high:
            y = at(rows[0]["bytes"], 10.0**power)[1]
            parts.append(f"<line class='grid' x1='{LEFT}' x2='{WIDTH - 8}' y1='{y:.1f}' y2='{y:.1f}'/>")
            parts.append(f"<text x='{LEFT - 6}' y='{y + 4:.1f}' text-anchor='end'>{seconds(10.0**power)}</text>")
    parts.append("<text class='axis' x='0' y='12'>time of a call</text>")
    for row in rows:
        x = min(at(row["bytes"], every[0])[0], WIDTH - 18)
        # Without the unit, which the title of the axis has, the largest two sizes fit beside each other.
        size = named(int(row["bytes"])).removesuffix("B").removesuffix("i").replace(" ", "")
        parts.append(f"<text x='{x:.1f}' y='{BOTTOM + 16}' text-anchor='middle'>{size}</text>")
    title = "bytes of the whole buffer (K = 1024)"
    parts.append(f"<text class='axis' x='{WIDTH - 4}' y='{BOTTOM + 34}' text-anchor='end'>{title}</text>")
    for number, (name, label) in enumerate([*SERIES, ("predicted", "predicted")]):
        points = [at(row["bytes"], row[name]) for row in rows if name in row]
        if points:
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f"<polyline class='series s{number}' points='{line}'/>")
            parts += [mark(number, x, y) for x, y in points]
        if points:
            legend = (12, 62, 118, 188, 272)[number]
            parts.append(mark(number, legend, PLOT_HEIGHT - 8))
            parts.append(f"<text x='{legend + 7}' y='{PLOT_HEIGHT - 4}'>{label}</text>")
    return "".join([*parts, "</svg>"])


def seconds(value: float) -> str:
    """Return a time as text.

    >>> seconds(1e-5), seconds(0.00243)
    ('10 µs', '2.43 ms')
    """
    for unit, name in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= unit * 0.999:
            return f"{value / unit:.3g} {name}"
    return f"{value * 1e6:.2g} µs"


def figures_table(operation: str, apart: bool, where: str) -> str:
    """Return the figures of a plot as an HTML table that is folded away."""
    rows = times(operation, apart)
    if not rows:
        return ""
    kept = json.loads(RECORDED.read_text(encoding="utf-8"))
    shown = [pair for pair in [*SERIES, ("predicted", "predicted")] if pair[0] in rows[0]]
    head = "".join(f"<th>{label}</th>" for _, label in shown)
    body = "".join(
        f"<tr><td>{named(int(row['bytes'])) if row['bytes'] else 'no data'}</td>"
        + "".join(f"<td>{seconds(row[name]) if name in row else ''}</td>" for name, _ in shown)
        + "</tr>"
        for row in rows
    )
    versions = f"torch {kept['versions']['torch']}, Python {kept['versions']['python']}"
    stamp = f"Recorded on {kept['date']}, {kept['machine']['processor']}, {versions}."
    return (
        f"<details class='figures'{' open' if len(rows) < 2 else ''}><summary>Figures, {where}</summary>"
        f"<div class='player-table' tabindex='0'><table class='table'><thead><tr><th>size</th>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div><p>{stamp}</p></details>"
    )
