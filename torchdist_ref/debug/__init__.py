"""Debugging aids of process groups: debug levels, checked collectives and monitored barriers."""
