"""Every planted fault fits the library as it is: its pattern occurs exactly once."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

import torchdist_ref
from tests.mutants.planting import Fault, matches, places, plant, planted

PACKAGE = Path(torchdist_ref.__file__).parent
FEWEST = 95


FAULTS = planted()


@pytest.mark.parametrize("part", sorted({fault.where.partition("/")[0] for fault in FAULTS}))
def test_faults_fit(part: str) -> None:
    """One test for all faults of a package: there are hundreds, of a few milliseconds each."""
    of_part = [fault for fault in FAULTS if fault.where.partition("/")[0] == part]
    assert not {fault.name: problem for fault in of_part if (problem := misfit(fault))}


def misfit(fault: Fault) -> str:
    """Return why a fault cannot be planted, or its tests not be found; empty if all is well."""
    found = [str(file) for file, _ in places(fault, PACKAGE)]
    if len(found) != 1 or fault.new == fault.old:
        return f"fits {len(found)} places {found}, or changes nothing"
    names, _, expression = fault.tests.partition(" -k ")
    paths = [PACKAGE.parent / name.partition("::")[0] for name in names.split()]
    files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
    try:
        Expression.compile(expression)
    except SyntaxError as error:
        return f"pytest does not understand {expression!r}: {error}"
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    # Other words may be of parameters.
    unknown = [word for word in re.findall(r"\w+_\w+", expression) if word not in text]
    if unknown:
        return f"no test has the words {unknown}"
    selected = [kind for name, kind in functions(text) if expression and expression in name]
    return "its tests are all `long`, which are not run" if selected and all(selected) else ""


def functions(text: str) -> list[tuple[str, bool]]:
    """Return the names of test functions, each with whether it is marked as `long`."""
    found = re.findall(r"((?:^@.*\n(?:^[ )\]}].*\n)*)*)^def (test_\w+)", text, re.MULTILINE)
    return [(name, "@pytest.mark.long\n" in marks) for marks, name in found]


def test_there_are_enough_faults_and_each_has_a_name_of_its_own() -> None:
    names = [fault.name for fault in planted()]
    assert len(set(names)) == len(names) >= FEWEST


def test_quotes_around_the_words_are_refused() -> None:
    """The shell takes them away; here no shell reads the row."""
    quoted = replace(FAULTS[0], tests=f"{Path(__file__).relative_to(PACKAGE.parent)} -k 'fit or name'")
    assert "does not understand" in misfit(quoted)


def test_tests_that_are_not_run_are_refused() -> None:
    """A test was moved to the night, and its fault could no longer be planted by day."""
    of_the_night = replace(FAULTS[0], tests="tests/backends/test_same_bits.py -k ten_thousand_random")
    assert "long" in misfit(of_the_night)


def test_layout_comments_and_trailing_commas_do_not_matter() -> None:
    source = "def f():\n    return g(  # why\n        a,\n        b,\n    )\n"
    assert len(matches(source, "return g(a, b)")) == 1


def test_a_placeholder_is_one_name_everywhere() -> None:
    assert len(matches("x = y + y", "$a + $a")) == 1
    assert not matches("x = y + z", "$a + $a")
    assert not matches("x = 1 + 1", "$a + $a")


def test_a_fault_is_planted_with_the_names_and_indentation_of_its_place(tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text("def f(many):\n    for one in many:\n        g(one)\n")
    fault = Fault("", "part.py", "for $item in $all:\n    g($item)", "for $item in $all:\n    pass\ng($item)", "")
    plant(fault, tmp_path)
    assert (tmp_path / "part.py").read_text() == "def f(many):\n    for one in many:\n        pass\n    g(one)\n"


def test_a_fault_that_fits_two_places_is_refused(tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text("a = 1\nb = 1\n")
    with pytest.raises(LookupError, match="2 places"):
        plant(Fault("twice", "part.py", "$x = 1", "$x = 2", ""), tmp_path)
