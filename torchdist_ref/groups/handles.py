"""`group`, which can't live in the package's `__init__`: there the name means the module of groups."""

from __future__ import annotations

from torchdist_ref.groups.group import HasWorld


class group(metaclass=HasWorld):
    """The older place of `WORLD`.

    Attributes:
        WORLD: The group of all ranks; None before `init_process_group`.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> dist.group.WORLD is None
        True
        >>> run(lambda rank: dist.get_process_group_ranks(dist.group.WORLD), 2)
        [[0, 1], [0, 1]]
    """
