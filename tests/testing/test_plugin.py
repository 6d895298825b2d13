"""The mark ``spmd``: tests whose body runs on ranks, seen from outside by a pytest of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

TESTS = """
import os
import pytest
import torch
import torchdist_ref as dist
from torchdist_ref.testing import fill

@pytest.fixture
def shape():
    return (2, 3)

@pytest.mark.spmd(world_size=3)
def test_threads(rank, shape):
    tensor = fill(rank, shape)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, fill(0, shape) + fill(1, shape) + fill(2, shape))

@pytest.mark.spmd(2, backend="gloo", ranks="processes")
@pytest.mark.parametrize("root", [0, 1])
def test_processes(root):
    assert dist.get_backend() == "gloo" and os.getpid() != int(os.environ["OUTSIDE"])
    print("root", root, "rank", dist.get_rank())

class TestMethods:
    @pytest.mark.spmd(world_size=2, init=False)
    def test_method(self, rank):
        assert rank in (0, 1) and not dist.is_initialized()

@pytest.mark.spmd(world_size=2, ranks="processes")
def test_that_fails_on_one_rank(rank):
    assert rank == 0

@pytest.mark.spmd(world_size=2)
def test_that_skips():
    pytest.skip("no such device")

@pytest.mark.spmd(world_size=2, ranks="processes")
def test_that_is_expected_to_fail(rank):
    pytest.xfail("not yet")

def test_without_a_mark(rank):
    assert rank == 0
    os.environ["OUTSIDE"] = str(os.getpid())
"""


def test_marked_tests_run_on_ranks(python_with_torch: str, tmp_path: Path) -> None:
    (tmp_path / "test_ranks.py").write_text(TESTS)
    command = [python_with_torch, "-m", "pytest", "-p", "torchdist_ref.testing.plugin", "--strict-markers", "-rA"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OUTSIDE": "0"}
    result = subprocess.run(
        [*command, "-p", "no:cacheprovider"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert "1 failed, 5 passed, 1 skipped, 1 xfailed" in result.stdout.splitlines()[-1], result.stdout
    assert "RankError: rank 1 of 2 failed with AssertionError" in result.stdout
    assert "[rank 0] root 1 rank 0\n[rank 1] root 1 rank 1\n" in result.stdout
