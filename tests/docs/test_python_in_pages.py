"""What pages with Python run, without a browser: packages need the standard library alone, hostile files do nothing.

`test_in_browser` tests the same in the page.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import zipfile
import zlib
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import hang_page
import hang_run
import page_python
import pytest
import workbench
import workbench_run

from tests.debug.test_dumps import HOSTILE, entry, write_nccl_dumps
from torchdist_ref.debug.dumps import MAX_FILE_BYTES, read_directory
from torchdist_ref.debug.verdict import find_verdict
from torchdist_ref.schedules import violations

RECORDED = sorted(hang_page.EXAMPLE.parent.glob("*.json"))
LOG = Path(__file__).parents[1] / "debug/logs/torchrun_raise.log"


@pytest.mark.parametrize("name", page_python.PACKAGES)
def test_a_package_needs_nothing_else(name: str, tmp_path: Path) -> None:
    """Pyodide has the standard library alone."""
    for path, text in json.loads(page_python.package(name)).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    module = page_python.PACKAGES[name][1][-1]
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import {module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


# ---- why does my job hang?


def examine(folder: Path, log: str = "") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(hang_run.examine(str(folder), log))
    assert found["sentence"] and "\n" not in found["sentence"]
    return found


def write(folder: Path, recorded: Path) -> None:
    for name, content in json.loads(recorded.read_text()).items():
        (folder / name).write_text(json.dumps(content))


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda path: path.stem)
def test_the_page_has_the_verdict_of_the_command(recorded: Path, tmp_path: Path) -> None:
    write(tmp_path, recorded)
    found, wanted = examine(tmp_path), find_verdict(read_directory(tmp_path))
    assert (found["kind"], found["ranks"], found["sentence"]) == (wanted.kind, list(wanted.ranks), wanted.sentence)
    assert found["rows"] and not found["skipped"]


def test_the_timeline_has_the_order_of_the_calls(tmp_path: Path) -> None:
    write(tmp_path, hang_page.EXAMPLE)
    drawn = examine(tmp_path)["timeline"]
    assert drawn["times"] == sorted(set(drawn["times"])) and drawn["times"][0] == 0
    assert [(row["rank"], row["named"]) for row in drawn["rows"]] == [(0, False), (1, False), (2, False), (3, True)]
    for row in drawn["rows"]:
        for lane in range(row["lanes"]):
            bars = [bar for bar in row["bars"] if bar["lane"] == lane]
            assert all(bar["start"] < bar["end"] <= len(drawn["times"]) for bar in bars)
            assert all(one["end"] <= other["start"] for one, other in pairwise(bars))
    names = [bar["name"] for bar in sorted(drawn["rows"][0]["bars"], key=lambda bar: bar["start"])]
    assert names == ["init_process_group", "all_reduce", "new_group", "barrier", "recv"]


def test_torchs_dumps_without_ends_are_drawn(tmp_path: Path) -> None:
    calls = {rank: [entry(number, "all_reduce") for number in range(1, 40 - rank)] for rank in range(40)}
    write_nccl_dumps(tmp_path, calls)
    drawn = examine(tmp_path)["timeline"]
    assert len(drawn["rows"]) == hang_run.MAX_RANKS and drawn["omitted"] == 40 - hang_run.MAX_RANKS
    assert all(0 < len(row["bars"]) <= hang_run.MAX_CALLS for row in drawn["rows"] if row["rank"] < 39)


def test_a_log_is_read_whether_pasted_or_dropped(tmp_path: Path) -> None:
    text = LOG.read_text()
    pasted = examine(tmp_path, text)
    (tmp_path / "job.log").write_text(text)
    assert pasted == examine(tmp_path)
    assert (pasted["kind"], pasted["ranks"], pasted["columns"][0]) == ("raised", [1], "line of the log")
    text = (LOG.parent / "ours_late.log").read_text()
    assert set(examine(tmp_path, text)["entries"]) == {"rank-left", "rank-did-not-arrive"}


def test_dumps_tell_more_than_a_log(tmp_path: Path) -> None:
    write(tmp_path, hang_page.EXAMPLE)
    (tmp_path / "job.log").write_text(LOG.read_text())
    found = examine(tmp_path)
    assert (found["kind"], found["ranks"], found["skipped"]) == ("behind", [3], [])


BOMB = "made_by_a_pickle"


class Bomb:
    """Object whose pickle makes a directory when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (BOMB,)


