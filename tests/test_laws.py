"""The laws of the design that the source shows: short functions, few imports, no cycles, one name a class.

A function's length is from the first to the last line of its body, without its docstring. Run with -s to see figures.
The openings of sentences are in docs/test_language.py, the layers in test_architecture.py.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, namedtuple
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import layers
import torch
import torch.distributed as c10d
from torch.distributed.algorithms.ddp_comm_hooks import optimizer_overlap_hooks
from torch.nn.parallel import distributed

TESTS = Path(__file__).parent
# The files whose code may name CUDA: others ask for an accelerator, whatever its type.
NAMES_CUDA = {
    "transports/cuda_ipc.py": "memory that processes share",
    "backends/torch_native/nccl.py": "NCCL",
    "launcher/devices.py": "the variable of CUDA's driver, which assigns devices to ranks",
    "launcher/environment.py": "the same",
    "groups/queries.py": "torch's public tables of backends have it as a key",
    "parallel/logging_data.py": "a field of torch's logging data",
    "pipeline/pipe.py": "a method of torch.nn.Module",
}
FUNCTION, IMPORTED, LOOSE, UNFORMATTED = 60, 12, 10, 10
# Names of classes that two modules have, and why one of them cannot change.
FORCED_BY_TORCH = {"Backend": "torch has a class of names of backends; here `backends.base` has the interface, too"}
# Objects of torch whose private names programs use, so that the package offers some of them, and Python's tuples.
OTHERS = (
    c10d,
    c10d.distributed_c10d,
    c10d.DeviceMesh,
    c10d.ProcessGroup,
    c10d.Reducer,
    c10d.Work,
    distributed,
    distributed.DistributedDataParallel,
    optimizer_overlap_hooks,
    torch.Tensor,
    torch.cuda,
    torch.ops,
    torch._C._distributed_c10d.Backend.Options,
    namedtuple("Empty", ()),
)
# Accesses of tests to private names of the package. The number is what is reached, so it only falls.
PRIVATE = 48
PRIVATE_NAME = re.compile(r"_(?!_)\w*(?<!_)")
WORD = re.compile(r"\w+")
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


@cache
def imports_that_run() -> tuple[layers.Import, ...]:
    """Return the imports of modules of ours by others of ours, those for type checkers only left out."""
    paths = {layers.module_name(path): path for path in layers.files()}
    return tuple(
        found
        for found in layers.imports()
        if found.target in paths
        and found.target != found.module
        and found.line not in lines_for_type_checkers(paths[found.module])
    )


def test_no_module_imports_many_of_ours() -> None:
    """Imports that run when the module is loaded; an `__init__` may re-export as much as its package has."""
    packages = {layers.module_name(path) for path in layers.files() if path.name == "__init__.py"}
    imported: dict[str, set[str]] = {}
    for found in imports_that_run():
        if not found.late and found.module not in packages:
            imported.setdefault(found.module, set()).add(found.target)
    assert not {name: sorted(targets) for name, targets in imported.items() if len(targets) > IMPORTED}


def in_circles(graph: dict[str, set[str]]) -> list[str]:
    """Return the nodes that are on a cycle or between two.

    >>> in_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()})
    ['b', 'c']
    """
    left = {name: set(targets) for name, targets in graph.items()}
    while True:
        imported = set().union(*left.values())
        ends = {name for name, targets in left.items() if not targets & left.keys() or name not in imported}
        if not ends:
            return sorted(left)
        left = {name: targets - ends for name, targets in left.items() if name not in ends}


def graph_of(room: int) -> dict[str, set[str]]:
    """Return who imports whom, by the first parts of the modules' names: so many, or all for 0."""

    def shortened(module: str) -> str:
        return ".".join(module.split(".")[: room or None])

    graph: dict[str, set[str]] = {}
    for found in imports_that_run():
        importer, imported = shortened(found.module), shortened(found.target)
        graph.setdefault(importer, set()).update({imported} - {importer, layers.PACKAGE})
    return graph


def test_no_imports_of_modules_run_in_a_circle() -> None:
    """Deferred imports count: a cycle that they hide is one for the reader all the same."""
    assert not in_circles(graph_of(0))


def test_no_imports_of_packages_run_in_a_circle() -> None:
    """A package is a folder of the root, or a module that lies there."""
    graph = graph_of(2)
    del graph[layers.PACKAGE]
    assert len(graph) > 20 and not in_circles(graph)


