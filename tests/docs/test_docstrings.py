"""Docstrings of the names that torch documents are complete: summary, arguments, errors, example, counterparts."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

import torchdist_ref
from tests.docs import pages
from tests.docs.test_each_rank import MOVING

LISTED = pages.DOCS / "_inventories" / "documented_names.txt"
# Queries that read a value and cannot fail.
NEVER_RAISE = """
is_available is_initialized is_mpi_available is_nccl_available is_torchelastic_launched Work.is_completed
GradBucket.index GradBucket.buffer GradBucket.gradients GradBucket.parameters GradBucket.is_last is_checkpointing
is_recomputing noop_hook fp16_compress_wrapper bf16_compress_wrapper get_log_level get_logger substitute
PowerSGDState.maybe_increase_iter PowerSGDState.compression_stats PowerSGDState.__getstate__
PowerSGDState.__setstate__ PostLocalSGDState.maybe_increase_iter JoinHook.main_hook JoinHook.post_hook
Joinable.join_hook convert_deferred_batch_norm ModelAverager.average_parameters Work.get_future get_debug_level
""".split()
# Parts of an object whose example is at its class or its module, or that a program does not call itself.
SHOWN_ELSEWHERE = """
set_debug_level set_debug_level_from_env Join.notify_join_context Joinable Joinable.join_hook JoinHook
JoinHook.main_hook JoinHook.post_hook PostLocalSGDState.maybe_increase_iter PowerSGDState.maybe_increase_iter
PowerSGDState.compression_stats PowerSGDState.__getstate__ PowerSGDState.__setstate__ ModelAverager
ModelAverager.average_parameters PeriodicModelAverager.average_parameters
HierarchicalModelAverager.average_parameters macros launch_agent Pipe.cuda Pipe.cpu Pipe.to Pipe.forward
DeferredBatchNorm.forward DeferredBatchNorm.convert_deferred_batch_norm stash pop ProcessGroup Work.is_completed
Store.set Store.get Store.num_keys Store.set_timeout Store.delete_key Store.wait
""".split()

# Methods without an operation of their own: parts of a protocol, accessors, and methods of every module of torch.
OF_THE_CLASS = """
GradBucket.index GradBucket.buffer GradBucket.gradients GradBucket.parameters GradBucket.is_last GradBucket.set_buffer
Join.notify_join_context Joinable.join_hook JoinHook.main_hook JoinHook.post_hook substitute
PostLocalSGDState.maybe_increase_iter PowerSGDState.maybe_increase_iter PowerSGDState.compression_stats
PowerSGDState.__getstate__ PowerSGDState.__setstate__ ModelAverager.average_parameters
PeriodicModelAverager.average_parameters HierarchicalModelAverager.average_parameters Pipe.cuda Pipe.cpu Pipe.to
Pipe.forward DeferredBatchNorm.forward DeferredBatchNorm.convert_deferred_batch_norm
""".split()


def documented() -> Iterator[tuple[str, Any]]:
    """Yield name and object of everything callable that torch documents and this library implements."""
    for line in LISTED.read_text(encoding="utf-8").splitlines():
        if not line.startswith("torch.distributed.") or line.startswith("torch.distributed.reduce_op"):
            continue
        name = line.split()[0].removeprefix("torch.distributed.")
        found: Any = torchdist_ref
        for part in name.split("."):
            found = getattr(found, part, None) or submodule(found, part)
        own = getattr(found, "__module__", None) or ""
        if own.startswith("torchdist_ref") and (inspect.isroutine(found) or inspect.isclass(found)):
            yield name, found


def submodule(parent: Any, name: str) -> Any:
    """Import a module of a package; None if there is none."""
    try:
        return importlib.import_module(f"{parent.__name__}.{name}")
    except (AttributeError, ImportError):
        return None


def short(name: str) -> str:
    """Return the class and the method, or the function."""
    parts = name.split(".")
    return ".".join(parts[-2:]) if len(parts) > 1 and parts[-2][:1].isupper() else parts[-1]


NAMES = dict(documented())


def test_the_list_is_not_empty() -> None:
    assert len(NAMES) > 150


@pytest.mark.parametrize("name", NAMES)
def test_a_docstring_has_its_parts(name: str) -> None:
    found, text = NAMES[name], inspect.getdoc(NAMES[name]) or ""
    lacks = [] if re.match(r"[A-Z].*\.", text) else ["summary"]
    if inspect.isroutine(found):
        for parameter in inspect.signature(found).parameters:
            if parameter not in ("self", "cls", "args", "kwargs", "state") and parameter.strip("_"):
                lacks += [] if re.search(rf"\b{parameter}\b", text) else [parameter]
        if "Raises:" not in text and short(name) not in NEVER_RAISE and short(name).split(".")[-1] not in NEVER_RAISE:
            lacks.append("errors")
    if ">>>" not in text and short(name) not in SHOWN_ELSEWHERE:
        lacks.append("example")
    assert not lacks


@pytest.mark.parametrize("name", NAMES)
def test_a_docstring_names_the_counterparts_in_mpi_nccl_and_jax(name: str) -> None:
    # A method that is no operation of its own has those of its class.
    owner = NAMES.get(name.rpartition(".")[0])
    found = counterparts(NAMES[name]) or (counterparts(owner) if short(name) in OF_THE_CLASS else "")
    # Objects are mpi4py's and keys are PMIx's, which the launchers of MPI provide.
    assert not [library for library in ("MPI|mpi4py|PMIx", "NCCL", "JAX") if not re.search(rf"\b({library})\b", found)]


def counterparts(found: Any) -> str:
    """Return the section of a docstring that names what MPI, NCCL and JAX have."""
    return (inspect.getdoc(found) or "").partition("\nElsewhere:\n")[2].partition("\n\n")[0]


@pytest.mark.parametrize("name", MOVING)
def test_a_call_that_moves_data_names_shapes_or_objects(name: str) -> None:
    text = (inspect.getdoc(getattr(torchdist_ref, name)) or "").partition("Args:")[2].partition("\n\n")[0]
    if "object" in name:
        assert re.search(r"picklable|[Oo]bject", text) and re.search(
            r"one entry|one length|same length|as long|one object", text
        )
    else:
        assert re.search(r"\bshapes?\b|\bsizes?\b|\belements\b", text) and "dtype" in text
