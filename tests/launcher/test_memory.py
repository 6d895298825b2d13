"""Kills for lack of memory: the kernel's counter in the cgroup of the job, of both versions of cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchdist_ref.elastic.attempt import Exit
from torchdist_ref.launcher.child_failures import ProcessFailure, describe, failure_of
from torchdist_ref.launcher.memory import OutOfMemoryKills

V1 = "5:devices:/\n4:cpu,memory:/job/a\n0::/\n"
V2 = "0::/job/a\n"
LAYOUTS = [
    (V1, "memory/job/a/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"),
    (V1, "memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"),
    (V2, "job/a/memory.events", "low 9\nhigh 9\nmax 9\noom 9\noom_kill {}\noom_group_kill 0\n"),
    (V2, "memory.events", "low 9\nhigh 9\nmax 9\noom 9\noom_kill {}\noom_group_kill 0\n"),
]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(("cgroup", "name", "content"), LAYOUTS)
def test_the_kernels_counter_tells_whether_the_memory_was_the_cause(
    cgroup: str, name: str, content: str, tmp_path: Path
) -> None:
    write(tmp_path / "proc/self/cgroup", cgroup)
    write(tmp_path / "sys/fs/cgroup" / name, content.format(7))
    kills = OutOfMemoryKills(str(tmp_path))
    assert kills.explain_kill().startswith("The kernel has counted no out-of-memory kill in the job's cgroup")
    write(tmp_path / "sys/fs/cgroup" / name, content.format(9))
    assert kills.explain_kill().startswith("The kernel's out-of-memory killer has ended 2 of the job's processes. Give")


@pytest.mark.parametrize("content", [None, "", "low 1\noom 2\n"])
def test_nothing_is_said_where_the_kernel_does_not_count(content: str | None, tmp_path: Path) -> None:
    assert OutOfMemoryKills(str(tmp_path)).explain_kill() == ""
    write(tmp_path / "proc/self/cgroup", V2)
    if content is not None:
        write(tmp_path / "sys/fs/cgroup/memory.events", content)
    assert OutOfMemoryKills(str(tmp_path)).explain_kill() == ""


def test_the_report_has_the_sentence_and_the_last_lines_of_the_log_file(tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    log.write_text("".join(f"line {i**2}\n" for i in range(5000)))
    end = Exit(3, 1, 4711, -9, "", True, str(log), memory="The kernel has ended it.")
    text = describe(3, failure_of(end, ProcessFailure))
    assert (
        f"  stderr    : {log}\n" in text
        and "Signal 9 (SIGKILL) received by PID 4711\n  The kernel has ended it.\n" in text
    )
    assert text.endswith("\n".join(["error:", *(f"  line {i**2}" for i in range(4980, 5000))]))
