"""Algorithms that sit on top of collectives: communication hooks for DDP, and training with uneven inputs.

Each is built from public functions of `torchdist_ref.groups` only. Hooks know neither the reducer
nor the model: they get a state and a bucket.
"""
