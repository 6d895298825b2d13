"""Methods of DDP from versions in which a process had several devices, compared with torch's on the same arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchdist_ref as dist
from torchdist_ref.testing import fill, run

CALLS: dict[str, Callable[[Any], Any]] = {
    "to_kwargs": lambda m: m.to_kwargs((fill(0, (3,)), {"a": [fill(1, (2,)), "x"]}), {"b": fill(2, (1,))}, 0),
    "to_kwargs of nothing": lambda m: m.to_kwargs((), {}, 0),
    "to_kwargs of inputs": lambda m: m.to_kwargs((1,), None, 0),
    "to_kwargs of keywords": lambda m: m.to_kwargs((), {"b": 1}, 0),
    "scatter": lambda m: m.scatter(("a", [1]), {"k": 1}, [0, 1]),
    "scatter of keywords": lambda m: m.scatter((), {"k": 1}, [0, 1]),
    "scatter on the CPU": lambda m: m.scatter((fill(0, (4,)),), {}, ["cpu"]),
    "gather": lambda m: m.gather([{"a": None}, {"a": None}], "cpu"),
    "gather of other keys": lambda m: m.gather([{"a": None}, {}], "cpu"),
    "gather on the CPU": lambda m: m.gather([fill(0, (2,)), fill(1, (2,))], "cpu"),
}


def plain(value: Any) -> Any:
    """Return a result with its tensors as lists beside their devices, so that results compare."""
    if isinstance(value, Tensor):
        return value.tolist(), str(value.device)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return type(value)(plain(item) for item in value) if isinstance(value, list | tuple) else value


def outcome(call: Callable[[Any], Any], module: Any) -> Any:
    try:
        return plain(call(module))
    except (ValueError, AssertionError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("call", CALLS)
def test_results_and_errors_are_torchs(call: str) -> None:
    def program(rank: int) -> tuple[Any, Any]:
        ours = dist.DistributedDataParallel(nn.Linear(2, 1))
        theirs = TorchDDP(nn.Linear(2, 1), process_group=dist.group.WORLD)
        return outcome(CALLS[call], ours), outcome(CALLS[call], theirs)

    ((ours, theirs),) = run(program, 1)
    assert ours == theirs
