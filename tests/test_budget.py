"""The size laws of the design, measured on the source. Run with -s to see the figures.

A line of code has a token that is not part of a docstring or a comment. A function's length is from the first to the
last line of its body, without its docstring. Modules named `__init__` re-export and are not counted in the average.
"""

from __future__ import annotations

import ast
import io
import tokenize
from functools import cache
from pathlib import Path

import layers

MODULE_AVERAGE, MODULE, FUNCTION, IMPORTED, TWICE = 95, 400, 50, 12, 3
Function = ast.FunctionDef | ast.AsyncFunctionDef
_LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.COMMENT)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


def code_lines(source: str) -> int:
    """Count the lines with a token that is neither layout, comment nor docstring."""
    prose: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        documented = isinstance(node, ast.Module | ast.ClassDef | Function)
        if documented and ast.get_docstring(node, clean=False) is not None:
            prose.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - prose)


def length(function: Function) -> int:
    body = function.body
    if ast.get_docstring(function, clean=False) is not None:
        body = body[1:]
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def sizes() -> dict[str, int]:
    """Lines of code of every module but the `__init__` files."""
    return {
        layers.module_name(path): code_lines(path.read_text(encoding="utf-8"))
        for path in layers.files()
        if path.name != "__init__.py"
    }


def test_functions_are_short() -> None:
    lengths = {
        f"{layers.module_name(path)}.{node.name}:{node.lineno}": length(node)
        for path in layers.files()
        for node in nodes_of(path)
        if isinstance(node, Function)
    }
    print("longest function:", max(lengths.items(), key=lambda item: item[1]))
    assert not {name: lines for name, lines in lengths.items() if lines > FUNCTION}


def test_no_module_is_long_and_few_are_tiny() -> None:
    lines = sizes()
    average = sum(lines.values()) / len(lines)
    print(f"{len(lines)} modules, {sum(lines.values())} lines of code, {average:.0f} a module")
    assert not {name: count for name, count in lines.items() if count > MODULE}
    assert average >= MODULE_AVERAGE


@cache
def lines_for_type_checkers(path: Path) -> set[int]:
    """Return the lines below ``if TYPE_CHECKING``, which do not run."""
    blocks = [node for node in nodes_of(path) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    return {line for block in blocks for line in range(block.lineno, (block.end_lineno or 0) + 1)}


def test_no_module_imports_many_of_ours() -> None:
    """Imports that run when the module is loaded; an `__init__` may re-export as much as its package has."""
    imported: dict[str, set[str]] = {}
    paths = {layers.module_name(path): path for path in layers.files() if path.name != "__init__.py"}
    for found in layers.imports():
        if found.target.startswith(layers.PACKAGE) and not found.late and found.module in paths:
            if found.line not in lines_for_type_checkers(paths[found.module]):
                imported.setdefault(found.module, set()).add(found.target)
    assert not {name: sorted(targets) for name, targets in imported.items() if len(targets) > IMPORTED}


def test_no_imports_run_in_a_circle() -> None:
    """Deferred imports count: a cycle that they hide is one for the reader all the same."""
    paths = {layers.module_name(path): path for path in layers.files()}
    graph: dict[str, set[str]] = {name: set() for name in paths}
    for found in layers.imports():
        if found.target in paths and found.target != found.module:
            if found.line not in lines_for_type_checkers(paths[found.module]):
                graph[found.module].add(found.target)
    left = dict(graph)
    while ready := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in ready:
            del left[name]
    assert not left, sorted(left)


def test_class_names_are_unique() -> None:
    homes: dict[str, list[str]] = {}
    for path in layers.files():
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(layers.module_name(path))
    twice = {name: places for name, places in homes.items() if len(places) > 1}
    assert len(twice) <= TWICE, twice


def test_docstrings_and_comments_are_not_counted() -> None:
    source = '"""One."""\n\n# Two\ndef f():\n    """Three\n    four."""\n    a = 1  # five\n    return a\n'
    assert code_lines(source) == 3
    function = ast.parse(source).body[1]
    assert isinstance(function, ast.FunctionDef)
    assert length(function) == 2


def test_every_file_says_what_it_is_for() -> None:
    silent = [
        layers.module_name(path)
        for path in layers.files()
        if path.read_text(encoding="utf-8").strip() and not ast.get_docstring(tree_of(path))
    ]
    assert not silent
