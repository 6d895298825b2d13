"""Who updates which parameter: the division of an optimizer's parameters among ranks, the same on every rank.

Whole parameters are given out, the largest first, each to the rank that has least so far; so the loads differ by
at most one parameter. Nothing here communicates, and nothing knows what an optimizer does with a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


class Shards:
    """The parameters of each rank, group of parameters by group.

    Attributes:
        groups: ``groups[g][r]`` are the parameters of group `g` that rank `r` updates.

    Example:
        >>> import torch
        >>> big, middle, small = (torch.zeros(n) for n in (5, 3, 1))
        >>> shards = Shards(2)
        >>> shards.give_out([small, big, middle])
        >>> [[len(tensor) for tensor in mine] for mine in shards.groups[0]]
        [[5], [3, 1]]
    """

    def __init__(self, world_size: int) -> None:
        self.groups: list[list[list[Tensor]]] = []
        self._loads = [0] * world_size
        self._owners: dict[Tensor, int] = {}

    def give_out(self, parameters: Iterable[Tensor]) -> None:
        """Add a group of parameters, so that ranks have about equally many numbers to update."""
        ranks: list[list[Tensor]] = [[] for _ in self._loads]
        for parameter in sorted(parameters, key=torch.Tensor.numel, reverse=True):
            least = self._loads.index(min(self._loads))
            ranks[least].append(parameter)
            self._take(parameter, least)
        self.groups.append(ranks)

    def give_out_as(self, groups: Iterable[Iterable[Tensor]], ranks: Sequence[Sequence[Tensor]]) -> None:
        """Add all groups of parameters, each parameter to the rank in whose list it stands."""
        for rank, parameters in enumerate(ranks):
            for parameter in parameters:
                self._take(parameter, rank)
        for group in groups:
            members = set(group)
            self.groups.append([[p for p in parameters if p in members] for parameters in ranks])

    def _take(self, parameter: Tensor, rank: int) -> None:
        self._loads[rank] += parameter.numel()
        self._owners[parameter] = rank

    def owner(self, parameter: Tensor) -> int:
        """The rank that updates a parameter."""
        return self._owners[parameter]

    def of(self, rank: int) -> list[list[Tensor]]:
        """The parameters of one rank, group by group; a group may be empty."""
        return [ranks[rank] for ranks in self.groups]


def local_groups(groups: Sequence[dict[str, Any]], mine: Sequence[list[Tensor]]) -> list[dict[str, Any]]:
    """Groups of parameters with the same options, and only a rank's own parameters in them."""
    return [{**group, "params": parameters} for group, parameters in zip(groups, mine, strict=True)]


def copy_options(source: Sequence[dict[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Copy all of groups of parameters but the parameters: learning rates, and what schedulers leave there."""
    for from_, to in zip(source, target, strict=True):
        to.update({name: value for name, value in from_.items() if name != "params"})


def flatten(shards: Shards, world_size: int) -> list[list[Tensor]]:
    """Lay out the parameters of each rank one after the other in memory, and make the parameters views of that.

    Returns:
        For each rank, one flat tensor for each device and dtype.
    """
    return [_flatten([p for group in shards.of(rank) for p in group]) for rank in range(world_size)]


def _flatten(parameters: Sequence[Tensor]) -> list[Tensor]:
    kinds = dict.fromkeys((p.device, p.dtype) for p in parameters)
    return [_lay_out([p for p in parameters if (p.device, p.dtype) == kind]) for kind in kinds]


def _lay_out(parameters: Sequence[Tensor]) -> Tensor:
    flat = torch.cat([p.detach().reshape(-1) for p in parameters])
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.data = part.view(parameter.shape)
    return flat
