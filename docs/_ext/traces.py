"""Calls followed from function to function: run under a tracer on real ranks, then shown hop by hop on the pages.

`.. trace:: all_reduce`
    The functions of the library that one call enters on its thread, in order, each with its file, the first line of
    its docstring and a link to its source.

A page that is generated from a run cannot name a module that does not exist, and `tests/docs/test_traces.py` holds
the number of files that a call may touch. The source pages that the links lead to are made here too.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

HEADER = ("number", "file", "function", "purpose")
PACKAGE = "torchdist_ref"
ROOT = Path(__file__).resolve().parents[2] / PACKAGE


@dataclass(frozen=True)
class Hop:
    """One call of a function of the library.

    Attributes:
        file: Its file, relative to the package.
        function: Its qualified name.
        line: Line of its definition.
        depth: Number of functions of the library that were active when it was called.
    """

    file: str
    function: str
    line: int
    depth: int


class Tracer:
    """Record of the functions of the library that the current thread calls while the tracer is open.

    >>> from torchdist_ref.stores import HashStore
    >>> with Tracer() as tracer:
    ...     HashStore().set("key", "value")
    >>> tracer.hops[0].file.startswith("stores/")
    True
    """

    def __init__(self) -> None:
        self.hops: list[Hop] = []
        self._depth = 0

    def __enter__(self) -> Tracer:
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(f"{ROOT}{os.sep}"):
            return None
        file = str(Path(code.co_filename).relative_to(ROOT))
        if code.co_name not in ("<module>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>"):
            self.hops.append(Hop(file, code.co_qualname, code.co_firstlineno, self._depth))
        self._depth += 1
        return self._within

    def _within(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        if event == "return":
            self._depth -= 1
        return self._within


def files(hops: list[Hop]) -> list[str]:
    """Return the distinct files of some hops, in order of first use."""
    return list(dict.fromkeys(hop.file for hop in hops))


def all_reduce(rank: int) -> dict[str, list[Hop]]:
    """Trace the first and the second all_reduce of 1 KiB of float32 after initialization.

    In the second, the peer is ready first: a rank that has to wait enters `transports.link` too.
    """
    import torchdist_ref as dist
    from torchdist_ref.testing import fill

    tensor, found, call = fill(rank, (256,)), {}, dist.all_reduce
    for name in ("all_reduce", "all_reduce again"):
        if rank == 0 and found:
            wait_until_ready(1)
        with Tracer() as tracer:
            call(tensor)
        found[name] = tracer.hops
    return found


def wait_until_ready(peer: int) -> None:
    """Return when a peer has signaled its next call on the default group; its signal stays posted."""
    from torchdist_ref.backends.ref import Ref
    from torchdist_ref.groups.world import default_group

    backend = default_group().backend
    assert isinstance(backend, Ref)
    semaphore = backend.link.ready_from[peer]
    assert semaphore.acquire(True, 60)
    semaphore.release()


def message(rank: int) -> dict[str, list[Hop]]:
    """Trace a recv of 1 KiB; the sender is not traced."""
    import torchdist_ref as dist
    from torchdist_ref.testing import fill

    tensor, call = fill(rank, (256,)), dist.recv
    if rank:
        dist.send(tensor, dst=0)
        return {}
    with Tracer() as tracer:
        call(tensor, src=1)
    return {"recv": tracer.hops}


def gradient(rank: int) -> dict[str, list[Hop]]:
    """Trace forward and backward of the twelfth step: two linear layers, a bucket for each.

    The first step rebuilds the buckets, and DDP measures the ten after it, then one in a hundred (`logging_data`).
    """
    import torch

    from torchdist_ref import DistributedDataParallel
    from torchdist_ref.testing import fill

    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)), bucket_cap_mb=1e-4)
    data = fill(rank, (2, 8))
    for _ in range(12):
        with Tracer() as tracer:
            ddp(data).sum().backward()
    return {"gradient": tracer.hops}


def get() -> dict[str, list[Hop]]:
    """Trace TCPStore.get on the client; the server answers on a thread of its own."""
    from datetime import timedelta

    from torchdist_ref.stores import TCPStore

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    client = TCPStore("127.0.0.1", server.port, wait_for_workers=False, timeout=timedelta(seconds=20))
    server.set("key", "value")
    client.get("key")
    runs = []
    for _ in range(3):
        with Tracer() as tracer:
            client.get("key")
        runs.append(tracer.hops)
    return {"get": min(runs, key=len)}


def group(rank: int, ports: Sequence[int]) -> dict[str, list[Hop]]:
    """Trace init_process_group, new_group and destroy_process_group of two ranks, each the second time.

    The first time, modules are imported and functions of torch are replaced.
    """
    import torchdist_ref as dist
    from torchdist_ref.stores.prefix import WatchedStore

    # A wait for a late peer looks for failures again and again. How late the peer is depends on the load of the host.
    WatchedStore.next_check = lambda self, deadline: deadline.remaining()  # type: ignore[method-assign]
    initialize, create, destroy = dist.init_process_group, dist.new_group, dist.destroy_process_group
    for port in ports:
        with Tracer() as init:
            initialize("ref", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        dist.barrier()
        with Tracer() as new:
            create([0, 1])
        dist.barrier()
        with Tracer() as end:
            destroy()
    return {"init_process_group": init.hops, "new_group": new.hops, "destroy_process_group": end.hops}


def death() -> dict[str, list[Hop]]:
    """Trace an all_reduce of rank 0 whose peer, a forked process, was killed; from the wait to the error."""
    import torchdist_ref as dist
    from torchdist_ref.testing import fill

    (port,), call, tensor = free_ports(1), dist.all_reduce, fill(0, (256,))
    child = os.fork()
    dist.init_process_group("ref", init_method=f"tcp://127.0.0.1:{port}", rank=int(not child), world_size=2)
    call(tensor)
    if not child:
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    with suppress(dist.RankDiedError), Tracer() as tracer:
        call(tensor)
    dist.destroy_process_group()
    return {"death": tracer.hops}


def free_ports(count: int) -> list[int]:
    """Return ports of this host that no socket uses."""
    with ExitStack() as opened:
        sockets = [opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def run_all() -> dict[str, list[Hop]]:
    """Run every traced program in this process and processes forked from it.

    A rank that has to wait for a peer enters more functions, so the shortest of three runs is kept.
    """
    from torchdist_ref.testing import run

    found = get() | death()
    for program in (all_reduce, message, gradient):
        runs = [run(program, 2, ranks="processes")[0] for _ in range(3)]
        found |= {name: min((each[name] for each in runs), key=len) for name in runs[0]}
    runs = [run(group, 2, free_ports(2), ranks="processes", init=False)[0] for _ in range(3)]
    return found | {name: min((each[name] for each in runs), key=len) for name in runs[0]}


@cache
def traced() -> dict[str, list[Hop]]:
    """Return all traces; they are run in a process of their own, so that nothing of Sphinx or pytest is in them."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT.parent), str(Path(__file__).parent)])}
    command = [sys.executable, "-m", "traces"]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    if answer.returncode:
        raise RuntimeError(f"the traced programs failed:\n{answer.stderr[-3000:]}")
    return {name: [Hop(**hop) for hop in hops] for name, hops in json.loads(answer.stdout).items()}


