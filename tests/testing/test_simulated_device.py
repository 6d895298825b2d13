"""The simulated device: tensors, streams, events, memory and random numbers as torch's own accelerators have them."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.on_sim import forked, missing, on_sim
from torchdist_ref.testing import fill, run, simulated_device
from torchdist_ref.testing.simulated_device import building, torch_sim

sim: Any = torch_sim


@on_sim
def test_torch_finds_the_devices() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.device_count() == torch.sim.device_count() == 4  # type: ignore[attr-defined]
    assert [torch.ones(2, device=f"sim:{index}").device.index for index in range(4)] == [0, 1, 2, 3]
    with sim.device(2):
        assert torch.ones(2, device="sim").device.index == sim.current_device() == 2
    assert sim.current_device() == 0 and sim.is_available() and not sim.is_current_stream_capturing()


@on_sim
def test_values_of_a_chain_of_operations_are_those_of_the_cpu() -> None:
    def chain(tensor: torch.Tensor) -> torch.Tensor:
        return (((tensor + 2).view(4, 2).t()[1] * tensor[:4]) / 3 - tensor[1]).to(torch.float64).cumsum(0)

    host = fill(1, (8,))
    assert torch.equal(chain(host.to("sim:2")).cpu(), chain(host))


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64]
)
@on_sim
def test_arithmetic_promotes_broadcasts_and_casts_as_on_the_cpu(dtype: torch.dtype) -> None:
    a, b = fill(1, (3, 1), dtype=dtype), fill(2, (4,), dtype=torch.float32)
    for operation in (torch.add, torch.sub, torch.mul, torch.div):
        expected, found = operation(a, b), operation(a.to("sim"), b.to("sim"))
        assert found.dtype == expected.dtype and torch.equal(found.cpu(), expected)
        assert torch.equal(operation(a.to("sim"), 2).cpu(), operation(a, 2))
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.ones(2, dtype=torch.int64, device="sim").div_(2)


@on_sim
def test_views_and_storage_are_shared() -> None:
    base = torch.zeros(4, 4, dtype=torch.complex64, device="sim")
    torch.view_as_real(base)[1, :, 0].fill_(2)
    base.t()[1].add_(1j)
    assert base.conj().cpu()[1].tolist() == [2, 2 - 1j, 2, 2]
    tensor = torch.ones(4, device="sim")
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(32)
    assert tensor.fill_(2).tolist() == [2.0] * 4
    grown = torch.ones(2, device="sim").resize_(100)
    assert grown[:2].tolist() == [1.0, 1.0] and torch.isnan(grown[2:]).all()
    file = io.BytesIO()
    torch.save({"a": copy.deepcopy(tensor).to("sim:3")}, file)
    file.seek(0)
    assert torch.load(file)["a"].device == torch.device("sim:3")


@on_sim
def test_gradients_are_those_of_the_cpu() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    host = fill(1, (5, 4))
    net(host).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
    net.zero_grad()
    net.to("sim:1")
    net(host.to("sim:1")).square().sum().backward()
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        assert parameter.grad is not None and parameter.grad.device == torch.device("sim:1")
        torch.testing.assert_close(parameter.grad.cpu(), gradient)


@on_sim
def test_convolutions_and_their_gradients_are_those_of_the_cpu() -> None:
    host = fill(1, (2, 4, 5, 5))
    for layer in (
        torch.nn.Conv2d(4, 6, 3, padding=1, groups=2),
        torch.nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, bias=False),
    ):
        found: list[torch.Tensor] = []
        for device in ("cpu", "sim:1"):
            moved, x = copy.deepcopy(layer).to(device), host.clone().to(device).requires_grad_()
            (result := moved(x)).square().sum().backward()
            gradients = [x.grad, *(parameter.grad for parameter in moved.parameters())]
            found.append(
                torch.cat([each.cpu().flatten() for each in [result.detach(), *gradients] if each is not None])
            )
        torch.testing.assert_close(*found)


@on_sim
def test_batch_normalization_updates_its_running_statistics() -> None:
    """torch's operator does not say that it writes them, so they stayed as they were."""
    layers = [torch.nn.BatchNorm2d(3), torch.nn.BatchNorm2d(3).to("sim"), torch.nn.BatchNorm2d(3).to("sim")]
    layers[2].track_running_stats, layers[2].running_mean, layers[2].running_var = False, None, None
    host = fill(1, (4, 3, 2, 2))
    expected, found, untracked = (layer(host.to(next(layer.parameters()).device)) for layer in layers)
    assert torch.equal(found.cpu(), expected) and torch.equal(untracked.cpu(), expected)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(getattr(layers[1], name).cpu(), getattr(layers[0], name)), name
    assert torch.equal(layers[1].eval()(host.to("sim")).cpu(), layers[0].eval()(host))


