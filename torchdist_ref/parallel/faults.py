"""What the reducer says when an iteration can't be finished. Texts only; when to say them is the reducer's business."""

from __future__ import annotations

from collections.abc import Iterable


def unfinished(names: Iterable[str], rank: int, static: bool) -> str:
    """Parameters got no gradient, and the next forward pass has begun."""
    missing = ", ".join(map(repr, names))
    advice = (
        "static_graph=True promises the same graph every time, and this iteration's graph was another."
        if static
        else "If they are meant to take no part, pass find_unused_parameters=True; "
        "if they are not, make sure that every output of forward reaches the loss."
    )
    return (
        "DistributedDataParallel: the last backward pass did not finish its reduction before this forward pass "
        f"(on rank {rank}): no gradient arrived for {missing}, so nothing was averaged. {advice}"
    )


def twice(name: str, rank: int, static: bool) -> str:
    """A parameter got its gradient twice before the reduction was over."""
    advice = (
        "static_graph=True promises the same graph every time, and in this iteration it was used more often."
        if static
        else "It is probably used by two forward passes, or in reentrant backward passes (activation checkpointing); "
        "if the graph is always the same, pass static_graph=True."
    )
    what = f"parameter {name!r} got its gradient twice in one iteration (on rank {rank})"
    return f"DistributedDataParallel: {what}. {advice}"
