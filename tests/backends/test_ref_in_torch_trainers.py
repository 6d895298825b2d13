"""Lightning's DDPStrategy and accelerate on `ref`: gradients and weights as on Gloo, and `ref` did the work."""

from __future__ import annotations

import logging
import os
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as c10d
from torch import Tensor, nn

from tests.backends.inside_torch import compared, kept
from tests.ports import reserve_port
from torchdist_ref.testing import fill, run

STEPS, SIZE = 3, 2

# Their own imports use what newer Pythons and torches warn of.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 24), nn.Tanh(), nn.Linear(24, 3)).double()


def rows() -> list[Tensor]:
    """What both ranks train on: each takes every second row."""
    return [fill(row, (7,), torch.float64) / 4 for row in range(STEPS * SIZE)]


def launched(rank: int, port: int) -> dict[str, str]:
    """The environment in which torchrun starts a rank."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": SIZE, "LOCAL_WORLD_SIZE": SIZE}
    names = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
        "OMP_NUM_THREADS": "1",
    }
    return {**{name: str(value) for name, value in place.items()}, **names}


def fit(backend: str) -> tuple[list[Tensor], Counter[str]]:
    """Three steps under Lightning, which makes the process group itself; gradients, and weights at the end."""
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    history: list[Tensor] = []

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return self.net(batch).square().mean()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            history.extend(parameter.grad.clone() for parameter in self.parameters())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    strategy = DDPStrategy(process_group_backend=backend, find_unused_parameters=False)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(accelerator="cpu", devices=SIZE, strategy=strategy, max_steps=STEPS, **quiet)
    task = Task()
    trainer.fit(task, torch.utils.data.DataLoader(rows(), batch_size=1))
    kept.append(c10d.group.WORLD)
    seen = Counter(event.call.op for event in getattr(c10d.group.WORLD, "recorder", ()))
    assert trainer.global_step == STEPS and c10d.get_backend() == backend
    return [*history, *(parameter.detach() for parameter in task.parameters())], seen


def lightning_rank(rank: int, ports: dict[str, int]) -> tuple[list[Tensor], list[Tensor], Counter[str]]:
    results, counts = {}, {}
    for backend, port in ports.items():
        os.environ.update(launched(rank, port))
        results[backend], counts[backend] = fit(backend)
        c10d.destroy_process_group()
    return results["ref"], results["gloo"], counts["ref"]


def accelerated(rank: int, size: int) -> list[Tensor]:
    """Three steps under accelerate; its sampler gives the ranks their rows, its gather and reduce are called too."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    os.environ.update(launched(rank, 1))
    accelerator, history = Accelerator(cpu=True), []
    assert accelerator.num_processes == size and accelerator.process_index == rank
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    net, optimizer, loader = accelerator.prepare(net, optimizer, torch.utils.data.DataLoader(rows(), batch_size=1))
    for batch in loader:
        optimizer.zero_grad()
        loss = net(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        history += [parameter.grad.clone() for parameter in net.parameters()]
        history += [accelerator.gather(loss.detach()), accelerator.reduce(loss.detach(), "mean")]
    accelerator.wait_for_everyone()
    AcceleratorState._reset_state(reset_partial_state=True)
    return [*history, *(parameter.detach() for parameter in net.parameters())]


def same(results: list[tuple[list[Tensor], list[Tensor], Counter[str]]], ops: set[str]) -> None:
    assert len(results) == SIZE
    for ours, theirs, seen in results:
        assert len(ours) == len(theirs) > STEPS and ops <= seen.keys(), seen
        for got, wanted in zip(ours, theirs, strict=True):
            torch.testing.assert_close(got, wanted)
    for first, second in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(first, second)


# Over a second: Lightning takes five to import, and two groups train in two processes.
def test_lightning_trains_the_same() -> None:
    # Here, so that the ranks are forked with it and need not load it each.
    import_module("lightning.pytorch.strategies")
    ports = {"ref": reserve_port(), "gloo": reserve_port()}
    same(run(lightning_rank, SIZE, ports, init=False, ranks="processes", timeout=60.0), {"all_reduce", "broadcast"})


def test_accelerate_trains_the_same(tmp_path: Path) -> None:
    import_module("accelerate")
    ops = {"all_reduce", "broadcast", "all_gather", "barrier"}
    same(compared(accelerated, SIZE, str(tmp_path / "meet")), ops)
