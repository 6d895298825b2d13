"""Run the text of one cell in a rank: the value of its last line, or a traceback that shows the cell's own lines.

Knows nothing of ranks, sockets or IPython. What becomes of a value is the caller's affair.
"""

from __future__ import annotations

import ast
import linecache
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_HERE = os.path.dirname(__file__)
_LIBRARY = os.path.dirname(_HERE) + os.sep


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong in a cell, as text, since an exception may not survive the journey to the kernel.

    Attributes:
        kind: The name of the exception's class.
        message: What it says.
        trace: The traceback, with no frame of this package but perhaps the last.
    """

    kind: str
    message: str
    trace: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}".removesuffix(": ")


def run_cell(source: str, name: str, namespace: dict[str, Any], show: Callable[[Any], None]) -> None:
    """Run a cell.

    Args:
        source: Its text.
        name: The name of the file that tracebacks shall show, such as ``<spmd cell 3>``.
        namespace: The global variables, read and written.
        show: Called with the value of the last line, if that is an expression, has a value and no semicolon after it.

    Example:
        >>> space = {}
        >>> run_cell("a = 20\\na + 1", "<cell 1>", space, print)
        21
        >>> run_cell("a;", "<cell 2>", space, print)
    """
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    # Not ast.parse, which would be a line in the traceback of every slip of the pen.
    body: ast.Module = compile(source, name, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)  # type: ignore[assignment]
    last = body.body.pop() if body.body and isinstance(body.body[-1], ast.Expr) else None
    exec(compile(body, name, "exec", dont_inherit=True), namespace)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), namespace)
        if value is not None and not _silenced(source, last):
            show(value)


def _silenced(source: str, last: ast.Expr) -> bool:
    line = source.splitlines()[(last.end_lineno or 1) - 1].encode()
    return line[last.end_col_offset :].lstrip().startswith(b";")


def failure(error: BaseException) -> Failure:
    """Put an exception that a cell raised into words.

    Args:
        error: The exception.

    Returns:
        The words.
    """
    trace = traceback.TracebackException.from_exception(error)
    _leave_out_ours(trace)
    return Failure(type(error).__name__, _one_line(error), "".join(trace.format()))


def _leave_out_ours(trace: traceback.TracebackException) -> None:
    """Keep the frames of the cell and of what it calls, in the exception and in those that it came from.

    Of the way through the library only its end is kept: the reader of a cell wants to see where the cell called it.
    """
    frames = [frame for frame in trace.stack if os.path.dirname(frame.filename) != _HERE]
    kept = [frame for frame in frames[:-1] if not frame.filename.startswith(_LIBRARY)] + frames[-1:]
    trace.stack = traceback.StackSummary.from_list(kept)
    for earlier in (trace.__cause__, trace.__context__):
        if earlier is not None:
            _leave_out_ours(earlier)


def _one_line(error: BaseException) -> str:
    try:
        return str(error).partition("\n")[0]
    except Exception as second:
        return f"(its text cannot be had: {type(second).__name__})"
