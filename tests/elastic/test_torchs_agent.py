"""torch's agent and rendezvous, imported from our paths: they run and restart our ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from torchdist_ref.elastic.agent.server import WorkerSpec, WorkerState
from torchdist_ref.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torchdist_ref.elastic.multiprocessing import DefaultLogsSpecs
from torchdist_ref.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry

import torchdist_ref as dist
from torchdist_ref.testing import fill


@pytest.fixture(autouse=True)
def handlers_of_signals() -> Iterator[None]:
    """Restore what torch's agent leaves behind."""
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    former = {signum: signal.getsignal(signum) for signum in signals}
    yield
    for signum, handler in former.items():
        signal.signal(signum, handler)


def job(good_after: int) -> list[float]:
    """Sum over the ranks; fail on rank 1 until the job has been started `good_after` times again."""
    dist.init_process_group("ref")
    tensor = fill(dist.get_rank(), (5,))
    dist.all_reduce(tensor)
    if dist.get_rank() == 1 and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < good_after:
        raise ValueError("no data on rank 1")
    dist.destroy_process_group()
    return tensor.tolist()


@pytest.mark.long
def test_torchs_agent_restarts_our_ranks(tmp_path: Path) -> None:
    # Seconds: torch's agent and rendezvous wait and poll.
    parameters = RendezvousParameters("c10d", "localhost:0", "job", 1, 1)
    handler = rendezvous_handler_registry.create_handler(parameters)
    spec = WorkerSpec("trainer", 2, handler, entrypoint=job, args=(1,), max_restarts=1, monitor_interval=0.02)
    try:
        result = LocalElasticAgent(spec, DefaultLogsSpecs(str(tmp_path)), "fork").run()
    finally:
        handler.shutdown()
    total = (fill(0, (5,)) + fill(1, (5,))).tolist()
    assert result.state is WorkerState.SUCCEEDED and result.return_values == {0: total, 1: total}
