"""Algorithms that sit on top of collectives: communication hooks for DDP, averaging of models, uneven inputs.

Each is built from public functions of `torchdist_ref.groups` only. Hooks receive a state and a bucket; do not add the
reducer or the model to them.
"""

from __future__ import annotations

from torchdist_ref.algorithms.join import Join, Joinable, JoinHook

__all__ = ["Join", "JoinHook", "Joinable"]
