"""The directives of this site: pictures and tables that are made from the library itself.

`.. schedule:: all_reduce ring 4`
    The schedule as the library builds it, drawn, with the same steps as text below.
`.. layers::`
    The layers of the package with the imports between them, as the architecture test reads them.
`.. layer-table::`
    Who may import whom, and who does.
`.. algorithms::`
    Every operation with its algorithms, and what each costs.
`.. capabilities::`
    What each backend can do, as the tests measured it.
`.. backend-table::`
    The same in the shape of torch's page: call by backend and device.
`.. versions::`
    Results of the tests with each pair of Python and torch, as `nox -s versions` recorded them.
`.. proofs-at-length::`
    Last run of each proof, as `nox -s soak` recorded it.
`.. nightly::`
    Last outcome of each step that is too long for CI, as `nox -s nightly` recorded it.
`.. private-names::`
    The private names of torch that the library uses, from `torchdist_ref.torch_internals.torch_private`.
`.. launcher-options::`
    The options of the launcher, from its parser.
`.. benchmark-options::`
    The options of the benchmark, for each of its commands.
`.. gpu-report::`
    What ran on a GPU, as `python -m tests.gpu --land` recorded it; a sentence if nothing has.
"""

from __future__ import annotations

import json
import re
from argparse import Action, ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import layers
from docutils import nodes
from docutils.parsers.rst import Directive, directives
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from torchdist_ref import schedules
from torchdist_ref.benchmark import __main__ as benchmark
from torchdist_ref.launcher.options import get_args_parser
from torchdist_ref.torch_internals import torch_private

VERSIONS = Path(__file__).parents[1] / "versions.json"
SOAK = Path(__file__).parents[1] / "soak.json"
NIGHTLY = Path(__file__).parents[1] / "nightly.json"
GPU = Path(__file__).parents[1] / "gpu.json"
GPU_TUTORIALS = Path(__file__).parents[1] / "gpu_tutorials.json"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.11", "2.12", "2.13", "2.14", "2.15")
CAPABILITIES = Path(__file__).parents[1] / "reference" / "capabilities.json"


def run_before_reading(app: Sphinx, directive: str, program: Callable[[], object]) -> None:
    """Run the program of a directive before Sphinx forks its readers, if a page to be read has the directive.

    The program runs once then, the readers find what it has cached, and its ranks have the machine for themselves.
    """
    fence = f"```{{{directive}}} "

    def run(app: Sphinx, env: BuildEnvironment, pages: list[str]) -> None:
        if any(fence in env.doc2path(page).read_text("utf-8") for page in pages):
            program()

    app.connect("env-before-read-docs", run)


