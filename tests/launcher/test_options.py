"""Options of the command: torch's own parser is the oracle of names and values; errors are one sentence each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.run as theirs

from tests.torch_versions import needs_torch, torch_has
from torchdist_ref import launch
from torchdist_ref.errors import ArgumentError
from torchdist_ref.launcher import devices, options

ROOT = Path(__file__).parents[2]
# With a value that is not the default.
VALUES = {
    "nproc_per_node": "3",
    "nnodes": "1:4",
    "node_rank": "2",
    "master_addr": "host7",
    "master_port": "4711",
    "local_addr": "10.0.0.7",
    "rdzv_backend": "c10d",
    "rdzv_endpoint": "host7:4712",
    "rdzv_id": "job9",
    "rdzv_conf": "timeout=7,last_call_timeout=3",
    "max_restarts": "5",
    "monitor_interval": "2.5",
    "start_method": "forkserver",
    "event_log_handler": "console",
    "role": "trainer",
    "log_dir": "logs",
    "redirects": "0:3,1:1",
    "tee": "2",
    "local_ranks_filter": "0,1",
    "duplicate_stdout_filters": "apple,,pear,plum",
    "duplicate_stderr_filters": "error",
    "logs_specs": "mine",
    "signals_to_handle": "SIGTERM,SIGUSR1",
    "shutdown_timeout": "11",
    "numa_binding": "node",
    "log_line_prefix_template": "${hostname}:${rank}: ",
}
FLAGS = ["standalone", "module", "no_python", "run_path", "virtual_local_rank"]
OURS = {"prefix", "use_env"}
# Options that older releases of torch lack, or whose default is another one there.
SINCE = {
    "shutdown_timeout": "2.13",
    "master_port": "2.13",
    "log_line_prefix_template": "2.15",
    "print_completion": "2.15",
}
OTHERS = {name for name, version in SINCE.items() if not torch_has(version)}
NAMES = [
    pytest.param(name, marks=needs_torch(SINCE[name], f"--{name}")) if name in SINCE else name
    for name in (*VALUES, *FLAGS)
]


def both(arguments: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what our parser and torch's find, without the options that cannot be compared."""
    ours = vars(options.get_args_parser().parse_args([*arguments, "script.py", "--lr", "1"]))
    torchs = vars(theirs.get_args_parser().parse_args([*arguments, "script.py", "--lr", "1"]))
    ours, torchs = ({name: found[name] for name in found if name not in OURS | OTHERS} for found in (ours, torchs))
    return ours, torchs


def test_defaults_are_torchs() -> None:
    ours, torchs = both([])
    assert ours == torchs


@needs_torch("2.13", "the options --numa-binding, --shutdown-timeout and --virtual-local-rank")
def test_every_option_of_torch_exists() -> None:
    parsers = [options.get_args_parser(), theirs.get_args_parser()]
    ours, torchs = ({flag for action in parser._actions for flag in action.option_strings} for parser in parsers)
    names = {flag[2:].replace("-", "_") for flag in torchs if flag[:2] == "--"}
    assert torchs <= ours and (set(VALUES) | set(FLAGS) | {"help", "print_completion"}) - OTHERS == names


@pytest.mark.parametrize("spelling", ["-", "_"])
@pytest.mark.parametrize("name", NAMES[: len(VALUES)])
def test_values_are_torchs(name: str, spelling: str) -> None:
    option = "--" + name.replace("_", spelling)
    if option not in options.get_args_parser()._option_string_actions:
        pytest.skip("a name of one word")
    ours, torchs = both([option, VALUES[name]])
    assert ours == torchs and ours[name] != both([])[0][name]


@pytest.mark.parametrize("name", NAMES)
def test_defaults_from_the_environment_are_torchs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"PET_{name.upper()}", VALUES.get(name, "1"))
    ours, torchs = both([])
    # torch reads these two from the command line only.
    if name not in ("logs_specs", "numa_binding"):
        assert ours[name] == torchs[name] and ours[name] not in (None, False)


