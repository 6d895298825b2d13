"""The texts from which remote modules are made: torch's own, see `remote_module_template`."""
