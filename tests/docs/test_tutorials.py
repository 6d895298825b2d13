"""The tutorials as files: each is listed, leads to the next, packs its data, and hides the solutions of its exercises.

That they run is shown by the build, which executes each in an empty folder, from the archive that readers download.
"""

import ast
import importlib.util
import io
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import curriculum
import nbformat
import pytest

from tests.docs import pages

LINK = re.compile(r"\]\((\w+)\.ipynb\)")
PARTS = curriculum.PARTS
TUTORIALS = sorted((pages.ROOT / "tutorials").glob("*.ipynb"))
# These measure or train from the first cell to the last; the others end with exercises.
WITHOUT_EXERCISES = {"03_train_digits", "08_when_compression_pays"}
# Lines of its own code that a tutorial on parallelism may have, and those that have more because they show several
# methods: stages of ZeRO, schedules of a pipeline, kinds of attention, dimensions of a mesh.
MOST_LINES = 150
LONGER = {"17_sharded_training": 240, "20_pipeline_parallel": 195, "22_context_parallel": 230, "24_whole_mesh": 195}


def runner() -> Any:
    """Import docs/run_tutorials.py, which is a program and not part of a package."""
    spec = importlib.util.spec_from_file_location("run_tutorials", pages.DOCS / "run_tutorials.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cells(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return found


def text(path: Path, kind: str) -> str:
    return "\n".join("".join(cell["source"]) for cell in cells(path) if cell["cell_type"] == kind)


def test_the_index_lists_every_tutorial_in_order() -> None:
    listed = re.findall(r"^\d\d_\w+$", (pages.DOCS / "tutorials" / "index.md").read_text("utf-8"), re.MULTILINE)
    assert listed == [path.stem for path in TUTORIALS]


def test_each_lesson_says_what_it_is_for_and_names_earlier_ones() -> None:
    known = curriculum.lessons()
    assert list(known) == [path.stem for path in TUTORIALS] and {each.part for each in known.values()} == {*PARTS}
    for each in known.values():
        assert each.goal.endswith(".") and 20 < len(each.goal) < 100 and len(each.short) <= 20
        assert each.minutes > 0 and all(name < each.name for name in each.after), each


def test_what_to_read_first_is_what_the_first_cell_links_to() -> None:
    for path in TUTORIALS:
        first = "".join(cells(path)[0]["source"])
        linked = [name for line in re.findall(r"^Read .*first", first, re.M) for name in LINK.findall(line)]
        assert linked == curriculum.lessons()[path.stem].after or not linked, path.name


def test_the_map_has_a_place_for_each_tutorial_and_an_arrow_for_each_that_comes_before() -> None:
    known = curriculum.lessons()
    drawn = curriculum.svg(known)
    assert len({*curriculum.places(known).values()}) == len(known) == drawn.count("<rect")
    assert drawn.count("<path") == sum(len(each.after) for each in known.values())


def test_an_exercise_names_the_arguments_that_its_check_passes() -> None:
    for path in TUTORIALS:
        asked = dict(re.findall(r"\bWrite (?:a function )?`(\w+)\(([^)`]*)\)`", text(path, "markdown")))
        for name, arguments in asked.items():
            found = re.search(rf"(?:def|class) {name}(?:\(|:)([^)]*)\)?:?", text(path, "code"))
            assert found is not None, (path.name, name)
            if f"def {name}(" in text(path, "code"):
                assert names_of(arguments) == names_of(found[1]), (path.name, name, found[1])


def names_of(arguments: str) -> list[str]:
    return [each.partition("=")[0].strip() for each in arguments.split(",") if each.strip()]


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_links_between_tutorials_exist(path: Path) -> None:
    links = re.findall(r"\]\((\w+\.ipynb)\)", text(path, "markdown"))
    assert links or path == TUTORIALS[-1]
    assert [link for link in links if not path.with_name(link).exists()] == []


@pytest.mark.parametrize(
    "path", [path for path in TUTORIALS if path.stem not in WITHOUT_EXERCISES], ids=lambda path: path.stem
)
def test_one_to_three_exercises_with_checked_and_hidden_solutions(path: Path) -> None:
    found = cells(path)
    solutions = [index for index, cell in enumerate(found) if "solution" in cell["metadata"].get("tags", [])]
    assert 1 <= len(solutions) <= 3
    for index in solutions:
        before, after = ("".join(found[near]["source"]) for near in (index - 1, index + 1))
        assert before.startswith("<details>") and after == "</details>"
        program = "".join(found[index]["source"])
        # The last statement of a solution calls the function that checks it, defined in a visible cell.
        last = ast.parse(re.sub(r"^%%spmd.*$", "", program, flags=re.MULTILINE)).body[-1]
        assert isinstance(last, ast.Expr) and isinstance(last.value, ast.Call) and isinstance(last.value.func, ast.Name)
        check = last.value.func.id
        visible = "\n".join("".join(cell["source"]) for at, cell in enumerate(found) if at not in solutions)
        assert check.startswith("check") and f"def {check}(" in visible
        assert "assert " in visible.split(f"def {check}(")[1]


def own_lines(path: Path) -> int:
    """Count the lines of code that a reader has to follow.

    These are the lines of all visible cells without blank lines, comments, docstrings and imports. Checks of exercises
    do not count, nor do cells with the tags `picture`, which only draw, and `model`, the ordinary model to be split.
    """
    found = 0
    for cell in cells(path):
        if cell["cell_type"] == "code" and not {"solution", "picture", "model"} & {*cell["metadata"].get("tags", [])}:
            source = re.sub(r"^%.*$", "", "".join(cell["source"]), flags=re.MULTILINE)
            lines = {at for at, line in enumerate(source.splitlines(), 1) if line.strip() and line.strip()[0] != "#"}
            for node in ast.walk(ast.parse(source)):
                is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                is_check = isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
                is_import = isinstance(node, (ast.Import, ast.ImportFrom))
                if isinstance(node, ast.stmt) and (is_docstring or is_check or is_import):
                    lines -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
            found += len(lines)
    return found


@pytest.mark.parametrize(
    "path",
    [path for path in TUTORIALS if curriculum.lessons()[path.stem].part == "Parallelism from scratch"],
    ids=lambda path: path.stem,
)
def test_a_kind_of_parallelism_takes_few_lines(path: Path) -> None:
    assert own_lines(path) <= LONGER.get(path.stem, MOST_LINES)


def test_only_cells_that_draw_are_tagged_as_pictures_and_their_axes_have_names() -> None:
    for path in TUTORIALS:
        for cell in cells(path):
            source, where = "".join(cell["source"]), (path.name, cell["id"])
            if "picture" in cell["metadata"].get("tags", []):
                assert "plt.show()" in source or "Drawing(" in source, where
            if "plt.show()" in source and 'axis("off")' not in source and "xticks=[]" not in source:
                assert "xlabel" in source and ("ylabel" in source or "set_yticks" in source or "barh(" in source), where


def test_an_archive_has_the_data_that_its_notebook_reads() -> None:
    path = pages.ROOT / "tutorials" / "08_when_compression_pays.ipynb"
    program = runner()
    packed = program.pack(path, program.own_metadata(nbformat.read(path, as_version=4)))
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        names = set(archive.namelist())
    recorded = {f"hooks_measured/{one.name}" for one in (path.parent / "hooks_measured").iterdir()}
    assert 'Path("hooks_measured")' in text(path, "code") and len(recorded) > 2
    assert names == recorded | {path.name}


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_reads_no_file_that_its_archive_lacks(path: Path) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))["metadata"].get("torchdist_ref", {}).get("data", [])
    read = re.findall(r"(?:open|Path)\(\"([\w./]+)\"", text(path, "code"))
    assert [name for name in read if name.split("/")[0] not in data] == []