@pytest.mark.parametrize("flag", ["-m", "--module", "--no-python", "--run_path", "--standalone"])
def test_flags_are_torchs(flag: str) -> None:
    ours, torchs = both([flag])
    assert ours == torchs


@pytest.mark.parametrize("short", [["-r", "3"], ["-t", "1"]])
def test_short_options_are_torchs(short: list[str]) -> None:
    ours, torchs = both(short)
    assert ours == torchs


def test_configuration_is_torchs(tmp_path: Path) -> None:
    arguments = ["--nnodes", "2:3", "--rdzv-backend", "c10d", "--rdzv-endpoint", "h:1", "--rdzv-id", "x", "--role", "r"]
    arguments += [
        "--log-dir",
        str(tmp_path),
        "--rdzv-conf",
        "read_timeout=7",
        "--max-restarts",
        "2",
        "-m",
        "this",
        "-v",
    ]
    ours, command, args = options.config_from_args(options.get_args_parser().parse_args(arguments))
    torchs, their_command, their_args = theirs.config_from_args(theirs.get_args_parser().parse_args(arguments))
    names = "min_nodes max_nodes nproc_per_node run_id role rdzv_endpoint rdzv_backend max_restarts signals_to_handle"
    for name in [*names.split(), "monitor_interval", "start_method", "local_addr", "virtual_local_rank"]:
        assert getattr(ours, name) == getattr(torchs, name), name
    assert ours.rdzv_configs["read_timeout"] == torchs.rdzv_configs["read_timeout"] == "7"
    assert (command, args) == (their_command, their_args)


@pytest.mark.parametrize("text", ["1", "4", "1:4", "12:16"])
def test_numbers_of_hosts_are_torchs(text: str) -> None:
    assert options.parse_min_max_nnodes(text) == theirs.parse_min_max_nnodes(text)


def error_of(function: Callable[..., object], argument: Any) -> Exception:
    with pytest.raises((ValueError, RuntimeError)) as raised:
        function(argument)
    return raised.value


@pytest.mark.parametrize("text", ["2:20:30", "a", "1:b", ""])
def test_errors_of_numbers_of_hosts_are_torchs(text: str) -> None:
    ours, torchs = (error_of(module.parse_min_max_nnodes, text) for module in (options, theirs))
    assert isinstance(ours, type(torchs)) and str(torchs) in str(ours)


def test_the_error_of_a_module_without_python_is_torchs() -> None:
    arguments = ["--no-python", "-m", "this"]
    ours, torchs = (error_of(run.main, arguments) for run in (launch, theirs))
    assert isinstance(ours, type(torchs)) and "--no-python" in str(torchs) and "--no-python" in str(ours)


@pytest.mark.parametrize("text", ["3", "cpu", "auto"])
def test_number_of_ranks_is_torchs(text: str) -> None:
    assert options.determine_local_world_size(text) == theirs.determine_local_world_size(text)


