"""From torch: writes the Python module of a remote module's class, and imports it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchdist_ref.nn.theirs import torchs

if TYPE_CHECKING:
    from torch.distributed.nn.jit.instantiator import (
        get_arg_return_types_from_interface,
        instantiate_non_scriptable_remote_module_template,
        instantiate_scriptable_remote_module_template,
    )

__all__ = [
    "get_arg_return_types_from_interface",
    "instantiate_non_scriptable_remote_module_template",
    "instantiate_scriptable_remote_module_template",
]


def __getattr__(name: str) -> Any:
    return torchs("jit.instantiator", name, __all__)