def summary(hop: Hop) -> str:
    """Return the first line of the docstring of a hop's function, or of the function around it; else nothing.

    A constructor is documented by its class, other methods are not.
    """
    lines = documented(hop.file)
    around = hop.function.split(".<locals>.")
    names = [".".join(around[:end]) for end in range(len(around), 0, -1)]
    if around[-1].endswith(("__init__", "__post_init__", "__new__")):
        names.append(around[-1].rpartition(".")[0])
    return next((lines[name] for name in names if lines.get(name)), "") or inherited(hop)


def inherited(hop: Hop) -> str:
    """Return the first line of the docstring that a method has from a base class; else nothing."""
    module = importlib.import_module(f"{PACKAGE}.{hop.file.removesuffix('.py').replace('/', '.')}")
    try:
        found = attrgetter(hop.function)(module)
    except AttributeError:
        return ""
    return (inspect.getdoc(found) or "").partition("\n")[0] if inspect.isfunction(found) else ""


@cache
def documented(file: str) -> dict[str, str]:
    """Return the first docstring line of each function and class of a file, by qualified name."""
    found: dict[str, str] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}"
                found[name] = (ast.get_docstring(child) or "").partition("\n")[0]
                visit(child, f"{name}.")
            else:
                visit(child, prefix)

    visit(ast.parse((ROOT / file).read_text(encoding="utf-8")), "")
    return found


