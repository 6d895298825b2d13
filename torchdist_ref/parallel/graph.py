"""Questions to the autograd graph: which node delivers a parameter's gradient, and which will run in this backward.

Only reads the graph. What to do about a parameter that takes no part is decided in `reducer`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge


def accumulator(parameter: torch.Tensor) -> Node:
    """The node that adds a gradient into ``parameter.grad``.

    Its post-hooks run on every arrival, also when the gradient that arrives is undefined; a hook on the
    tensor itself would miss that case. The node lives as long as someone holds it.
    """
    return get_gradient_edge(parameter).node


def when_done(node: Any, hook: Callable[[Any, Any], None]) -> None:
    """Call ``hook(inputs, gradients)`` whenever backward has run ``node``."""
    node.register_hook(hook)


def when_reached(tensor: Any, hook: Callable[[torch.Tensor], None]) -> None:
    """Call ``hook(gradient)`` when backward has computed the gradient of ``tensor``."""
    tensor.register_hook(hook)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in what a forward pass returned: nested sequences, mappings and dataclasses are searched.

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
    """Every node that a backward pass from ``outputs`` could run."""
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