def zip_bomb() -> bytes:
    """Return a small archive of 50 MB of zeros."""
    packed = BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("rank0.json", bytes(50_000_000))
    return packed.getvalue()


FILES = HOSTILE | {
    "a program": pickle.dumps({"entries": [Bomb()]}),
    "an archive that unfolds": zip_bomb(),
    "compressed": zlib.compress(bytes(1_000_000)),
    "other JSON": b'{"entries": 3}',
    "JSON that ends": b'{"format": "torchdist_ref flight recorder", "rank"',
    "a number": b"7",
    "a picture": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "names with markup": b'{"entries": [{"process_group": ["<img src=x onerror=alert(1)>"]}]}',
}


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_gives_one_sentence(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "dumps"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    (folder / "nccl_trace_rank_0").write_bytes(FILES[name])
    found = examine(folder)
    assert (found["kind"], found["sentence"]) == ("nothing", hang_run.NOT_READ)
    assert [file for file, _ in found["skipped"]] == ["nccl_trace_rank_0"]
    assert not Path(BOMB).exists()


def test_a_hundred_megabytes_of_garbage_are_not_read(tmp_path: Path) -> None:
    with (tmp_path / "rank0.json").open("wb") as file:
        file.truncate(100_000_000)
    assert examine(tmp_path)["skipped"] == [["rank0.json", f"larger than {MAX_FILE_BYTES} bytes"]]


def test_a_good_dump_beside_a_hostile_file_is_read(tmp_path: Path) -> None:
    write(tmp_path, hang_page.EXAMPLE)
    (tmp_path / "rank3.json").write_bytes(FILES["a program"])
    found = examine(tmp_path)
    assert "the dump of rank 3 could not be read" in found["sentence"] and len(found["skipped"]) == 1


# ---- workbench


@pytest.mark.parametrize("title", workbench.STARTS)
def test_every_algorithm_to_start_from_is_right(title: str) -> None:
    operation, code = workbench.STARTS[title]
    names: dict[str, Any] = {}
    exec(code, names)
    assert len(workbench.STARTS) == 6
    for world in range(2, 17):
        assert not list(violations(names["algorithm"](world), operation)), world
    assert json.loads(workbench_run.examine(code, operation, "6", "1024", "one host"))["right"]


def test_a_wrong_result_names_the_round_and_the_move() -> None:
    code = workbench.START.replace("reduce=True", "reduce=step > 0")
    found = json.loads(workbench_run.examine(code, "all_reduce", "4", "4", "one host"))
    cause = (
        "round 1, move 1.data[0] -> 2.data[0]: replaces the value of data[0] on rank 2, and that of 2.data[0] is lost"
    )
    assert f"result: rank 0, data[0]: {cause}" in found["said"].splitlines()
    assert "at the end" not in found["said"]


def test_another_order_of_the_sum_names_the_move_that_wrote_it_last() -> None:
    code = """from torchdist_ref.schedules import Move, Schedule, carry


def algorithm(world):
    data, other = ("data", 0), ("tmp", 0)
    pairs = (carry(1, 0, data, True), carry(0, 1, data, True), carry(0, 2, data, True))
    rest = (Move(2, 0, data, other), Move(2, 1, data, other), Move(1, 2, data, other))
    return Schedule("two orders", 3, ((*pairs, *rest), tuple(Move(r, r, other, data, True) for r in range(3))))
"""
    found = json.loads(workbench_run.examine(code, "all_reduce", "3", "4", "one host"))
    assert found["said"].splitlines() == [
        "Wrong.",
        "replicas: rank 2, data[0]: round 2, move 2.tmp[0] -> 2.data[0] +, wrote it last",
        "    expected the order of the ranks before, got another order of the same",
    ]
