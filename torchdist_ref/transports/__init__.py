"""Transports: connections between the ranks of a group, which are threads, processes of a host, or on several hosts.

Reading order: `segment` (the bytes that ranks share: offsets, announced calls, memory of threads and of processes),
`base` (access to them), `link` (signals and waits; a peer's death becomes an error there), `selection` (how ranks
connect), `tcp`. Point-to-point messages are in `mailbox`. A new transport starts in `base`.
"""

from __future__ import annotations

from torchdist_ref.transports.link import Link
from torchdist_ref.transports.registered_memory import empty as empty_registered
from torchdist_ref.transports.selection import TRANSPORTS, all_on_one_host, connect
from torchdist_ref.transports.successor import succeed

__all__ = ["Link", "TRANSPORTS", "all_on_one_host", "connect", "empty_registered", "succeed"]
