"""Programs of ranks on devices, compared with the same programs on the CPU.

The device is simulated (`torchdist_ref.testing.simulated_device`): code that forgets to wait has wrong numbers there
every time. On a machine with GPUs, ``pytest -m gpu`` runs the same tests on CUDA. Ranks are threads, each with devices
of its own where there are enough.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import on_sim
from torchdist_ref.testing import fill, run

RANKS = 2
DEVICES = [pytest.param("sim", marks=pytest.mark.sim), pytest.param("cuda", marks=pytest.mark.gpu)]


def on_each_device(test: Callable[[str], None]) -> Any:
    """Run a test on simulated devices, in a process of its own, and on CUDA where there is one."""

    @on_sim.NEEDS_PARENT
    @functools.wraps(test)
    def either(device: str, *args: Any, **kwargs: Any) -> None:
        if device == "sim":
            on_sim.on_sim(test)(device, *args, **kwargs)
        elif torch.cuda.is_available():
            test(device, *args, **kwargs)
        else:
            pytest.skip("needs a CUDA device")

    return pytest.mark.parametrize("device", DEVICES)(either)


def devices_of(rank: int, device: str, count: int) -> list[torch.device]:
    """Return `count` devices of a rank, which no other rank has where there are enough."""
    there = torch.accelerator.device_count() if device != "cpu" else 1
    indices = (torch.device(device, (rank * count + n) % there) for n in range(count))
    return [torch.device("cpu") if device == "cpu" else each for each in indices]


def same_as_on_cpu(
    device: str, program: Callable[..., Any], exact: bool = True, ranks: int = RANKS, devices: int = 1
) -> None:
    """Run a program on the CPU and on devices; all tensors that it returns have the same values.

    Args:
        device: Type of the devices.
        program: Function of the rank and its devices.
        exact: Whether the values are equal on each kind of device, or nearly so on other ones than the simulated.
        ranks: Number of ranks.
        devices: Number of devices of a rank.
    """

    def placed(rank: int, kind: str) -> Any:
        where = devices_of(rank, kind, devices)
        if kind != "cpu":
            torch.accelerator.set_device_index(where[0].index)
        return program(rank, *where)

    wanted, got = (run(placed, ranks, kind, timeout=60) for kind in ("cpu", device))
    check(got, wanted, exact or device == "sim")


def check(got: Any, wanted: Any, exact: bool) -> None:
    """Assert that results of a program on devices are those of the same program on the CPU, and on devices."""
    if isinstance(wanted, Tensor):
        assert got.device.type != "cpu" or wanted.numel() == 0, got.device
        if exact:
            assert torch.equal(got.cpu(), wanted), (got.cpu(), wanted)
        else:
            torch.testing.assert_close(got.cpu(), wanted, rtol=1e-4, atol=1e-5)
    elif isinstance(wanted, list | tuple):
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            check(one, other, exact)
    elif isinstance(wanted, dict):
        for name, value in wanted.items():
            try:
                check(got[name], value, exact)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error
    else:
        assert got == wanted


def late(rank: int, count: int, where: torch.device) -> Tensor:
    """Return a tensor that the device has yet to compute."""
    return fill(rank, (count,)).to(where) * 2 + 1
