"""16,384 ranks: each algorithm of the catalogue is simulated in seconds, and within little memory.

Two are not, and the tests leave them out: in a direct all_reduce and in scatter_all_gather everybody hears from
everybody, no two ranks at the same times, which makes 268 million messages to clock. (Ten seconds are enough for
about 700 and 900 ranks.)
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.schedules.formulas import A, B, G, M, formula, network_of
from torchdist_ref.schedules import Network, algorithms, build, entry, operations, simulate
from torchdist_ref.schedules.catalogue import make

HUGE = 16_384
HOSTS = tuple(rank // 8 for rank in range(HUGE))
UNLIKE = [("broadcast", "scatter_all_gather")]
CLOCKED = [(op, name) for op in operations() for name in algorithms(op) if (op, name) not in UNLIKE]

FOLDING = [(op, name) for op, name in CLOCKED if "halving" in name or "doubling" in name or name == "blocks"]


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("all_reduce", "halving_doubling"),
        ("all_reduce", "blocks"),
        ("all_reduce", "ring"),
        ("all_reduce", "recursive_doubling"),
        ("broadcast", "tree"),
        ("reduce", "tree"),
        ("all_to_all", "bruck"),
        ("barrier", "dissemination"),
    ],
)
def test_16384_ranks_take_the_time_of_the_formula(op: str, name: str) -> None:
    found = simulate(build(op, name, HUGE), M, Network(A, B, G)).total
    assert found == pytest.approx(formula(entry(op, name).cost, HUGE), rel=1e-6)


def test_16384_ranks_on_2048_hosts() -> None:
    network = Network(A, B, G, HOSTS, local_alpha=A / 10, local_beta=B / 10)
    read, reduced = (A + M * B) / 10, M * G
    assert read < reduced, "so that a leader reads the next tensor while it reduces one"
    found = simulate(build("all_reduce", "hierarchical", HUGE, hosts=HOSTS), M, network).total
    assert found == pytest.approx(read + 7 * reduced + 11 * (A + M * B + M * G) + read, rel=1e-9)


@pytest.mark.long
@pytest.mark.parametrize(("op", "name"), CLOCKED)
def test_the_whole_catalogue_on_one_network(op: str, name: str) -> None:
    """On the network that the catalogue's formula is for, and up to three seconds each on a quiet machine."""
    schedule = make(entry(op, name), HUGE, 0, tuple(range(HUGE)))
    found = simulate(schedule, M, network_of(name, HUGE)).total
    if name == "hierarchical":
        assert 0 < found < float("inf"), "its formula depends on the hosts"
    else:
        assert found == pytest.approx(formula(entry(op, name).cost, HUGE), rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(("op", "name"), FOLDING)
def test_one_rank_less_than_a_power_of_two(op: str, name: str) -> None:
    """Ranks fold, so that all ranks are simulated, by messages, not by chunks: some 10 seconds on a busy machine."""
    fewer, even = (simulate(build(op, name, world), M, Network(A, B, G)).total for world in (HUGE - 1, HUGE // 2))
    assert fewer > even, "folding comes on top of what half as many ranks do"


IN_TWO_GIB = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
from torchdist_ref.schedules import Network, build, simulate
op, name = sys.argv[1:]
hosts = tuple(rank // 8 for rank in range(16_384))
print(simulate(build(op, name, 16_384, hosts=hosts), 1 << 20, Network(hosts=hosts)).total)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere RLIMIT_AS is not kept")
@pytest.mark.parametrize(("op", "name"), CLOCKED)
def test_the_whole_catalogue_on_2048_hosts_within_two_gib(op: str, name: str) -> None:
    """Up to three seconds each on a quiet machine: the limit is for a busy one."""
    done = subprocess.run([sys.executable, "-c", IN_TWO_GIB, op, name], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0


@pytest.mark.long
def test_16384_ranks_one_by_one() -> None:
    """Every rank's own clock, without representatives: about 700,000 events."""
    trace = simulate(build("all_reduce", "recursive_doubling", HUGE), M, Network(A, B, G), representative=False)
    assert len(trace) == 3 * 14 * HUGE and trace.total == pytest.approx(14 * (A + M * B + M * G))
