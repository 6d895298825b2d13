"""Processes of the operating system: how they start, are known to each other, are forked, and end."""
