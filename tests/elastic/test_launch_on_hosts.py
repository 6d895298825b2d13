"""The launcher's functions on several hosts, each a process of this machine."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.ports import reserve_port
from torchdist_ref.elastic import coordinator, session
from torchdist_ref.elastic.agent_settings import agent_settings
from torchdist_ref.elastic.roster import Rules
from torchdist_ref.errors import ArgumentError, RankDiedError
from torchdist_ref.launcher.api import LaunchConfig, launch_agent


@pytest.fixture(autouse=True)
def allow_long_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of one process share its interpreter: on a busy machine, a launcher can be silent for a second."""
    for module in (coordinator, session):
        monkeypatch.setattr(module, "SILENCE_SECONDS", 20.0)


def launch(
    node_rank: int, port: int, script: str | Callable[[], object], backend: str = "static", **settings: object
) -> object:
    """Run a program on one of two hosts; return the ranks' results, or the error."""
    configs = {"rank": node_rank} if backend == "static" else {}
    config = LaunchConfig(
        2, 2, 2, rdzv_endpoint=f"127.0.0.1:{port}", rdzv_backend=backend, run_id="job", rdzv_configs=configs, **settings
    )
    try:
        if callable(script):
            return launch_agent(config, script, [])
        return launch_agent(config, sys.executable, ["-S", "-c", script])
    except Exception as error:
        return error


def both(script: str | Callable[[], object], **settings: object) -> list[object]:
    port = reserve_port()
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda rank: launch(rank, port, script, **settings), range(2)))


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_hosts(backend: str, tmp_path: Path) -> None:
    script = f"import os; open('{tmp_path}/' + os.environ['RANK'], 'w').write(os.environ['WORLD_SIZE'])"
    results = both(script, backend=backend)
    assert sorted(rank for result in results for rank in result) == [0, 1, 2, 3]  # type: ignore[attr-defined]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys("0123", "4")


def test_a_failure_on_one_host_is_raised_on_both() -> None:
    script = "import os, signal; os.environ['RANK'] == '2' and os._exit(7); signal.pause()"
    first, second = both(script, max_restarts=0)
    assert isinstance(first, RankDiedError) and "rank 2 on " in str(first) and "exited with code 7" in str(first)
    assert type(second).__name__ == "ChildFailedError" and "exitcode  : 7" in str(second)


def lose_the_data() -> None:
    """Raise on rank 2; the others wait."""
    if os.environ["RANK"] == "2":
        raise ValueError("no data on rank 2")
    signal.pause()


def test_the_other_host_shows_the_traceback_of_the_first_failure(caplog: pytest.LogCaptureFixture) -> None:
    first, second = both(lose_the_data, max_restarts=0)
    # Either launcher may have logged the last line of all.
    [last_lines] = [message for message in caplog.messages if message.startswith("the job failed")]
    for text in (str(first), last_lines):
        head, *lines = text[text.index("rank 2 on ") :].splitlines()
        assert head.endswith("exited with code 1: ValueError: no data on rank 2")
        rows = dict(line.strip().split(": ", 1) for line in lines if re.match(r" *[a-z_]+ *: ", line))
        found = {name.strip(): value for name, value in rows.items()}
        assert found["rank"] == "2 (local_rank: 0)" and found["exitcode"].startswith("1 (pid: ")
        assert found["host"] in head and found["exitcode"][9:-1] in head and found["error_file"] == "<N/A>"
        assert ", in lose_the_data" in text and lines[-1] == "  ValueError: no data on rank 2"
    assert "ValueError: no data on rank 2" in str(second)


@pytest.mark.parametrize(
    ("endpoint", "options", "expected"),
    [
        ("host-0:123", {}, ("host-0", 123, None, -1)),
        ("host-0", {"is_host": "false"}, ("host-0", 29400, False, -1)),
        ("[fd77::1]:5", {"is_host": "true"}, ("fd77::1", 5, True, -1)),
        ("[fd77::1]", {}, ("fd77::1", 29400, None, -1)),
    ],
)
def test_endpoint_and_options(endpoint: str, options: dict[str, str], expected: tuple[object, ...]) -> None:
    found = agent_settings(Rules("job", 1, 2), endpoint, 1, "c10d", {"join_timeout": "7", **options})
    assert (found.host, found.port, found.serves, found.node_rank) == expected
    assert (found.rules.join_seconds, found.rules.last_call_seconds) == (7.0, 30.0)


def test_options_that_cannot_be_used() -> None:
    with pytest.raises(ArgumentError, match="--rdzv-backend 'etcd' is not available"):
        agent_settings(Rules("job", 1, 2), "host-0:1", 1, "etcd")
    with pytest.raises(ArgumentError, match="--rdzv-conf join_timeout='soon' is not a number"):
        agent_settings(Rules("job", 1, 2), "host-0:1", 1, "c10d", {"join_timeout": "soon"})


def test_the_first_node_rank_serves_a_static_rendezvous() -> None:
    found = [agent_settings(Rules("job", 2, 2), "host-0", 1, "static", {"rank": rank}) for rank in range(2)]
    assert [(each.serves, each.node_rank) for each in found] == [(True, 0), (False, 1)]
