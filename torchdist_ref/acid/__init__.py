"""Acid test of a backend of `torch.distributed`: ``python -m torchdist_ref.acid --backend NAME``.

It runs some seventy checks on any backend that torch knows, each on ranks of its own, and says of each whether the
backend passes it, refuses it with an error that says so, fails, crashes or hangs, with the call that shows it.

A check is a function in `values`, `order`, `failures` or `modules`; `runs` gives it ranks; `report` writes the table.
Add a check for what a program may expect from each backend, with the sentence of torch's documentation that promises
it. Do not add checks of speed, or of what only this library offers.
"""

from __future__ import annotations

# Each module adds its checks; they run in this order.
from torchdist_ref.acid import values, order, failures, modules  # isort: skip
from torchdist_ref.acid.checks import CHECKS, Check, Ranks
from torchdist_ref.acid.runs import CheckOutcome, run_check

__all__ = ["CHECKS", "Check", "CheckOutcome", "Ranks", "failures", "modules", "order", "run_check", "values"]
