"""What the page says of each backend is what the backend does today."""

from __future__ import annotations

import pytest

from tests.capabilities import table


# Over a second: two ranks call every function three times; for `mpi` each is a new interpreter.
@pytest.mark.parametrize("backend", table.CPU)
def test_cells_are_as_the_page_says(backend: str) -> None:
    said, found = table.kept()["cpu"][backend], table.on_cpu(backend)
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
    assert table.kept()["cuda"][backend] in (table.UNKNOWN, table.on_cuda(backend))