@on_sim
def test_a_side_stream_sees_old_memory_without_an_event_and_new_with_it() -> None:
    source, side = torch.ones(4, device="sim"), sim.Stream()
    with sim.stream(side):
        early = source * 2
    side.synchronize()
    assert torch.isnan(early).all()
    source.fill_(3)
    side.wait_stream(sim.current_stream())
    with side:
        assert sim.current_stream() == side != sim.default_stream()
        late = source * 2
    side.synchronize()
    assert late.cpu().tolist() == [6.0] * 4


@on_sim
def test_unordered_streams_run_in_the_reverse_of_the_programs_order() -> None:
    first, second = sim.Stream(), sim.Stream()
    tensor = torch.zeros(4, device="sim")
    sim.synchronize()
    with first:
        tensor.fill_(1)
    with second:
        tensor.fill_(2)
    sim.synchronize()
    assert tensor.tolist() == [1.0] * 4
    with simulated_device.delay("none"):
        with first:
            tensor.fill_(1)
        with second:
            tensor.fill_(2)
        assert sim.ops().pending(0) == 0
    assert tensor.tolist() == [2.0] * 4


@on_sim
def test_a_seed_draws_both_results_of_a_race_and_repeats_itself() -> None:
    def race(seed: int) -> float:
        with simulated_device.delay(seed):
            tensor, side = torch.ones(4, device="sim"), sim.Stream()
            with side:
                host = tensor.to("cpu", non_blocking=True)
            side.synchronize()
            sim.synchronize()
            return host.nan_to_num(0).mean().item()

    found = [race(seed) for seed in range(20)]
    assert set(found) == {0.0, 1.0} and found == [race(seed) for seed in range(20)]


@on_sim
def test_polling_an_event_or_a_stream_ends_after_as_many_queries_as_operations() -> None:
    tensor, side = torch.zeros(4, device="sim"), sim.Stream()
    for _ in range(10):
        tensor.add_(1)
    side.wait_stream(sim.current_stream())
    with side:
        tensor.add_(1)
    event, queries = side.record_event(), 0
    while not event.query():
        queries += 1
    # allocate, fill, 10 additions, event; wait, addition, event.
    assert queries == 16 and side.query() and tensor.tolist() == [11.0] * 4


@on_sim
def test_a_stream_holds_1024_operations_at_most() -> None:
    tensor = torch.zeros(4, device="sim")
    for _ in range(2000):
        tensor.add_(1)
    assert sim.ops().pending(0) == 1024
    assert tensor.tolist() == [2000.0] * 4


@on_sim
def test_events_time_virtual_microseconds_and_the_timeline_shows_overlap() -> None:
    size = 10_000
    with simulated_device.timeline() as spans:
        begin, end = sim.Event(enable_timing=True), sim.Event(enable_timing=True)
        tensor, side = torch.zeros(size, device="sim"), sim.Stream()
        side.wait_event(sim.current_stream().record_event())
        begin.record()
        tensor.add_(1)
        end.record()
        with side:
            host = tensor.to("cpu", non_blocking=True)
        end.synchronize()
        sim.synchronize()
    assert isinstance(end, sim.Event) and host.is_pinned()
    assert begin.elapsed_time(end) * 1000 == pytest.approx(5 + 4 * size / 10_000, abs=2)
    add, copied = (next(span for span in spans if span.name == name) for name in ("add", "copy to host"))
    assert (add.stream, copied.stream) == (0, side.stream_id)
    assert add.begin < copied.end and copied.begin < add.end
    assert [span.begin for span in spans] == sorted(span.begin for span in spans)