def shown(hops: list[Hop]) -> Iterator[Hop]:
    """Yield the first call of each function, in order."""
    seen: set[tuple[str, str]] = set()
    for hop in hops:
        if (hop.file, hop.function) not in seen:
            seen.add((hop.file, hop.function))
            yield hop


def source_page(file: str) -> str:
    """Return the name of the page that shows a file."""
    return "source/" + file.removesuffix(".py")


def setup(app: Any) -> dict[str, Any]:
    """Register the directive and the source pages with Sphinx."""
    from docutils import nodes
    from docutils.parsers.rst import Directive
    from site_directives import run_before_reading, with_code

    class TraceDirective(Directive):
        """A table of the hops of one call."""

        required_arguments = 1
        final_argument_whitespace = True
        option_spec: ClassVar[dict[str, Any]] = {}

        def run(self) -> list[nodes.Node]:
            """Run the program, and list the functions that it entered."""
            env = self.state.document.settings.env
            hops = traced()[self.arguments[0]]
            # First lines of docstrings, and line numbers, change with the sources.
            for file in files(hops):
                env.note_dependency(str(ROOT / file))
            up = "../" * env.docname.count("/")
            rows = [self._row(number, hop, up) for number, hop in enumerate(shown(hops), 1)]
            group = nodes.tgroup(cols=4)
            group += [nodes.colspec(colwidth=width) for width in (4, 28, 30, 60)]
            head = nodes.row("", *[nodes.entry("", nodes.paragraph("", text)) for text in HEADER])
            group += nodes.thead("", head)
            group += nodes.tbody("", *rows)
            text = f"{len(rows)} functions in {len(files(hops))} files, recorded when this page was built."
            return [nodes.table("", group, classes=["own-table", "trace"]), nodes.paragraph("", text)]

        @staticmethod
        def _row(number: int, hop: Hop, up: str) -> nodes.row:
            uri = f"{up}{source_page(hop.file)}.html#line-{hop.line}"
            name = hop.function.replace(".<locals>", "")
            link = nodes.reference("", "", nodes.literal("", name), refuri=uri, internal=True)
            cells: list[nodes.Node] = [
                nodes.paragraph("", str(number)),
                nodes.paragraph("", "", nodes.literal("", hop.file)),
                nodes.paragraph("", "", link),
                nodes.paragraph("", "", *with_code(summary(hop))),
            ]
            return nodes.row("", *[nodes.entry("", cell) for cell in cells])

    def pages(_: Any) -> Iterator[tuple[str, dict[str, str], str]]:
        from pygments import highlight
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import PythonLexer

        for file in sorted({hop.file for hops in traced().values() for hop in hops}):
            formatter = HtmlFormatter(lineanchors="line", cssclass="highlight", linenos="inline", anchorlinenos=True)
            body = highlight((ROOT / file).read_text(encoding="utf-8"), PythonLexer(), formatter)
            title = f"{PACKAGE}/{file}"
            yield source_page(file), {"title": title, "body": f"<h1>{title}</h1>\n{body}"}, "page.html"

    app.add_directive("trace", TraceDirective)
    run_before_reading(app, "trace", traced)
    app.connect("html-collect-pages", pages)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    assert threading.current_thread() is threading.main_thread()
    assert importlib.util.find_spec(PACKAGE)
    print(json.dumps({name: [asdict(hop) for hop in hops] for name, hops in run_all().items()}))
