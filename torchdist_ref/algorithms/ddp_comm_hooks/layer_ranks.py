"""Ranks for PowerSGD, layer by layer, from an error bound or a byte budget.

One rank for all layers spends bytes on layers whose singular values decay fast, and saves them on the others. Both
functions read the gradients once (after an exact step, when every rank holds the same average in ``.grad``) and return
a rule for ``PowerSGDState(rank_rule=...)``. Do not add compression here.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from torchdist_ref.algorithms.ddp_comm_hooks.low_rank import matrix_shape

__all__ = ["LayerRanks", "ranks_for_bytes", "ranks_for_error"]


class LayerRanks:
    """Rank rule with a rank for each parameter; 0, no compression, for unknown ones.

    Args:
        ranks: Parameters and their ranks.
    """

    def __init__(self, ranks: Iterable[tuple[torch.Tensor, int]]) -> None:
        self.ranks = {id(parameter): (parameter, rank) for parameter, rank in ranks}

    def __call__(self, parameter: torch.Tensor) -> int:
        """Return the rank of a parameter."""
        return self.ranks[id(parameter)][1] if id(parameter) in self.ranks else 0


@dataclass(frozen=True, slots=True)
class _Spectrum:
    """Squares of the singular values of a gradient, largest first, and the bytes of one more rank."""

    parameter: torch.Tensor
    cost: int
    energies: tuple[float, ...]

    @property
    def total(self) -> float:
        return sum(self.energies)


def _layers(parameters: Iterable[torch.Tensor]) -> list[_Spectrum]:
    """Return the spectrum of each matrix among the gradients."""
    found = []
    for parameter in parameters:
        if parameter.grad is not None and parameter.dim() > 1:
            n, m = matrix_shape(parameter.grad)
            flat = torch.as_strided(parameter.grad.detach(), (n, m), (m, 1))
            energies = torch.linalg.svdvals(flat.double()).square_().tolist()
            found.append(_Spectrum(parameter, (n + m) * parameter.element_size(), tuple(energies)))
    return found


def ranks_for_error(parameters: Iterable[torch.Tensor], error: float) -> LayerRanks:
    """Return, for each layer, the least rank whose best approximation is within ``error`` of the gradient.

    Args:
        parameters: Parameters with an exact, averaged gradient in ``.grad``.
        error: Relative error in the norm, between 0 and 1; 0.3 keeps 91 % of each gradient's squared norm.

    Returns:
        A rule for ``PowerSGDState``.

    Example:
        >>> import torch
        >>> from torchdist_ref.algorithms.ddp_comm_hooks.layer_ranks import ranks_for_error
        >>> weight = torch.nn.Parameter(torch.empty(6, 4))
        >>> weight.grad = torch.zeros(6, 4)
        >>> weight.grad[0, 0], weight.grad[1, 1], weight.grad[2, 2] = 3.0, 2.0, 0.1
        >>> ranks_for_error([weight], 0.1)(weight)
        2
    """
    return LayerRanks((layer.parameter, _least_rank(layer, error)) for layer in _layers(parameters))


def _least_rank(layer: _Spectrum, error: float) -> int:
    allowed, left = error**2 * layer.total, layer.total
    for rank, energy in enumerate(layer.energies, 1):
        left -= energy
        if left <= allowed:
            return rank
    return len(layer.energies)


def ranks_for_bytes(parameters: Iterable[torch.Tensor], budget: int) -> LayerRanks:
    """Return ranks within a budget of bytes per step: the next rank goes to the layer that gains most per byte.

    Every layer gets at least rank 1, whatever the budget.

    Args:
        parameters: Parameters with an exact, averaged gradient in ``.grad``.
        budget: Bytes of all factors of one step, of P and Q together.

    Returns:
        A rule for ``PowerSGDState``.

    Example:
        >>> import torch
        >>> from torchdist_ref.algorithms.ddp_comm_hooks.layer_ranks import ranks_for_bytes
        >>> flat, steep = (torch.nn.Parameter(torch.empty(4, 4)) for _ in range(2))
        >>> flat.grad = torch.diag(torch.tensor([2.0, 2, 2, 2]))
        >>> steep.grad = torch.diag(torch.tensor([2.0, 0.1, 0, 0]))
        >>> rule = ranks_for_bytes([flat, steep], 128)
        >>> rule(flat), rule(steep)
        (3, 1)
    """
    layers = _layers(parameters)
    ranks = [1] * len(layers)
    left = budget - sum(layer.cost for layer in layers)
    queue = [_gain(place, layer, 1) for place, layer in enumerate(layers) if len(layer.energies) > 1]
    heapq.heapify(queue)
    while queue:
        _, place = heapq.heappop(queue)
        layer = layers[place]
        if layer.cost > left:
            continue
        left -= layer.cost
        ranks[place] += 1
        if ranks[place] < len(layer.energies):
            heapq.heappush(queue, _gain(place, layer, ranks[place]))
    return LayerRanks((layer.parameter, rank) for layer, rank in zip(layers, ranks, strict=True))


def _gain(place: int, layer: _Spectrum, rank: int) -> tuple[float, int]:
    return -layer.energies[rank] / layer.cost, place
