"""Pipeline whose partitions are on several devices: values, and what overlaps. See `tests.on_devices`."""

from __future__ import annotations

import itertools
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torchdist_ref.pipeline.sync import Pipe, WithDevice
from torchdist_ref.pipeline.sync.utils import partition_model

from tests.on_devices import on_each_device
from tests.on_sim import on_sim
from torchdist_ref.testing import fill, simulated_device

WAYS = ("always", "except_last", "never")


def layers() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 3))
    model = model.double()
    with torch.no_grad():
        for n, parameter in enumerate(model.parameters()):
            parameter.copy_(fill(n, parameter.shape, torch.float64) / 16)
    return model


def trained(model: nn.Sequential, checkpoint: str, where: str) -> list[Tensor]:
    """Train a model on a pipeline; `where` is the device of its inputs."""
    pipe, results = Pipe(model, chunks=4, checkpoint=checkpoint), []
    for step in range(2):
        inputs = (fill(step, (12, 6), torch.float64) / 8).to(where).requires_grad_()
        result = pipe(inputs).local_value()
        # The tensor is multiplied before the loss is known on the host.
        (result * fill(5, (12, 3), torch.float64).to(result.device)).square().sum().backward()
        assert inputs.grad is not None
        results += [result.detach(), inputs.grad]
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.01)
                parameter.grad = None
    return [each.cpu() for each in [*results, *model.state_dict().values()]]


@on_each_device
def test_values_and_gradients_are_those_of_a_pipeline_on_the_cpu(device: str) -> None:
    count = torch.accelerator.device_count()
    places = [f"{device}:{n % count}" for n in range(3)]
    for checkpoint in WAYS:
        wanted = trained(partition_model(layers(), [2, 2, 2], ["cpu"] * 3), checkpoint, "cpu")
        found = trained(partition_model(layers(), [2, 2, 2], places), checkpoint, places[0])
        for one, other in zip(found, wanted, strict=True):
            # Gradients of micro-batches are summed in another order.
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@on_each_device
def test_partitions_get_the_devices_by_number(device: str) -> None:
    count = min(3, torch.accelerator.device_count())
    model = partition_model(layers(), [6 - count + 1] + [1] * (count - 1))
    devices = [next(part.parameters(), torch.zeros(0, device=f"{device}:{n}")).device for n, part in enumerate(model)]
    assert devices == [torch.device(device, n) for n in range(count)]
    pipe = Pipe(nn.Sequential(nn.Linear(6, 8).to(f"{device}:0"), WithDevice(nn.Tanh(), f"{device}:0")), chunks=2)
    assert pipe.devices == [torch.device(device, 0)]
    assert pipe(torch.ones(4, 6, device=device)).local_value().device == torch.device(device, 0)


class Scale(nn.Module):
    """Layer whose operations are asynchronous on the simulated device."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + fill(3, (size,)) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + 1


def scaled(places: list[str], size: int = 20_000) -> nn.Sequential:
    return nn.Sequential(*(Scale(size).to(place) for place in places))


@on_sim
def test_partitions_work_at_the_same_time() -> None:
    """In the timeline of the streams, the second partition computes while the first computes the next micro-batch."""
    chunks, places = 4, ["sim:0", "sim:1", "sim:2"]
    pipe, inputs = Pipe(scaled(places), chunks=chunks, checkpoint="never"), torch.ones(chunks, 20_000, device="sim:0")
    with torch.no_grad(), simulated_device.timeline() as spans:
        pipe(inputs)
        for number in range(3):
            torch.accelerator.synchronize(number)
    work = [[span for span in spans if span.device == n and span.name in ("mul", "add")] for n in range(3)]
    assert [len(each) for each in work] == [2 * chunks] * 3
    for before, after in itertools.pairwise(work):
        for chunk in range(chunks - 1):
            begin, end = after[2 * chunk].begin, after[2 * chunk + 1].end
            next_begin, next_end = before[2 * chunk + 2].begin, before[2 * chunk + 3].end
            assert begin < next_end and next_begin < end, (chunk, work)


@on_each_device
def test_partitions_work_on_the_streams_of_the_caller(device: str) -> None:
    """They worked on the default streams, which wait for nothing that the caller's streams have yet to compute."""
    count = torch.accelerator.device_count()
    places = [f"{device}:{n % count}" for n in range(3)]
    inputs = fill(1, (8, 20_000))
    wanted = scaled(["cpu"] * 3)(inputs * 2)
    pipe = Pipe(scaled(places), chunks=4)
    streams = [torch.Stream(place) for place in places]
    for number in range(count):
        torch.accelerator.synchronize(number)
    with ExitStack() as entered:
        for stream in reversed(streams):
            entered.enter_context(stream)
        found = pipe(inputs.to(places[0], non_blocking=True) * 2).local_value()
        assert torch.equal(found.cpu(), wanted)
