"""Transports: connections between the ranks of a group, which are threads, processes of a host, or on several hosts."""

from __future__ import annotations

from torchdist_ref.transports.link import Link
from torchdist_ref.transports.selection import TRANSPORTS, all_on_one_host, connect, refuse_to_connect

__all__ = ["Link", "TRANSPORTS", "all_on_one_host", "connect", "refuse_to_connect"]
