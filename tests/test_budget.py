"""The laws of the design that the source shows: short functions, few imports, no cycles, one name a class.

A function's length is from the first to the last line of its body, without its docstring. Run with -s to see figures.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import layers

FUNCTION, IMPORTED, TWICE = 60, 12, 3
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


def length(function: Function) -> int:
    body = function.body
    if ast.get_docstring(function, clean=False) is not None:
        body = body[1:]
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_functions_are_short() -> None:
    lengths = {
        f"{layers.module_name(path)}.{node.name}:{node.lineno}": length(node)
        for path in layers.files()
        for node in nodes_of(path)
        if isinstance(node, Function)
    }
    print("longest function:", max(lengths.items(), key=lambda item: item[1]))
    assert not {name: lines for name, lines in lengths.items() if lines > FUNCTION}


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


def test_docstrings_are_not_counted() -> None:
    source = '"""One."""\n\n# Two\ndef f():\n    """Three\n    four."""\n    a = 1  # five\n    return a\n'
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
