"""Decorator `record`, with torch's name: the exception of a worker's entry function goes to its failure record.

The record lies in the file that TORCHELASTIC_ERROR_FILE names, in torch's JSON layout, and the launcher shows it last.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torchdist_ref.launcher import error_handler as handlers
from torchdist_ref.launcher.child_failures import TORCH, ChildFailedError
from torchdist_ref.processes.failure_record import NO_FILE

logger = logging.getLogger("torchdist_ref.launcher")

_P = ParamSpec("_P")
_R = TypeVar("_R")


def record(fn: Callable[_P, _R], error_handler: handlers.ErrorHandler | None = None) -> Callable[_P, _R | None]:
    """Decorate the entry function of a worker, so that its exception is written to its failure record.

    Use it once in a process, on its outermost function. `SystemExit` with code 0 makes the function return None.
    A `ChildFailedError`, ours or torch's, hands on the record of the child that failed first.

    Args:
        fn: Function.
        error_handler: Writer of the record. Default None: `get_error_handler`.

    Example:
        >>> from torchdist_ref.elastic.multiprocessing.errors import record
        >>> @record
        ... def main(number):
        ...     return number + 1
        >>> main(1)
        2
    """
    handler = error_handler or handlers.get_error_handler()
    # Handlers of torch before 2.15 have fewer methods.
    is_recent = hasattr(handler, "set_entrypoint_fn_name")

    @functools.wraps(fn)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        if is_recent:
            handler.set_entrypoint_fn_name(getattr(fn, "__qualname__", None))
        handler.initialize()
        try:
            result = fn(*args, **kwargs)
        except SystemExit as end:
            if end.code == 0:
                return None
            raise
        except Exception as error:
            if isinstance(error, ChildFailedError) or _is_torchs(error):
                _, failure = error.get_first_failure()  # type: ignore[attr-defined]
                if failure.error_file != NO_FILE:
                    handler.dump_error_file(failure.error_file, failure.exitcode)
                elif isinstance(failure.error_file_data.get("message"), dict):
                    # The file has been removed with the temporary folder of its job.
                    handlers.hand_on(handler, NO_FILE, failure.error_file_data, failure.exitcode)
                else:
                    logger.info("local rank %d left no failure record", failure.local_rank)
            else:
                handler.record_exception(error)
            raise
        if is_recent:
            handler.record_success()
        return result

    return wrapper


def _is_torchs(error: Exception) -> bool:
    torchs = getattr(sys.modules.get(f"{TORCH}.errors"), "ChildFailedError", None)
    return torchs is not None and isinstance(error, torchs)