def test_circles_are_found() -> None:
    assert in_circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == ["b", "c"]
    assert in_circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_few_modules_lie_in_the_root() -> None:
    """What belongs together has a folder; `__main__` is a name of Python's."""
    loose = sorted({path.name for path in layers.SOURCE.glob("*.py")} - {"__init__.py", "__main__.py"})
    assert len(loose) <= LOOSE, loose


def test_class_names_are_unique() -> None:
    homes: dict[str, list[str]] = {}
    for path in layers.files():
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(layers.module_name(path))
    twice = {name: modules for name, modules in homes.items() if len(modules) > 1}
    assert twice.keys() <= FORCED_BY_TORCH.keys(), twice


def test_few_places_are_kept_from_the_formatter() -> None:
    mark = "# fmt:" + " skip"
    folders = (layers.SOURCE, TESTS, TESTS.parent / "docs" / "_ext")
    kept = {
        str(path): count
        for folder in folders
        for path in folder.rglob("*.py")
        if (count := path.read_text(encoding="utf-8").count(mark))
    }
    assert sum(kept.values()) < UNFORMATTED, kept


@cache
def private_names() -> frozenset[str]:
    """Return the private names that the package defines, but for those that others have too."""
    defined = set()
    for path in layers.files():
        for node in nodes_of(path):
            if isinstance(node, Function | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                defined.add(node.id if isinstance(node, ast.Name) else node.attr)
    known: set[str] = set()
    for owner in OTHERS:
        known.update(dir(owner))
    return frozenset({name for name in defined if PRIVATE_NAME.fullmatch(name)} - known)


def private_accesses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of each access to a private name of another object, or patch of one by its name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in private_names():
            if ast.unparse(node.value) not in ("self", "cls", "super()", "os"):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("attr"):
            for argument in node.args[:2]:
                text = argument.value if isinstance(argument, ast.Constant) else None
                if isinstance(text, str) and text.rpartition(".")[2] in private_names():
                    yield node.lineno, f"{node.func.attr} {text}"


def test_few_tests_use_private_names() -> None:
    """A test that needs a private name binds the code that it tests: the class lacks an argument, or a public name."""
    # Few files have the words: trees of all the others would take seconds, and memory that later forks copy.
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(TESTS.rglob("*.py"))}
    found = {
        f"{path.relative_to(TESTS)}:{line}: {text}"
        for path, source in texts.items()
        if private_names().intersection(WORD.findall(source))
        for line, text in private_accesses(ast.parse(source))
    }
    folders = Counter(name.split("/")[0] if "/" in name else "." for name in found)
    print("accesses to private names:", sum(folders.values()), dict(folders.most_common()))
    assert len(found) <= PRIVATE, "\n".join(sorted(found))


def test_private_accesses_are_found() -> None:
    source = 'self._pool\nstore._pool\nmonkeypatch.setattr(store, "_pool", 1)\nmonkeypatch.setattr("a.b._pool", 1)\n'
    source += "os._exit(1)\ntorch._C\nc10d.group._get_backend()\n"
    assert [line for line, _ in private_accesses(ast.parse(source))] == [2, 3, 4]


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


def names_of_cuda(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of each name, and of each text without spaces, that has CUDA in it; docstrings have any."""
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    # The parts of a text with values in it are parts of a message.
    docstrings |= {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        named = getattr(node, "attr", getattr(node, "id", getattr(node, "arg", getattr(node, "name", None))))
        if isinstance(node, ast.Constant) and node not in docstrings and " " not in str(node.value):
            named = node.value
        if isinstance(named, str) and "cuda" in named.lower():
            yield node.lineno, named


def test_few_files_name_cuda() -> None:
    found: dict[str, list[str]] = {}
    for path in layers.files():
        for line, text in names_of_cuda(tree_of(path)):
            found.setdefault(str(path.relative_to(layers.SOURCE)), []).append(f"{line}: {text}")
    print("places that name CUDA:", sum(map(len, found.values())))
    assert found.keys() == NAMES_CUDA.keys(), {name: found[name] for name in found.keys() - NAMES_CUDA.keys()}


def test_names_of_cuda_are_found() -> None:
    source = '"""torch.cuda"""\ntorch.cuda.synchronize()\ntensor.is_cuda\nkind = "cuda"\nf"use {kind} or cuda"\n'
    source += 'text = "such as cuda:nccl"\ndef cuda(): ...\n'
    assert sorted(line for line, _ in names_of_cuda(ast.parse(source))) == [2, 3, 4, 7]
