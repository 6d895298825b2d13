"""Which planted faults CI takes: those that a change concerns, and a tenth of the others, all in ten turns."""

from __future__ import annotations

from pathlib import Path

from tests.mutants.choice import ROOT, SHARE, chosen_by, named
from tests.mutants.planting import Fault, places, planted

FAULTS = planted()


def chosen(changed: list[str], former: list[Fault] = FAULTS, turn: int = 0) -> set[str]:
    return {fault.name for fault in chosen_by(FAULTS, [ROOT / name for name in changed], former, turn)}


def test_without_changes_every_fault_has_its_turn_once_in_ten() -> None:
    turns = [chosen([], turn=turn) for turn in range(20, 20 + SHARE)]
    assert set.union(*turns) == {fault.name for fault in FAULTS} and sum(map(len, turns)) == len(FAULTS)
    assert all(len(FAULTS) / 20 < len(turn) < len(FAULTS) / 5 for turn in turns)


def test_a_changed_file_of_the_package_chooses_the_faults_in_it() -> None:
    changed = ROOT / "torchdist_ref" / "calls.py"
    inside = {fault.name for fault in FAULTS if changed in {file for file, _ in places(fault, ROOT / "torchdist_ref")}}
    assert inside and chosen(["torchdist_ref/calls.py"]) == chosen([]) | inside


def test_changed_tests_choose_the_faults_that_they_notice() -> None:
    name = "tests/stores/test_hash.py"
    of_file = {fault.name for fault in FAULTS if name in fault.tests}
    of_folder = {fault.name for fault in FAULTS if "tests/stores " in f"{fault.tests} "}
    assert of_file and chosen([name]) == chosen([]) | of_file | of_folder


def test_a_new_or_changed_row_is_chosen() -> None:
    first, *others = FAULTS
    assert chosen([], former=others) == chosen([]) | {first.name}
    other = Fault(first.name, first.where, first.old, f"{first.new} ", first.tests)
    assert chosen([], former=[other, *others]) == chosen([]) | {first.name}


def test_changes_elsewhere_choose_nothing_more() -> None:
    assert chosen(["README.md", "docs/index.md"]) == chosen([]) and Path(ROOT, "README.md").exists()


def test_faults_are_found_by_words_of_their_name() -> None:
    assert [fault.name for fault in named(FAULTS, FAULTS[3].name)] == [FAULTS[3].name]
