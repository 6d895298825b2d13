"""One agent with its workers, as a process of its own: `python agent_main.py SETTINGS`, in JSON."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

from torchdist_ref.elastic import coordinator, session
from torchdist_ref.elastic.agent_settings import AgentSettings
from torchdist_ref.elastic.host_agent import run_agent
from torchdist_ref.elastic.roster import Rules
from torchdist_ref.launcher.environment import Job
from torchdist_ref.launcher.local_workers import LocalWorkers, WorkerSettings
from torchdist_ref.membership.trust import job_secret

WORKER = """
import os, signal, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE",
         "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "TORCHDIST_REF_TOKEN")
line = ["start", sys.argv[1], str(os.getpid()), *(os.environ.get(name, "-") for name in names)]
pipe = os.open(sys.argv[2], os.O_WRONLY)
os.write(pipe, (" ".join(line) + "\\n").encode())
if sys.argv[3] == "end":
    sys.exit()
signal.pause()
"""


def main() -> None:
    given = SimpleNamespace(**json.loads(sys.argv[1]))
    pipe = os.open(given.pipe, os.O_WRONLY)

    for module in (coordinator, session):
        module.SILENCE_SECONDS = given.silence

    def log(line: str) -> None:
        os.write(pipe, f"log {given.name} {line}\n".encode())

    rules = Rules(given.run_id, given.min, given.max, given.restarts, given.join, given.last_call)
    settings = AgentSettings(
        rules, given.host, given.port, given.workers, given.node_rank, given.serves, secret=job_secret()
    )
    entry = WorkerSettings(
        sys.executable,
        ["-S", "-c", WORKER, given.name, given.pipe, given.task],
        Job(max_restarts=given.restarts),
        shutdown_timeout=5,
    )
    with LocalWorkers(entry) as workers:
        end = run_agent(settings, workers, log)
    assert not {"torch", "_hashlib"} & sys.modules.keys()
    usage = Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]
    os.write(pipe, f"end {given.name} {end.code} {usage} {end.text}\n".encode())
    sys.exit(end.code)


if __name__ == "__main__":
    main()
