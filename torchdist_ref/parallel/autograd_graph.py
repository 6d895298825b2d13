"""Searches of the autograd graph: the nodes that add gradients to parameters, and those that outputs reach.

Nothing here changes a graph or knows the reducer, which decides what a result means.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

from torchdist_ref.torch_internals import torch_private


def accumulates(nodes: Iterable[Node | None]) -> bool:
    """Return whether the backward pass that runs accumulates a gradient at one of the nodes."""
    will_execute = torch_private.WILL_EXECUTE.bind()
    try:
        return any(map(will_execute, nodes))
    except RuntimeError:
        # torch refuses to tell in `torch.autograd.grad` of parameters, which accumulates nowhere.
        return False


def accumulator(parameter: torch.Tensor) -> Node:
    """Return the node that adds a gradient into ``parameter.grad``.

    Its post-hooks run on every arrival, also when the gradient that arrives is undefined; a hook on the tensor itself
    would miss that case. The node lives as long as a reference to it.
    """
    return get_gradient_edge(parameter).node


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in the outputs of a forward pass: in nested sequences, mappings and dataclasses.

    >>> [t.item() for t in tensors_in({"a": torch.tensor(1), "b": [torch.tensor(2), "text"]})]
    [1, 2]
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def reachable(outputs: Iterable[torch.Tensor]) -> set[Node]:
    """Return every node that a backward pass from ``outputs`` could run."""
    frontier = [_entrance(output) for output in outputs if output.requires_grad]
    seen = set(frontier)
    while frontier:
        for node, _ in frontier.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                frontier.append(node)
    return seen


def _entrance(output: torch.Tensor) -> Node:
    return accumulator(output) if output.grad_fn is None else output.grad_fn
