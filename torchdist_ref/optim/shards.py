"""Division of an optimizer's parameters and state among ranks, the same on every rank.

`Shards` assigns parameters to ranks. A state dict identifies parameters by numbers, in the order of the groups. The
optimizer of one rank numbers only that rank's parameters; a saved state numbers all of them. `merge_states` and
`own_state` convert between the two numberings, so that any number of ranks, or one process, can load a state that
several ranks saved. Do not add communication or the arithmetic of optimizers here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor

StateDict = dict[str, Any]


class Shards:
    """Parameters of each rank, group of parameters by group.

    Whole parameters are assigned, the largest first, each to the rank with the least elements so far; so the loads
    differ by at most one parameter.

    Attributes:
        groups: ``groups[g][r]`` are the parameters of group `g` that rank `r` updates.

    Example:
        >>> import torch
        >>> big, middle, small = (torch.zeros(n) for n in (5, 3, 1))
        >>> shards = Shards(2)
        >>> shards.assign([small, big, middle])
        >>> [[len(tensor) for tensor in mine] for mine in shards.groups[0]]
        [[5], [3, 1]]
    """

    def __init__(self, world_size: int) -> None:
        self.groups: list[list[list[Tensor]]] = []
        self._loads = [0] * world_size
        self._owners: dict[Tensor, int] = {}

    def assign(self, parameters: Iterable[Tensor]) -> None:
        """Add a group of parameters, so that ranks have about equally many elements to update."""
        ranks: list[list[Tensor]] = [[] for _ in self._loads]
        for parameter in sorted(parameters, key=torch.Tensor.numel, reverse=True):
            least = self._loads.index(min(self._loads))
            ranks[least].append(parameter)
            self._own(parameter, least)
        self.groups.append(ranks)

    def assign_to(self, groups: Iterable[Iterable[Tensor]], ranks: Sequence[Sequence[Tensor]]) -> None:
        """Add all groups of parameters, and assign each parameter to the rank whose list contains it."""
        for rank, parameters in enumerate(ranks):
            for parameter in parameters:
                self._own(parameter, rank)
        for group in groups:
            members = set(group)
            self.groups.append([[p for p in parameters if p in members] for parameters in ranks])

    def _own(self, parameter: Tensor, rank: int) -> None:
        self._loads[rank] += parameter.numel()
        self._owners[parameter] = rank

    def owner(self, parameter: Tensor) -> int:
        """Return the rank that updates a parameter."""
        return self._owners[parameter]

    def of(self, rank: int) -> list[list[Tensor]]:
        """Return the parameters of one rank, group by group; a group may be empty."""
        return [ranks[rank] for ranks in self.groups]


def local_groups(groups: Sequence[dict[str, Any]], mine: Sequence[list[Tensor]]) -> list[dict[str, Any]]:
    """Return groups with the same options, and only a rank's own parameters in them."""
    return [{**group, "params": parameters} for group, parameters in zip(groups, mine, strict=True)]


def copy_options(source: Sequence[dict[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Copy the options of groups of parameters: learning rates, and values that schedulers store there."""
    for from_, to in zip(source, target, strict=True):
        to.update({name: value for name, value in from_.items() if name != "params"})


def flatten(shards: Shards, world_size: int) -> list[list[Tensor]]:
    """Move the parameters of each rank into contiguous memory, of which they become views.

    Returns:
        For each rank, one flat tensor for each device and dtype.
    """
    return [_flatten([p for group in shards.of(rank) for p in group]) for rank in range(world_size)]


def _flatten(parameters: Sequence[Tensor]) -> list[Tensor]:
    kinds = dict.fromkeys((p.device, p.dtype) for p in parameters)
    return [_flatten_kind([p for p in parameters if (p.device, p.dtype) == kind]) for kind in kinds]


def _flatten_kind(parameters: Sequence[Tensor]) -> Tensor:
    flat = torch.cat([p.detach().reshape(-1) for p in parameters])
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.data = part.view(parameter.shape)
    return flat


# ---- state dicts


def parameter_numbers(groups: Sequence[Sequence[Tensor]]) -> dict[Tensor, int]:
    """Return the number of each parameter in a state dict."""
    return {parameter: number for number, parameter in enumerate(chain.from_iterable(groups))}


def merge_states(
    all_numbers: dict[Tensor, int], ranks: Sequence[tuple[Sequence[Sequence[Tensor]], StateDict]]
) -> dict[int, Any]:
    """Merge the states of all ranks.

    Args:
        all_numbers: The number of each parameter in the whole optimizer.
        ranks: For each rank its parameters, group by group, and its state dict.

    Returns:
        The entry ``state`` of the whole optimizer's state dict, in order.
    """
    found: dict[int, Any] = {}
    for groups, state in ranks:
        for parameter, number in parameter_numbers(groups).items():
            if number in state["state"]:
                found[all_numbers[parameter]] = state["state"][number]
    return {number: found[number] for number in sorted(found)}


def own_state(all_numbers: dict[Tensor, int], mine: Sequence[Sequence[Tensor]], whole: StateDict) -> StateDict:
    """Return one rank's part of a whole state dict.

    Args:
        all_numbers: The number of each parameter in the whole optimizer.
        mine: The rank's parameters, group by group.
        whole: The state dict of the whole optimizer; not changed.

    Returns:
        A state dict for the rank's own optimizer.
    """
    own = parameter_numbers(mine)
    # Copied, because the optimizer will write to these tensors.
    states = {own[p]: deepcopy(whole["state"][all_numbers[p]]) for p in own if all_numbers[p] in whole["state"]}
    groups = [
        {**group, "params": [own[p] for p in parameters]}
        for group, parameters in zip(whole["param_groups"], mine, strict=True)
    ]
    return {"state": states, "param_groups": groups}


def on_cpu(value: Any) -> Any:
    """Return a copy of nested dicts and lists with all tensors on the CPU, where they cost no device memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: on_cpu(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(on_cpu(item) for item in value)
    return value
