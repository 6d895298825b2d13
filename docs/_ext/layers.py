"""The layers of the package: the table of who may import whom, what the source really imports, and the picture of both.

One table, read by three: tests/test_architecture.py holds the source to it, the page "Design" shows it, and the
diagram on that page is drawn from the imports found. So the picture cannot say what the code does not do.

To add a module to the package, add it to PARTS (the test fails until then). This module reads files and returns values;
anything that knows Sphinx is in site_directives.py.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path

PACKAGE = "torchdist_ref"
SOURCE = Path(__file__).resolve().parents[2] / PACKAGE

NEVER = "never"
LATE = "only inside functions"
YES = "yes"

CORE = ("errors", "calls", "processes", "recorder", "timeouts", "torch_internals", "work")


@dataclass(frozen=True)
class Part:
    """One box of the picture: a module or a package, and what it may import.

    Attributes:
        name: Its path below the package; the longest name that fits a module wins.
        layer: The row it stands in.
        may: The parts it may import besides itself.
        torch: Whether it may import torch: NEVER, LATE or YES.
        banned: Modules of the standard library that it must do without.
    """

    name: str
    layer: str
    may: tuple[str, ...] = ()
    torch: str = YES
    banned: tuple[str, ...] = ()


API = (*CORE, "groups")
ALL = "everything"

BELOW_BACKENDS = (*CORE, "stores", "membership", "rendezvous", "transports")
SHARED_BY_BACKENDS = ("backends", "backends.base", "backends.reductions", "backends.operands", "backends.observers")

PARTS = (
    Part("error_index", "0 core types", torch=NEVER),
    Part("errors", "0 core types", ("error_index",), torch=LATE),
    Part("calls", "0 core types", ("errors",), torch=NEVER),
    Part("recorder", "0 core types", ("calls", "errors"), torch=NEVER),
    Part("timeouts", "0 core types", ("errors",), torch=NEVER),
    Part("torch_internals", "0 core types", ("errors",)),
    Part("work", "0 core types", ("errors", "calls", "timeouts", "torch_internals")),
    Part("schedules", "1 schedules", ("calls", "errors"), torch=NEVER, banned=("os",)),
    Part("processes", "1 infrastructure", ("errors",), torch=NEVER),
    Part("stores", "1 infrastructure", CORE, torch=LATE),
    Part("rendezvous", "1 infrastructure", (*CORE, "stores"), torch=LATE),
    Part("plain_data", "1 infrastructure"),
    Part("membership", "1 membership", (*CORE, "stores", "rendezvous"), torch=LATE),
    Part("transports", "1 membership", (*CORE, "stores", "membership")),
    Part("backends.base", "2 backends", (*CORE, "stores", "membership")),
    Part("backends.reductions", "2 backends", (*CORE, "backends.base")),
    Part("backends.operands", "2 backends", CORE),
    Part("backends.observers", "2 backends", (*CORE, "backends.base")),
    Part("backends.registry", "2 backends", (*BELOW_BACKENDS, "backends.base")),
    Part(
        "backends",
        "2 backends",
        (*BELOW_BACKENDS, *SHARED_BY_BACKENDS, "backends.ref", "backends.ref_in_torch", "debug"),
    ),
    Part("backends.ref", "2 backends", (*BELOW_BACKENDS, *SHARED_BY_BACKENDS, "schedules")),
    Part("backends.torch_native", "2 backends", (*BELOW_BACKENDS, *SHARED_BY_BACKENDS)),
    Part("backends.mpi", "2 backends", (*BELOW_BACKENDS, *SHARED_BY_BACKENDS)),
    Part(
        "backends.ref_in_torch",
        "2 backends",
        (*BELOW_BACKENDS, *SHARED_BY_BACKENDS, "plain_data", "backends.ref", "backends.torch_native", "debug"),
    ),
    Part("debug", "2 backends", (*BELOW_BACKENDS, "error_index", "schedules", "backends.base")),
    Part("backends.detail_level", "2 backends", (*BELOW_BACKENDS, "backends.base", "backends.operands", "debug")),
    Part(
        "groups",
        "3 public API",
        (
            *CORE,
            "stores",
            "membership",
            "plain_data",
            "rendezvous",
            "backends.base",
            "backends.detail_level",
            "backends.reductions",
            "backends.registry",
            "backends.operands",
            "backends.ref_in_torch",
            "debug",
        ),
    ),
    Part("algorithms.division", "4 training"),
    Part("algorithms.bucket", "4 training", ("errors", "algorithms.division")),
    Part("algorithms", "4 training", (*API, "algorithms.bucket", "algorithms.division")),
    Part("parallel", "4 training", (*API, "algorithms", "algorithms.bucket", "algorithms.division")),
    Part("nn", "4 training", (*API, "schedules")),
    Part("optim", "4 training", (*API, "algorithms", "parallel")),
    Part("utilities", "4 training", (*API, "parallel", "algorithms", "nn")),
    Part("reproducible", "4 training", (*API, "algorithms")),
    Part("pipeline", "4 training", ("errors", "torch_internals")),
    Part("elastic.data", "4 training", API),
    Part(
        "launch",
        "launcher",
        ("errors", "stores", "membership", "rendezvous", "processes", "launcher", "elastic"),
        torch=LATE,
    ),
    Part(
        "launcher",
        "launcher",
        ("errors", "stores", "membership", "rendezvous", "processes", "elastic"),
        torch=LATE,
    ),
    Part("torch_paths", "compatibility", (ALL,), torch=LATE),
    Part("elastic", "launcher", ("errors", "timeouts", "stores", "membership", "rendezvous", "processes"), torch=LATE),
    Part("ranks", "tools", (ALL,)),
    Part("simulation", "tools", (ALL,)),
    Part("testing", "tools", (ALL,)),
    Part("acid", "tools", (ALL,)),
    Part("benchmark", "tools", (ALL,)),
    Part("notebook", "tools", (ALL,)),
    Part("__main__", "tools", ("launcher", "debug"), torch=NEVER),
)
BY_NAME = {part.name: part for part in PARTS}
TRAINING = tuple(part.name for part in PARTS if part.layer == "4 training")
TOOLS = tuple(part.name for part in PARTS if part.layer == "tools")


@dataclass(frozen=True)
class Import:
    """One import statement: which module imports which, where, and whether it runs when the module is loaded."""

    module: str
    target: str
    line: int
    late: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def module_name(path: Path) -> str:
    """Return the dotted name of a file of the package."""
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def files() -> list[Path]:
    """Return all source files of the package, in order."""
    return sorted(SOURCE.rglob("*.py"))


def is_module(name: str) -> bool:
    """Whether a dotted name is a file or folder of the package, and not a name inside one."""
    path = SOURCE.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def absolute(module: str, is_package: bool, node: ast.ImportFrom) -> str:
    """Return the module that a `from ... import` names, relative or not."""
    if not node.level:
        return node.module or ""
    base = module.split(".")[: len(module.split(".")) - node.level + is_package]
    return ".".join([*base, *([node.module] if node.module else [])])


def targets(module: str, is_package: bool, node: ast.AST) -> Iterator[str]:
    """Yield the modules that one statement imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = absolute(module, is_package, node)
        names = [f"{base}.{alias.name}" for alias in node.names]
        yield from {name if base.startswith(PACKAGE) and is_module(name) else base for name in names}


