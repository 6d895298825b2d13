"""Split sizes of all_to_all_single: the kinds of sequences that torch's Gloo takes, beside formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import torchdist_ref as dist
from torchdist_ref.nn import functional
from torchdist_ref.testing import fill, run

SIZES: dict[str, Callable[[list[int]], Any]] = {
    "tuple": tuple,
    "tensor": torch.tensor,
    "array": np.array,
    "list of NumPy's integers": lambda sizes: [np.int64(size) for size in sizes],
    "list of tensors": lambda sizes: [torch.tensor(size) for size in sizes],
}


@pytest.mark.parametrize("call", [dist.all_to_all_single, functional.all_to_all_single])
@pytest.mark.parametrize("kind", SIZES)
def test_split_sizes_may_be_arrays_and_tensors(kind: str, call: Callable[..., Any]) -> None:
    def program(rank: int) -> list[float]:
        output = torch.zeros(2 * rank + 2)
        call(output, fill(rank, (3,)), SIZES[kind]([rank + 1] * 2), SIZES[kind]([1, 2]))
        return output.tolist()

    zero, one = fill(0, (3,)).tolist(), fill(1, (3,)).tolist()
    assert run(program, 2) == [[zero[0], one[0]], [*zero[1:], *one[1:]]]
