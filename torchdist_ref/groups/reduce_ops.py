"""What can be asked of a reduction, and its old spelling. The reductions themselves are torch's `ReduceOp`."""

from __future__ import annotations

import warnings
from typing import Any

from torch.distributed import ReduceOp

from torchdist_ref.groups.arguments import word_of

_NOT_COMPLEX = ("product", "min", "max", "band", "bor", "bxor")


def supports_complex(reduceOp: Any) -> bool:
    """Whether a reduction makes sense for complex numbers.

    Args:
        reduceOp: A member of `ReduceOp`, or a ``ReduceOp.PREMUL_SUM`` with its factor.

    Returns:
        True for SUM, AVG and PREMUL_SUM. Complex numbers have no order and no bits to work on, and backends
        multiply real numbers only.

    Raises:
        ArgumentTypeError: Not a ReduceOp.

    Example:
        >>> import torchdist_ref as dist
        >>> dist.supports_complex(dist.ReduceOp.SUM), dist.supports_complex(dist.ReduceOp.MAX)
        (True, False)
    """
    if reduceOp is ReduceOp.PREMUL_SUM:
        return True
    return word_of(reduceOp, "supports_complex") not in _NOT_COMPLEX


class _OldReduceOp:
    """The members of `ReduceOp` under the name that torch had before 1.0; each use warns."""

    def __getattr__(self, name: str) -> Any:
        members = ReduceOp.RedOpType.__members__
        if name == "__members__":
            return members
        if name not in members:
            raise AttributeError(f"reduce_op has no member {name!r}; there are {', '.join(members)}.")
        warnings.warn("reduce_op is deprecated, please use ReduceOp instead.", FutureWarning, stacklevel=2)
        return members[name]


reduce_op = _OldReduceOp()
