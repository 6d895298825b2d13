"""Every planted fault fits the library as it is: its piece occurs exactly once in its file."""

from __future__ import annotations

from pathlib import Path

import pytest

import torchdist_ref
from tests.mutants.__main__ import PLANTED
from tests.mutants.faults import Fault

PACKAGE = Path(torchdist_ref.__file__).parent


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.name)
def test_fault_fits(fault: Fault) -> None:
    assert (PACKAGE / fault.file).read_text().count(fault.old) == 1
    assert fault.new != fault.old
