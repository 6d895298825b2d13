"""Forty mistakes, a line each below the first blank lines: a type checker must see every one."""

import torch
from torch import nn

import torchdist_ref as dist

t = torch.ones(4)
model = nn.Linear(4, 4)
store = dist.HashStore()

# Each line from here on is wrong.
dist.all_reduc(t)
dist.init_proces_group("ref")
dist.get_rnk()
dist.ReduceOp.SUMM
dist.reduceop.SUM
dist.RankDied
dist.HashStor()
dist.DistributedDataParalel(model)
dist.all_reduce()
dist.all_reduce(3)
dist.all_reduce([t])
dist.all_reduce(t, op="sum")
dist.all_reduce(t, op=sum)
dist.all_reduce(t, group="world")
dist.all_reduce(t, async_op="yes")
dist.all_reduce(t, asynch=True)
dist.all_reduce(t).wait()
dist.barrier().wait()
dist.broadcast(t, source=0)
dist.broadcast(t, src="0")
dist.broadcast([t], src=0)
dist.reduce(t, dst=0, op=0)
dist.all_gather(t, t)
dist.all_gather(t)
dist.gather(t, t, dst=0)
dist.scatter(t, scatter_list=t)
dist.reduce_scatter(t, t)
dist.all_gather_into_tensor([t], t)
dist.all_to_all_single(t, t, output_split_sizes=4)
dist.send(t, dst="1")
dist.send([t], dst=1)
name: str = dist.recv(t, src=0)
dist.batch_isend_irecv(dist.P2POp(dist.isend, t, 1))
dist.new_group(4)
dist.new_group([0, 1], timeout=60)
dist.init_process_group("ref", timeout=60)
dist.init_process_group("ref", rank="0")
rank: str = dist.get_rank()
store.set(1, "value")
value: str = store.get("key")
dist.TCPStore("127.0.0.1", "29500")
dist.monitored_barrier(wait_all_ranks=1.5)
