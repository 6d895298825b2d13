"""Helpers that training frameworks wrap around collectives: for metrics, losses over all ranks, and initialization.

Each uses public functions of `torchdist_ref.groups`, and the rest of the library needs none of them.
"""
