"""The size budget: short functions, short files. Run with -s to see the figures.

A function's length is from the first to the last line of its body, docstring not counted, functions inside it counted.
"""

import ast
from statistics import median, quantiles

import layers

MEDIAN, NINE_IN_TEN, LONGEST, FILE = 6, 20, 50, 300
Function = ast.FunctionDef | ast.AsyncFunctionDef


def length(function: Function) -> int:
    body = function.body
    if ast.get_docstring(function, clean=False) is not None:
        body = body[1:]
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def functions() -> dict[str, int]:
    return {
        f"{layers.module_name(path)}.{node.name}:{node.lineno}": length(node)
        for path in layers.files()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, Function)
    }


def test_functions_are_short() -> None:
    lengths = functions()
    values = sorted(lengths.values())
    figures = {
        "functions": len(values),
        "median": median(values),
        "90 %": quantiles(values, n=10)[-1],
        "longest": values[-1],
    }
    print(figures)
    too_long = {name: lines for name, lines in lengths.items() if lines > LONGEST}
    assert not too_long
    assert figures["median"] <= MEDIAN, figures
    assert figures["90 %"] <= NINE_IN_TEN, figures


def test_files_are_short() -> None:
    lengths = {layers.module_name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in layers.files()}
    print(
        {
            "files": len(lengths),
            "lines": sum(lengths.values()),
            "longest": max(lengths.items(), key=lambda item: item[1]),
        }
    )
    assert not {name: lines for name, lines in lengths.items() if lines > FILE}


def test_docstrings_are_not_counted() -> None:
    source = 'def f():\n    """One\n    two."""\n    a = 1\n    return a\n'
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert length(function) == 2


def test_every_file_says_what_it_is_for() -> None:
    silent = [
        layers.module_name(path)
        for path in layers.files()
        if path.read_text(encoding="utf-8").strip()
        and not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not silent
