"""The state of a sharded optimizer in the words of one that is not: from and to the form of ``Optimizer.state_dict``.

A state dict numbers parameters in the order of the groups. Each rank numbers its own ones; the whole optimizer numbers
all of them. These functions translate, so that what several ranks saved, any number of ranks can load, or one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from itertools import chain
from typing import Any

from torch import Tensor

State = dict[str, Any]


def numbers(groups: Sequence[Sequence[Tensor]]) -> dict[Tensor, int]:
    """The number of each parameter in a state dict."""
    return {parameter: number for number, parameter in enumerate(chain.from_iterable(groups))}


def merge(all_numbers: dict[Tensor, int], ranks: Sequence[tuple[Sequence[Sequence[Tensor]], State]]) -> dict[int, Any]:
    """Put the states of all ranks together.

    Args:
        all_numbers: The number of each parameter in the whole optimizer.
        ranks: For each rank its parameters, group by group, and its state dict.

    Returns:
        The entry ``state`` of the whole optimizer's state dict, in order.
    """
    found: dict[int, Any] = {}
    for groups, state in ranks:
        for parameter, number in numbers(groups).items():
            if number in state["state"]:
                found[all_numbers[parameter]] = state["state"][number]
    return {number: found[number] for number in sorted(found)}


def part(all_numbers: dict[Tensor, int], mine: Sequence[Sequence[Tensor]], whole: State) -> State:
    """Take one rank's part out of a whole state dict.

    Args:
        all_numbers: The number of each parameter in the whole optimizer.
        mine: The rank's parameters, group by group.
        whole: The state dict of the whole optimizer. It stays as it is.

    Returns:
        A state dict for the rank's own optimizer.
    """
    own = numbers(mine)
    # Copied: an optimizer goes on writing to the tensors that it was given.
    states = {own[p]: deepcopy(whole["state"][all_numbers[p]]) for p in own if all_numbers[p] in whole["state"]}
    groups = [
        {**group, "params": [own[p] for p in parameters]}
        for group, parameters in zip(whole["param_groups"], mine, strict=True)
    ]
    return {"state": states, "param_groups": groups}


def on_cpu(value: Any) -> Any:
    """A copy of nested dicts and lists with all tensors on the CPU, where they cost no device memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: on_cpu(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(on_cpu(item) for item in value)
    return value
