"""From torch: writes the Python module of a remote module's class, and imports it."""

from __future__ import annotations

from typing import Any

from torchdist_ref.nn.theirs import torchs

__all__ = [
    "get_arg_return_types_from_interface",
    "instantiate_non_scriptable_remote_module_template",
    "instantiate_scriptable_remote_module_template",
]


def __getattr__(name: str) -> Any:
    return torchs("jit.instantiator", name, __all__)
