"""Frames of recorded stacks: which belong to the program, and how they are shown.

The stacks may be of another host, another Python and another installation of torch, so a path alone decides. Do not add
imports of torch here: `verdict` runs without it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from torchdist_ref.recorder import Frame

_OURS = frozenset(path.name for path in Path(__file__).parents[1].iterdir())
_INSTALLED = re.compile(r"<frozen|.*(/lib(64)?/python3[.]\d+/|-packages/)")
"""Files of Python's own modules and of installed packages."""


def user_frames(frames: Sequence[Frame]) -> list[Frame]:
    """Return the frames of the program: not those of torch, of this library and of Python's own modules."""
    outside = [frame for frame in frames if not _is_library(frame[1])]
    return [frame for frame in outside if not _INSTALLED.match(frame[1])] or outside


def _is_library(file: str) -> bool:
    """Return whether a file, perhaps of another host, is one of torch's or of this library's."""
    _, found, inside = file.rpartition("/torchdist_ref/")
    return (bool(found) and inside.partition("/")[0] in _OURS) or "-packages/torch/" in file


def frame_text(frame: Frame | None) -> str:
    """Return the place of a frame: file, line and function.

    >>> frame_text(("step", "/home/me/train.py", 41))
    'train.py:41 in step'
    """
    if frame is None:
        return "an unknown place"
    function, file, line = frame
    return f"{Path(file).name}:{line} in {function}"
