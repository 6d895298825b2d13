"""The hook laboratory's table: one line a hook, for one task and backend, with a pair of columns for each link."""

from __future__ import annotations

from collections.abc import Sequence

from torchdist_ref.benchmark import table
from torchdist_ref.benchmark.hooks_contestants import summed
from torchdist_ref.benchmark.hooks_results import Result, select
from torchdist_ref.benchmark.units import show_millis, show_number

LEGEND = """\
bytes: what a rank sends in a step; x less: than without compression.
error: of the gradients, relative to their exact average.
x none: a step's time by the first hook's, so that less than 1 is faster.
loss: the mean over the ranks at the end.
!: bytes are not those of the hook's formula.
(modelled): computed from bytes, not measured."""


def show(results: Sequence[Result], ratios: bool = True) -> str:
    """The table of one task on one backend.

    Args:
        results: Of any number of hooks and links. The first hook is what the others are compared with.
        ratios: Whether to compare times. Without, the table is narrower.

    Returns:
        Lines of text; all times are medians over the turns, in milliseconds.
    """
    first = results[0]
    links = list(dict.fromkeys(result.link for result in results))
    hooks = list(dict.fromkeys(result.hook for result in results))
    head = f"{first.task}: {first.parameters:,} parameters, {first.world} ranks on {first.backend}"
    titles = ["hook", "bytes", "x less", "error"]
    for link in links:
        modelled = " (modelled)" if select(results, link=link)[0].modelled else ""
        titles += [f"{link}{modelled} ms", *([f"x {hooks[0]}"] if ratios else [])]
    lines = [_line(select(results, hook=hook), results, links, ratios) for hook in hooks]
    return f"{head}\n{table.columns([*titles, 'loss'], lines)}"


def _line(mine: Sequence[Result], results: Sequence[Result], links: Sequence[str], ratios: bool) -> list[str]:
    some = mine[0]
    right = some.sent_bytes == some.expected_bytes
    whole = 4 * some.parameters * summed(some.world)
    cells = [some.hook, f"{some.sent_bytes:,.0f}{'' if right else '!'}"]
    cells += [show_number(whole / some.sent_bytes) if some.sent_bytes else "-", f"{some.mean_error:.2g}"]
    for link in links:
        here = select(mine, link=link)
        cells += _times(here[0], select(results, link=link)[0])[: 1 + ratios] if here else ["-"] * (1 + ratios)
    return [*cells, f"{some.losses[-1]:.3f}"]


def _times(one: Result, first: Result) -> list[str]:
    return [show_millis(one.step), show_number(one.ratio(first))]
