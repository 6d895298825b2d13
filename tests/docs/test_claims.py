"""Claims of hand-written pages, each compared with what it is about."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import site_directives
import torch
import torch.distributed as c10d

import torchdist_ref as dist
from tests.docs import pages
from torchdist_ref import schedules
from torchdist_ref.testing import fill, run

DOCS = pages.DOCS


def words_of(page: str) -> str:
    return " ".join((DOCS / page).read_text(encoding="utf-8").split())


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation")
@pytest.mark.parametrize("backend", ["ref", "gloo"])
@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32], ids=str)
def test_quantized_tensors_are_refused_as_the_page_on_backends_says(backend: str, dtype: torch.dtype) -> None:
    assert "They reject quantized tensors" in words_of("reference/distributed/backends.rst")

    def refused(rank: int) -> bool:
        tensor = torch.quantize_per_tensor(fill(rank, (4,)), 0.1, 0, dtype)
        try:
            dist.broadcast(tensor, src=0)
        except dist.UnsupportedError:
            return True
        return False

    assert run(refused, 2, backend=backend, ranks="processes") == [True, True]


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32], ids=str)
def test_ref_refuses_a_plain_tensor_of_a_quantized_dtype(dtype: torch.dtype) -> None:
    def refused(rank: int) -> bool:
        plain = torch.ones(4, dtype=torch.int32 if dtype is torch.qint32 else torch.uint8)
        try:
            dist.broadcast(plain.view(dtype), src=0)
        except dist.UnsupportedError:
            return True
        return False

    assert run(refused, 2) == [True, True]


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_all_gather_takes_different_shapes_on_every_backend(backend: str) -> None:
    def gather(rank: int) -> list[Any]:
        outputs = [torch.zeros(other + 1) for other in range(2)]
        dist.all_gather(outputs, fill(rank, (rank + 1,)))
        return [output.tolist() for output in outputs]

    expected = [fill(rank, (rank + 1,)).tolist() for rank in range(2)]
    assert run(gather, 2, backend=backend, ranks="processes") == [expected, expected]


def test_a_second_append_appends_in_torchs_file_store(tmp_path: Path) -> None:
    store = c10d.FileStore(str(tmp_path / "store"), 1)
    store.set("key", "a")
    store.append("key", "b")
    store.append("key", "c")
    assert store.get("key") == b"abc"
    assert "FileStore.append" not in words_of("explanation/stores_and_rendezvous.md")


def test_calls_that_need_no_group_are_those_that_the_page_names() -> None:
    assert "Before it, only functions that need no group can be called" in words_of("reference/distributed.rst")
    assert dist.is_available() and dist.get_debug_level() is not None and not dist.is_initialized()
    dist.HashStore().set("key", "value")
    for call in (dist.get_rank, dist.get_world_size, dist.barrier, dist.new_group, dist.get_backend):
        with pytest.raises(dist.NotInitializedError):
            call()


ROUNDS = {"lg(n)": 3, "2 lg(n)": 6, "(n-1)": 7, "2(n-1)": 14, "n-1": 7}


@pytest.mark.parametrize(
    ("operation", "algorithm"),
    [(operation, algorithm) for operation in schedules.operations() for algorithm in schedules.algorithms(operation)],
)
def test_rounds_in_the_table_of_algorithms_agree_with_the_closed_form_beside_them(
    operation: str, algorithm: str
) -> None:
    rounds, sent = site_directives.counted(operation, algorithm)
    cost = schedules.entry(operation, algorithm).cost
    latency = re.match(r"((?:2 )?lg\(n\)) ?(?:a|\(a)|((?:2)?\((?:n-1|n\+6)\))", cost)
    if algorithm == "hierarchical":
        within = re.search(r"\+ (\d) rounds? within", cost)
        inner = re.match(r"(\w+) on hosts", cost)
        assert within and inner
        between = {"halving_doubling": 2, "dissemination": 1}.get(inner[1], 1)
        assert rounds == between + int(within[1])
    elif latency and algorithm not in ("direct", "two_shot"):
        formula = (latency[1] or latency[2]).replace("lg(n)", "*3").replace("(n-1)", "*7").replace("(n+6)", "*14")
        expected = math.prod(int(factor) for factor in formula.replace(" ", "").split("*") if factor)
        assert rounds == expected or (operation, algorithm) in OVERLAPPED, (
            f"{operation} {algorithm}: {cost!r} starts with {expected} times a for 8 ranks, and the schedule has "
            f"{rounds} rounds. Correct the cost in catalogue_rows.py, or add the row to OVERLAPPED if phases overlap"
        )
    assert rounds and sent


# Closed forms of several phases, whose first term is one phase's.
OVERLAPPED = {("reduce", "ring"), ("broadcast", "scatter_all_gather")}


def test_ref_is_faster_than_gloo_and_slower_than_mpi_for_small_tensors_in_the_recorded_runs() -> None:
    assert "faster than `gloo`, and slower than an MPI library for small tensors" in words_of(
        "how-to/choose_a_backend.md"
    )
    recorded = json.loads((DOCS / "explanation" / "speed.json").read_text(encoding="utf-8"))["cells"]
    cells = [cell for cell in recorded if not cell["namespaces"]]
    assert cells and all(cell["gloo"] > 1 for cell in cells if cell.get("gloo"))
    assert all(min(cell["mpich"], cell["openmpi"]) < 1 for cell in cells if cell["bytes"] == 4)


def test_bfloat16_has_two_to_three_digits() -> None:
    assert "two to three decimal digits" in words_of("how-to/write_a_hook.md")
    digits = 8 * math.log10(2)  # the bits of its significand
    assert torch.finfo(torch.bfloat16).eps == 2**-7 and 2 < digits < 3


def test_the_first_example_pages_say_how_many_ranks_they_run() -> None:
    page = words_of("reference/distributed.rst")
    assert "Most examples run two ranks" in page
    calls = re.findall(r">>> run\(\w+, (\d+)", (DOCS / "reference" / "distributed.rst").read_text(encoding="utf-8"))
    assert calls.count("2") > len(calls) / 2


def test_torch_reads_the_variables_that_the_page_names() -> None:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    binary = library.read_bytes()
    for name in (b"TORCH_GLOO_LAZY_INIT", b"TORCH_SHOW_CPP_STACKTRACES", b"TORCH_CPP_LOG_LEVEL", b"GLOO_SOCKET_IFNAME"):
        found = binary + (library.parent / "libc10.so").read_bytes() if name not in binary else binary
        assert name in found
