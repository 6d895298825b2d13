"""Brief runs of the benchmark on few ranks. The measured figures are not compared here.

Each run forks ranks and starts backends, which takes some tenths of a second.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from torchdist_ref import groups
from torchdist_ref.benchmark import competitors, faults
from torchdist_ref.benchmark.__main__ import main
from torchdist_ref.benchmark.calls import ADDED, TORCH, WITHOUT
from torchdist_ref.benchmark.collectives import Case
from torchdist_ref.benchmark.competitors import available
from torchdist_ref.benchmark.faults import BUSY, INTERRUPT, MISMATCH, strike, trial
from torchdist_ref.benchmark.operations import OPERATIONS, Buffers
from torchdist_ref.benchmark.ranks import run_ranks
from torchdist_ref.benchmark.rounds import RankContext
from torchdist_ref.errors import ArgumentError
from torchdist_ref.testing import RankError, namespaces, run

BRIEF = ["--repetitions", "2", "--seconds", "0.001"]


def results(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["results"]
    return found


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("op", [op for op in OPERATIONS if op != "barrier"])
def test_expected_results_equal_those_of_the_backend(op: str, world: int) -> None:
    def program(rank: int) -> tuple[list[float], list[float] | None]:
        operation = OPERATIONS[op]
        buffers = operation.buffers(rank, world, 24 * world, torch.float32)
        operation.load(buffers)
        operation.bind(groups, None, buffers)()
        answer = operation.answer(buffers)
        return buffers.result.tolist(), None if answer is None else answer.tolist()

    pairs = [(got, answer) for got, answer in run(program, world) if answer is not None]
    assert pairs and all(len(got) >= 6 and got == answer for got, answer in pairs)


@pytest.mark.parametrize("op", [op for op in OPERATIONS if op != "barrier"])
def test_a_backend_that_does_nothing_is_wrong(op: str) -> None:
    operation = OPERATIONS[op]
    buffers: Buffers = operation.buffers(1, 2, 64, torch.float32)
    if (answer := operation.answer(buffers)) is None:
        buffers = operation.buffers(0, 2, 64, torch.float32)
        answer = operation.answer(buffers)
    operation.load(buffers)
    assert answer is not None and not torch.equal(buffers.result, answer)


def test_backends_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.svg"
    ops = ["--ops", "all_reduce,sendrecv,barrier", "--sizes", "4,64K"]
    assert main([*ops, *BRIEF, "--backends", "ref,gloo", "--json", str(out), "--plot", str(picture)]) == 0
    printed = capsys.readouterr()
    assert printed.err == "all_reduce ...\nsendrecv ...\nbarrier ...\n"
    assert printed.out.count("x gloo") == 3 and "64 KiB" in printed.out
    entries = results(out)
    assert len(entries) == 2 * 2 * 3 + 2
    assert {entry["backend"] for entry in entries} == {"ref", "gloo", "limit"}
    assert all(len(entry["samples_seconds"]) == 2 and entry["seconds"] > 0 for entry in entries)
    assert picture.read_text().startswith("<?xml")


def test_torch_gloo_in_a_loop_on_int32(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    named = ["--backends", "torch:gloo,ref", "--against", "torch:gloo", "--dtype", "int32"]
    assert main(["--ops", "all_gather", "--sizes", "1K", "--loop", *BRIEF, *named, "--json", str(out)]) == 0
    assert [entry["backend"] for entry in results(out)] == ["torch:gloo", "ref", "limit"]
    assert json.loads(out.read_text())["settings"]["loop"] is True


@pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing())
def test_namespaces_put_each_half_of_the_ranks_on_a_host(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    named = ["--ops", "all_reduce", "--sizes", "1K", "--backends", "ref,gloo", "--world", "3", "--namespaces"]
    assert main([*named, "--repetitions", "2", "--seconds", "0.001", "--json", str(out)]) == 0
    assert {entry["backend"] for entry in results(out)} == {"ref", "gloo", "limit"}
    assert json.loads(out.read_text())["settings"]["namespaces"] == 2


def test_a_backend_that_cannot_be_made_is_left_out_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(competitors.UNDER_MPIEXEC, "mpi", "no_such_package")
    assert main(["--ops", "barrier", *BRIEF, "--backends", "ref,mpi"]) == 0
    printed = capsys.readouterr().out
    assert "mpi is left out: needs the package no_such_package" in printed
    assert "barrier" in printed


@pytest.mark.long
def test_mpi_ranks_under_mpiexec(tmp_path: Path, python_with_torch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Over a second: MPI's ranks wait busily.
    # Without MPI, ref runs alone and a note has the reason.
    beside = competitors.find_mpiexec()
    monkeypatch.setattr(competitors, "find_mpiexec", lambda: beside)
    monkeypatch.setattr(sys, "executable", python_with_torch)
    names, left_out = available(["ref", "mpi4py"])
    assert names == ["ref", "mpi4py"] or "mpi4py is left out" in str(left_out[0])
    out = tmp_path / "out.json"
    assert main(["--sizes", "64", *BRIEF, "--backends", "ref,mpi4py", "--json", str(out)]) == 0
    found = {(entry["op"], entry["backend"]) for entry in results(out)}
    assert found >= {(op, name) for op in OPERATIONS for name in names}


def test_mpi_is_left_out_where_ranks_are_forked() -> None:
    names, left_out = available(["ref", "mpi4py"], forked=True)
    assert names == ["ref"] and "mpi4py" in str(left_out[0])


def test_wrong_result_raises() -> None:
    def program(context: RankContext) -> None:
        case = Case(context, Namespace(dtype="float32", device="cpu"), OPERATIONS["broadcast"], 64)
        case.check("careless", lambda: None, case.buffers)

    with pytest.raises(RankError, match=r"broadcast of 64 B on 'careless' is wrong on rank 1: element 0 of 16"):
        run_ranks(program, 2)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--ops", "all_reduse"], "--ops"),
        (["--backends", "glue"], "--backends"),
        (["--sizes", "many"], "--sizes"),
        (["--dtype", "nonsense"], "--dtype"),
        (["--world", "1"], "--world"),
        (["--against", "gloo", "--backends", "ref"], "--against"),
        (["--namespaces", "--backends", "ref,mpi4py"], "--namespaces"),
        (["--namespaces", "1"], "--namespaces"),
        (["--namespaces", "4", "--backends", "ref", "--world", "3"], "--world 3"),
        (["store", "--clients", "0"], "--clients"),
        (["faults", "--ops", "gossip"], "--ops"),
        (["faults", "--size", "large"], "'large'"),
        (["faults", "--world", "1"], "--world"),
        (["faults", "--trials", "0"], "--trials"),
        (["--json", "/no/such/folder/out.json"], "--json"),
        (["calls", "--json", "/"], "--json"),
        (["--plot", "/no/such/folder/out.svg"], "--plot"),
    ],
)
def test_wrong_options_are_named(options: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options) == 1
    assert named in capsys.readouterr().err


def test_an_unknown_backend_is_an_argument_error() -> None:
    with pytest.raises(ArgumentError, match="glue"):
        available(["ref", "glue"])


def test_stores_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main(["store", "--clients", "1,2", "--repetitions", "1", "--seconds", "0.01", "--json", str(out)]) == 0
    assert "rate / torch" in capsys.readouterr().out
    entries = results(out)
    assert [(e["operation"], e["clients"]) for e in entries] == [
        (operation, clients) for clients in (1, 2) for operation in ("set", "get", "add", "barrier")
    ]
    assert all(samples[0] > 0 for entry in entries for samples in entry["samples"].values())


def test_starting_side_by_side(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    brief = ["--backends", "ref,gloo", "--worlds", "2", "--repetitions", "1"]
    assert main(["start", *brief, "--json", str(out)]) == 0
    begun, cycled = results(out)
    assert (begun["operation"], cycled["operation"]) == ("init", "init and destroy")
    assert all(cycled["samples"][name][0] > begun["samples"][name][0] > 0 for name in ("ref", "gloo"))


@pytest.fixture
def long_wait_for_survivors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an error that a busy machine delays by seconds count as one that came."""
    monkeypatch.setattr(faults, "SURVIVOR_SECONDS", 15.0)