def walk(node: ast.AST, late: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Yield every node below, and whether it is inside a function."""
    for child in ast.iter_child_nodes(node):
        inside = late or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield child, inside
        yield from walk(child, inside)


def imports_of(path: Path) -> Iterator[Import]:
    """Yield every import statement of one file."""
    module = module_name(path)
    for node, late in walk(ast.parse(path.read_text(encoding="utf-8"))):
        for target in targets(module, path.name == "__init__.py", node):
            yield Import(module, target, node.lineno, late)  # type: ignore[attr-defined]


@cache
def imports() -> tuple[Import, ...]:
    """Return every import statement of the package."""
    return tuple(found for path in files() for found in imports_of(path))


def part_of(module: str) -> Part | None:
    """Return the part that a module belongs to: the longest name that fits. None for the package's own front page."""
    path = module.removeprefix(PACKAGE).removeprefix(".")
    fits = [name for name in BY_NAME if path == name or path.startswith(f"{name}.")]
    return BY_NAME[max(fits, key=len)] if fits else None


def violation(found: Import) -> str:
    """Say what is wrong with one import, or nothing."""
    part = part_of(found.module)
    if part is None:
        return (
            "" if found.module == PACKAGE else f"{found.module} is in no part: add it to PARTS in docs/_ext/layers.py"
        )
    if found.target.split(".")[0] == PACKAGE:
        return wrong_part(part, found)
    if found.target.split(".")[0] == "torch":
        return wrong_torch(part, found)
    return f"{found}, which {part.name} must do without" if found.target.split(".")[0] in part.banned else ""


def wrong_part(part: Part, found: Import) -> str:
    """Say what is wrong with an import of our own."""
    target = part_of(found.target)
    if part.may == (ALL,) or target is part:
        return ""
    if target is None:
        return f"{found}: the package itself; inside the package, name the module"
    if target.name not in part.may:
        return f"{found}: {part.name} ({part.layer}) may not import {target.name} ({target.layer})"
    if part.name in TRAINING and target.name == "groups" and found.target != f"{PACKAGE}.groups":
        return f"{found}: training uses the public names of {PACKAGE}.groups, not what is inside it"
    return ""


def wrong_torch(part: Part, found: Import) -> str:
    """Say what is wrong with an import of torch."""
    allowed = {YES: True, NEVER: False, LATE: found.late}
    return "" if allowed[part.torch] else f"{found}: {part.name} may import torch {part.torch}"


def edges() -> dict[str, set[str]]:
    """Return, for each part that exists, the other parts that it imports today."""
    found: dict[str, set[str]] = {}
    for path in files():
        if (part := part_of(module_name(path))) is not None:
            found.setdefault(part.name, set())
    for item in imports():
        source, target = part_of(item.module), part_of(item.target)
        if source and target and target is not source and item.target.startswith(PACKAGE) and target.name in found:
            found[source.name].add(target.name)
    return found


ROWS = ("4 training", "3 public API", "2 backends", "1 membership", "1 schedules", "0 core types")
FOLDERS = ("backends", "algorithms")
"""Folders that are one box of the picture, although the table has several parts of them."""
WIDTH, BOX, GAP, ROW, LEFT = 860, 58, 22, 104, 104
LETTER, LINE = 7.6, 15.0
MOST = 5
Arrow = tuple[str, str]


def box_of(name: str) -> str:
    """Return the box that a part belongs to: its folder, or the part itself.

    >>> box_of("backends.ref"), box_of("elastic.data")
    ('backends', 'elastic.data')
    """
    head = name.partition(".")[0]
    return head if head in FOLDERS else name


def size(name: str) -> tuple[int, int]:
    """Return the number of files and of lines of one box."""
    own = [path for path in files() if (part := part_of(module_name(path))) and box_of(part.name) == name]
    return len(own), sum(len(path.read_text(encoding="utf-8").splitlines()) for path in own)


def svg() -> str:
    """Draw the layers that exist as boxes, top to bottom, with the arrows that `arrows` keeps."""
    boxes = place()
    height = max(y for _, y, _ in boxes.values()) + BOX + 8
    lines = "".join(arrow(boxes[a], boxes[b]) for a, b in sorted(arrows()))
    return (
        f'<svg class="layers" viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="layers-title" '
        'xmlns="http://www.w3.org/2000/svg"><title id="layers-title">The layers of torchdist_ref and the imports '
        "between them; the table below says the same in words</title>"
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="currentColor"/></marker></defs>'
        f"{labels(boxes)}{lines}{''.join(box(name, *boxes[name]) for name in boxes)}</svg>"
    )


def row_of(part: Part) -> int:
    """Return the row of a part: schedules and infrastructure share one."""
    return ROWS.index("1 schedules" if part.layer == "1 infrastructure" else part.layer)


def layered() -> dict[str, int]:
    """Return the row of each box. The launcher and the tools are beside the layers, so they are not drawn."""
    existing = edges()
    return {
        box_of(part.name): row_of(part)
        for part in PARTS
        if part.layer in (*ROWS, "1 infrastructure") and part.name in existing
    }


def arrows() -> set[Arrow]:
    """Return the imports to draw between boxes: without those that follow from a chain of others, and of core types."""
    rows = layered()
    kept = {
        (box_of(source), box_of(target))
        for source, many in edges().items()
        for target in many
        if box_of(source) != box_of(target) and box_of(source) in rows and box_of(target) in rows and target not in CORE
    }
    # The longest arrows first: a picture of short ones is easier to follow.
    for pair in sorted(kept, key=lambda pair: (rows[pair[0]] - rows[pair[1]], pair)):
        if reaches(kept - {pair}, *pair):
            kept.remove(pair)
    return kept


def reaches(pairs: set[Arrow], source: str, target: str) -> bool:
    """Return whether arrows lead from one box to another.

    >>> reaches({("a", "b"), ("b", "c")}, "a", "c"), reaches({("a", "b")}, "b", "a")
    (True, False)
    """
    found, new = {source}, {source}
    while new:
        new = {b for a, b in pairs if a in new} - found
        found |= new
    return target in found


def place() -> dict[str, tuple[float, float, float]]:
    """Return x, y and width of each box."""
    rows, boxes, y = layered(), {}, 4.0
    for row in range(len(ROWS)):
        for names in divided([name for name in rows if rows[name] == row]):
            width = (WIDTH - LEFT - GAP * len(names)) / max(len(names), 4)
            start = LEFT + (WIDTH - LEFT - len(names) * (width + GAP)) / 2
            boxes.update({name: (start + i * (width + GAP), y, width) for i, name in enumerate(names)})
            y += ROW if row < len(ROWS) - 1 else BOX + 10
    return boxes


def divided(names: list[str]) -> list[list[str]]:
    """Divide a row with too many boxes into two; the upper one has those that no other box of the row imports."""
    if len(names) <= MOST:
        return [names]
    used = {box_of(b) for a, many in edges().items() for b in many if box_of(a) in names and box_of(a) != box_of(b)}
    return [[name for name in names if name not in used], [name for name in names if name in used]]


def arrow(source: tuple[float, float, float], target: tuple[float, float, float]) -> str:
    """Draw one import: a curve down, or a line along the row."""
    (x1, y1, w1), (x2, y2, w2) = source, target
    a, b, top, right = x1 + w1 / 2, x2 + w2 / 2, y1 + BOX, x2 > x1
    if y1 == y2:
        # Two boxes that import each other have two lines, one above the other.
        a, b, y = (x1 + w1 if right else x1), (x2 if right else x2 + w2), y1 + BOX / 2 + (6 if right else -6)
        return f'<path d="M{a:.0f} {y:.0f}L{b:.0f} {y:.0f}" class="import" marker-end="url(#tip)"/>'
    middle, bottom = (top + y2 - 2) / 2, y2 - 2
    curve = f"M{a:.0f} {top:.0f}C{a:.0f} {middle:.0f} {b:.0f} {middle:.0f} {b:.0f} {bottom:.0f}"
    return f'<path d="{curve}" class="import" marker-end="url(#tip)"/>'


def box(name: str, x: float, y: float, width: float) -> str:
    """Draw one box: its name and its size."""
    count, lines = size(name)
    words = [(name, "name"), (f"{count} file{'s' * (count != 1)}, {lines:,} lines", "size")]
    first = y + (BOX - LINE * len(words)) / 2 + LINE - 4
    return f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{BOX}" rx="6" class="part"/>' + "".join(
        f'<text x="{x + width / 2:.0f}" y="{first + LINE * line:.0f}" class="{kind}">{escape(word)}</text>'
        for line, (word, kind) in enumerate(words)
    )


def labels(boxes: dict[str, tuple[float, float, float]]) -> str:
    """Write the name of each row at its left."""
    rows, heights = layered(), {}
    for name, (_, y, _) in boxes.items():
        heights.setdefault(rows[name], y)
    names = {ROWS.index("1 schedules"): "1 infrastructure"}
    return "".join(
        f'<text x="0" y="{y + BOX / 2 + 4:.0f}" class="layer">{names.get(row, ROWS[row])}</text>'
        for row, y in sorted(heights.items())
    )


def table() -> list[tuple[str, str, str, str, str]]:
    """Return the rows of the table: part, layer, what it may import, what it imports today, torch."""
    today = edges()
    return [
        (
            part.name,
            part.layer,
            ", ".join(part.may) or "nothing of ours",
            ", ".join(sorted(today[part.name])) or "nothing of ours",
            part.torch,
        )
        for part in PARTS
        if part.name in today
    ]
