"""What the page says of each backend is what the backend does today."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.capabilities import table


# Two ranks call every function three times.
@pytest.mark.parametrize("backend", table.CPU)
def test_cells_are_as_the_page_says(backend: str, python_with_torch: str) -> None:
    said, found = table.kept()["cpu"][backend], table.on_cpu(backend, python_with_torch)
    changed = {
        f"{name}, {aspect}": f"the page says {said.get(name, {}).get(aspect)!r}, measured {cell!r}"
        for name, cells in found.items()
        for aspect, cell in cells.items()
        if said.get(name, {}).get(aspect) != cell
    }
    assert not changed, "python -m tests.capabilities writes the table anew"
    assert said.keys() == found.keys()


def test_every_backend_has_cells_for_both_kinds_of_device() -> None:
    kept = table.kept()
    assert tuple(kept["cpu"]) == table.CPU and tuple(kept["cuda"]) == table.CUDA


@pytest.mark.gpu
@pytest.mark.parametrize("backend", table.CUDA)
def test_cuda_cells_are_as_the_page_says(backend: str) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    found, said = table.on_cuda(backend), table.kept()["cuda"][backend]
    if isinstance(found, str):
        pytest.skip(found)
    # Unmeasured cells hold a sentence.
    assert isinstance(said, str) or said == found


def test_new_cuda_cells_leave_the_others() -> None:
    old = table.kept()
    new = table.with_cuda({"ref": {"barrier": {"plain": "yes"}}}, "some day")
    assert new["cpu"] == old["cpu"] and new["date"] == old["date"] and new["cuda_run"] == "some day"
    assert new["cuda"] == old["cuda"] | {"ref": {"barrier": {"plain": "yes"}}}


def test_reasons_why_a_backend_is_not_measured_on_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(table, "MPIEXEC", tmp_path / "absent")
    assert table.missing_on_device("ref", 1) == "" and table.missing_on_device("nccl", 2) == ""
    assert table.missing_on_device("nccl", 1) == "not measured: two ranks of nccl need two GPUs, and there was 1"
    assert table.missing_on_device("mpi", 1) == "not measured: no mpiexec was installed"
    assert table.missing_on_device("ref", 0, "sim") == ""
    assert table.missing_on_device("nccl", 4, "sim") == "nccl takes no tensors of simulated devices"
