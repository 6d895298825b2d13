"""Sixty lines that a user may write, each of which must pass a strict type checker."""

from datetime import timedelta

import torch
import torch.distributed
from torch import Tensor, nn

import torchdist_ref as dist
from torchdist_ref.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torchdist_ref.algorithms.join import Join
from torchdist_ref.optim import ZeroRedundancyOptimizer

ONE_MINUTE = timedelta(minutes=1)
dist.init_process_group("ref", timeout=ONE_MINUTE)
rank: int = dist.get_rank()
world: int = dist.get_world_size()
t: Tensor = torch.ones(4)
dist.all_reduce(t)
dist.all_reduce(t, dist.ReduceOp.MAX)
dist.all_reduce(t, op=dist.ReduceOp.PREMUL_SUM(0.5), async_op=False)
dist.all_reduce(t, async_op=True).wait()
w: dist.Work = dist.all_reduce(t, op=dist.ReduceOp.AVG, async_op=True)
w.wait(ONE_MINUTE)
future: torch.futures.Future[list[Tensor]] = w.get_future()
asynchronous: bool = rank >= 0
maybe = dist.broadcast(t, src=0, async_op=asynchronous)
if maybe is not None:
    maybe.wait()
dist.barrier()
dist.barrier(async_op=True).wait()
dist.monitored_barrier(timeout=ONE_MINUTE, wait_all_ranks=True)
blocks = [torch.empty(4) for _ in range(world)]
dist.all_gather(blocks, t)
dist.all_gather(blocks, t, async_op=True).wait()
dist.gather(t, blocks if rank == 0 else None, dst=0)
dist.scatter(t, blocks if rank == 0 else None, src=0)
dist.reduce(t, dst=0, op=dist.ReduceOp.SUM)
dist.reduce_scatter(t, blocks, async_op=True).wait()
dist.reduce_scatter_tensor(t, torch.ones(4 * world))
dist.all_gather_into_tensor(torch.empty(4 * world), t, async_op=True).wait()
dist.all_to_all(blocks, blocks)
dist.all_to_all_single(t, t, output_split_sizes=[4], input_split_sizes=[4])
dist.send(t, dst=1, tag=3)
sender: int = dist.recv(t, src=0)
requests: list[dist.Work] = dist.batch_isend_irecv([dist.P2POp(dist.isend, t, 1), dist.P2POp(dist.irecv, t, 0)])
objects: list[object] = [None] * world
dist.all_gather_object(objects, {"rank": rank})
dist.broadcast_object_list(objects, src=0)
group: dist.ProcessGroup = dist.new_group([0, 1], timeout=ONE_MINUTE)
as_torchs: torch.distributed.ProcessGroup = group
torch.distributed.all_reduce(t, group=group)
dist.all_reduce(t, group=as_torchs, async_op=True).wait()
smaller, all_groups = dist.new_subgroups(2)
members: list[int] = dist.get_process_group_ranks(group)
mesh: dist.DeviceMesh = dist.init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
store: dist.Store = dist.PrefixStore("mine", dist.TCPStore("127.0.0.1", 29500, 1, True))
store.set("key", b"value")
value: bytes = store.get("key")
count: int = store.add("counter", 1)
model = dist.DistributedDataParallel(nn.Linear(4, 4), gradient_as_bucket_view=True)
model.register_comm_hook(None, default_hooks.allreduce_hook)
model.register_comm_hook(powerSGD_hook.PowerSGDState(None, 1), powerSGD_hook.powerSGD_hook)
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
with Join([model]), model.no_sync():
    loss: Tensor = model(t).sum()
try:
    dist.all_reduce(t)
except dist.RankDiedError as error:
    print(error)


def hook(state: dict[str, int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sum a bucket: the form of a hook that a user writes."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


model.register_comm_hook({"steps": 0}, hook)
dist.destroy_process_group()
