"""Pickles from before modules and classes were moved or renamed still load, and training resumes from them.

The file holds pickles of a PowerSGDState after four steps, of a DistributedDataParallel and of small values, made at
commit b033c9a, with the gradients of the step that followed there.
"""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import torch

import torchdist_ref as dist
from torchdist_ref.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torchdist_ref.parallel import MixedPrecision
from torchdist_ref.testing import fill, run

FORMER = json.loads((Path(__file__).parent / "pickles_of_former_paths.json").read_text(encoding="utf-8"))


def load(name: str) -> Any:
    return pickle.loads(zlib.decompress(base64.b64decode(FORMER[name])))


def test_a_former_powersgd_state_resumes_to_the_same_gradients() -> None:
    def program(rank: int) -> Any:
        state = load("PowerSGDState")
        model = torch.nn.Linear(24, 16)
        with torch.no_grad():
            model.weight.copy_(fill(1, (16, 24)))
            model.bias.copy_(fill(2, (16,)))
        ddp = dist.DistributedDataParallel(model)
        ddp.register_comm_hook(state, powerSGD_hook)
        ddp(fill(4, (3, 24))).square().sum().backward()
        gradients = [parameter.grad.flatten()[:8].clone() for parameter in ddp.parameters()]
        return type(state) is PowerSGDState, state.iter, gradients

    [(same_class, steps, gradients)] = run(program, 1)
    assert same_class and steps == 5
    torch.testing.assert_close(gradients, [torch.tensor(values) for values in FORMER["next gradients"]])


def test_a_former_ddp_trains() -> None:
    def program(rank: int) -> Any:
        ddp = load("DistributedDataParallel")
        ddp(fill(rank, (4, 3))).sum().backward()
        options = ddp.gradient_as_bucket_view, ddp.bucket_bytes_cap, ddp.module.weight.tolist()
        return options, ddp.module.weight.grad.clone()

    wanted = torch.stack([fill(rank, (4, 3)).sum(0) for rank in range(2)]).mean(0).expand(2, 3)
    for options, gradient in run(program, 2):
        assert options == (True, 3 * 2**20, fill(1, (2, 3)).tolist())
        torch.testing.assert_close(gradient, wanted)


def test_former_values_are_those_of_today() -> None:
    kind, precision, bucket = load("values")
    assert kind is dist.BuiltinCommHookType.FP16_COMPRESS
    assert precision == MixedPrecision(torch.bfloat16)
    assert bucket is dist.GradBucket
