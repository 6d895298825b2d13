"""The page of environment variables lists exactly those that the source reads."""

import re

import layers

from tests.docs import pages

OWN = re.compile(r"TORCHDIST_REF_[A-Z_]*[A-Z]")


def test_every_variable_of_ours_is_on_the_page() -> None:
    in_source = {name for path in layers.files() for name in OWN.findall(path.read_text(encoding="utf-8"))}
    on_page = set(OWN.findall((pages.DOCS / "reference" / "environment.md").read_text(encoding="utf-8")))
    assert in_source
    assert on_page == in_source