WRONG = [
    (["--nproc-per-node", "xpu", "x.py"], "--nproc-per-node/--nproc_per_node: xpu: these devices are not counted"),
    (["--nproc-per-node", "gpu", "x.py"], "--nproc-per-node gpu: this host has no visible GPU; give a number, cpu or"),
    (["--nnodes", "0", "x.py"], "--nnodes: must be a number of hosts, or MIN:MAX with 1 <= MIN <= MAX, got '0'"),
    (["--nnodes", "3:2", "x.py"], "--nnodes: must be a number of hosts, or MIN:MAX with 1 <= MIN <= MAX, got '3:2'"),
    (["--nnodes", "1:2", "x.py"], "--nnodes 1:2 needs a rendezvous that hosts can join; add --rdzv-backend c10d"),
    (
        ["--nnodes", "2", "--rdzv-backend", "c10d", "x.py"],
        "--rdzv-backend c10d needs --rdzv-endpoint HOST:PORT, the sa",
    ),
    (
        ["--nnodes", "2", "--standalone", "x.py"],
        "--standalone is for one host, but --nnodes is 2; leave out one of the",
    ),
    (["--nnodes", "2", "--node-rank", "2", "x.py"], "--node-rank 2 must be less than the number of hosts, --nnodes 2"),
    (["--node-rank", "1", "x.py"], "--node-rank 1 must be less than the number of hosts, --nnodes 1:1"),
    (["--max-restarts", "1.5", "x.py"], "--max-restarts/--max_restarts: must be a whole number, 0 or more, got '1.5'"),
    (["--start-method", "thread", "x.py"], "must be one of spawn, fork, forkserver, got 'thread'"),
    (["--numa-binding", "all", "x.py"], "must be one of node, socket, exclusive, core-complex, got 'all'"),
    (["--numa-binding", "node", "x.py"], "--numa-binding node: local rank 0 has no NVIDIA GPU on this host; leave out"),
    (["--signals-to-handle", "SIGFOO", "x.py"], "'SIGFOO' is not a signal; name signals as in SIGTERM,"),
    (["--signals-to-handle", "SIGTERM,SIGKILL", "x.py"], "'SIGKILL' cannot be forwarded; name signals as in SIGTERM,"),
    (["--redirects", "4", "x.py"], "must be 0, 1 (stdout), 2 (stderr), 3 (both), or LOCAL_RANK:NUMBER pairs such as"),
    (["-t", "1:3", "x.py"], "--tee names local rank 1, but --nproc-per-node 1 starts ranks 0 to 0"),
    (["--local-ranks-filter", "0,7", "x.py"], "--local-ranks-filter names local rank 7, but --nproc-per-node 1 starts"),
    (["--local-ranks-filter", "a", "x.py"], "must be local ranks with commas between them, such as 0,2, got 'a'"),
    (["--log-dir", "x.py", "x.py"], "--log-dir x.py: log_dir: x.py is a file; name a folder"),
    (["--logs-specs", "nosuch", "x.py"], "Could not find entrypoint under 'torchrun.logs_specs' of this name; install"),
    (["--rdzv-conf", "timeout", "x.py"], "--rdzv-conf must be KEY=VALUE pairs with commas between them, got 'timeout'"),
    (["--no-python", "-m", "this"], "-m (--module) and --no-python contradict each other; leave out one of them"),
    (
        ["--no-python", "nosuch-program"],
        "--no-python: there is no executable 'nosuch-program', neither at this path nor",
    ),
    (["--no-python", "./x.py"], "--no-python: './x.py' is not executable (chmod +x it, or leave out --no-python"),
    (["--run-path", "x.py"], "--run-path needs an absolute path, got 'x.py'; give "),
    (["/bin/sh"], "the script '/bin/sh' is a binary, not Python source (to run an executable, add --no-python)"),
    (["--nosuch", "x.py"], "--nosuch"),
]


