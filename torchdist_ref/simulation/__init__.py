"""A cluster in one process: hundreds of ranks, virtual time, a network and failures, by the library's own code.

`run` calls a program on simulated ranks, `explore` looks for an interleaving in which it fails, and
`run_job` runs an elastic job on simulated hosts.
"""

from torchdist_ref.ranks.outcomes import RankError, RankTimeoutError
from torchdist_ref.schedules.network import Network
from torchdist_ref.simulation.elastic_job import SimulatedJob
from torchdist_ref.simulation.faults import Cut, Delay, EndHost, EndStore, Fault, Kill, Slow, Stop
from torchdist_ref.simulation.job_workers import SimulatedAttempt
from torchdist_ref.simulation.one_run import simulated_operations, simulated_store
from torchdist_ref.simulation.result import BlockedOutsideError, DeadlockError, SimulatedRun
from torchdist_ref.simulation.running import FailingOrder, explore, run, run_job
from torchdist_ref.simulation.timeline import Happening, Timeline

__all__ = [
    "BlockedOutsideError",
    "Cut",
    "DeadlockError",
    "Delay",
    "EndHost",
    "EndStore",
    "FailingOrder",
    "Fault",
    "Happening",
    "Kill",
    "Network",
    "RankError",
    "RankTimeoutError",
    "SimulatedAttempt",
    "SimulatedJob",
    "SimulatedRun",
    "Slow",
    "Stop",
    "Timeline",
    "explore",
    "run",
    "run_job",
    "simulated_operations",
    "simulated_store",
]
