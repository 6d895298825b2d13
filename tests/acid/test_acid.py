"""The acid test of backends: what it says of right ones, and of those that hang, crash, end or are wrong."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from torchdist_ref import acid
from torchdist_ref.acid import report
from torchdist_ref.acid.__main__ import parse

ODD = ("--import", "tests.acid.odd_backends")
ROOT = Path(__file__).parents[2]


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(python_with_torch: str) -> Run:
    """Run the command in a Python that has torch: the command and each check start one."""

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        # The last of two equal options counts: checks that do not hang may take as long as a busy machine needs.
        command = [python_with_torch, "-m", "torchdist_ref.acid", "--seconds", "100", *options]
        # A backend's C++ may print to the terminal whatever it likes; the table is on stdout.
        return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)

    return run


def left(text: str) -> list[str]:
    """Return the files of shared memory whose name has a text, and the processes that map such a file or run there."""
    found = [path.name for path in Path("/dev/shm").iterdir() if text in path.name]
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            has = text in (process / "maps").read_text(errors="replace") or text in os.readlink(process / "cwd")
            found += [process.name] if has else []
    return found


def outcomes(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    kinds = ("pass", "refused", "fail", "crash", "hang", "not run")
    found = {}
    for line in done.stdout.splitlines():
        for kind in kinds:
            if line.startswith(f"{kind} ") and line.endswith(" s)"):
                found[line[9:].rpartition(" (")[0]] = kind
    return found


def test_each_check_has_a_demand_a_source_and_code() -> None:
    assert len(acid.CHECKS) >= 60
    assert len({check.name for check in acid.CHECKS}) == len(acid.CHECKS)
    assert {check.area for check in acid.CHECKS} == {"values", "order", "failures", "modules"}
    for check in acid.CHECKS:
        assert check.demand.endswith(".") and check.source and "def _(ranks: Ranks)" in check.code, check.name
    assert acid.CHECKS[0].name.startswith("init_process_group")


@pytest.mark.parametrize(("backend", "extra"), [("gloo", ()), ("ref", ("--import", "torchdist_ref"))])
def test_right_backends_pass(run: Run, backend: str, extra: tuple[str, ...], tmp_path: Path) -> None:
    done = run("--backend", backend, *extra, "--only", "all_reduce of bool", "--report", str(tmp_path / "new"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(outcomes(done).values()) == {"pass"} and len(outcomes(done)) == 2
    kept = json.loads((tmp_path / "new" / "report.json").read_text())
    assert kept["summary"] == "2 pass" and kept["about"]["backend"] == backend and kept["about"]["ranks"] == "3"
    assert "all_reduce(tensor)" in kept["checks"][1]["code"]
    page = (tmp_path / "new" / "report.html").read_text()
    assert "all_reduce of bool" in page and "http" not in page.replace("http://www.w3.org", "")
    assert "2 of 2" in (tmp_path / "new" / "badge.svg").read_text()


def test_torchs_gloo_loses_a_nan_and_ref_does_not(run: Run) -> None:
    done = run("--backend", "gloo", "--only", "NaN in MAX")
    assert done.returncode == 1 and outcomes(done)["NaN in MAX"] == "fail"
    assert "rank 0: got [2.0, 3.0]" in done.stdout
    assert run("--backend", "ref", "--import", "torchdist_ref", "--only", "NaN in MAX").returncode == 0


def test_a_wrong_value_and_a_rank_that_exits_cost_one_row_each(run: Run) -> None:
    done = run("--backend", "one_less", *ODD, "--only", "of float32 and float64")
    assert outcomes(done)["all_reduce of float32 and float64"] == "fail" and done.returncode == 1, done.stdout
    assert "expected torch" not in done.stdout and ", expected [" in done.stdout
    done = run("--backend", "one_less", *ODD, "--only", "broadcast from each rank")
    assert outcomes(done)["broadcast from each rank"] == "crash", done.stdout
    assert "rank 1 ended with exit code 7 in its calls" in done.stdout


@pytest.mark.parametrize(
    ("backend", "kind", "text"),
    [
        ("hangs", "hang", "did not end within 4 s. (odd_backends.py, line"),
        ("aborts", "crash", "ended with signal SIGABRT in its calls"),
        ("refuses", "fail", "refuses needs a license"),
        ("nobody_knows_it", "fail", "nobody_knows_it"),
    ],
)
def test_a_backend_that_makes_no_group_is_one_fact(
    run: Run, backend: str, kind: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("ODD_MEMORY", f"acid-{os.getpid()}-{backend}")
    done = run("--backend", backend, *ODD, "--only", "bool", "--seconds", "4")
    assert done.returncode == 1
    assert [*outcomes(done).values()] == [kind, "not run"], done.stdout
    assert text in done.stdout
    assert not [*tmp_path.iterdir()] and not left(f"acid-{os.getpid()}-{backend}")


def test_memory_of_ranks_that_a_check_kills_is_removed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"acid-{os.getpid()}-killed"
    monkeypatch.setenv("ODD_MEMORY", name)
    done = run("--backend", "one_less", *ODD, "--only", "a rank that is killed")
    assert "a rank that is killed" in outcomes(done), done.stdout
    assert not left(name)


def test_a_module_that_cannot_be_imported_is_one_fact(run: Run, python_with_torch: str, tmp_path: Path) -> None:
    done = run("--backend", "x", "--import", "no_such_module_of_acid", "--report", str(tmp_path / "new"))
    assert done.returncode == 1 and outcomes(done) == {"import no_such_module_of_acid": "fail"}
    assert "No module named 'no_such_module_of_acid'" in done.stdout and done.stdout.endswith("x, 3 ranks: 1 fail\n")
    [kept] = json.loads((tmp_path / "new" / "report.json").read_text())["checks"]
    assert kept["outcome"] == "fail" and kept["code"] == "import no_such_module_of_acid\n"
    assert "0 of 1" in (tmp_path / "new" / "badge.svg").read_text()
    (tmp_path / "ends_the_interpreter.py").write_text("import os\nos.abort()\n")
    command = [python_with_torch, "-m", "torchdist_ref.acid", "--backend", "x", "--import", "ends_the_interpreter"]
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 1 and "crash    import ends_the_interpreter" in done.stdout
    assert "SIGABRT" in done.stdout


MPIEXEC = Path(sys.executable).with_name("mpiexec")


@pytest.mark.skipif(not MPIEXEC.exists(), reason="the extra `mpi` is not installed")
def test_a_launcher_starts_the_ranks_of_backends_that_need_one(run: Run, python_with_torch: str) -> None:
    """Slow, 3 s: MPI's ranks start twice."""
    launcher = f"{MPIEXEC} -n {{world}} {python_with_torch}"
    options = ("--backend", "mpi", "--api", "torchdist_ref", "--world", "2", "--launcher", launcher)
    done = run(*options, "--only", "all_reduce of bool")
    assert done.returncode == 0, done.stdout + done.stderr
    assert outcomes(done) == {acid.CHECKS[0].name: "pass", "all_reduce of bool": "pass"}, done.stdout


