"""``python -m tests.capabilities`` measures the CPU cells and writes the table; with ``--cuda`` the CUDA cells."""

from __future__ import annotations

import datetime
import json
import sys
from datetime import timedelta
from pathlib import Path

import torch

from tests.capabilities import table
from tests.capabilities.measure import measured


def main(*arguments: str) -> None:
    """Measure and write; or be one rank under mpiexec."""
    if arguments[:1] == ("--mpi-rank",):
        be_mpi_rank(arguments[1], arguments[2])
        return
    if arguments[:1] == ("--device-cells",):
        device, backend, path = arguments[1:]
        Path(path).write_text(json.dumps(table.here_on_device(device, backend)), encoding="utf-8")
        return
    old = table.kept() if table.FILE.exists() else {"cpu": {}, "cuda": {}}
    if arguments == ("--cuda",):
        cuda = {backend: table.on_cuda(backend) for backend in table.CUDA}
        name = torch.cuda.get_device_name(0)
        run = f"{datetime.date.today().isoformat()} with torch {torch.__version__} on {name}"
        table.save(table.with_cuda(cuda, run))
    else:
        cpu = {backend: table.on_cpu(backend) for backend in table.CPU}
        table.written(cpu, {backend: old["cuda"].get(backend, table.UNKNOWN) for backend in table.CUDA})


def be_mpi_rank(folder: str, device: str) -> None:
    """Measure the backend `mpi`, and leave what was found in a file."""
    from mpi4py import MPI

    import torchdist_ref as dist

    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("mpi", f"file://{folder}/meet", timedelta(seconds=20), world_size=size, rank=rank)
    (Path(folder) / str(rank)).write_text(json.dumps(measured(device)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
