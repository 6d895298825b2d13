"""Write `torchdist_ref/__init__.pyi`, by which type checkers see the package, from the package's own signatures.

The names of the package are resolved on first use, which no type checker can follow, and a collective's result depends
on `async_op`, which takes three overloads a function. Both are written by rule here instead of by hand in the source:
a reader of the source sees one signature, a type checker sees all that it needs. `python -m tests.typed` writes the
file, and a test compares it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import torchdist_ref
from torchdist_ref import torch_paths

STUB = Path(torchdist_ref.__file__).with_name("__init__.pyi")
SOURCE = STUB.with_suffix(".py")
HEAD = '''"""Types of the package's names, written by `python -m tests.typed` from the signatures in the source."""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any, Literal, overload

import torch
import torch.distributed
from torch import Tensor
from torch.futures import Future

'''
# On a rank outside the group, these return the NON_GROUP_MEMBER marker. Torch's annotations leave that out as well: a
# program that passes the result on to a call, which is what nearly all do, would need a cast at each.
GROUPS = {"ProcessGroup | int | None": "ProcessGroup"}
# A group that torch made serves as well: ours is a subclass of its class.
GROUP = "ProcessGroup | int | None"
# Modules that no program has a use for as an attribute of the package.
INTERNAL = "backends calls capabilities error_index launch membership notebook processes ranks recorder schedules "
INTERNAL += "timeouts torch_internals torch_paths transports plain_data"


def text() -> str:
    """Return the stub file."""
    aliases, functions = [], []
    for home, names in tables()["_HOMES"].items():
        for name in names.split():
            value = getattr(importlib.import_module(home), name)
            overloaded = isinstance(value, FunctionType) and list(_overloads(name, value))
            if overloaded:
                functions += overloaded
            else:
                aliases.append(f"from {home} import {name} as {name}\n")
    modules = [f"from torchdist_ref import {name} as {name}\n" for name in _modules()]
    paths = sorted({path.partition(".")[0] for path in torch_paths.PATHS} - {*_modules(), *INTERNAL.split()})
    torchs = [
        f"{name}: Any\n"
        for name in sorted(name for names in tables()["_TORCHS_OWN"].values() for name in names.split())
    ]
    lines = [*modules, *aliases, "from torchdist_ref.groups.arguments import Reduction\n"]
    lines += [
        "from torchdist_ref.groups.subgroups import Subgroups\n\n",
        "AnyGroup = torch.distributed.ProcessGroup | int | None\n\n",
    ]
    lines += ["__all__: list[str]\n__version__: str\n\n# Import paths that torch has: modules without a file.\n"]
    lines += [f"{path}: ModuleType\n" for path in paths]
    lines += ["\n# Torch's own: its functions work on the groups made here.\n", *torchs, "\n", *functions]
    return HEAD + "".join(lines)


def tables() -> dict[str, dict[str, str]]:
    """Return the tables of the package's file: the names of each module, by the table's name."""
    nodes = [node for node in ast.parse(SOURCE.read_text()).body if isinstance(node, ast.Assign)]
    return {
        ast.unparse(node.targets[0]): ast.literal_eval(node.value) for node in nodes if isinstance(node.value, ast.Dict)
    }


def _modules() -> list[str]:
    """Return the names of the modules below the package that are reached as its attributes."""
    found = {path.stem if path.is_file() else path.name for path in SOURCE.parent.iterdir() if _is_module(path)}
    return sorted(found - set(INTERNAL.split()) - set(torchdist_ref.__all__))


def _is_module(path: Path) -> bool:
    return (path.suffix == ".py" and not path.name.startswith("__")) or (path / "__init__.py").exists()


def _overloads(name: str, function: FunctionType) -> Iterator[str]:
    """Yield what a type checker needs beyond the source's signature; nothing where that says all."""
    node, summary = _parsed(function), (inspect.getdoc(function) or "").partition("\n")[0]
    assert node.returns is not None
    returned = ast.unparse(node.returns)
    position = next((at for at, argument in enumerate(node.args.args) if argument.arg == "async_op"), None)
    if position is None:
        # The source's alias of a name has the name of what it stands for.
        node.name, node.returns = name, ast.Name(GROUPS.get(returned, returned))
        if any(argument.annotation and ast.unparse(argument.annotation) == GROUP for argument in node.args.args):
            yield _definition(node, summary)
        elif returned in GROUPS:
            yield _definition(node, summary)
        return
    assert returned.endswith(" | None"), f"{name} returns {returned}"
    waits, returns = ("Literal[False]", "None"), ("Literal[True]", returned.removesuffix(" | None"))
    for annotation, result in (waits, returns, ("bool", returned)):
        node = _parsed(function)
        node.name, node.returns = name, ast.Name(result)
        node.args.args[position].annotation = ast.Name(annotation)
        if annotation == "Literal[True]":
            # A required argument can't follow one with a default: it and what follows are passed by keyword here.
            behind = node.args.args[position:]
            first_default = len(node.args.args) - len(node.args.defaults)
            defaults = node.args.defaults[position - first_default :]
            node.args.args, node.args.defaults = node.args.args[:position], node.args.defaults[: -len(behind)]
            node.args.kwonlyargs, node.args.kw_defaults = behind, [None, *defaults[1:]]
        yield "@overload\n" + _definition(node, summary)


def _parsed(function: FunctionType) -> ast.FunctionDef:
    node = ast.parse(inspect.getsource(inspect.unwrap(function))).body[0]
    assert isinstance(node, ast.FunctionDef)
    return node


def _definition(node: ast.FunctionDef, summary: str) -> str:
    """Return a function of a stub: its signature, defaults elided, and the first line of its docstring."""
    for argument in node.args.args + node.args.kwonlyargs:
        if argument.annotation and ast.unparse(argument.annotation) == GROUP:
            argument.annotation = ast.Name("AnyGroup")
    node.decorator_list = []
    node.args.defaults = [ast.Constant(...) for _ in node.args.defaults]
    node.args.kw_defaults = [default and ast.Constant(...) for default in node.args.kw_defaults]
    node.body = [ast.Expr(ast.Constant(summary))]
    return ast.unparse(node) + "\n\n"
