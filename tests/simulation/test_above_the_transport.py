"""Whatever the library offers above its transport gives the same values on simulated ranks as on threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.simulation.programs import PROGRAMS
from torchdist_ref import simulation
from torchdist_ref.simulation import Network
from torchdist_ref.testing import run

SIZE = 4
NETWORK = Network(alpha=3e-5, beta=1e-9, hosts=(0, 0, 1, 2))


ROUNDED = {"fp16": 1e-3, "FP16": 1e-3, "bf16": 1e-2}
"""Tolerance where gradients are rounded to 16 bits: that amplifies a difference in the last bit."""


def assert_same(found: Any, expected: Any, tolerance: float = 1e-6) -> None:
    """Compare values of any kind. The last bits of a product of matrices depend on the addresses of its operands."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=10 * tolerance, atol=tolerance)
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected) and len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other, tolerance)
    else:
        assert found == expected


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_are_those_of_thread_ranks(name: str) -> None:
    program = PROGRAMS[name]
    expected = run(program, SIZE)
    tolerance = next((value for word, value in ROUNDED.items() if word in name), 1e-6)
    for seed, network in ((0, None), (5, NETWORK)):
        found = simulation.run(program, SIZE, seed=seed, network=network).values
        assert_same(found, expected, tolerance)
