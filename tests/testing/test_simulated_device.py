"""The simulated device: tensors, streams, events, memory and random numbers as torch's own accelerators have them."""

from __future__ import annotations

import pytest
import torch

from tests.on_sim import on_sim
from torchdist_ref.testing import fill


@on_sim
def test_torch_finds_the_devices() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.device_count() == torch.sim.device_count() == 4  # type: ignore[attr-defined]
    assert [torch.ones(2, device=f"sim:{index}").device.index for index in range(4)] == [0, 1, 2, 3]


@on_sim
def test_values_of_a_chain_of_operations_are_those_of_the_cpu() -> None:
    def chain(tensor: torch.Tensor) -> torch.Tensor:
        return (((tensor + 2).view(4, 2).t()[1] * tensor[:4]) / 3 - tensor[1]).to(torch.float64).cumsum(0)

    host = fill(1, (8,))
    assert torch.equal(chain(host.to("sim:2")).cpu(), chain(host))


@on_sim
def test_a_side_stream_sees_old_memory_without_an_event_and_new_with_it() -> None:
    source, side = torch.ones(4, device="sim"), torch.Stream("sim")
    with side:
        early = source * 2
    side.synchronize()
    assert torch.isnan(early).all()
    source.fill_(3)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        late = source * 2
    side.synchronize()
    assert late.cpu().tolist() == [6.0] * 4


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
def test_a_device_index_beyond_is_one_sentence() -> None:
    with pytest.raises(RuntimeError, match=r"sim:7 does not exist: .* \(sim:0 to sim:3\)"):
        torch.ones(2, device="sim:7")
