"""`--against-checkout`: its arithmetic on tables written out, and brief runs of this checkout against itself.

Three interpreters that import torch take some 5 s, so runs here fork them: most from this process, one by its command.
"""

from __future__ import annotations

import ast
import json
import os
import pickle
import socket
import sys
from argparse import Namespace
from functools import partial
from math import prod
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any, NoReturn

import pytest

import torchdist_ref
from torchdist_ref.benchmark import collectives, ranks, started_rank
from torchdist_ref.benchmark.__main__ import main
from torchdist_ref.benchmark.checkouts import COMMANDS, SIDES, old_spread, ratio_to_old, show, slower
from torchdist_ref.benchmark.competitors import available
from torchdist_ref.benchmark.rounds import HUB, ParentAddress, RankContext, Result, take_turns
from torchdist_ref.errors import DistBackendError
from torchdist_ref.processes import control as processes
from torchdist_ref.testing import namespaces

HERE = Path(torchdist_ref.__file__).parents[1]


def compared(cell: dict[str, object], *samples: list[float]) -> Result:
    return Result(cell, dict(zip(SIDES, samples, strict=True)))


def table() -> list[Result]:
    """Three cells: twice as fast, slower within the noise of the old checkout, and slower beyond it."""
    return [
        compared({"op": "all_reduce", "size_bytes": 4}, [1e-6, 3e-6, 2e-6], [4e-6] * 3, [4e-6] * 3),
        compared({"op": "all_reduce", "size_bytes": 1024}, [6e-6] * 3, [4e-6] * 3, [8e-6] * 3),
        compared({"op": "barrier", "size_bytes": 0}, [5e-6] * 3, [4e-6] * 3, [4e-6, 4.2e-6, 3e-6]),
    ]


def test_ratio_is_of_medians_and_spread_is_old_against_old() -> None:
    assert list(map(ratio_to_old, table())) == pytest.approx([0.5, 1.0, 1.25])
    assert list(map(old_spread, table())) == pytest.approx([1.0, 2.0, 1.0])


def test_slower_needs_more_than_three_percent_and_more_than_the_spread() -> None:
    assert list(map(slower, table())) == [False, False, True]
    cell = {"op": "barrier", "size_bytes": 0}
    assert not slower(compared(cell, [1.02], [1.0], [1.0]))
    assert slower(compared(cell, [1.04], [1.0], [1.0]))
    assert not slower(compared(cell, [1.04], [0.98], [1.05]))


def test_table_names_cells_that_are_slower() -> None:
    assert show(table()) == (
        "cell               this us  old A us  old B us  this / old  old spread\n"
        "all_reduce, 4 B       2.00      4.00      4.00       0.500       1.000\n"
        "all_reduce, 1 KiB     6.00      4.00      8.00       1.000       2.000\n"
        "barrier, 0            5.00      4.00      4.00       1.250       1.000\n"
        "\n"
        "geometric mean of this / old over 3 cells: 0.855\n"
        "slower than 1.03 and than the old spread: barrier, 0"
    )


def forked_side(address: ParentAddress, program: Any, checkout: Path, side: int, mpi: bool) -> processes.Child:
    """The ranks of one checkout, forked from this process, which has imported it."""
    folder = Path(address.folder, str(side))
    (folder / started_rank.TASK).write_bytes(pickle.dumps((str(checkout), address, side, program)))

    def run_side() -> NoReturn:
        os._exit(started_rank.main(str(folder), mpi=False))

    return processes.fork(run_side)


def overlapping(context: RankContext) -> None:
    """Report the order of the sides' turns; a turn fails if another side's is not over."""
    lock = Path(context.folder).parent / "lock"

    def turn() -> list[float]:
        if context.rank == 0:
            lock.touch(exist_ok=False)
            with Path(context.folder).parent.joinpath("order").open("a") as file:
                file.write(str(context.side))
        context.exchange(None)
        if context.rank == 0:
            lock.unlink()
        return [1.0]

    take_turns(context, {"only": turn}, 4)
    order = (Path(context.folder).parent / "order").read_text()
    context.report(Result({"order": order[:12], "values": context.exchange((context.side, context.rank))}, {}))


