"""Command line of the launcher: torchrun's options with torchrun's meaning, and some of our own.

Each option has its name with dashes and with underscores, and a default from the variable ``PET_NAME``. Errors are one
sentence that names the option and the cure, with exit code 2. Do not add an option here without a test that fails
without it.
"""

from __future__ import annotations

import argparse
import os
import sys
import uuid
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn

from torchdist_ref.errors import ArgumentError, BackendArgumentError
from torchdist_ref.launcher import devices
from torchdist_ref.launcher.api import LaunchConfig
from torchdist_ref.launcher.environment import LOCALHOST
from torchdist_ref.launcher.local_workers import DEFAULT_SIGNALS, parse_signals
from torchdist_ref.launcher.logs import DefaultLogsSpecs, LogsSpecs, Std
from torchdist_ref.launcher.target import run_script_path, target_error
from torchdist_ref.stores.addresses import parse_endpoint, parse_host, parse_port

_PROGRAMS = {"torchdist-run": "torchdist-run", "torchdist_ref.run": "python -m torchdist_ref.run"}
MASTER_PORT = 29500
START_METHODS = ("spawn", "fork", "forkserver")
_DESCRIPTION = "Run a script as several ranks on this host, or as the ranks of one of several hosts."
_EPILOG = """\
The environment of each rank has RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR and
MASTER_PORT, which is all that init_process_group() needs. Rank 0 reads the launcher's standard input, the others read
nothing. Each option has a default from the environment: PET_MAX_RESTARTS for --max-restarts.

When a rank fails, the launcher reports its number and exit code and stops the others. Then it restarts all ranks, if
--max-restarts allows it, or shows the first failure and exits with that rank's code (128 plus the number of the signal
that killed it). Ctrl-C, SIGTERM, SIGHUP and SIGQUIT are forwarded to every rank; a second one kills them. Wrong options
exit with 2.

example:
  python -m torchdist_ref.launch --nproc-per-node 4 hello.py --epochs 3
"""


def get_args_parser() -> argparse.ArgumentParser:
    """Return the parser. Names and forms of the parsed values are those of torchrun."""
    parser = _Parser(
        prog=_PROGRAMS.get(os.path.basename(sys.argv[0]), "python -m torchdist_ref.launch"),
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for add in (_add_size_options, _add_rendezvous_options, _add_worker_options, _add_log_options):
        add(parser)
    text = "print the versions of torchdist_ref, Python and torch, and exit"
    parser.add_argument("--version", action=_PrintVersions, nargs=0, default=argparse.SUPPRESS, help=text)
    parser.add_argument("training_script", metavar="script", help="the script to run, or with -m the module")
    rest = parser.add_argument(
        "training_script_args", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments"
    )
    rest.required = False  # otherwise argparse reports two missing arguments
    return parser


class _Parser(argparse.ArgumentParser):
    """Parser that reports an error in one sentence, without the list of all options."""

    def error(self, message: str) -> NoReturn:
        """Write the sentence and exit with 2. Without a script, say how the command is used."""
        text = f"{self.prog}: error: {message}\n"
        if message.endswith(": script"):
            text = f"usage: {self.prog} [options] script [arguments of the script]\n{text}--help lists the options.\n"
        self.exit(2, text)


class _PrintVersions(argparse.Action):
    """Option that prints versions."""

    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any) -> NoReturn:
        from torchdist_ref.launcher.about import versions

        sys.stdout.write(f"{versions()}\n")
        parser.exit()


class _PrintCompletion(argparse.Action):
    """Option that prints the completion script of a shell, which the package `shtab` makes from the parser."""

    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any) -> NoReturn:
        _, shell, option = arguments
        try:
            shtab = import_module("shtab")
        except ImportError:
            parser.error(f"{option} needs the package shtab: pip install shtab")
        if shell not in shtab.SUPPORTED_SHELLS:
            parser.error(f"{option} {shell}: give one of {', '.join(shtab.SUPPORTED_SHELLS)}")
        # A shell completes the name of a command, not `python -m`.
        parser.prog = "torchdist-run"
        sys.stdout.write(f"{shtab.complete(parser, shell=shell)}\n")
        parser.exit()


