"""Programs that a tool runs on several ranks, and their outcomes: shared by `testing` and `simulation`."""
