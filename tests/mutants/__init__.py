"""Faults planted in the library on purpose, to see that the tests notice. Run with ``python -m tests.mutants``."""
