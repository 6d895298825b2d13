"""What torch's remote modules are made with: torch's own, see `instantiator` and `templates`."""