def test_outputs_that_showed_progress_are_removed() -> None:
    """A cell of a second or more has one; the text before and after it is one text, as in a quick cell."""
    output = nbformat.v4.new_output
    progress = output("display_data", {"text/plain": ""}, metadata={"torchdist_ref": "progress"})
    picture = output("display_data", {"image/svg+xml": "<svg/>"})
    texts = [output("stream", text=text) for text in ("a\n", "b\n", "c\n")]
    kept = runner().without_progress([texts[0], progress, texts[1], picture, texts[2], progress])
    assert kept == [output("stream", text="a\nb\n"), picture, output("stream", text="c\n")]


def test_the_fingerprint_of_the_library_ignores_docstrings_only(tmp_path: Path, monkeypatch: Any) -> None:
    program = runner()
    package = tmp_path / "torchdist_ref"
    package.mkdir()
    monkeypatch.setattr(program, "ROOT", tmp_path)

    def of(source: str) -> str:
        (package / "one.py").write_text(source)
        found: str = program.fingerprint_of_library()
        return found

    first = of('"""A module."""\n\n\ndef double(x):\n    """Return twice x."""\n    return 2 * x\n')
    assert of('"""Another."""\n\n\ndef double(x):\n    # Why.\n    return 2 * x\n') == first
    assert of('"""A module."""\n\n\ndef double(x):\n    """Return twice x."""\n    return 3 * x\n') != first


def test_built_pages_are_kept_while_what_they_are_made_of_is_the_same(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(str(pages.DOCS))
    spec = importlib.util.spec_from_file_location("keep_html", pages.DOCS / "keep_html.py")
    assert spec and spec.loader
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    built = tmp_path / "_build"
    for name, value in {"DOCS": tmp_path, "BUILT": built, "STAMP": built / "made_of"}.items():
        monkeypatch.setattr(program, name, value)
    library = ["code"]
    monkeypatch.setattr(program, "fingerprint_of_library", lambda: library[0])
    (tmp_path / "page.md").write_text("text")
    (tmp_path / "figures.json").write_text("1")

    def kept() -> bool:
        (built / "html").mkdir(parents=True, exist_ok=True)
        program.main()
        return (built / "html").exists()

    assert not kept() and kept()
    (tmp_path / "page.md").write_text("another text")
    assert kept()
    (tmp_path / "figures.json").write_text("2")
    assert not kept() and kept()
    (tmp_path / "page.md").rename(tmp_path / "other.md")
    assert not kept() and kept()
    library[0] = "other code"
    assert not kept()
