"""The times that the catalogue prints as text, as numbers, and the network that each of them is for."""

from __future__ import annotations

import re
from math import ceil, log2

from torchdist_ref.schedules import Network

M = 3 * 5 * 7 * 1024
A, B, G = 5e-6, 1e-9, 0.4e-9


def lg(n: object) -> int:
    return ceil(log2(int(n)))  # type: ignore[call-overload]


def formula(text: str, n: int) -> float:
    """Return the time of a cost of the catalogue: adjacent letters and brackets are multiplied."""
    signals = re.findall(r"\d+|lg|[abgkmn]|[-+/()]", text)
    joined = ""
    for before, signal in zip(["", *signals], signals, strict=False):
        juxtaposed = (before.isalnum() or before == ")") and before != "lg" and (signal.isalnum() or signal == "(")
        joined += ("*" if juxtaposed else "") + signal
    return eval(joined, {"n": n, "k": min(n, 16), "m": M, "a": A, "b": B, "g": G, "lg": lg})


def network_of(name: str, world: int) -> Network:
    """Direct algorithms are for one host, where readers do not keep the owner busy; others for a flat network."""
    if name in ("direct", "two_shot"):
        return Network(99.0, 99.0, G, hosts=(0,) * world, local_alpha=A, local_beta=B)
    return Network(A, B, G)
