"""Sizes and times as people write and read them."""

from __future__ import annotations

import re

from torchdist_ref.errors import ArgumentError, explain

_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+)\s*([KMG]?)(i?B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes from a number with an optional K, M or G, each 1024 times the one before.

    >>> parse_size("4"), parse_size("64K"), parse_size("1 MiB")
    (4, 65536, 1048576)
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or int(found[1]) == 0:
        raise ArgumentError(explain("benchmark", "--sizes", "sizes such as 4, 64K or 16M, with commas between", text))
    return int(found[1]) * _FACTORS[found[2].upper()]


def show_size(nbytes: int) -> str:
    """Bytes in the largest unit that leaves a whole number.

    >>> show_size(4), show_size(65536), show_size(1536)
    ('4 B', '64 KiB', '1536 B')
    """
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes and nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def show_number(value: float) -> str:
    """Three or four digits that count, no exponent.

    >>> [show_number(x) for x in (0.01234, 1.234, 12.34, 123.4, 12345.6)]
    ['0.012', '1.23', '12.3', '123', '12,346']
    """
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def show_micros(seconds: float) -> str:
    """Seconds, shown in microseconds.

    >>> show_micros(5.2e-6)
    '5.20'
    """
    return show_number(seconds * 1e6)


def show_millis(seconds: float) -> str:
    """Seconds, shown in milliseconds.

    >>> show_millis(0.0187)
    '18.7'
    """
    return show_number(seconds * 1e3)
