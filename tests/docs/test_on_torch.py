"""What the boxes "On torch" of the repaired pages say holds for the pinned torch."""

import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as c10d

import torchdist_ref as dist
from tests.docs import pages
from tests.torchs_world import start_torch
from torchdist_ref.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torchdist_ref.testing import fill, run


class TwoLayers(torch.nn.Module):
    """Two outputs, of which the test uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 1, bias=False), torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x), self.b(x)


def unused_parameters(level: c10d.DebugLevel) -> tuple[bool, bool]:
    """Return whether torch's error names the unused parameter, and whether it shows its index."""
    c10d.set_debug_level(level)
    model = torch.nn.parallel.DistributedDataParallel(TwoLayers())
    try:
        for _ in range(2):
            model(torch.ones(2, 4))[1].sum().backward()
    except RuntimeError as error:
        return "a.weight" in str(error), "indices which did not receive grad" in str(error)
    finally:
        c10d.set_debug_level(c10d.DebugLevel.OFF)
    return False, False


def facts(rank: int, path: str) -> dict[str, Any]:
    """Ask torch's own Gloo."""
    start_torch(init_method=f"file://{path}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    found: dict[str, Any] = {}
    message = fill(rank, (1,))
    work = c10d.isend(message, 1) if rank == 0 else c10d.irecv(message, 0)
    try:
        work.get_future()
    except RuntimeError as error:
        found["future of a message"] = str(error)
    work.wait()
    work = c10d.all_reduce(fill(rank, (3,)), async_op=True)
    found["future of a collective"] = work.get_future().wait()[0].tolist()
    found["off"] = unused_parameters(c10d.DebugLevel.OFF)
    found["info"] = unused_parameters(c10d.DebugLevel.INFO)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        c10d.all_reduce(torch.ones(1))
    found["profiled"] = [event.key for event in profile.key_averages() if event.key.startswith("gloo:")]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    try:
        model.register_comm_hook(None, bf16_compress_hook)
    except TypeError as error:
        found["bf16"] = "NCCL 2.10" in str(error)
    if rank == 0:
        try:
            c10d.monitored_barrier(timeout=timedelta(seconds=0.2))
        except RuntimeError as error:
            found["barrier"] = str(error).splitlines()[0]
        try:
            c10d.all_reduce(torch.ones(1))
        except RuntimeError:
            found["after"] = "unusable"
    return found


def test_what_the_boxes_say_of_torch_holds(tmp_path: Path) -> None:
    first, second = run(facts, 2, str(tmp_path / "store"), ranks="processes", init=False)
    for found in (first, second):
        assert "not implemented" in found["future of a message"]
        assert found["future of a collective"] == (fill(0, (3,)) + fill(1, (3,))).tolist()
        assert found["off"] == (False, True) and found["info"] == (True, True)
        assert found["profiled"] == ["gloo:all_reduce"]
        # A torch that was built for CUDA has NCCL, also where there is no device.
        assert torch.version.cuda or found["bf16"]
    assert first["barrier"].startswith("[Rank 0]: Rank 1 failed to pass monitoredBarrier in 200 ms")
    assert first["after"] == "unusable" and "barrier" not in second


@pytest.fixture
def taken_port() -> Iterator[int]:
    """Listen on a port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


def test_messages_of_torch_that_the_page_on_hangs_explains_are_torchs(taken_port: int) -> None:
    page = (pages.DOCS / "how-to" / "my_job_hangs.md").read_text(encoding="utf-8")
    library = (Path(torch.__file__).parent / "lib" / "libtorch_cpu.so").read_bytes()
    for message in (
        "Connection closed by peer",
        "Expected to have finished reduction in the prior iteration",
        "Expected to mark a variable ready only once",
        "wait timeout after",
    ):
        assert f"`{message}" in page and message.encode() in library
    for call, message in (
        (lambda: c10d.distributed_c10d._get_default_group(), "Default process group has not been initialized"),
        (lambda: c10d.TCPStore("127.0.0.1", taken_port, is_master=True), "address already in use"),
    ):
        assert message in page or message.capitalize() in page
        with pytest.raises(Exception, match=message):
            call()


def test_messages_of_ours_that_the_page_on_hangs_explains_are_ours(tmp_path: Path, taken_port: int) -> None:
    page = (pages.DOCS / "how-to" / "my_job_hangs.md").read_text(encoding="utf-8")
    short = timedelta(seconds=0.05)
    for message, call in {
        "Default process group has not been initialized": dist.barrier,
        "Address already in use": lambda: dist.TCPStore("127.0.0.1", taken_port, is_master=True),
        "ECONNREFUSED": lambda: dist.TCPStore("127.0.0.1", 1, is_master=False, timeout=short),
        "wait timeout after": lambda: dist.FileStore(str(tmp_path / "store"), 1).wait(["key"], short),
    }.items():
        assert f"`{message}" in page
        with pytest.raises(Exception, match=message):
            call()


def test_what_the_page_says_of_ours_beside_them(tmp_path: Path) -> None:
    def ours(rank: int) -> tuple[list[float], list[str]]:
        message = fill(rank, (1,))
        work = dist.isend(message, 1) if rank == 0 else dist.irecv(message, 0)
        work.get_future().wait()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            dist.all_reduce(torch.ones(1))
        return message.tolist(), [event.key for event in profile.key_averages() if event.key.startswith("ref:")]

    assert run(ours, 2, ranks="processes") == [(fill(0, (1,)).tolist(), ["ref:all_reduce"])] * 2


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_torchs_breakpoint_stops_one_rank_of_ours(ranks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[int] = []

    class Debugger:
        def message(self, text: str) -> None:
            assert "rank=1" in text

        def set_trace(self) -> None:
            stopped.append(c10d.get_rank())

    monkeypatch.setattr(c10d, "_make_distributed_pdb", Debugger)

    def program(rank: int) -> list[int]:
        c10d.breakpoint(1, timeout_s=None)
        dist.barrier()
        return list(stopped)

    assert run(program, 2, ranks=ranks)[1] == [1]
