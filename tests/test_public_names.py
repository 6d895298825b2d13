"""Public names are deliberate: listed, sorted, documented, annotated, and on a page of the site."""

import importlib
import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import layers
import pytest

import torchdist_ref
from tests.docs import pages

MODULES = [
    module
    for path in layers.files()
    if path.name != "__main__.py" and not (module := layers.module_name(path)).split(".")[-1].startswith("_")
]
SURFACE = (
    "torchdist_ref",
    "torchdist_ref.algorithms",
    "torchdist_ref.algorithms.ddp_comm_hooks.default_hooks",
    "torchdist_ref.algorithms.model_averaging.averagers",
    "torchdist_ref.algorithms.model_averaging.hierarchical_model_averager",
    "torchdist_ref.algorithms.model_averaging.utils",
    "torchdist_ref.elastic.utils",
    "torchdist_ref.elastic.utils.data",
    "torchdist_ref.elastic.utils.distributed",
    "torchdist_ref.elastic.utils.log_level",
    "torchdist_ref.elastic.utils.logging",
    "torchdist_ref.elastic.utils.store",
    "torchdist_ref.launcher",
    "torchdist_ref.nn.functional",
    "torchdist_ref.optim",
    "torchdist_ref.pipeline.sync",
    "torchdist_ref.pipeline.sync.batchnorm",
    "torchdist_ref.pipeline.sync.schedule",
    "torchdist_ref.pipeline.sync.skip",
    "torchdist_ref.pipeline.sync.utils",
    "torchdist_ref.schedules",
    "torchdist_ref.stores",
    "torchdist_ref.testing",
)


def names(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the public functions and classes of a module, with their names."""
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isroutine(value) or inspect.isclass(value):
            yield name, value


def ours(value: object) -> bool:
    return getattr(value, "__module__", "").startswith("torchdist_ref")


@pytest.mark.parametrize("name", MODULES)
def test_all_is_sorted_and_complete(name: str) -> None:
    module = importlib.import_module(name)
    listed = getattr(module, "__all__", [])
    assert list(listed) == sorted(set(listed))
    assert [missing for missing in listed if not hasattr(module, missing)] == []


@pytest.mark.parametrize("name", SURFACE)
def test_the_public_modules_list_their_names(name: str) -> None:
    assert importlib.import_module(name).__all__


def test_dir_shows_the_lazy_names() -> None:
    assert set(torchdist_ref.__all__) <= set(dir(torchdist_ref))


def test_a_wrong_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="all_reduse"):
        torchdist_ref.all_reduse  # noqa: B018


@pytest.mark.parametrize("name", SURFACE)
def test_every_public_name_has_a_docstring(name: str) -> None:
    module = importlib.import_module(name)
    silent = [own for own, value in names(module) if ours(value) and not inspect.getdoc(value)]
    silent += [
        f"{own}.{method}"
        for own, value in names(module)
        if ours(value) and inspect.isclass(value)
        for method, function in vars(value).items()
        if inspect.isfunction(function) and not method.startswith("_") and not inspect.getdoc(getattr(value, method))
    ]
    assert not silent


@pytest.mark.parametrize("name", SURFACE)
def test_every_public_name_is_annotated(name: str) -> None:
    bare = [
        own
        for own, value in names(importlib.import_module(name))
        if ours(value) and inspect.isfunction(value) and not annotated(value)
    ]
    assert not bare


def annotated(function: Any) -> bool:
    # Hooks show torch's DDP a signature without annotations, which is all that it accepts; the source has them.
    shown = vars(function).pop("__signature__", None)
    signature = inspect.signature(function)
    if shown is not None:
        vars(function)["__signature__"] = shown
    return signature.return_annotation is not inspect.Signature.empty and all(
        parameter.annotation is not inspect.Parameter.empty for parameter in signature.parameters.values()
    )


def documented() -> set[str]:
    """Return every name that the reference pages document, by reading their autodoc lines."""
    found = set()
    for page in (pages.DOCS / "reference").rglob("*.rst"):
        text = page.read_text(encoding="utf-8")
        module = re.search(r"^\.\. (?:current)?module:: (\S+)", text, re.MULTILINE)
        for name in re.findall(r"^\.\. auto(?:function|class|exception|data|decorator)?:: (\S+)", text, re.MULTILINE):
            found.add(name if name.startswith("torchdist_ref") or module is None else f"{module[1]}.{name}")
        for section in re.findall(r"^\.\. py:(?:data|attribute|class):: (\S+)", text, re.MULTILINE):
            found.add(section)
    return found


@pytest.mark.parametrize("name", SURFACE)
def test_every_public_name_is_on_a_reference_page(name: str) -> None:
    there = {entry.rsplit(".", 1)[-1] for entry in documented()}
    absent = [own for own in importlib.import_module(name).__all__ if own not in there and own != "__version__"]
    assert not absent


def imported_by_pages() -> Iterator[tuple[str, str]]:
    """Yield every name that a page tells its readers to import, with the page."""
    for page in sorted(pages.DOCS.rglob("*.md")):
        for found in re.findall(r"^\s*from torchdist_ref\S* import ([\w, ]+)$", page.read_text("utf-8"), re.MULTILINE):
            for name in found.split(", "):
                yield page.name, name.split(" as ")[0]


def test_names_that_pages_import_are_on_a_reference_page() -> None:
    there = {part for entry in documented() for part in entry.split(".")}
    absent = [(page, name) for page, name in imported_by_pages() if name not in there]
    assert not absent
