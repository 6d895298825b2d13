"""torch's own default group on Gloo, beside our group in the same process: the oracle of the comparisons with torch.

Our groups may be registered with torch, as the default group among others. `start_torch` withdraws them first, so
torch's functions communicate through torch's backend, and results of the two libraries are independent.
"""

from __future__ import annotations

from typing import Any

import torch.distributed

from torchdist_ref.groups import world


def start_torch(**arguments: Any) -> None:
    """Withdraw our groups from torch's tables, and create torch's default group on Gloo.

    Args:
        arguments: Arguments of ``torch.distributed.init_process_group``.
    """
    world.current().run_on_close()
    torch.distributed.init_process_group("gloo", **arguments)