@on_sim
def test_a_timeline_begins_at_0_on_each_thread_whatever_ran_before() -> None:
    """The clock of a new thread was behind the streams, so operations of one moment were far apart."""
    torch.zeros(100_000, device="sim").add_(1).tolist()

    def program(rank: int) -> None:
        side = torch.Stream("sim:0")
        with side:
            torch.zeros(4, device="sim:0")
        torch.zeros(4, device="sim:0")
        sim.synchronize()

    for _ in range(2):
        with simulated_device.timeline() as spans:
            run(program, 1)
        begins = [span.begin for span in spans if span.name == "fill"]
        assert len(begins) == 2 and 0 < min(begins) <= max(begins) < 20, begins


@on_sim
def test_asynchronous_copies_need_pinned_memory_and_others_are_safe() -> None:
    host = torch.arange(4.0)
    device = torch.empty(4, device="sim").copy_(host, non_blocking=True)
    host.fill_(9)
    assert device.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert torch.zeros(4).copy_(device, non_blocking=True).tolist() == [0.0, 1.0, 2.0, 3.0]
    pinned = torch.ones(4).pin_memory()
    assert pinned.is_pinned() and not host.is_pinned()
    device.copy_(pinned, non_blocking=True)
    del pinned
    assert torch.zeros(4).pin_memory() is not None and device.tolist() == [1.0] * 4
    assert device.to("sim:3").add_(1).to("sim:1").tolist() == [2.0] * 4


@on_sim
def test_freed_memory_is_reused_at_once_on_its_stream_only() -> None:
    def address() -> int:
        return torch.empty(64, device="sim").data_ptr()

    side = sim.Stream()
    first = address()
    assert address() == first
    with side:
        assert address() != first
    tensor = torch.empty(64, device="sim")
    assert tensor.data_ptr() == first
    with side:
        tensor.fill_(1)
    tensor.record_stream(side)
    del tensor
    assert address() != first
    side.synchronize()
    assert address() == first


@on_sim
def test_memory_is_counted_and_its_end_is_an_error() -> None:
    before = sim.memory_allocated(1)
    tensor = torch.empty(1000, device="sim:1")
    assert sim.memory_allocated(1) - before == 4096 and sim.max_memory_allocated(1) >= 4096
    del tensor
    assert sim.memory_allocated(1) == before and sim.memory_reserved(1) >= 4096
    sim.reset_peak_memory_stats(1)
    assert sim.max_memory_allocated(1) == before
    assert torch.accelerator.memory_stats(1) == sim.memory_stats(1)
    free, total = sim.mem_get_info(1)
    assert free == total - sim.memory_reserved(1)
    sim.empty_cache()
    with pytest.raises(torch.OutOfMemoryError, match=r"sim:1 is out of memory: .* \(memory= of"):
        torch.empty(total, device="sim:1")


@on_sim
def test_random_numbers_are_drawn_from_the_devices_generator() -> None:
    torch.manual_seed(3)
    first = torch.randn(5, device="sim:1")
    sim.manual_seed_all(3)
    assert torch.equal(torch.randn(5, device="sim:1"), first)
    assert torch.equal(torch.randn(5, device="sim:2").cpu(), first.cpu())
    generator = torch.Generator("sim:1").manual_seed(3)
    assert torch.equal(torch.randn(5, device="sim:1", generator=generator), first)
    state = sim.get_rng_state(1)
    drawn = torch.rand(5, device="sim:1")
    sim.set_rng_state(state, 1)
    assert torch.equal(torch.rand(5, device="sim:1"), drawn)
    assert sim.initial_seed() == 3 and sorted(torch.randperm(9, device="sim").tolist()) == list(range(9))


def in_new_process(program: str) -> subprocess.CompletedProcess[str]:
    install = "import torch; from torchdist_ref.testing import simulated_device; simulated_device.install(2)\n"
    return subprocess.run([sys.executable, "-c", install + program], capture_output=True, text=True, timeout=60)


