"""Numbers of a network: checks, presets with their sources, files, and their part in the clock of schedules."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from torchdist_ref.errors import ArgumentError
from torchdist_ref.schedules import Network, build, simulate
from torchdist_ref.schedules.network import LINKS
from torchdist_ref.schedules.schedule import Move, Schedule

DATA = ("data", 0)


@pytest.mark.parametrize(
    "name", ["alpha", "beta", "gamma", "local_alpha", "local_beta", "copy", "overhead", "cache", "memory"]
)
@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf, True, "1"])
def test_a_wrong_number_is_named(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"Network: argument '{name}' must be (seconds|bytes), 0 or more"):
        Network(**{name: value})


@pytest.mark.parametrize("hosts", [5, "ab", (0, "a"), (0, 0.5), {0, 1}])
def test_hosts_are_numbers(hosts: Any) -> None:
    with pytest.raises(
        ArgumentError, match="Network: argument 'hosts' must be the number of the host of each rank, or"
    ):
        Network(hosts=hosts)


def test_an_unknown_link_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"argument 'within' must be 'shared_memory' or .*, got 'smoke signals'"):
        Network.preset("smoke signals", "25gbps")
    with pytest.raises(ArgumentError, match=r"argument 'between' must be 'shared_memory' or .*, got '25g'"):
        Network.preset("pcie", "25g")


@pytest.mark.parametrize("name", LINKS)
def test_each_link_has_a_source_and_gives_a_network(name: str) -> None:
    link = LINKS[name]
    assert len(link.source) > 30
    network = Network.preset(name, name, hosts=(0, 0, 1))
    assert (network.alpha, network.local_alpha, network.beta) == (link.alpha, link.alpha, link.beta)
    assert network.hosts == (0, 0, 1)


def test_only_ranks_on_processors_do_one_thing_at_a_time() -> None:
    assert Network.preset("shared_memory", "tcp").overlap is False and Network.preset("pcie", "tcp").overlap is True


def test_a_network_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "fit.json"
    path.write_text(json.dumps({"network": {"alpha": 1.0, "overlap": False}}))
    assert Network.from_file(path, hosts=(0, 1)) == Network(alpha=1.0, overlap=False, hosts=(0, 1))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"network": {"speed": 1}}', '{"network": 3}', '{"network": [3]}'])
def test_a_file_without_numbers_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "fit.json"
    path.write_text(text)
    for wrong in (path, tmp_path / "none.json"):
        with pytest.raises(
            ArgumentError, match=r"Network.from_file: argument 'path' must be a file that benchmark fit"
        ):
            Network.from_file(wrong)


def test_calls_copies_and_memory_are_part_of_the_clock() -> None:
    network = Network(alpha=1.0, beta=0.5, gamma=0.25, copy=2.0, overhead=10.0, cache=4, memory=3.0)
    assert simulate(build("all_reduce", "direct", 2), 4, network).total == 10 + 1 + 4 * 0.5 + 4 * 0.25
    local = Schedule("local", 1, ((Move(0, 0, DATA, ("tmp", 0)),),))
    assert simulate(local, 4, network).total == 10 + 4 * 2.0
    assert simulate(local, 8, network).total == 10 + 8 * 3 * 3.0
    near = Network(hosts=(0, 0), local_alpha=1.0, local_beta=0.5, cache=4, memory=3.0)
    assert simulate(build("broadcast", "direct", 2), 6, near).total == 1 + 6 * (0.5 + (2 * 3.0 - 0.5) / 2)


def test_one_processor_does_one_thing_at_a_time() -> None:
    both, one = (Network(alpha=1.0, beta=0.5, gamma=0.25, overlap=overlap) for overlap in (True, False))
    exchange = build("all_reduce", "direct", 2)
    assert simulate(exchange, 4, both).total == 1 + 2 + 1
    # Rank 1 sends; then rank 0 reduces, and sends.
    assert simulate(exchange, 4, one).total == (2 + 1) + 1 + (2 + 1) + 1


def test_a_rank_that_is_free_while_it_waits_completes_a_round_only_when_its_bytes_are_there() -> None:
    one = Network(alpha=8.0, beta=0.5, overlap=False)
    assert simulate(build("broadcast", "direct", 2), 4, one).total == 8 + 4 * 0.5
    # Each rank of the chain passes on in the next round what arrived in the one before.
    assert simulate(build("broadcast", "tree", 4), 4, one).total == 2 * (8 + 4 * 0.5)
