"""Short versions of the proofs at length, and a bug for each checker that it must find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.soak import (
    collectives,
    deaths,
    histories,
    linearizability,
    networks,
    parser,
    proofs,
    random_deaths,
    sessions,
)
from tests.soak.__main__ import PROOFS
from tests.soak.linearizability import NEVER, UNKNOWN, Call
from tests.soak.proofs import Limits
from torchdist_ref.testing import namespaces


def test_the_parsers_agree_with_an_obvious_one_on_random_streams() -> None:
    outcome = parser.prove(Limits(4000))
    assert (outcome.done, outcome.failures) == (4000, [])


def test_mesh_sessions_admit_only_ranks_that_know_the_key() -> None:
    outcome = sessions.prove(Limits(2000))
    assert (outcome.done, outcome.failures) == (2000, [])
    assert set(outcome.counts) == set(sessions.PLANS)


def test_histories_with_killed_and_stopped_clients_are_linearizable() -> None:
    outcome = histories.prove(Limits(8))
    assert (outcome.done, outcome.failures) == (8, [])


@pytest.mark.parametrize("transport", [0, 3])
def test_random_collectives_have_the_results_of_their_formulas(transport: int) -> None:
    """Seeds choose the transport and the number of ranks."""
    outcome = collectives.prove(Limits(120, seed=transport + 1), 120)
    assert (outcome.done, outcome.failures) == (120, [])


def test_survivors_of_random_deaths_name_the_dead_rank() -> None:
    outcome = random_deaths.prove(Limits(4))
    assert (outcome.done, outcome.failures) == (4, [])


@pytest.mark.skipif(bool(namespaces.missing()), reason="needs network namespaces")
def test_sums_over_a_network_of_four_hosts_are_right() -> None:
    cell = networks.Cell("sums", 4, "ipv6", 1e9)
    outcome = networks.prove(Limits(1), [cell], {1e9: 1 << 17})
    assert (outcome.done, outcome.failures, outcome.counts[cell.name]) == (1, [], 1)


def test_the_proof_of_networks_finds_wrong_sums_and_late_or_wrong_errors() -> None:
    sums, freeze = networks.Cell("sums", 2, "ipv4", 1e9), networks.Cell("freeze", 2, "ipv4", 1e9)
    assert networks.faults(sums, [(True, 0.1, ""), (False, 0.1, "")]) == ["rank 1 had other values"]
    assert networks.faults(freeze, [(True, 1.6, "rank 1 did not arrive"), (True, 9.0, "")]) == []
    [unnamed] = networks.faults(freeze, [(True, 1.6, "rank 0 aborted"), (True, 1.7, "")])
    [late] = networks.faults(freeze, [(True, 60.0, "rank 1 did not arrive"), (True, 1.7, "")])
    assert "does not name" in unnamed and "after 60.0 s" in late


def call(name: str, result: Any, began: float, ended: float, *arguments: Any) -> Call:
    return Call("k", name, arguments, result, began, ended)


@pytest.mark.parametrize(
    ("calls", "explained"),
    [
        # A read during a write sees the old value or the new one; after it, only the new one.
        ([call("set", None, 0, 1, b"a"), call("set", None, 2, 5, b"b"), call("get", b"a", 3, 4)], True),
        ([call("set", None, 0, 1, b"a"), call("set", None, 2, 5, b"b"), call("get", b"b", 3, 4)], True),
        ([call("set", None, 0, 1, b"a"), call("set", None, 2, 5, b"b"), call("get", b"a", 6, 7)], False),
        # Two reads during a write: new, then old.
        (
            [call("set", None, 0, 1, b"a"), call("set", None, 2, 9, b"b"), call("get", b"b", 3, 4)]
            + [call("get", b"a", 5, 6)],
            False,
        ),
        # A call that never returned has an effect at any later time, or none.
        ([call("add", UNKNOWN, 0, NEVER, 5), call("add", 1, 1, 2, 1), call("add", 7, 3, 4, 1)], True),
        ([call("add", UNKNOWN, 0, NEVER, 5), call("add", 1, 1, 2, 1), call("add", 2, 3, 4, 1)], True),
        ([call("add", UNKNOWN, 0, NEVER, 5), call("add", 6, 1, 2, 1), call("add", 2, 3, 4, 1)], False),
        # A request that ran twice.
        ([call("append", None, 0, 1, b"x"), call("get", b"xx", 2, 3)], False),
        # One value of a queue for two clients.
        (
            [call("queue_push", None, 0, 1, b"v"), call("queue_pop", b"v", 2, 4), call("queue_pop", b"v", 3, 5)],
            False,
        ),
        ([call("queue_pop", b"v", 0, 4), call("queue_push", None, 1, 3, b"v"), call("queue_len", 0, 5, 6)], True),
    ],
)
def test_the_checker_explains_exactly_the_linearizable_histories(calls: list[Call], explained: bool) -> None:
    assert linearizability.explains(calls) == explained
    assert bool(linearizability.unexplained(calls)) != explained


@pytest.mark.long
def test_a_server_that_runs_a_request_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchdist_ref.stores.hash.Table.append", append_twice)
    assert "no order explains" in histories.prove(Limits(8)).failures[0]


def append_twice(table: Any, key: bytes, value: bytes) -> None:
    table.values[key] = table.values.get(key, b"") + value + value


def test_a_mesh_that_does_not_check_ranges_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchdist_ref.transports.mesh.check_ranges", lambda *_: None)
    assert "expected refused" in parser.prove(Limits(1000)).failures[0]


def test_a_failing_program_of_collectives_names_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(collectives.REDUCTIONS, "MAX", collectives.REDUCTIONS["MIN"])
    [failure] = collectives.prove(Limits(100, seed=7), 100).failures
    assert failure.startswith("seed 7, 3 ranks, shared_memory") and "op='MAX'" in failure


def test_the_record_keeps_the_last_row_of_each_proof(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    for name, done in [("b", 3), ("a", 5), ("b", 4)]:
        proofs.write_row(name, Limits(10), proofs.Outcome(done), path)
    rows = json.loads(path.read_text())
    assert [(row["proof"], row["asked"], row["done"], row["failures"]) for row in rows] == [
        ("a", 10, 5, 0),
        ("b", 10, 4, 0),
    ]


def test_the_record_on_the_site_has_a_row_for_each_proof() -> None:
    rows = json.loads(proofs.RECORD.read_text(encoding="utf-8"))
    asked = {row["proof"]: row["asked"] for row in rows}
    # How many lines there are is not known before.
    for transport in deaths.TRANSPORTS:
        asked.pop(f"lines, {transport}", None)
    assert asked == {name: proof.count for name, proof in PROOFS.items()}
