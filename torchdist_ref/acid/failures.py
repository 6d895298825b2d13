"""Checks of failures: time-outs, deaths, calls that differ, wrong arguments, and programs that end in odd ways."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import torch
from torch import Tensor

from torchdist_ref.acid.checks import RankLeaves, Ranks, check, raises, same, total

SHORT = timedelta(seconds=3)
WITHIN = 15.0
"""Seconds within which a call with a time-out of three must have raised."""


NO_WRONG_SUM = "At least one rank raises an error or does not return."


def raises_soon(call: Callable[[], object], what: str) -> Exception:
    """Return the exception of a call, which must come within `WITHIN` seconds."""
    begin = time.monotonic()
    error = raises(call, what)
    assert (took := time.monotonic() - begin) < WITHIN, f"{what}: it raised after {took:.0f} s"
    return error


def kill_myself() -> None:
    """End this process as the kernel ends one that uses too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> NoReturn:
    """End this process without the rest of the check, and without cleaning up: its group may be unusable."""
    raise RankLeaves


@check(
    "a collective that one rank does not call",
    "The others raise after the time-out.",
    initialized=False,
    needs_two=True,
)
def _(ranks: Ranks) -> None:
    ranks.init(SHORT)
    if ranks.rank == ranks.world - 1:
        time.sleep(9)
    else:
        raises_soon(lambda: ranks.dist.all_reduce(ranks.mine()), "all_reduce without the last rank")
    leave()


@check("a recv that nobody sends", "It raises after the time-out.", initialized=False, needs_two=True)
def _(ranks: Ranks) -> None:
    ranks.init(SHORT)
    if ranks.rank == 0:
        raises_soon(lambda: ranks.dist.recv(ranks.empty(), 1), "recv without a send")
    else:
        time.sleep(9)
    leave()


@check("wait with a time-out of its own", "wait(timeout) raises, and not only after the group's.", needs_two=True)
def _(ranks: Ranks) -> None:
    if ranks.rank == 0:
        work = ranks.dist.all_reduce(ranks.mine(), async_op=True)
        raises_soon(lambda: work.wait(timedelta(seconds=1)), "wait for one second")
    else:
        time.sleep(4)
    leave()


@check(
    "a rank that is killed",
    "The others' calls raise.",
    "none; a hang costs the whole job",
    initialized=False,
    needs_two=True,
    ends=lambda rank: -signal.SIGKILL if rank == 1 else 0,
)
def _(ranks: Ranks) -> None:
    ranks.init(SHORT)
    ranks.dist.all_reduce(ranks.mine())
    if ranks.rank == 1:
        kill_myself()
    raises_soon(lambda: [ranks.dist.all_reduce(ranks.mine()) for _ in range(3)], "all_reduce after a death")
    leave()


@check(
    "a rank that is killed while others wait for its message",
    "The receiver's call raises.",
    "none; a hang costs the whole job",
    initialized=False,
    needs_two=True,
    ends=lambda rank: -signal.SIGKILL if rank == 1 else 0,
)
def _(ranks: Ranks) -> None:
    ranks.init(SHORT)
    ranks.dist.barrier()
    if ranks.rank == 1:
        time.sleep(0.3)
        kill_myself()
    if ranks.rank == 0:
        raises_soon(lambda: ranks.dist.recv(ranks.empty(), 1), "recv from a rank that dies")
    leave()


def differing_sum(ranks: Ranks, tensor: Tensor) -> None:
    """Sum tensors that do not fit together, and raise if no rank's call does."""
    ranks.init(SHORT)
    try:
        ranks.dist.all_reduce(tensor)
    except Exception:
        leave()
    store = ranks.store("differing")
    returned = store.add("returned", 1)
    time.sleep(2)
    assert max(returned, store.add("returned", 0)) < ranks.world, f"all ranks returned; this one has {tensor.tolist()}"
    leave()


@check("tensors of unequal sizes", NO_WRONG_SUM, initialized=False, needs_two=True)
def _(ranks: Ranks) -> None:
    differing_sum(ranks, ranks.mine((5 if ranks.rank else 9,)))


@check("tensors of unequal dtypes", NO_WRONG_SUM, initialized=False, needs_two=True)
def _(ranks: Ranks) -> None:
    differing_sum(ranks, ranks.mine((4,), torch.float32 if ranks.rank else torch.int32))


@check("a root that does not exist", "It raises on each rank, and the group works on.")
def _(ranks: Ranks) -> None:
    raises(lambda: ranks.dist.broadcast(ranks.mine(), ranks.world + 3), "broadcast from a rank beyond the world")
    tensor = ranks.mine()
    ranks.dist.all_reduce(tensor)
    same(tensor, total(ranks))


@check("a list of the wrong length", "all_gather into too few tensors raises on each rank, and the group works on.")
def _(ranks: Ranks) -> None:
    few = [ranks.empty() for _ in ranks.everyone[1:]]
    raises(lambda: ranks.dist.all_gather(few, ranks.mine()), "all_gather into too few tensors")
    tensor = ranks.mine()
    ranks.dist.all_reduce(tensor)
    same(tensor, total(ranks))


@check("a sparse tensor", "It is summed, or the error says that sparse tensors are not supported.")
def _(ranks: Ranks) -> None:
    tensor = torch.eye(3, dtype=torch.float32, device=ranks.device).mul(ranks.rank + 1).to_sparse()
    ranks.dist.all_reduce(tensor)
    factor = sum(rank + 1 for rank in ranks.everyone)
    same(tensor.to_dense(), torch.eye(3, dtype=torch.float32, device=ranks.device) * factor)


@check("a program that ends without destroy_process_group", "Its process exits with code 0.")
def _(ranks: Ranks) -> None:
    ranks.dist.all_reduce(ranks.mine())
    raise SystemExit(0)


@check("a rank that ends early", "A rank that has done its calls may exit while others compute.", needs_two=True)
def _(ranks: Ranks) -> None:
    ranks.dist.all_reduce(ranks.mine())
    if ranks.rank == 1:
        raise SystemExit(0)
    time.sleep(1)
    assert ranks.dist.is_initialized()
    leave()


@check("a child process", "A child forked by a rank ends without harm to the group.")
def _(ranks: Ranks) -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    tensor = ranks.mine()
    ranks.dist.all_reduce(tensor)
    same(tensor, total(ranks))
