"""Helpers that training frameworks wrap around collectives: for metrics, for losses over all ranks, for setting up.

Each is built from public functions of `torchdist_ref.groups`, and none is needed by the rest of the library.
"""
