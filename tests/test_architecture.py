"""The layer rule: calls go down as values, completions come up as Work, and nothing below imports anything above.

The table of who may import whom is in docs/_ext/layers.py, from which the page "Design" takes its table and its
diagram.
"""

import subprocess
import sys

import layers
import pytest


def test_every_import_goes_where_the_table_allows() -> None:
    wrong = [text for found in layers.imports() if (text := layers.violation(found))]
    assert not wrong, "\n".join(wrong)


def test_every_module_has_a_place_in_the_table() -> None:
    homeless = [
        module
        for path in layers.files()
        if (module := layers.module_name(path)) != layers.PACKAGE and layers.part_of(module) is None
    ]
    assert not homeless, f"add {homeless} to PARTS in docs/_ext/layers.py"


def test_nothing_in_the_package_imports_what_is_beside_it() -> None:
    from_beside = [
        str(found)
        for found in layers.imports()
        if (target := layers.part_of(found.target))
        and found.target.startswith(layers.PACKAGE)
        and target.name in layers.TOOLS
        and part_name(found.module) not in layers.TOOLS
    ]
    assert not from_beside


def part_name(module: str) -> str:
    part = layers.part_of(module)
    return part.name if part else module


@pytest.mark.parametrize(
    ("module", "target", "late", "fault"),
    [
        ("torchdist_ref.schedules.ring", "torch", False, "may import torch never"),
        ("torchdist_ref.schedules.ring", "os", False, "must do without"),
        ("torchdist_ref.stores.tcp", "torchdist_ref.groups", False, "may not import groups"),
        ("torchdist_ref.groups.world", "torchdist_ref.backends.ref", True, "may not import backends"),
        ("torchdist_ref.parallel.reducer", "torchdist_ref.groups.world", False, "public names"),
        ("torchdist_ref.backends.ref", "torchdist_ref.testing", True, "may not import testing"),
        ("torchdist_ref.launch", "torch", False, "only inside functions"),
        ("torchdist_ref.novelty", "json", False, "in no part"),
        ("torchdist_ref.groups.world", "torchdist_ref", False, "name the module"),
    ],
)
def test_the_rule_notices(module: str, target: str, late: bool, fault: str) -> None:
    assert fault in layers.violation(layers.Import(module, target, 1, late))


def test_relative_imports_and_late_imports_are_read() -> None:
    tree = layers.ast.parse("from ..stores import base\ndef f():\n    import torch.futures\n")
    found = [
        (target, late)
        for node, late in layers.walk(tree)
        for target in layers.targets("torchdist_ref.groups.world", False, node)
    ]
    assert found == [("torchdist_ref.stores.base", False), ("torch.futures", True)]


def test_the_picture_shows_the_imports_that_exist() -> None:
    picture, edges = layers.svg(), layers.edges()
    assert "backends" in edges["groups"] or "backends.base" in edges["groups"]
    arrows = layers.arrows()
    assert picture.count('class="import"') == len(arrows) > 5
    imported = {(layers.box_of(a), layers.box_of(b)) for a, many in edges.items() for b in many}
    assert arrows <= imported
    # What the picture omits follows from its arrows.
    rows = layers.layered()
    between = {(a, b) for a, b in imported if a != b and a in rows and b in rows and b not in layers.CORE}
    assert all(layers.reaches(arrows, *pair) for pair in between)
    assert all(f">{name}</text>" in picture for name in ("schedules", "stores", "groups", "errors"))


@pytest.mark.parametrize("module", ["torchdist_ref", "torchdist_ref.launch"])
def test_importing_it_does_not_import_torch(module: str) -> None:
    program = f"import sys, {module}; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout == "False\n"


def test_asking_for_a_function_imports_torch_then() -> None:
    program = "import sys, torchdist_ref; torchdist_ref.all_reduce; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout == "True\n"
