"""A call touches few files: the pages that follow one call are generated from these traces.

The traced programs run once, on two forked ranks, which takes about three seconds.
"""

from __future__ import annotations

import pytest
import traces

# Distinct files of the library with a function that the call enters on its thread; recorder and profiler ranges are on.
MOST_FILES = {
    "all_reduce": 16,
    "all_reduce again": 8,
    "gradient": 12,
    "get": 3,
    "recv": 12,
    "init_process_group": 35,
    "new_group": 17,
    "destroy_process_group": 14,
    "death": 21,
}


@pytest.mark.parametrize("name", MOST_FILES)
def test_a_call_touches_few_files(name: str) -> None:
    found = traces.files(traces.traced()[name])
    assert 0 < len(found) <= MOST_FILES[name], found


def test_a_trace_begins_at_the_public_function() -> None:
    first = {name: hops[0].function for name, hops in traces.traced().items()}
    assert first["all_reduce"] == first["all_reduce again"] == "all_reduce"
    for name in ("recv", "init_process_group", "new_group", "destroy_process_group"):
        assert first[name] == name
    assert first["death"] == "all_reduce"
    assert first["get"] == "TCPStore.get"
    assert first["gradient"].startswith("DistributedDataParallel")


def test_the_bytes_are_moved_below_the_executor() -> None:
    files = traces.files(traces.traced()["all_reduce"])
    assert files[0].startswith("groups/")
    assert any(file.startswith("schedules/") for file in files)
    assert any(file.startswith("transports/") for file in files)


def test_most_functions_say_what_they_do() -> None:
    hops = [hop for name in ("all_reduce", "gradient") for hop in traces.shown(traces.traced()[name])]
    silent = [hop for hop in hops if not traces.summary(hop)]
    assert len(silent) <= len(hops) // 10, [f"{hop.file}:{hop.function}" for hop in silent]


def test_the_tracer_counts_depth_and_leaves_others_alone() -> None:
    from torchdist_ref.stores import HashStore

    store = HashStore()
    with traces.Tracer() as tracer:
        store.set("key", "value")
    outside = len(tracer.hops)
    store.get("key")
    assert len(tracer.hops) == outside
    assert tracer.hops[0].depth == 0 and max(hop.depth for hop in tracer.hops) >= 1
