"""The hook laboratory's table: one line a hook, for one task and engine, with a pair of columns for each link."""

from __future__ import annotations

from collections.abc import Sequence

from torchdist_ref.benchmark import table
from torchdist_ref.benchmark.hooks_results import Result, select
from torchdist_ref.benchmark.units import show_millis, show_number

LEGEND = (
    "bytes: what a rank sends in a step; x less: than without compression. error: of the gradients, relative to their\n"
    "exact average. x none: a step's time by that of the first hook, so that less than 1 is faster. loss: at the end.\n"
    "!: bytes are not those of the hook's formula. (modelled): computed from bytes, not measured."
)


def show(results: Sequence[Result]) -> str:
    """The table of one task on one engine.

    Args:
        results: Of any number of hooks and links. The first hook is what the others are compared with.

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
        titles += [f"{link}{modelled} ms", f"x {hooks[0]}"]
    lines = [_line(select(results, hook=hook), results, links, 4 * first.parameters) for hook in hooks]
    return f"{head}\n{table.columns([*titles, 'loss'], lines)}"


def _line(mine: Sequence[Result], results: Sequence[Result], links: Sequence[str], dense: int) -> list[str]:
    some = mine[0]
    right = some.sent_bytes == some.expected_bytes
    whole = dense * 2 * (some.world - 1) / some.world
    cells = [some.hook, f"{some.sent_bytes:,.0f}{'' if right else '!'}"]
    cells += [show_number(whole / some.sent_bytes) if some.sent_bytes else "-", f"{some.mean_error:.2g}"]
    for link in links:
        here = select(mine, link=link)
        cells += _times(here[0], select(results, link=link)[0]) if here else ["-", "-"]
    return [*cells, f"{some.losses[-1]:.3f}"]


def _times(one: Result, first: Result) -> list[str]:
    return [show_millis(one.step), show_number(one.ratio(first))]
