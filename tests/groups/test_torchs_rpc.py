"""torch's RPC beside our default group: before and after `init_process_group`, with the store of either at one address.

RPC and the default group need processes. Each test starts three or two, of which the longest takes two seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import rpc

from tests.ports import reserve_port
from torchdist_ref.testing import fill

pytestmark = pytest.mark.skipif(not rpc.is_available(), reason="this torch has no remote calls")

# What a program calls, by letter: the group and RPC are initialized in the order that a test gives.
PROGRAM = textwrap.dedent(
    """
    import os, sys, torch
    from torch.distributed import rpc
    import torchdist_ref as dist
    from torchdist_ref.testing import fill

    calls, backend, members, workers = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    rank, seen = int(os.environ["RANK"]), []
    for call in calls:
        if call == "g" and rank < members:
            dist.init_process_group(backend, rank=rank, world_size=members)
        elif call == "r" and rank < workers:
            rpc.init_rpc(f"worker{rank}", rank=rank, world_size=workers)
        elif call == "a" and rank < members:
            tensor = fill(rank, (3,))
            dist.all_reduce(tensor)
            seen.append(tensor.tolist())
        elif call == "c" and rank < workers:
            name = f"worker{(rank + 1) % workers}"
            seen.append(rpc.rpc_sync(name, torch.mul, args=(fill(rank, (3,)), 3)).tolist())
        elif call == "d" and rank < members:
            dist.destroy_process_group()
        elif call == "s" and rank < workers:
            rpc.shutdown()
    print("seen", rank, seen)
    """
)


def expected(calls: str, rank: int, members: int, workers: int) -> list[Any]:
    """Return what a rank sees."""
    total = sum((fill(member, (3,)) for member in range(1, members)), fill(0, (3,)))
    results = {"a": total.tolist() if rank < members else None, "c": (fill(rank, (3,)) * 3).tolist()}
    results["c"] = results["c"] if rank < workers else None
    return [results[call] for call in calls if results.get(call) is not None]


# The store's server is ours, then torch's; a program that destroys the group, uses RPC, and makes a group again.
ORDERS = [("grcadcgas", 2, 3), ("rgcadcgads", 2, 3), ("grcasd", 3, 2)]


@pytest.mark.parametrize(("calls", "members", "workers"), ORDERS)
def test_rpc_and_the_group_share_an_address(python_with_torch: str, calls: str, members: int, workers: int) -> None:
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserve_port())}
    arguments = [python_with_torch, "-c", PROGRAM, calls, "ref", str(members), str(workers)]
    size = max(members, workers)
    environments = [{**environment, "RANK": str(rank), "WORLD_SIZE": str(size)} for rank in range(size)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(arguments, env=each, **pipes) for each in environments]
    try:
        ended = [process.communicate(timeout=60) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    for rank, (out, err) in enumerate(ended):
        assert f"seen {rank} {expected(calls, rank, members, workers)}\n" in out, err


@pytest.mark.parametrize(("calls", "backend"), [("grcasd", "gloo"), ("rgcasd", "ref")])
def test_rpc_works_under_a_launcher(python_with_torch: str, tmp_path: Path, calls: str, backend: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [python_with_torch, "-m", "torchdist_ref.launch", "--nproc-per-node", "2", str(program)]
    ended = subprocess.run([*command, calls, backend, "2", "2"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        assert f"seen {rank} {expected(calls, rank, 2, 2)}\n" in ended.stdout


def test_a_port_that_another_process_holds_is_still_an_error(python_with_torch: str) -> None:
    program = """
        import socket
        import torch.distributed
        import torchdist_ref as dist
        with socket.create_server(("127.0.0.1", 0)) as other:
            try:
                dist.init_process_group("ref", f"tcp://127.0.0.1:{other.getsockname()[1]}", rank=0, world_size=1)
            except dist.DistNetworkError as error:
                print(error)
    """
    command = [python_with_torch, "-c", textwrap.dedent(program)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=os.environ)
    assert "Address already in use" in shown.stdout and sys.executable not in shown.stdout