def test_sides_have_their_turns_one_at_a_time_in_an_order_that_rotates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "start_child", forked_side)
    reports: dict[int, Any] = {}
    ranks.run_programs(overlapping, 2, reports.__setitem__, dict.fromkeys(SIDES, HERE))
    assert [reports[side].cell["order"] for side in range(3)] == ["012120201012"] * 3
    assert [reports[side].cell["values"] for side in range(3)] == [[(side, 0), (side, 1)] for side in range(3)]


@pytest.mark.parametrize(
    ("command", "cells"),
    [
        (
            ["collectives", "--ops", "all_reduce,barrier", "--sizes", "4", "--seconds", "0.001"],
            [
                {"backend": name, "op": op, "size_bytes": size, "world": 2}
                for op, size in (("all_reduce", 4), ("barrier", 0))
                for name in ("ref", "gloo")
            ],
        ),
        (["ddp", "--models", "tiny", "--hooks", "fp16", "--seconds", "0.001"], [{"model": "tiny", "hook": "fp16"}]),
        (
            ["store", "--clients", "1", "--seconds", "0.001"],
            [{"operation": operation, "clients": 1} for operation in ("set", "get", "add", "barrier")],
        ),
        (
            ["start", "--backends", "ref", "--worlds", "2"],
            [{"backend": "ref", "operation": name, "world": 2} for name in ("init", "init and destroy")],
        ),
    ],
    ids=lambda value: value[0] if isinstance(value[0], str) else "",
)
def test_this_checkout_against_itself(
    command: list[str],
    cells: list[dict[str, object]],
    tmp_path: Path,
    python_with_torch: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if command[0] == "start":
        monkeypatch.setattr(sys, "executable", python_with_torch)
    else:
        monkeypatch.setattr(ranks, "start_child", forked_side)
    out = tmp_path / "out.json"
    assert main([*command, "--repetitions", "2", "--against-checkout", str(HERE), "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["benchmark"] == f"{command[0]} against checkout" and report["schema"] == 3
    assert [{key: entry[key] for key in cell} for entry, cell in zip(report["results"], cells, strict=True)] == cells
    for entry in report["results"]:
        assert {side: len(samples) for side, samples in entry["samples"].items()} == dict.fromkeys(SIDES, 2)
        assert min(min(samples) for samples in entry["samples"].values()) > 0
        assert entry["ratio"] > 0 and entry["old_spread"] >= 1 and entry["slower"] in (False, True)
    assert report["geometric_mean"] == pytest.approx(
        prod(each["ratio"] for each in report["results"]) ** (1 / len(cells))
    )
    assert f"over {len(cells)} cells" in capsys.readouterr().out


def on_a_host(context: RankContext) -> None:
    """Report the host and the network interfaces of each rank of each side."""
    interfaces = [name for _, name in socket.if_nameindex()]
    context.report(context.exchange((context.host.ipv4, interfaces), everyone=True))


@pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing())
def test_ranks_of_each_side_are_on_the_same_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "start_child", forked_side)
    reports: dict[int, Any] = {}
    with namespaces.hosts(2) as pair:
        sides = dict.fromkeys(SIDES, HERE)
        ranks.run_programs(on_a_host, 3, reports.__setitem__, sides, hosts=pair)
    one, other = ((host.ipv4, ["lo", host.interface]) for host in pair)
    assert reports == dict.fromkeys(range(3), [one, one, other] * 3)


@pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing())
def test_checkouts_are_compared_on_hosts(
    tmp_path: Path, python_with_torch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", python_with_torch)
    out = tmp_path / "out.json"
    where = ["--namespaces", "3", "--world", "3", "--backends", "ref"]
    calls = ["--ops", "all_reduce", "--sizes", "1K", "--repetitions", "2", "--seconds", "0.001"]
    assert main([*calls, *where, "--against-checkout", str(HERE), "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["settings"]["namespaces"] == 3
    assert [entry["op"] for entry in report["results"]] == ["all_reduce"]


def test_ranks_of_the_old_checkout_import_the_old_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "torchdist_ref").mkdir()
    (tmp_path / "torchdist_ref" / "__init__.py").write_text("raise SystemExit(3)\n")
    assert main(["start", "--worlds", "2", "--against-checkout", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "the checkout 'old " in error and "failed: the process ended with exit code 3" in error


def ignore(side: int, event: Any) -> None:
    """Ignore a report."""


def failing(context: RankContext) -> None:
    """Fail on the second side."""
    if context.side == 1:
        raise ValueError("no such operation")
    context.exchange(None, everyone=True)


def test_error_of_a_checkout_names_it_and_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "start_child", forked_side)
    with pytest.raises(DistBackendError, match=r"the checkout 'old A' failed.*rank 0.*no such operation"):
        ranks.run_programs(failing, 1, ignore, dict.fromkeys(SIDES, HERE))


def test_hub_goes_on_without_a_rank_that_ends_before_it_says_its_number() -> None:
    reports: list[object] = []
    with ranks.hub(2, lambda side, event: reports.append(event)) as address:
        # As the parent of a failing rank kills the others, one may just have connected.
        Client(os.path.join(address.folder, HUB)).close()
        with Client(os.path.join(address.folder, HUB)) as rank:
            rank.send(1)
            rank.send((None, "after it"))
    assert reports == ["after it"]


def test_error_of_the_first_rank_stays_whole_if_another_is_killed_while_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_rank.leave_error(str(tmp_path), "KeyError on rank 1: 'gossip'")
    error = tmp_path / started_rank.ERROR

    def killed(file: object, text: str) -> None:
        raise SystemExit(9)

    monkeypatch.setattr("tempfile._TemporaryFileWrapper.write", killed, raising=False)
    with pytest.raises(SystemExit, match="9"):
        started_rank.leave_error(str(tmp_path), "KeyError on rank 0: 'gossip'")
    assert error.read_text() == "KeyError on rank 1: 'gossip'"


def test_error_of_the_first_rank_is_the_one_that_is_shown(tmp_path: Path) -> None:
    for rank in (1, 0):
        started_rank.leave_error(str(tmp_path), f"KeyError on rank {rank}: 'gossip'")
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"error": "KeyError on rank 1: 'gossip'"}


# mpiexec starts Pythons of its own, which import torch: seconds.
@pytest.mark.long
@pytest.mark.skipif("mpi4py" not in available(["mpi4py"])[0], reason="there is no MPI")
def test_error_of_an_mpi_rank_names_it() -> None:
    settings = Namespace(backends=["mpi4py"], device="cpu", window=4096, ops=["gossip"], sizes=[4])
    program = partial(collectives.measure, settings=settings)
    with pytest.raises(DistBackendError, match=r"the checkout 'this' failed: KeyError on rank [01]: 'gossip'"):
        ranks.run_programs(program, 2, ignore, {"this": HERE}, mpi=True)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--against-checkout", "/no/such/folder"], "--against-checkout"),
        (["--against-checkout", str(HERE), "--backends", "torch:gloo"], "--backends"),
    ],
)
def test_wrong_options_of_a_comparison_are_named(
    options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options) == 1
    assert named in capsys.readouterr().err


def imported_at_load(module: str) -> set[str]:
    """Names that a module of the benchmark, and those that it imports, take from the library when they are loaded."""
    found, folder, waiting = set[str](), Path(ranks.__file__).parent, [module]
    for name in waiting:
        for node in ast.parse((folder / f"{name}.py").read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module == "torchdist_ref.benchmark":
                waiting += [alias.name for alias in node.names if alias.name not in waiting]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchdist_ref.benchmark."):
                waiting += {str(node.module).rpartition(".")[2]} - set(waiting)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchdist_ref"):
                found.add(str(node.module))
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_ranks_of_an_old_checkout_load_what_it_has(command: str) -> None:
    assert imported_at_load(command) <= {"torchdist_ref.errors", "torchdist_ref.testing"}