@pytest.mark.long
@pytest.mark.usefixtures("long_wait_for_survivors")
def test_faults_are_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # A busy machine may not resume a rank within 2 s.
    monkeypatch.setattr(faults, "SURVIVOR_SECONDS", 10.0)
    out = tmp_path / "out.json"
    assert main(["faults", "--ops", "recv", "--backends", "ref", "--trials", "1", "--json", str(out)]) == 0
    assert "worst ms" in capsys.readouterr().out
    assert [len(entry["samples"]["seconds"]) for entry in results(out)] == [2, 20, 20, 20, 20, 1]
    assert all(entry["late"] == 0 for entry in results(out))


@pytest.mark.usefixtures("long_wait_for_survivors")
def test_a_death_among_busy_ranks_reaches_every_survivor() -> None:
    found = strike(BUSY, "ref", "all_reduce", 1024, 3, seed=7)
    assert len(found) == 2 and None not in found


@pytest.mark.usefixtures("long_wait_for_survivors")
def test_mismatches_and_interrupts_end_in_errors() -> None:
    assert len(trial(MISMATCH, "root", "ref", Namespace(trials=1))) == 20
    assert None not in strike(INTERRUPT, "ref", "barrier", 0, 2, seed=0)


# Over a second: interpreters start that load torch.
def test_cost_of_the_public_api_and_of_imports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], python_with_torch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The times mean nothing then; what is measured, and how it is shown, is the subject.
    monkeypatch.setattr(sys, "executable", python_with_torch)
    out = tmp_path / "out.json"
    brief = ["--repetitions", "2", "--calls", "3", "--imports", "1"]
    assert main(["calls", "--ops", "all_reduce,all_gather,barrier", "--worlds", "1,2", *brief, "--json", str(out)]) == 0
    *calls, loaded = results(out)
    assert [(entry["op"], entry["world"]) for entry in calls] == [
        (op, world) for world in (1, 2) for op in ("all_reduce", "all_gather", "barrier")
    ]
    samples = [entry["samples"] for entry in calls]
    assert all(len(each["public"]) == len(each["backend"]) == 2 and min(each["backend"]) > 0 for each in samples)
    assert all(len(loaded["samples"][what]) == 1 and loaded["samples"][what][0] > 0 for what in (TORCH, ADDED, WITHOUT))
    printed = capsys.readouterr().out
    assert "public API us" in printed and ADDED in printed