@pytest.mark.parametrize(
    ("arguments", "words"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_wrong_option_is_one_sentence(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A program learns of a value that this host cannot use by an exception, of others by an exit."""
    (tmp_path / "x.py").write_text("print('never')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises((SystemExit, ArgumentError)) as raised:
        launch.main(arguments)
    shown, text = capfd.readouterr(), str(raised.value)
    if isinstance(raised.value, SystemExit):
        assert raised.value.code == 2 and shown.err.endswith("\n")
        text = shown.err[:-1]
    assert words in text and "\n" not in text and shown.out == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nnodes", "0", "x.py"], "error: argument --nnodes: must be a number of hosts, or MIN:MAX with 1 <= MIN"),
        (["--master-addr", "192.0.2.7", "--master-port", "0", "x.py"], "192.0.2.7, an address that no interface of th"),
    ],
)
def test_the_launcher_exits_with_2_after_one_sentence(arguments: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("print('never')")
    command = [sys.executable, "-m", "torchdist_ref.launch", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert words in result.stderr and result.stderr.count("\n") == 1, result.stderr
    assert (result.returncode, result.stdout) == (2, "")


def test_a_zip_application_is_a_script(tmp_path: Path) -> None:
    import zipapp

    (tmp_path / "application").mkdir()
    (tmp_path / "application" / "__main__.py").write_text("")
    zipapp.create_archive(tmp_path / "application", tmp_path / "application.pyz")
    assert options.parse_args([str(tmp_path / "application.pyz")]).training_script.endswith("pyz")


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 4), ("0,2", 2), ("", 0), ("-1", 0), ("0,9,1", 1), ("3", 1), ("GPU-a1,GPU-b2", 2), ("MIG-a,MIG-b,MIG-c", 3)],
)
def test_gpus_are_counted_as_programs_see_them(visible: str | None, count: int, tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:{number}1:00.0").mkdir(parents=True)
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert devices.count_gpus(str(tmp_path), environment) == count


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("node", [(0, 1, 2, 3), (0, 1, 2, 3), (4, 5, 6, 7)]),
        ("socket", [(0, 1, 2, 3, 4, 5, 6, 7)] * 3),
        ("exclusive", [(0, 1), (2, 3), (4, 5, 6, 7)]),
        ("core-complex", [(0, 1), (2, 3), (4, 5)]),
    ],
)
def test_processors_near_a_gpu(mode: str, expected: list[tuple[int, ...]], tmp_path: Path) -> None:
    """Two nodes of four processors on one socket, pairs are threads of a core and share a cache; GPUs on 0, 0, 1."""
    for number, node in enumerate((0, 0, 1)):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:{number}1:00.0").mkdir(parents=True)
        write(tmp_path / f"sys/bus/pci/devices/0000:{number}1:00.0/numa_node", str(node))
    for cpu in range(8):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}"
        pair = f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}"
        write(folder / "topology/physical_package_id", "0")
        write(folder / "topology/thread_siblings_list", pair)
        write(folder / "cache/index3/shared_cpu_list", pair)
    for node in (0, 1):
        write(tmp_path / f"sys/devices/system/node/node{node}/cpulist", f"{4 * node}-{4 * node + 3}")
    write(tmp_path / "sys/devices/system/cpu/online", "0-7")
    assert [devices.processors_near_gpu(rank, mode, str(tmp_path)) for rank in range(3)] == expected


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def test_a_template_and_a_completion_script(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options of torch 2.15: the template comes before the variable, and shtab is asked for the script."""
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "${rank}!")
    for given, expected in (([], "${rank}!"), (["--log-line-prefix-template", "${hostname} "], "${hostname} ")):
        config, _, _ = options.config_from_args(options.get_args_parser().parse_args([*given, "script.py"]))
        assert config.log_line_prefix_template == expected
    monkeypatch.setitem(sys.modules, "shtab", None)  # type: ignore[arg-type]
    assert sentence(["--print-completion", "zsh"], capsys).endswith(
        "--print-completion needs the package shtab: pip install shtab"
    )
    made = SimpleNamespace(SUPPORTED_SHELLS=["bash"], complete=lambda parser, shell: f"{shell} of {parser.prog}")
    monkeypatch.setitem(sys.modules, "shtab", made)  # type: ignore[arg-type]
    assert sentence(["--print_completion", "zsh"], capsys).endswith("--print_completion zsh: give one of bash")
    with pytest.raises(SystemExit) as end:
        options.parse_args(["--print-completion", "bash"])
    assert (end.value.code, capsys.readouterr().out) == (0, "bash of torchdist-run\n")


def sentence(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the sentence with which the parser refuses arguments."""
    with pytest.raises(SystemExit) as end:
        options.parse_args(arguments)
    assert end.value.code == 2
    return capsys.readouterr().err.rstrip()