class _Adder:
    """Adds options of one group of the help, each in both spellings, with a default from the environment."""

    def __init__(self, parser: argparse.ArgumentParser, title: str) -> None:
        self._group = parser.add_argument_group(title)

    def value(
        self, *flags: str, kind: Callable[[str], Any] = str, default: Any = None, metavar: str | None = None, help: str
    ) -> None:
        """Add an option with a value."""
        name = flags[-1].lstrip("-").replace("-", "_")
        if metavar and metavar.startswith("{"):
            help = f"{help} {metavar}"
        self._group.add_argument(
            *_spellings(flags),
            dest=name,
            type=kind,
            default=os.environ.get(f"PET_{name.upper()}", default),
            metavar=metavar or name.rpartition("_")[2].upper(),
            help=help,
        )

    def flag(self, *flags: str, help: str) -> None:
        """Add an option without a value; a variable other than 0 sets it."""
        name = flags[-1].lstrip("-").replace("-", "_")
        default = os.environ.get(f"PET_{name.upper()}", "0") not in ("0", "")
        self._group.add_argument(*_spellings(flags), dest=name, action="store_true", default=default, help=help)


def _spellings(flags: Sequence[str]) -> list[str]:
    long = [flag for flag in flags if flag.startswith("--") and "-" in flag[2:]]
    return [*flags, *("--" + flag[2:].replace("-", "_") for flag in long)]


def _add_size_options(parser: argparse.ArgumentParser) -> None:
    add = _Adder(parser, "ranks and hosts")
    nproc = "ranks on each host: a number, cpu, gpu, or auto (one for each GPU, else for each processor) (default: 1)"
    add.value("--nproc-per-node", kind=_ranks, default="1", metavar="N", help=nproc)
    add.value("--nnodes", kind=_nodes, default="1:1", metavar="N|MIN:MAX", help="number of hosts (default: 1)")
    add.value("--node-rank", kind=_number, default=0, metavar="N", help="rank of this host, for static rendezvous")
    add.value("--role", default="default", help="ROLE_NAME of the ranks (default: default)")
    text = "restarts of all ranks when one fails (default: 0)"
    add.value("--max-restarts", kind=_number, default=0, metavar="N", help=text)


def _add_rendezvous_options(parser: argparse.ArgumentParser) -> None:
    add = _Adder(parser, "address and rendezvous")
    text = "address of the first host, for static rendezvous (default: 127.0.0.1)"
    add.value("--master-addr", kind=_host, default="127.0.0.1", metavar="ADDRESS", help=text)
    text = "port of the store on the first host (default: a free one on one host, else 29500)"
    add.value("--master-port", kind=_port, metavar="PORT", help=text)
    add.value(
        "--local-addr", kind=_host, metavar="ADDRESS", help="address of this host for other hosts (default: looked up)"
    )
    text = "static (host ranks are given) or c10d (hosts join and leave) (default: static)"
    add.value("--rdzv-backend", default="static", metavar="NAME", help=text)
    add.value("--rdzv-endpoint", kind=_endpoint, default="", metavar="HOST:PORT", help="address at which hosts meet")
    add.value("--rdzv-id", default="none", metavar="ID", help="name of the job (default: none)")
    add.value("--rdzv-conf", default="", metavar="K=V,...", help="further options of the rendezvous")
    add.flag("--standalone", help="one host, a free port and a new job name, whatever other options say")


def _add_worker_options(parser: argparse.ArgumentParser) -> None:
    add = _Adder(parser, "how ranks run")
    add.flag("-m", "--module", help="run a module, as python -m does")
    add.flag("--no-python", help="run an executable, without python before it")
    add.flag("--run-path", help="run the script (an absolute path) as a function of a started interpreter")
    text = f"start of an interpreter for --run-path: {', '.join(START_METHODS)} (default: spawn)"
    add.value("--start-method", kind=_one_of(*START_METHODS), default="spawn", metavar="METHOD", help=text)
    text = "signals to forward to the ranks, separated by commas (default: SIGTERM,SIGINT,SIGHUP,SIGQUIT)"
    add.value("--signals-to-handle", kind=_signals, default=DEFAULT_SIGNALS, metavar="NAMES", help=text)
    text = "time between asking ranks to stop and killing them (default: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 30)"
    add.value("--grace", "--shutdown-timeout", kind=_seconds, metavar="SECONDS", help=text)
    text = "accepted because torchrun has it, without effect: failures are noticed at once (default: 0.1)"
    add.value("--monitor-interval", kind=_seconds, default=0.1, metavar="SECONDS", help=text)
    add.flag("--virtual-local-rank", help="each rank sees only its own GPU, as device 0, and has LOCAL_RANK 0")
    text = "bind ranks to the processors near their GPU: node, socket, exclusive or core-complex"
    add.value("--numa-binding", kind=_one_of(*devices.BINDINGS), metavar="MODE", help=text)
    add.flag("--use-env", help="accepted because torch.distributed.launch has it; LOCAL_RANK is always set")


