"""README's commands and programs are what they say: its blocks are read out of it and run."""

import subprocess
from pathlib import Path

from tests.docs import pages

README = pages.ROOT / "README.md"
BLOCKS = pages.blocks(README)
COMMANDS = [block.text.strip() for block in BLOCKS if block.language == "sh"]
SET_UP = "python3 -m venv .venv && .venv/bin/pip install nox && .venv/bin/nox -s "


def only(language: str) -> str:
    (block,) = [block for block in BLOCKS if block.language == language]
    return block.text


def test_it_opens_with_three_sentences_and_then_exactly_the_two_commands() -> None:
    text = README.read_text(encoding="utf-8")
    opening = text.split("\n## ")[0]
    assert COMMANDS[:2] == [f"{SET_UP}docs", f"{SET_UP}tests"]
    assert opening.count("```sh") == 2
    assert opening.split("Run the tutorials")[0].replace("torch.distributed", "").count(". ") == 2


def test_hello_prints_what_readme_shows(python_with_torch: str, tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text(only("python"))
    command = COMMANDS[-1].split()
    assert command[0] == "python"
    answer = subprocess.run([python_with_torch, *command[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert answer.returncode == 0, answer.stderr
    assert sorted(answer.stdout.splitlines()) == only("output").splitlines()
    assert [path.name for path in tmp_path.iterdir()] == ["hello.py"]


def test_hello_has_ten_lines_at_most() -> None:
    assert len([line for line in only("python").splitlines() if line]) <= 10


def test_ci_takes_its_commands_from_readme() -> None:
    script = (pages.ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "README.md" in script
    assert "nox -s docs" not in script and "nox -s tests" not in script, "written there a second time, it can drift"


def test_links_lead_somewhere() -> None:
    import re

    targets = re.findall(r"\]\(([^)]+)\)", README.read_text(encoding="utf-8"))
    assert targets and all((pages.ROOT / target).exists() for target in targets)
