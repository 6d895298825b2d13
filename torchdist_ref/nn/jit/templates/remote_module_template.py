"""From torch: the text from which the Python module of a remote module's class is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchdist_ref.nn.theirs import torchs

if TYPE_CHECKING:
    from torch.distributed.nn.jit.templates.remote_module_template import get_remote_module_template

__all__ = [
    "get_remote_module_template",
]


def __getattr__(name: str) -> Any:
    return torchs("jit.templates.remote_module_template", name, __all__)
