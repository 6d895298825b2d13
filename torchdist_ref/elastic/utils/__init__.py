"""Small helpers of launchers and their workers. None needs torch but `data`, which is imported by itself."""

from __future__ import annotations

from torchdist_ref.elastic.utils.api import get_env_variable_or_raise, get_socket_with_port, macros

__all__ = ["get_env_variable_or_raise", "get_socket_with_port", "macros"]