def table(kind: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> nodes.table:
    """Build a table node; backticks enclose code in its text, the kind is for the style sheet."""
    group = nodes.tgroup(cols=len(header))
    group += [nodes.colspec(colwidth=1) for _ in header]
    group += nodes.thead("", row(header))
    group += nodes.tbody("", *[row(cells) for cells in rows])
    return nodes.table("", group, classes=["own-table", kind])


def row(cells: tuple[str, ...]) -> nodes.row:
    """Build one row of a table."""
    return nodes.row("", *[nodes.entry("", nodes.paragraph("", "", *with_code(cell))) for cell in cells])


def with_code(text: str) -> list[nodes.Node]:
    """Return plain text in which backticks enclose code, one or two of them on each side."""
    parts = re.split(r"(``.+?``|`[^`]+`)", text)
    return [nodes.literal("", part.strip("`")) if part.startswith("`") else nodes.Text(part) for part in parts if part]


def picture(svg: str, caption: str) -> nodes.figure:
    """Put a drawing into the page, as wide as the text at most."""
    drawing = nodes.raw("", f'<div class="drawing" tabindex="0">{svg}</div>', format="html")
    return nodes.figure("", drawing, nodes.caption("", caption), classes=["drawn"])


class ScheduleDirective(Directive):
    """Draw one schedule: operation, algorithm, world size, and a root where there is one."""

    required_arguments = 3
    optional_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {"caption": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        """Build the schedule, draw it, and write its steps below."""
        operation, algorithm, world, *root = self.arguments
        schedule = schedules.build(operation, algorithm, int(world), int(root[0]) if root else 0)
        caption = self.options.get("caption") or f"{operation} by {algorithm} over {world} ranks"
        steps = nodes.raw(
            "",
            f'<details class="steps"><summary>The same steps as text</summary><pre>{text(schedule)}</pre></details>',
            format="html",
        )
        return [picture(unique(schedules.draw(schedule), f"{operation}-{algorithm}-{world}"), caption), steps]


def text(schedule: Any) -> str:
    """Return the schedule's own text, safe for HTML."""
    return str(schedule).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def unique(svg: str, name: str) -> str:
    """Make the ids in a drawing unlike those of other drawings on the page."""
    for found in set(re.findall(r'id="([^"]+)"', svg)):
        svg = re.sub(rf'(id="|url\(#|href="#|labelledby="){re.escape(found)}\b', rf"\g<1>{name}-{found}", svg)
    return svg


class LayersDirective(Directive):
    """Draw the layers with the imports that exist."""

    def run(self) -> list[nodes.Node]:
        """Read the source and draw it."""
        return [
            picture(
                layers.svg(),
                "An arrow leads from a box to one that it imports. What follows from a chain of arrows is omitted.",
            )
        ]


class LayerTableDirective(Directive):
    """Show who may import whom."""

    def run(self) -> list[nodes.Node]:
        """Read the table and the source."""
        header = ("part", "layer", "may import", "imports today", "torch")
        opened = "<details><summary>All parts, and what each may import</summary>"
        rows = table("layer-table", header, list(layers.table()))
        return [nodes.raw("", opened, format="html"), rows, nodes.raw("", "</details>", format="html")]


class AlgorithmsDirective(Directive):
    """List the algorithms of every operation with their cost."""

    def run(self) -> list[nodes.Node]:
        """Take one table for each operation from the schedules."""
        return [node for operation in schedules.operations() for node in listing(operation)]


HEADER = ("algorithm", "what it does", "rounds", "sent", "time")


def listing(operation: str) -> list[nodes.Node]:
    """Make the table of one operation."""
    rows = [line(operation, algorithm) for algorithm in schedules.algorithms(operation)]
    return [nodes.rubric("", "", nodes.literal("", operation)), table("algorithms", HEADER, rows)]


def line(operation: str, algorithm: str) -> tuple[str, ...]:
    """Return the catalogue's row of one algorithm, with its rounds and the bytes that the busiest of 8 ranks sends."""
    entry = schedules.entry(operation, algorithm)
    rounds, sent = counted(operation, algorithm)
    idea = f"{entry.summary}; for: {entry.when} ({entry.source})"
    return algorithm, idea, str(rounds), sent, entry.cost


TWO_HOSTS = (0, 0, 0, 0, 1, 1, 1, 1)


def counted(operation: str, algorithm: str) -> tuple[int, str]:
    """Return the rounds in which 8 ranks communicate, on two hosts if that matters, and what the busiest sends."""
    hosts = TWO_HOSTS if algorithm == "hierarchical" else None
    schedule = schedules.build(operation, algorithm, 8, hosts=hosts)
    rounds = [[move for move in moves if move.src != move.dst] for moves in schedule.rounds]
    senders = [move.src for moves in rounds for move in moves]
    busiest = max((senders.count(rank) for rank in range(8)), default=0)
    sent = f"{float(busiest * schedule.share):.3g} m" if schedule.share else f"{busiest} signals"
    return sum(bool(moves) for moves in rounds), sent


class CapabilitiesDirective(Directive):
    """Show the table of what each backend can do, and with which torch and when it was measured."""

    def run(self) -> list[nodes.Node]:
        """Read what `python -m tests.capabilities` wrote."""
        kept = json.loads(CAPABILITIES.read_text(encoding="utf-8"))
        unmeasured = {said for said in kept["cuda"].values() if isinstance(said, str)}
        devices = {backend: found for backend, found in kept["cuda"].items() if not isinstance(found, str)}
        header = ("call", "CPU tensors", "unequal shapes", "subgroups", *(["CUDA tensors"] if devices else []))
        rows = [capability(kept["cpu"], devices, name) for name in next(iter(kept["cpu"].values()))]
        when = f"Measured on {kept['date']} with torch {kept['torch']} and {kept['world']} ranks, with the backends "
        when += f"{', '.join(kept['cpu'])}: where a cell names none of them, it holds for each. "
        rest = [backend for backend in kept["cuda"] if backend not in devices]
        when += f"CUDA tensors on {', '.join(rest)}: {', '.join(sorted(unmeasured))}." if rest else ""
        when += f" CUDA tensors were measured on {kept['cuda_run']}." if kept.get("cuda_run") else ""
        return [table("capabilities", header, rows), nodes.paragraph("", when)]


def capability(cpu: Any, cuda: Any, name: str) -> tuple[str, ...]:
    """Make the row of one function."""
    cells = [together({backend: found[name][aspect] for backend, found in cpu.items()}) for aspect in ASPECTS]
    return (
        name,
        *cells,
        *([together({backend: found[name]["plain"] for backend, found in cuda.items()})] if cuda else []),
    )


class BackendTableDirective(Directive):
    """Show which backend supports which call on which device, in the shape of torch's page."""

    def run(self) -> list[nodes.Node]:
        """Read what `python -m tests.capabilities` wrote."""
        kept = json.loads(CAPABILITIES.read_text(encoding="utf-8"))
        backends = list(kept["cuda"])
        header = ("call", *(f"{backend}, {device}" for backend in backends for device in ("CPU", "GPU")))
        rows = [
            (shown, *(cell(kept, backend, device, name) for backend in backends for device in ("cpu", "cuda")))
            for shown, name in OFFICIAL_ROWS.items()
        ]
        made = table("backend-table", header, rows)
        for paragraph in list(made.findall(nodes.paragraph)):
            paragraph.replace_self(paragraph.children)  # a page of many cells stays light
        return [made]


# Rows of torch's table, each with the measured call that decides it.
OFFICIAL_ROWS = {
    "send": "isend, recv",
    "recv": "isend, recv",
    **{
        name: name
        for name in ("broadcast", "all_reduce", "reduce", "all_gather", "gather", "scatter", "reduce_scatter")
    },
    "all_to_all": "all_to_all",
    "barrier": "barrier",
}


def cell(kept: dict[str, Any], backend: str, device: str, name: str) -> str:
    """Return what was measured for one call on one backend and device."""
    if device == "cpu" and backend not in kept["cpu"]:
        return "no"  # nccl accepts CUDA tensors only
    found = kept[device][backend]
    return "not measured" if isinstance(found, str) else str(found[name]["plain"])


ASPECTS = ("plain", "unequal", "subgroup")


def together(found: dict[str, str]) -> str:
    """Say in one cell what holds for all backends, or what for which."""
    backends: dict[str, list[str]] = {}
    for backend, said in found.items():
        backends.setdefault(said, []).append(backend)
    if len(backends) == 1:
        return next(iter(backends))
    return "; ".join(f"{', '.join(names)}: {said}" for said, names in backends.items())


class VersionsDirective(Directive):
    """Show the recorded test runs, why tests were skipped in each, and the versions without a run."""

    def run(self) -> list[nodes.Node]:
        """Read what `python -m tests.versions` wrote."""
        runs = json.loads(VERSIONS.read_text(encoding="utf-8"))
        header = ("Python", "torch", "system", "date", "passed", "failed", "skipped", "folders of tests not run")
        shown = [tuple(str(found[key]) for key in KEYS) + (", ".join(found["folders_not_run"]),) for found in runs]
        absent = [f"Python {version}" for version in PYTHONS if not recorded(runs, "python", version)]
        absent += [f"torch {version}" for version in TORCHES if not recorded(runs, "torch", version)]
        sentence = f"No run of nox -s versions is recorded with {', '.join(absent)}."
        rest = nodes.paragraph("", sentence) if absent else None
        details = [node for found in runs for key in ("failures", "reasons") for node in listed(found, key)]
        return [table("versions", header, shown), *([rest] if rest else []), *details]


class ProofsAtLengthDirective(Directive):
    """Show the last run of each test at length: runs, failures and time, and folded what the runs were."""

    def run(self) -> list[nodes.Node]:
        """Read what `python -m tests.soak` wrote."""
        self.state.document.settings.env.note_dependency(str(SOAK))
        found = json.loads(SOAK.read_text(encoding="utf-8"))
        header = ("test", "runs", "failures", "minutes", "date")
        rows = [
            (
                each["proof"],
                f"{each['done']:,}" + (f" of {each['asked']:,}" if each["done"] < each["asked"] else ""),
                f"{each['failures']:,}",
                f"{each['seconds'] / 60:.1f}",
                each["date"],
            )
            for each in found
        ]
        counted = [
            nodes.list_item("", nodes.paragraph("", f"{each['proof']}: {counts(each['counts'])}."))
            for each in found
            if each["counts"]
        ]
        machines = dict.fromkeys(f"{each['machine']}; Python {each['python']}, torch {each['torch']}" for each in found)
        where = nodes.paragraph("", f"Run on {' and '.join(machines)}, beside other work.")
        opened = nodes.raw("", "<details class='figures'><summary>Runs by kind, and times</summary>", format="html")
        folded = [opened, nodes.bullet_list("", *counted), nodes.raw("", "</details>", format="html")]
        return [table("proofs", header, rows), where, *(folded if counted else [])]


def counts(found: dict[str, int]) -> str:
    """Return the counters of a test as a text.

    >>> counts({"agent leaves": 100, "longest milliseconds": 1061})
    'agent leaves 100, longest milliseconds 1,061'
    """
    return ", ".join(f"{name} {count:,}" for name, count in found.items())


class NightlyDirective(Directive):
    """Show the last outcome of each step of the nightly run, with its date and commit; a sentence if there is none."""

    def run(self) -> list[nodes.Node]:
        """Read what `python -m tests.nightly` wrote."""
        self.state.document.settings.env.note_dependency(str(NIGHTLY))
        found = json.loads(NIGHTLY.read_text(encoding="utf-8")) if NIGHTLY.exists() else []
        if not found:
            return [nodes.paragraph("", "No nightly run is recorded yet.")]
        header = ("step", "outcome", "minutes", "date", "commit")
        rows = [
            (each["what"], each["result"] if each["passed"] else f"failed: {each['result']}")
            + (f"{each['minutes']:.1f}", each["date"], each["commit"][:9])
            for each in found
        ]
        where = nodes.paragraph("", f"Run on {' and '.join(dict.fromkeys(each['machine'] for each in found))}.")
        return [table("nightly", header, rows), where]


class PrivateNamesDirective(Directive):
    """List the private names of torch: the name, its purpose, the consequence without it, and where it was seen."""

    def run(self) -> list[nodes.Node]:
        """Read the table of the library."""
        header = ("name in torch", "purpose", "without it", "seen in torch")
        rows = [
            (str(name), name.purpose, name.without, ", ".join(name.versions)) for name in torch_private.NAMES.values()
        ]
        return [table("private-names", header, rows)]


KEYS = ("python", "torch", "system", "date", "passed", "failed", "skipped")
TITLES = {"failures": "Failed", "reasons": "Reasons of skipped tests"}


def recorded(runs: list[dict[str, Any]], key: str, version: str) -> bool:
    """Return whether there is a run with a version such as 3.11."""
    return any(found[key].split(".")[:2] == version.split(".") for found in runs)


def listed(found: dict[str, Any], key: str) -> list[nodes.Node]:
    """List the failures or the reasons of skipped tests of one run; nothing if there are none."""
    texts = [f"{count} x {why}" for why, count in found[key].items()] if key == "reasons" else found[key]
    if not texts:
        return []
    items = [nodes.list_item("", nodes.paragraph("", "", *with_code(text))) for text in texts]
    title = f"{TITLES[key]} with Python {found['python']} and torch {found['torch']}:"
    return [nodes.paragraph("", title), nodes.bullet_list("", *items)]


NO_GPU = "Nothing has run on a GPU yet: no machine with one was available to the project."


class GpuDirective(Directive):
    """Show the last landed run on a GPU: machine, counts, failures, times, and the outputs of the tutorials."""

    def run(self) -> list[nodes.Node]:
        """Read what `python -m tests.gpu --land` wrote."""
        if not GPU.exists():
            return [nodes.paragraph("", NO_GPU)]
        return gpu_report(
            json.loads(GPU.read_text(encoding="utf-8")), json.loads(GPU_TUTORIALS.read_text(encoding="utf-8"))
        )


def gpu_report(found: dict[str, Any], outputs: dict[str, Any]) -> list[nodes.Node]:
    """Build the nodes of a landed report."""
    machine = found["machine"]
    facts = f"CUDA {machine['cuda']}, NCCL {machine['nccl']}, driver {machine['driver']}, Python {machine['python']}"
    stamp = f"Run on {found['stamp']}; {facts}, {machine['system']}; commit {found['commit'][:10] or 'unknown'}."
    outcomes = ("passed", "failed", "crashed", "timed out", "not run", "skipped")
    rows = [
        (part["name"], *(str(part["counts"].get(each, 0)) for each in outcomes), f"{part['seconds']:.0f} s")
        for part in found["parts"]
    ]
    shown: list[nodes.Node] = [nodes.paragraph("", stamp), table("gpu", ("part", *outcomes, "time"), rows)]
    for part in found["parts"]:
        texts = [f"{name}: {why}" for name, why in part["failures"].items()]
        texts += [f"{count} skipped: {why}" for why, count in part["skips"].items()]
        if texts:
            items = [nodes.list_item("", nodes.paragraph("", text)) for text in texts]
            shown += [nodes.paragraph("", f"Not passed in {part['name']}:"), nodes.bullet_list("", *items)]
        if part["rows"]:
            header = ("collective", "bytes", "ranks", "backend", "microseconds")
            times = [
                (
                    each["op"],
                    str(each["size_bytes"]),
                    str(each["world"]),
                    each["backend"],
                    f"{each['seconds'] * 1e6:.1f}",
                )
                for each in part["rows"]
            ]
            shown.append(table("gpu-times", header, times))
    for name, tutorials in outputs.items():
        for tutorial, cells in tutorials.items():
            lines = "\n".join(f"# {cell}\n{each['output']}" for cell, each in cells.items() if each["output"])
            summary = f"<summary>Outputs of {tutorial}, {name}</summary>"
            shown.append(nodes.raw("", f"<details>{summary}<pre>{text(lines)}</pre></details>", format="html"))
    return shown


class LauncherOptionsDirective(Directive):
    """Tables of the launcher's options, one for each group of its help."""

    def run(self) -> list[nodes.Node]:
        """Read the parser, and write the groups that have options with values or switches."""
        shown: list[nodes.Node] = []
        for group in get_args_parser()._action_groups:  # noqa: SLF001 (argparse has no public list)
            found = [option for option in group._group_actions if option.dest not in ("help", "version")]  # noqa: SLF001
            found = [option for option in found if option.option_strings]
            if not found:
                continue
            rows = [(spelling(option), f"{option.help or ''}", f"PET_{option.dest.upper()}") for option in found]
            shown.append(nodes.rubric("", f"{group.title}".capitalize()))
            shown.append(table("launcher-options", ("option", "meaning", "default from"), rows))
        return shown


class BenchmarkOptionsDirective(Directive):
    """Tables of the benchmark's options, one for each command."""

    def run(self) -> list[nodes.Node]:
        """Read the options of each command."""
        shown: list[nodes.Node] = []
        for command in benchmark.COMMANDS:
            parser = ArgumentParser(add_help=False)
            benchmark.add_options(command, parser)
            rows = []
            for option in parser._actions:  # noqa: SLF001 (argparse has no public list)
                value = "" if option.metavar or option.nargs == 0 else option.dest.upper()
                default = "" if option.default in (None, False) else f"{option.default}"
                rows.append((f"{spelling(option)} {value}".strip(), option.help or "", default))
            shown.append(nodes.rubric("", command))
            shown.append(table("launcher-options", ("option", "meaning", "default"), rows))
        return shown


def spelling(option: Action) -> str:
    """Return the spellings of an option with dashes; underscores are accepted in their place."""
    flags = [flag for flag in option.option_strings if "_" not in flag]
    return f"{', '.join(flags)} {option.metavar or ''}".strip()


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives with Sphinx."""
    app.add_directive("schedule", ScheduleDirective)
    app.add_directive("layers", LayersDirective)
    app.add_directive("layer-table", LayerTableDirective)
    app.add_directive("algorithms", AlgorithmsDirective)
    app.add_directive("capabilities", CapabilitiesDirective)
    app.add_directive("backend-table", BackendTableDirective)
    app.add_directive("versions", VersionsDirective)
    app.add_directive("gpu-report", GpuDirective)
    app.add_directive("launcher-options", LauncherOptionsDirective)
    app.add_directive("benchmark-options", BenchmarkOptionsDirective)
    app.add_directive("proofs-at-length", ProofsAtLengthDirective)
    app.add_directive("nightly", NightlyDirective)
    app.add_directive("private-names", PrivateNamesDirective)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