@on_sim
def test_another_process_maps_memory_by_its_handle() -> None:
    tensor = torch.arange(4.0, device="sim:1")
    handle = sim.ipc_handle(tensor)
    sim.synchronize(1)
    other = in_new_process(
        f"t = torch.sim.open_ipc_handle({handle!r}).view(torch.float32)\n"
        "t.add_(1); torch.sim.synchronize(1); print(t.device)"
    )
    assert other.stdout == "sim:1\n", other.stderr[-1000:]
    assert tensor.tolist() == [1.0, 2.0, 3.0, 4.0]
    process, number, _, *others = handle.split()
    with pytest.raises(RuntimeError, match="can't be opened: its memory was closed"):
        sim.open_ipc_handle(" ".join([process, number, "1", *others]))
    with pytest.raises(RuntimeError, match="this is no IPC handle of sim: nonsense"):
        sim.open_ipc_handle("nonsense")


@on_sim
def test_bad_calls_are_one_sentence() -> None:
    with pytest.raises(RuntimeError, match=r"sim:7 does not exist: .* \(sim:0 to sim:3\)"):
        torch.ones(2, device="sim:7")
    with pytest.raises(RuntimeError, match=r"has 4 simulated devices of .*changed to 5 of .*: use another process"):
        simulated_device.install(5)
    assert simulated_device.install(4) is simulated_device.install() is torch.sim  # type: ignore[attr-defined]
    eighth = torch.ones(2, device="sim").to(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="sim has no kernel add for Float8_e4m3fn"):
        eighth.add_(eighth)
    with pytest.raises(
        RuntimeError, match="a generator of sim:1 draws numbers for tensors there, and this one is on cpu"
    ):
        torch.randn(2, generator=torch.Generator("sim:1"))
    with pytest.raises(ValueError, match="expected a device of type sim, not cpu"):
        sim.synchronize("cpu")
    with pytest.raises(ValueError, match="events of sim are for one process"):
        sim.Event(interprocess=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": 0}, "devices must be 1 to 64, not 0"),
        ({"devices": 65}, "devices must be 1 to 64, not 65"),
        ({"delay": "soon"}, "delay must be 'late', 'none' or a seed, not 'soon'"),
        ({"delay": True}, "delay must be 'late', 'none' or a seed, not True"),
    ],
)
def test_arguments_of_install_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulated_device.install(**arguments)


@on_sim
def test_a_fork_after_use_is_refused_and_one_before_is_not() -> None:
    forked(lambda: torch.ones(2, device="sim").tolist())
    tensor = torch.ones(2, device="sim")
    for use in (tensor.tolist, lambda: torch.ones(2, device="sim"), sim.synchronize, sim.Stream):
        with pytest.raises(AssertionError, match="sim can't be used in a process that was forked after its parent"):
            forked(use)
    assert not sim._is_in_bad_fork() and tensor.tolist() == [1.0, 1.0]


def test_without_a_compiler_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(simulated_device.BuildError, match=r"no-such-compiler is not there: install g\+\+ or clang\+\+"):
        building.build()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(simulated_device.BuildError, match=r"apt install g\+\+"):
        building.build()


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failing = tmp_path / "c++"
    failing.write_text("#!/bin/sh\necho 'device.cpp:1: error: no' >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CXX", str(failing))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    with pytest.raises(simulated_device.BuildError, match=r"can't compile .*: device.cpp:1: error: no"):
        building.build()
    assert not list(tmp_path.glob("cache/**/*.so"))


@pytest.mark.parametrize("version", ["2.10.0", "2.16.0+cpu", "3.0.0a0"])
def test_an_unknown_torch_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(simulated_device.BuildError, match=rf"torch 2.11 to 2.15, not for {version.replace('+', '.')}"):
        building.build()


@on_sim
def test_a_device_of_another_package_is_named() -> None:
    simulated_device.installed.clear()
    with pytest.raises(RuntimeError, match="one additional type of device per process, and sim is registered already"):
        simulated_device.install()


def test_the_build_is_found_again() -> None:
    if why := missing():
        pytest.skip(why)
    built = building.build()
    assert built.stat().st_size > 100_000 and built.parent == building.cache()
    assert os.path.commonpath([built, Path(__file__).parents[2]]) != str(Path(__file__).parents[2])