def test_a_launcher_that_fails_is_one_fact(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = run(
        "--backend", "gloo", "--launcher", f"{sys.executable} -c raise(SystemExit('no_slots_left'))", "--only", "bool"
    )
    assert done.returncode == 1 and [*outcomes(done).values()] == ["crash", "not run"], done.stdout + done.stderr
    assert "no_slots_left" in done.stdout
    assert not [*tmp_path.iterdir()]


@pytest.mark.long
def test_ranks_of_a_launcher_that_hang_or_die_are_named(run: Run, python_with_torch: str, tmp_path: Path) -> None:
    """A launcher in three lines, which starts two ranks and waits for them."""
    script = tmp_path / "launcher"
    script.write_text('#!/bin/sh\nPMI_RANK=0 "$@" &\nPMI_RANK=1 "$@" &\nwait\n')
    script.chmod(0o700)
    options = ("--world", "2", "--launcher", f"{script} {python_with_torch}", *ODD)
    done = run("--backend", "hangs", *options, "--only", "bool", "--seconds", "4")
    assert [*outcomes(done).values()] == ["hang", "not run"], done.stdout + done.stderr
    assert "rank 0 did not end within 4 s." in done.stdout
    done = run("--backend", "gloo", *options, "--only", "killed while")
    assert [*outcomes(done).values()] == ["pass", "pass"], done.stdout + done.stderr


def test_large_tensors_are_checked_only_if_asked_for(run: Run) -> None:
    listed = run("--backend", "x", "--list").stdout
    assert listed.count("more than 2 GiB:") == 3
    done = run("--backend", "gloo", "--only", "broadcast of more than 2 GiB")
    assert [*outcomes(done)] == [acid.CHECKS[0].name] and done.returncode == 0


@pytest.mark.long
@pytest.mark.parametrize("backend", ["gloo", "ref"])
def test_large_tensors(run: Run, backend: str) -> None:
    """Slow, a minute, and 13 GiB of memory: three ranks have tensors of more than 2 GiB."""
    done = run("--backend", backend, "--import", "torchdist_ref", "--large", "--only", "than 2 GiB", "--world", "2")
    assert [*outcomes(done).values()] == ["pass"] * 4, done.stdout


def test_one_rank_runs_what_one_rank_can(run: Run) -> None:
    done = run("--backend", "gloo", "--world", "1", "--only", "tag")
    assert done.returncode == 1 and outcomes(done)["tags"] == "not run" and "it needs two ranks" in done.stdout
    assert run("--backend", "gloo", "--world", "1", "--only", "all_reduce of bool").returncode == 0


def test_wrong_options_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for options, text in (([], "--backend"), (["--backend", "x", "--world", "0"], "--world must be at least 1, got 0")):
        with pytest.raises(SystemExit) as end:
            parse(options)
        assert end.value.code == 2 and text in capsys.readouterr().err


def test_the_badge_is_red_where_something_is_wrong() -> None:
    right, wrong = ({"outcome": kind} for kind in ("pass", "crash"))
    assert "#b3261e" not in report.badge([right]) and "#b3261e" in report.badge([right, wrong])
    assert "1 of 2" in report.badge([right, wrong])
