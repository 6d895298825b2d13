"""Runs whose weights are equal bit for bit: on other numbers of ranks, and compared with another run.

`MicroBatches` sums the gradients of a fixed number of micro-batches along one tree, however many ranks share them.
`fingerprint` and `Fingerprints` find the first step and tensor in which ranks, or two runs, differ. `hazards` lists
what else changes bits.
"""

from __future__ import annotations

from torchdist_ref.reproducible.conditions import hazards
from torchdist_ref.reproducible.fingerprints import Difference, Fingerprints, fingerprint, first_difference
from torchdist_ref.reproducible.micro_batches import MicroBatches

__all__ = ["Difference", "Fingerprints", "MicroBatches", "fingerprint", "first_difference", "hazards"]
