"""What PowerSGD loses, on 512 × 256 matrices of three spectra: figures of torch's hook, within the spread of 20 seeds.

torch's figures were taken once, with a seed that nobody wrote down; so all but the best approximation and step 20
depend on the draw. Ours, drawn twenty times, have to enclose them.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torchdist_ref as dist
from tests.algorithms.test_powersgd import error, matrix, started
from torchdist_ref.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook
from torchdist_ref.testing import run

# Relative error of: the best approximation; steps 1, 2 and 20 with warm start, and 20 without, no error feedback; the
# mean of 20 steps with error feedback, with and without warm start.
TABLE = {
    ("1/i", 1): (0.6250, 0.9492, 0.9175, 0.6250, 0.9464, 0.3385, 0.4140),
    ("1/i", 2): (0.4881, 0.7531, 0.4900, 0.4881, 0.7211, 0.2786, 0.2861),
    ("1/i", 4): (0.3640, 0.6244, 0.3663, 0.3640, 0.5295, 0.1962, 0.2224),
    ("1/i", 8): (0.2631, 0.3801, 0.2787, 0.2631, 0.3964, 0.1398, 0.1542),
    ("1/i^2", 1): (0.2758, 0.7007, 0.2811, 0.2758, 0.9804, 0.1036, 0.1400),
    ("1/i^2", 2): (0.1353, 0.2980, 0.1976, 0.1353, 0.1628, 0.0507, 0.0472),
    ("1/i^2", 4): (0.0574, 0.1199, 0.0606, 0.0574, 0.1029, 0.0212, 0.0232),
    ("1/i^2", 8): (0.0223, 0.0468, 0.0238, 0.0223, 0.0479, 0.0088, 0.0083),
    ("0.5^i", 1): (0.5000, 0.5930, 0.5038, 0.5000, 0.5688, 0.1286, 0.1281),
    ("0.5^i", 2): (0.2500, 0.5176, 0.3388, 0.2500, 0.3889, 0.0791, 0.0478),
    ("0.5^i", 4): (0.0625, 0.1253, 0.0768, 0.0625, 0.1115, 0.0163, 0.0155),
    ("0.5^i", 8): (0.0039, 0.0076, 0.0040, 0.0039, 0.0078, 0.0012, 0.0009),
}
SEEDS = 20
# The table has four digits.
DIGIT = 5e-5


def steps(spectrum: str, rank: int, seed: int, **kw: bool) -> list[Tensor]:
    """Twenty steps with the same gradient."""
    state = started(rank, random_seed=seed, **kw)
    gradient = matrix(spectrum, seed)
    found = []
    for _ in range(20):
        bucket = dist.GradBucket(buffer=gradient.flatten().clone(), gradients=[gradient])
        found.append(powerSGD_hook(state, bucket).wait().view(512, 256).clone())
    return found


def errors(spectrum: str, rank: int, seed: int) -> tuple[float, ...]:
    """The row of the table for one draw."""
    exact = matrix(spectrum, seed)
    best = float(torch.linalg.svdvals(exact)[rank:].norm() / exact.norm())
    warm = steps(spectrum, rank, seed, use_error_feedback=False)
    cold = steps(spectrum, rank, seed, use_error_feedback=False, warm_start=False)
    means = [torch.stack(steps(spectrum, rank, seed, warm_start=start)).mean(0) for start in (True, False)]
    return best, *(error(found, spectrum, seed) for found in (warm[0], warm[1], warm[19], cold[19], *means))


# Some 3 s each.
@pytest.mark.long
@pytest.mark.parametrize(("spectrum", "rank"), TABLE)
def test_torchs_figures_lie_within_the_spread_of_twenty_seeds(spectrum: str, rank: int) -> None:
    drawn = run(lambda _: [errors(spectrum, rank, seed) for seed in range(SEEDS)], 1, timeout=100)[0]
    for place, (theirs, ours) in enumerate(zip(TABLE[spectrum, rank], zip(*drawn, strict=True), strict=True)):
        assert min(ours) - DIGIT <= theirs <= max(ours) + DIGIT, (place, theirs, min(ours), max(ours))
        if place in (0, 3):
            assert max(ours) - min(ours) < 2 * DIGIT
