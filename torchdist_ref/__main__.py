"""Command ``python -m torchdist_ref``: what this package is, its version, and its commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torchdist_ref.launcher.about import versions

COMMANDS = {
    "torchdist_ref env": "versions, cores, memory, limits, devices and backends, for a report of a defect",
    "torchdist_ref.launch": "run a script as several ranks, with torchrun's options (also torchdist-run)",
    "torchdist_ref.debug": "explain the flight recorder dumps of a job that hangs",
    "torchdist_ref.acid": "run some seventy checks on a backend of torch.distributed",
    "torchdist_ref.benchmark": "measure collectives, hooks and DistributedDataParallel",
}
_BAD_INPUT_CODE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status: 2 if an argument is unknown, else 0.

    Args:
        arguments: Arguments. Default None: those of this process.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given == ["--version"]:
        sys.stdout.write(f"{versions()}\n")
        return 0
    if given == ["env"]:
        # The report says how torch was built, so it imports torch; nothing else here does.
        from torchdist_ref.debug import environment

        return environment.main()
    width = max(map(len, COMMANDS))
    rows = [f"  python -m {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    head = "The API of torch.distributed in readable Python: import torchdist_ref as dist"
    text = "\n".join([versions(), "", head, "", "commands (the others have --help):", *rows, ""])
    if given in ([], ["-h"], ["--help"]):
        sys.stdout.write(text)
        return 0
    sys.stderr.write(
        f"{text}\npython -m torchdist_ref: error: unknown argument {given[0]!r}; name one of the commands\n"
    )
    return _BAD_INPUT_CODE


if __name__ == "__main__":
    sys.exit(main())
