"""Error handlers, with torch's names: they write the exception of a worker to its failure record.

`record` calls the handler of a worker, and `child_failures` that of the launcher. Do not add readers of records here.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import warnings
from pathlib import Path
from typing import Any

from torchdist_ref.errors import message_of
from torchdist_ref.processes.failure_record import ERROR_FILE, content_of, write_whole

logger = logging.getLogger("torchdist_ref.launcher")


class ErrorHandler:
    """Writer of failure records. Subclass it to write more, and pass an instance to `record`."""

    _fn_name: str | None = None

    def set_entrypoint_fn_name(self, fn_name: str | None) -> None:
        """Set the name of the function that `record` decorates; it calls this before `initialize`. Since torch 2.15.

        Args:
            fn_name: Qualified name, which subclasses find in the attribute ``_fn_name``; None if it has none.
        """
        self._fn_name = fn_name

    def record_success(self) -> None:
        """Do nothing; `record` calls this when the function has returned. Since torch 2.15.

        A subclass may report the success. Its exceptions are raised to the caller, and no failure is recorded.
        """

    def maybe_enrich_signal_failure_message(self, message: str, error_file: str) -> str:
        """Return the message for a worker that a signal has killed, unchanged. Since torch 2.15.

        A subclass may add what it knows, such as a fault of a device; `get_error_handler` has to return it. Its
        exceptions are logged, and the message stays as it was.

        Args:
            message: The message.
            error_file: Path of the worker's failure record, which need not exist.
        """
        return message

    def initialize(self) -> None:
        """Prepare the process: print the stacks of all threads if it crashes."""
        try:
            faulthandler.enable(all_threads=True)
        except Exception as error:
            warnings.warn(f"the fault handler cannot be enabled: {message_of(error)}", stacklevel=2)

    def record_exception(self, e: BaseException) -> None:
        """Write an exception to the file that TORCHELASTIC_ERROR_FILE names; without the variable, do nothing."""
        path = os.environ.get(ERROR_FILE)
        if path:
            _write(path, content_of(e))

    def override_error_code_in_rootcause_data(
        self, rootcause_error_file: str, rootcause_error: dict[str, Any], error_code: int = 0
    ) -> None:
        """Set the exit code in the content of a child's failure record.

        Args:
            rootcause_error_file: Path of the record.
            rootcause_error: Its content.
            error_code: Exit code.
        """
        message = rootcause_error.get("message")
        if isinstance(message, dict):
            message["errorCode"] = error_code
        else:
            logger.warning("%s has no place for the exit code %d", rootcause_error_file, error_code)

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        """Copy a child's failure record to the file that TORCHELASTIC_ERROR_FILE names.

        Args:
            rootcause_error_file: Path of the child's record.
            error_code: Exit code to write into the copy; 0 keeps the child's.
        """
        hand_on(self, rootcause_error_file, json.loads(Path(rootcause_error_file).read_text("utf-8")), error_code)


def get_error_handler() -> ErrorHandler:
    """Return a new error handler."""
    return ErrorHandler()


def hand_on(handler: ErrorHandler, source: str, content: dict[str, Any], error_code: int) -> None:
    """Write the content of a child's record, which is or was in the file `source`, as the record of this process."""
    if error_code:
        handler.override_error_code_in_rootcause_data(source, content, error_code)
    path = os.environ.get(ERROR_FILE)
    if path:
        _write(path, content)
    else:
        logger.error("%s is not set: the failure record %s is not copied", ERROR_FILE, source)


def _write(path: str, content: dict[str, Any]) -> None:
    try:
        write_whole(Path(path), content)
    except OSError as error:
        warnings.warn(f"the failure record cannot be written: {error}", stacklevel=3)
