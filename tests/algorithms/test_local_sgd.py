"""Post-local SGD as a whole: hook, optimizer, averagers and subgroups, compared with torch's."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as their_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchdist_ref as dist
from tests.parallel.training import batch, build, forked
from torchdist_ref.algorithms.ddp_comm_hooks import post_localSGD_hook
from torchdist_ref.algorithms.model_averaging import averagers, hierarchical_model_averager
from torchdist_ref.optim import PostLocalSGDOptimizer
from torchdist_ref.testing import run

with warnings.catch_warnings():
    # torch's modules compile things as they are imported.
    warnings.simplefilter("ignore")
    import torch.distributed.algorithms.model_averaging.averagers as their_averagers
    import torch.distributed.algorithms.model_averaging.hierarchical_model_averager as their_hierarchical
    from torch.distributed.optim import PostLocalSGDOptimizer as THEIRS

OURS = SimpleNamespace(
    api=dist,
    ddp=dist.DistributedDataParallel,
    hook=post_localSGD_hook,
    optimizer=PostLocalSGDOptimizer,
    periodic=averagers.PeriodicModelAverager,
    hierarchical=hierarchical_model_averager.HierarchicalModelAverager,
)
TORCHS = SimpleNamespace(
    api=torch.distributed,
    ddp=TorchDDP,
    hook=their_hook,
    optimizer=THEIRS,
    periodic=their_averagers.PeriodicModelAverager,
    hierarchical=their_hierarchical.HierarchicalModelAverager,
)
WORLD, STEPS = 3, 14
# Averager, whether neighbors average gradients later on, whether training is saved and loaded on the way.
WAYS = {
    "periodic": ("periodic", True, False),
    "hierarchical": ("hierarchical", True, False),
    "local": ("periodic", False, False),
    "resumed": ("hierarchical", True, True),
}


def averager(side: Any, kind: str) -> Any:
    if kind == "periodic":
        return side.periodic(period=4, warmup_steps=3)
    return side.hierarchical(OrderedDict([(2, 1), (4, WORLD)]), warmup_steps=3)


def trained(side: Any, rank: int, way: str) -> tuple[Tensor, int, int]:
    kind, neighbors, resumed = WAYS[way]
    pair, last = side.api.new_group([0, 1]), side.api.new_group([2])
    state = side.hook.PostLocalSGDState(None, last if rank == 2 else pair, 3, neighbors)
    model = build("mlp")
    ddp = side.ddp(model, bucket_cap_mb=0.004)
    ddp.register_comm_hook(state, side.hook.post_localSGD_hook)

    def optimizer() -> Any:
        return side.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), averager(side, kind))

    steps = optimizer()
    for step in range(STEPS):
        if resumed and step == 9:
            saved, steps = copy.deepcopy(steps.state_dict()), optimizer()
            steps.load_state_dict(saved)
        steps.zero_grad()
        inputs, labels = batch(rank, step)
        nn.functional.cross_entropy(ddp(inputs), labels).backward()
        steps.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), state.iter, steps.state_dict()["step"]


def torchs_own(rank: int, path: str) -> dict[str, tuple[Tensor, int, int]]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=WORLD)
    found = {way: trained(TORCHS, rank, way) for way in WAYS}
    torch.distributed.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[Tensor, int, int]]]:
    return forked(torchs_own, WORLD, str(tmp_path_factory.mktemp("torch") / "meet"), init=False)


@pytest.mark.parametrize(("backend", "ranks"), [("ref", "threads"), ("ref", "processes"), ("gloo", "threads")])
def test_weights_and_counters_are_torchs(wanted: Any, backend: str, ranks: Any) -> None:
    def program(rank: int) -> Any:
        return {way: trained(OURS, rank, way) for way in WAYS}

    for theirs, found in zip(wanted, run(program, WORLD, backend=backend, ranks=ranks), strict=True):
        for way in WAYS:
            # Three ranks add in different orders: a few units in the last place.
            torch.testing.assert_close(found[way][0], theirs[way][0], rtol=1e-5, atol=1e-6, msg=way)
            assert found[way][1:] == theirs[way][1:]