def _add_log_options(parser: argparse.ArgumentParser) -> None:
    add = _Adder(parser, "output and logs")
    add.flag("--prefix", help="begin each line of output with the rank that wrote it")
    text = "text to begin each line with; ${role_name}, ${rank}, ${local_rank} and ${hostname} are replaced"
    add.value("--log-line-prefix-template", default="", metavar="TEXT", help=text)
    add.value("--log-dir", metavar="FOLDER", help="base folder of log files (default: a temporary one)")
    text = "streams to write to log files: 0, 1 (stdout), 2 (stderr), 3 (both), or LOCAL_RANK:NUMBER pairs"
    add.value("-r", "--redirects", kind=_streams, default="0", metavar="STREAMS", help=text)
    text = "streams to write to log files and to the console, given as for --redirects"
    add.value("-t", "--tee", kind=_streams, default="0", metavar="STREAMS", help=text)
    text = "local ranks whose output appears on the console, separated by commas (default: all)"
    add.value("--local-ranks-filter", kind=_rank_list, default="", metavar="RANKS", help=text)
    for name in ("stdout", "stderr"):
        text = f"copy lines of teed {name} with one of these texts to filtered_{name}.log (,, is a comma in a text)"
        add.value(f"--duplicate-{name}-filters", kind=_texts, default=[], metavar="TEXTS", help=text)
    text = "class of log files: its name in the entry points torchrun.logs_specs"
    add.value("--logs-specs", metavar="NAME", help=text)
    text = "handler of the events of agents on several hosts (default: null)"
    add.value("--event-log-handler", default="null", metavar="NAME", help=text)
    text = "print a completion script for a shell (bash, zsh or tcsh) and exit; needs the package shtab"
    parser.add_argument("--print-completion", "--print_completion", action=_PrintCompletion, metavar="SHELL", help=text)


