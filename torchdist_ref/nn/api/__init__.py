"""Modules that live in another process: torch's own, see `remote_module`."""
