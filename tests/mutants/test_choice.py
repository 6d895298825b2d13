"""Choice of planted faults for CI: those that a change concerns, a tenth of the others; of many, a sample."""

from __future__ import annotations

from pathlib import Path

from tests.mutants.choice import MOST, ROOT, SHARE, bounded, chosen_by, named
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


def test_a_large_change_takes_new_rows_and_a_sample_of_the_others() -> None:
    new, former = FAULTS[-3:], FAULTS[:-3]
    samples = [bounded(FAULTS, former, turn) for turn in (1, 2)]
    assert all(len(sample) == MOST < len(FAULTS) and set(new) <= set(sample) for sample in samples)
    assert set(samples[0]) != set(samples[1]) and samples[0] == bounded(FAULTS, former, 1)
    assert samples[0] == [fault for fault in FAULTS if fault in set(samples[0])]


def test_over_time_every_fault_is_in_a_sample() -> None:
    """A sample is a tenth of all faults; 150 samples leave one in a million out."""
    assert set(FAULTS) == {fault for turn in range(150) for fault in bounded(FAULTS, FAULTS, turn)}


def test_a_small_change_is_taken_whole() -> None:
    assert bounded(FAULTS[:MOST], [], 1) == FAULTS[:MOST]


def test_faults_are_found_by_words_of_their_name() -> None:
    assert [fault.name for fault in named(FAULTS, FAULTS[3].name)] == [FAULTS[3].name]
