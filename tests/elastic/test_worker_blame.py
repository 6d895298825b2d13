"""The order in which a worker is blamed: each row is what is known of several failures, and which one counts."""

from __future__ import annotations

from math import inf

import pytest

from torchdist_ref.elastic.worker_blame import Evidence, blame

BY_ITSELF, KILLED, FOLLOWS = Evidence(False, True), Evidence(False, False), Evidence(True, True)


@pytest.mark.parametrize(
    ("failures", "blamed"),
    [
        pytest.param([BY_ITSELF], 0, id="the only one"),
        pytest.param([BY_ITSELF, BY_ITSELF, BY_ITSELF], 0, id="of equals the first"),
        pytest.param([FOLLOWS, BY_ITSELF], 1, id="one that follows has a cause"),
        pytest.param([FOLLOWS, FOLLOWS], 0, id="all follow: their cause is elsewhere"),
        pytest.param([BY_ITSELF, KILLED], 1, id="an exit code may follow from a death"),
        pytest.param([Evidence(False, True, 3.0), KILLED], 1, id="a record may follow from a death"),
        pytest.param([Evidence(True, False), BY_ITSELF], 1, id="one that follows may be killed as it ends"),
        pytest.param([BY_ITSELF, Evidence(False, True, 9.0)], 1, id="a record explains the others"),
        pytest.param([Evidence(False, True, 9.0), Evidence(False, True, 4.0)], 1, id="the earliest record"),
        pytest.param([Evidence(True, True, 1.0), Evidence(False, True, inf)], 1, id="its cause may be recorded later"),
        pytest.param([Evidence(False, False, 8.0), Evidence(False, False, 7.0)], 1, id="of the killed the earliest"),
    ],
)
def test_blame(failures: list[Evidence], blamed: int) -> None:
    assert blame(list(enumerate(failures)), lambda each: each[1])[0] == blamed
