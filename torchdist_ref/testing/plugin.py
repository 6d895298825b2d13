"""Pytest plugin: ``@pytest.mark.spmd(world_size=4)`` runs the body of a test on four ranks.

Enable it with ``pytest_plugins = ["torchdist_ref.testing.plugin"]`` in the top-level conftest.py, or with
``pytest -p torchdist_ref.testing.plugin``. Do not add features here: it only calls `torchdist_ref.testing.run`.

::

    @pytest.mark.spmd(world_size=4, backend="gloo", ranks="processes")
    def test_the_sum(rank):
        tensor = fill(rank, (3,))
        dist.all_reduce(tensor)
        assert torch.equal(tensor, sum(fill(other, (3,)) for other in range(4)))
"""

from __future__ import annotations

import pytest

from torchdist_ref.ranks.outcomes import RankError
from torchdist_ref.testing.running import run

_MARK = (
    "spmd(world_size, *, backend='ref', ranks='threads', timeout=30.0, init=True, seeds=1): "
    "run the test on several ranks; the arguments are those of torchdist_ref.testing.run"
)


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    config.addinivalue_line("markers", _MARK)


@pytest.fixture
def rank() -> int:
    """Return the rank that runs the test: 0 unless the mark ``spmd`` starts several."""
    return 0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Call a marked test on its ranks. Fixtures are set up once, before, and shared by thread ranks."""
    mark = pyfuncitem.get_closest_marker("spmd")
    if mark is None:
        return None
    wanted = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}  # noqa: SLF001 (pytest has no public name)

    def body(rank: int) -> None:
        own = {"rank": rank} if "rank" in wanted else {}
        pyfuncitem.obj(**(wanted | own))

    try:
        run(body, *mark.args, **mark.kwargs)
    except RankError as error:
        if isinstance(error.__cause__, (pytest.skip.Exception, pytest.xfail.Exception)):
            # A rank has skipped the test, or expects it to fail.
            raise error.__cause__ from None
        raise
    return True
