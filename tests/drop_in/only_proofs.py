"""Plugin of pytest for `tests.drop_in.packages`: run only the tests that take the fixture `proof`."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests that take the fixture."""
    items[:] = [item for item in items if "proof" in getattr(item, "fixturenames", ())]
