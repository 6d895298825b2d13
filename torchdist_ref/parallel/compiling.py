"""Keeping torch's compiler out of code that communicates, without loading the compiler for those who don't use it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Let ``torch.compile`` run ``function`` as it is; what it calls is not compiled either.

    ``torch.compiler.disable`` does that too, but loads the compiler when it decorates, which takes seconds.
    """
    kept: list[Any] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not kept and "torch._dynamo" in sys.modules:
            kept.append(sys.modules["torch._dynamo"].disable(function))
        result: R = (kept[0] if kept else function)(*args, **kwargs)
        return result

    vars(call)["_torchdynamo_disable"] = True
    return call