def parse_args(args: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check a command line.

    Args:
        args: Arguments after the launcher's own name. None: those of this process.

    Returns:
        The options, with torchrun's names. Arguments after the script's name belong to the script.

    Raises:
        SystemExit: An argument is wrong. The code is 2, and a line on standard error names the argument.

    Example:
        >>> options = parse_args(["--nproc_per_node", "4", "-m", "this", "--verbose"])
        >>> options.nproc_per_node, options.training_script, options.training_script_args, options.max_restarts
        ('4', 'this', ['--verbose'], 0)
    """
    parser = get_args_parser()
    found = parser.parse_args(args)
    error = target_error(found.training_script, found.module, found.no_python, found.run_path) or _contradiction(found)
    if error:
        parser.error(error)
    return found


def _contradiction(args: argparse.Namespace) -> str:
    low, high = parse_min_max_nnodes(args.nnodes)
    if args.standalone and high > 1:
        return f"--standalone is for one host, but --nnodes is {args.nnodes}; leave out one of them"
    if args.node_rank and args.node_rank >= high:
        return f"--node-rank {args.node_rank} must be less than the number of hosts, --nnodes {args.nnodes}"
    if args.rdzv_backend == "static" and low != high:
        return f"--nnodes {args.nnodes} needs a rendezvous that hosts can join; add --rdzv-backend c10d"
    if high > 1 and args.rdzv_backend != "static" and not args.rdzv_endpoint:
        return f"--rdzv-backend {args.rdzv_backend} needs --rdzv-endpoint HOST:PORT, the same on all hosts"
    return _log_contradiction(args) if args.nproc_per_node.isdecimal() else ""


def _log_contradiction(args: argparse.Namespace) -> str:
    count = int(args.nproc_per_node)
    given = {"--redirects": args.redirects, "--tee": args.tee, "--local-ranks-filter": args.local_ranks_filter}
    for option, value in given.items():
        names = [] if option != "--local-ranks-filter" and ":" not in value else value.split(",")
        wrong = [rank for name in names if name and int(rank := name.partition(":")[0]) >= count]
        if wrong:
            return f"{option} names local rank {wrong[0]}, but --nproc-per-node {count} starts ranks 0 to {count - 1}"
    return ""


def config_from_args(args: argparse.Namespace) -> tuple[LaunchConfig, Callable[..., Any] | str, list[str]]:
    """Return configuration, executable (or function) and its arguments for a parsed command line.

    Args:
        args: Result of `parse_args`; it is not changed.

    Raises:
        ArgumentError: A value is wrong; the sentence names the option.
    """
    low, high = parse_min_max_nnodes(args.nnodes)
    alone = args.standalone or (high == 1 and args.master_port is None and not args.rdzv_endpoint)
    prefix = args.log_line_prefix_template or os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
    config = LaunchConfig(
        min_nodes=low,
        max_nodes=high,
        nproc_per_node=determine_local_world_size(args.nproc_per_node),
        logs_specs=_logs_specs(args),
        run_id=str(uuid.uuid4()) if alone else args.rdzv_id,
        role=args.role,
        rdzv_endpoint="localhost:0" if alone else get_rdzv_endpoint(args),
        rdzv_backend="c10d" if alone else args.rdzv_backend,
        rdzv_configs=_rendezvous_options(args),
        max_restarts=args.max_restarts,
        monitor_interval=args.monitor_interval,
        start_method=args.start_method,
        log_line_prefix_template="[rank ${rank}] " if args.prefix else prefix,
        local_addr=args.local_addr,
        event_log_handler=args.event_log_handler,
        numa_options=devices.NumaOptions(args.numa_binding) if args.numa_binding else None,
        signals_to_handle=args.signals_to_handle,
        duplicate_stdout_filters=args.duplicate_stdout_filters,
        duplicate_stderr_filters=args.duplicate_stderr_filters,
        virtual_local_rank=args.virtual_local_rank,
        shutdown_timeout=args.shutdown_timeout,
    )
    return config, *_command(args)


def _command(args: argparse.Namespace) -> tuple[Callable[..., Any] | str, list[str]]:
    if args.module and args.no_python:
        raise ArgumentError("-m (--module) and --no-python contradict each other; leave out one of them")
    rest = [args.training_script, *args.training_script_args]
    if args.run_path:
        return run_script_path, rest
    if args.no_python:
        return rest[0], rest[1:]
    return os.environ.get("PYTHON_EXEC", sys.executable), ["-u", *(["-m"] if args.module else []), *rest]


def parse_min_max_nnodes(nnodes: str) -> tuple[int, int]:
    """Return the smallest and the largest number of hosts.

    Args:
        nnodes: ``N`` or ``MIN:MAX``.

    Raises:
        BackendArgumentError: The text has another form.

    >>> parse_min_max_nnodes("2"), parse_min_max_nnodes("1:4")
    ((2, 2), (1, 4))
    """
    parts = nnodes.split(":")
    if len(parts) > 2:
        raise BackendArgumentError(
            f'nnodes={nnodes} is not in "MIN:MAX" format; give a number of hosts, or two as 1:4.'
        )
    return int(parts[0]), int(parts[-1])


def determine_local_world_size(nproc_per_node: str) -> int:
    """Return the number of ranks on this host.

    Args:
        nproc_per_node: A number, ``cpu``, ``gpu`` or ``auto``.

    Raises:
        ArgumentError: The text is another one, or this host has no GPU.
    """
    if nproc_per_node.isdecimal():
        return int(nproc_per_node)
    gpus = devices.count_gpus() if nproc_per_node in ("gpu", "auto") else 0
    if nproc_per_node == "gpu" and not gpus:
        raise ArgumentError("--nproc-per-node gpu: this host has no visible GPU; give a number, cpu or auto")
    return gpus or devices.count_cpus()


def get_rdzv_endpoint(args: argparse.Namespace) -> str:
    """Return ``host:port`` where the hosts meet: for static rendezvous the master's address, unless one is given."""
    if args.rdzv_endpoint or args.rdzv_backend != "static":
        return str(args.rdzv_endpoint)
    return f"{args.master_addr}:{MASTER_PORT if args.master_port is None else args.master_port}"


def get_use_env(args: argparse.Namespace) -> bool:
    """Return whether ranks learn their local rank from LOCAL_RANK alone. It is always so, whatever `args` are."""
    return True


def _rendezvous_options(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in filter(None, args.rdzv_conf.split(",")):
        name, sign, value = (part.strip() for part in pair.partition("="))
        if not (name and sign and value):
            raise ArgumentError(f"--rdzv-conf must be KEY=VALUE pairs with commas between them, got {pair!r}")
        found[name] = value
    return found | ({"rank": args.node_rank} if args.rdzv_backend == "static" else {})


def _logs_specs(args: argparse.Namespace) -> LogsSpecs | None:
    """Return the rule of log files; None if none is asked for."""
    redirects, tee = Std.from_str(args.redirects), Std.from_str(args.tee)
    ranks = {int(rank) for rank in args.local_ranks_filter.split(",")} if args.local_ranks_filter else None
    kind: Any = DefaultLogsSpecs
    if args.logs_specs is not None:
        from importlib.metadata import entry_points

        found = entry_points(group="torchrun.logs_specs", name=args.logs_specs)
        if not found:
            raise ArgumentError(
                f"--logs-specs {args.logs_specs}: Could not find entrypoint under 'torchrun.logs_specs' of this name; "
                "install the package that has it"
            )
        kind = next(iter(found)).load()
    elif not (args.log_dir or redirects or tee or ranks):
        return None
    try:
        specs: LogsSpecs = kind(log_dir=args.log_dir, redirects=redirects, tee=tee, local_ranks_filter=ranks)
    except OSError as error:
        reason = f"{error.strerror}; name a folder that can be created and written" if error.strerror else error
        raise ArgumentError(f"--log-dir {args.log_dir}: {reason}") from error
    return specs


def _ranks(text: str) -> str:
    if text in ("auto", "cpu", "gpu") or (text.isdecimal() and int(text) >= 1):
        return text
    if text == "xpu":
        raise argparse.ArgumentTypeError("xpu: these devices are not counted without torch; give their number")
    raise argparse.ArgumentTypeError(
        f"must be a whole number of ranks, at least 1, got {text!r} (or one of auto, cpu, gpu)"
    )


def _nodes(text: str) -> str:
    parts = text.split(":")
    valid = len(parts) <= 2 and all(part.isdecimal() for part in parts) and 0 < int(parts[0]) <= int(parts[-1])
    if not valid:
        raise argparse.ArgumentTypeError(f"must be a number of hosts, or MIN:MAX with 1 <= MIN <= MAX, got {text!r}")
    return text


def _number(text: str) -> int:
    if not text.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, 0 or more, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds, 0 or more, got {text!r}")
    return value


def _port(text: str) -> int:
    try:
        return parse_port(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a port number from 0 to 65535 (0: any free one), got {text!r}"
        ) from None


def _host(text: str) -> str:
    try:
        parse_host(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a host name or an address, got {text!r}: {error}") from None
    return text.strip()


def _endpoint(text: str) -> str:
    try:
        parse_endpoint(text.strip() or LOCALHOST, 0)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be HOST:PORT, got {text!r}: {error}") from None
    return text.strip()


def _one_of(*values: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in values:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(values)}, got {text!r}")
        return text

    return check


def _signals(text: str) -> str:
    try:
        parse_signals(text)
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _streams(text: str) -> str:
    try:
        Std.from_str(text)
    except ArgumentError:
        expected = "0, 1 (stdout), 2 (stderr), 3 (both), or LOCAL_RANK:NUMBER pairs such as 0:3,1:1"
        raise argparse.ArgumentTypeError(f"must be {expected}, got {text!r}") from None
    return text


def _rank_list(text: str) -> str:
    if text and not all(part.strip().isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"must be local ranks with commas between them, such as 0,2, got {text!r}")
    return text


def _texts(text: str) -> list[str]:
    return [part.replace("\0", ",") for part in text.replace(",,", "\0").split(",")]
