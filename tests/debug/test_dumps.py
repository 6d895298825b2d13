"""Dumps: ours round trip, torch's are read in both forms, and hostile files are refused before anything runs."""

from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import torchdist_ref as dist
from torchdist_ref.debug import dumps, flight_recorder
from torchdist_ref.debug.dumps import MAX_MEMBERS, DumpError, load_plain_pickle, read_directory, read_file
from torchdist_ref.debug.verdict import find_verdict
from torchdist_ref.testing import fill, run


def our_dump(folder: Path) -> dict[str, Any]:
    """Return the dump of rank 1 after an all_reduce, a message and a failed call."""

    def program(rank: int) -> None:
        dist.all_reduce(fill(rank, (2, 3)))
        if rank == 0:
            dist.send(fill(0, (4,)), 1, tag=5)
        else:
            dist.recv(torch.zeros(4), 0, tag=5)
        with pytest.raises(dist.MismatchError):
            dist.broadcast(fill(rank, (1,)), rank)
        flight_recorder.dump(folder, reason="for a test")

    run(program, 2, ranks="processes")
    content: dict[str, Any] = json.loads((folder / "rank1.json").read_text("utf-8"))
    return content


def test_a_dump_holds_sizes_dtypes_numbers_states_and_times(tmp_path: Path) -> None:
    content = our_dump(tmp_path)
    found = read_file(tmp_path / "rank1.json")
    assert (found.rank, found.reason, found.source) == (1, "for a test", "rank1.json")
    group, init = found.groups
    assert (group.name, group.members, group.is_in_store) == ("world", (0, 1), False)
    [event] = init.events
    assert (init.name, init.members, init.is_in_store) == ("init_process_group", (0, 1), True)
    assert (event.text, event.state, event.awaited) == ("init_process_group(world_size=2)", "completed", (0, 1))
    first, message, failed = group.events
    assert (first.number, first.text, first.state) == (
        (0, 0),
        "all_reduce(reduction=sum) of float32 [2, 3]",
        "completed",
    )
    assert first.nbytes == 24 and 0 < first.start_ns <= first.end_ns <= found.time_ns
    assert (message.number, message.op, message.peer, message.nbytes) == ((-1, 0), "recv", 0, 16)
    assert (failed.number, failed.state) == ((1, 0), "failed") and failed.error.startswith("MismatchError: ")
    raw = content["groups"][0]["events"][0]
    assert (raw["arguments"], raw["dtype"], raw["outputs"]) == ({"reduction": "sum"}, "float32", [[2, 3]])
    assert content["pid"] != os.getpid() and content["world_size"] == 2


BROKEN: dict[str, Any] = {
    "a rank that is a text": {"rank": "one"},
    "no groups": {"groups": None},
    "a member that is a list": {"groups": [{"name": "a", "members": [[1]], "events": []}]},
    "an event of no state": {
        "groups": [{"name": "a", "members": [0], "events": [{"op": "x", "state": "y", "stack": 0}]}]
    },
    "a number without end": {"time_ns": 10**400},
    "threads that are numbers": {"threads": [1, 2]},
    "more members than a job has": {"groups": [{"name": "a", "members": [0] * (MAX_MEMBERS + 1), "events": []}]},
}


@pytest.mark.parametrize("name", BROKEN)
def test_damaged_dumps_are_refused_and_the_others_read(name: str, tmp_path: Path) -> None:
    good = our_dump(tmp_path)
    (tmp_path / "rank0.json").write_text(json.dumps(good | BROKEN[name]))
    with pytest.raises(DumpError):
        read_file(tmp_path / "rank0.json")
    found = read_directory(tmp_path)
    assert list(found.ranks) == [1] and list(found.skipped) == ["rank0.json"] and found.missing == (0,)


def test_dumps_of_an_earlier_attempt_are_left_out(tmp_path: Path) -> None:
    """Once the verdict was that they could not be read."""
    newer = our_dump(tmp_path) | {"attempt": 1}
    (tmp_path / "rank1.json").write_text(json.dumps(newer))
    found = read_directory(tmp_path)
    assert list(found.ranks) == [1] and found.skipped == {"rank0.json": "of attempt 0, and the last one is 1"}
    assert found.lack(0) == "the dump of rank 0 is of an earlier attempt"


# ---- torch's own


def test_dumps_of_an_earlier_run_are_left_out(tmp_path: Path) -> None:
    """Once the calls of a rank of the run before were compared with those of this one."""
    content, folder = our_dump(tmp_path / "template"), tmp_path / "dumps"
    [call] = [event for group in content["groups"] for event in group["events"] if event["op"] == "init_process_group"]
    folder.mkdir()

    def write(rank: int, host: str, start: int, end: int, time: int) -> None:
        call.update(start_ns=start, end_ns=end, state="completed" if end else "failed")
        (folder / f"rank{rank}.json").write_text(json.dumps(content | {"rank": rank, "host": host, "time_ns": time}))

    write(1, "here", 100, 110, 200)
    # The clock of another host may be another.
    write(2, "there", 100, 110, 200)
    # This rank gave up its initialization before rank 0 began.
    write(3, "here", 299, 0, 300)
    write(0, "here", 301, 310, 400)
    found = read_directory(folder)
    assert list(found.ranks) == [0, 2, 3] and list(found.skipped) == ["rank1.json"]
    assert found.lack(1) == "the dump of rank 1 is of an earlier run"


def test_dumps_that_torch_has_written_are_read(python_with_torch: str, tmp_path: Path) -> None:
    folders = [tmp_path / "pickles", tmp_path / "texts"]
    for folder in folders:
        folder.mkdir()
    # A process decides once whether to record, when it first could.
    program = [python_with_torch, str(Path(__file__).with_name("torchs_dumps.py")), *map(str, folders)]
    subprocess.run(program, check=True, env=os.environ | {"TORCH_FR_BUFFER_SIZE": "100"}, timeout=60)
    for found in map(read_directory, folders):
        assert list(found.ranks) == [0, 1, 2] and not found.skipped
        [group] = found.ranks[2].groups
        assert group.name == "default_pg (0)"
        assert [(e.number[0], e.op, e.state) for e in group.events] == [
            (1, "all_reduce", "completed"),
            (2, "broadcast", "completed"),
            (3, "all_reduce", "scheduled"),
        ]
        assert [event.nbytes for event in group.events] == [48, 48, 20]
        verdict = find_verdict(found)
        assert (verdict.kind, verdict.ranks, verdict.number) == ("behind", (1,), (3, 0))
        start = "Rank 1 is behind: ranks 0 and 2 wait for it in call 3, all_reduce of float [5],"
        assert verdict.sentence.startswith(start)


def entry(number: int, name: str, state: str = "completed", **more: Any) -> dict[str, Any]:
    """Return a call as torch's recorder for NCCL writes it."""
    return {
        "record_id": number, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": number,
        "p2p_seq_id": 0, "op_id": number, "profiling_name": f"nccl:{name}", "time_created_ns": 1000 * number,
        "input_sizes": [[4]], "input_dtypes": ["Float"], "output_sizes": [[4]], "output_dtypes": ["Float"],
        "state": state, "time_discovered_started_ns": None, "time_discovered_completed_ns": None,
        "retired": state == "completed", "timeout_ms": 600000, "is_p2p": False,
        "frames": [{"name": "step", "filename": "/job/train.py", "line": 40 + number}],
    } | more  # fmt: skip


def write_nccl_dumps(folder: Path, entries: dict[int, list[dict[str, Any]]]) -> None:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(entries))}}
    for rank, calls in entries.items():
        content = {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": calls}
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(content, protocol=2))


def test_calls_of_nccl_in_another_order_are_named(tmp_path: Path) -> None:
    usual = [entry(1, "all_reduce"), entry(2, "broadcast"), entry(3, "all_reduce", "started")]
    other = [entry(1, "broadcast"), entry(2, "all_reduce"), entry(3, "all_reduce", "started")]
    write_nccl_dumps(tmp_path, {0: usual, 1: usual, 2: usual, 3: other})
    found = find_verdict(read_directory(tmp_path))
    assert (found.kind, found.ranks, found.number) == ("swapped", (3,), (1, 0))
    assert found.sentence.startswith("Rank 3 made calls 1 and 2 in the other order in group 'default_pg (0)'")


def test_a_receive_of_nccl_that_waits_names_its_sender(tmp_path: Path) -> None:
    waiting = entry(2, "recv 1<-2", "started", is_p2p=True)
    write_nccl_dumps(
        tmp_path, {0: [entry(1, "all_reduce")], 1: [entry(1, "all_reduce"), waiting], 2: [entry(1, "all_reduce")]}
    )
    found = find_verdict(read_directory(tmp_path))
    assert (found.kind, found.ranks) == ("behind", (2,))
    assert "rank 1 waits for it in recv 1<-2" in found.sentence and "train.py:42 in step" in found.sentence


def test_a_scatter_whose_root_alone_has_inputs_is_one_call(tmp_path: Path) -> None:
    """Once torch's dumps of a job that was well gave a mismatch."""
    inputs = {0: {"input_sizes": [[4], [4]], "input_dtypes": ["Float", "Float"]}}
    other = {"input_sizes": [], "input_dtypes": []}
    calls = {rank: [entry(1, "scatter", **inputs.get(rank, other)), entry(2, "barrier")] for rank in range(3)}
    write_nccl_dumps(tmp_path, calls)
    assert find_verdict(read_directory(tmp_path)).kind == "nothing"


def test_gathered_tensors_of_different_sizes_are_one_call(tmp_path: Path) -> None:
    outputs = {"output_sizes": [[2], [3]], "output_dtypes": ["Float", "Float"]}
    write_nccl_dumps(
        tmp_path, {rank: [entry(1, "all_gather", input_sizes=[[2 + rank]], **outputs)] for rank in range(2)}
    )
    assert find_verdict(read_directory(tmp_path)).kind == "nothing"


def test_the_end_of_a_batch_of_messages_of_nccl_is_no_collective(tmp_path: Path) -> None:
    batch = [entry(2, "send 0->1", is_p2p=True), entry(1, "coalesced", is_p2p=True)]
    calls = {0: [entry(1, "all_reduce"), *batch], 1: [entry(1, "all_reduce"), *batch], 2: [entry(1, "all_reduce")]}
    write_nccl_dumps(tmp_path, calls)
    assert find_verdict(read_directory(tmp_path)).kind == "nothing"


def test_a_call_that_all_have_begun_and_none_has_completed_is_named(tmp_path: Path) -> None:
    calls = {rank: [entry(1, "broadcast"), entry(2, "all_reduce", "started")] for rank in range(3)}
    write_nccl_dumps(tmp_path, calls)
    found = find_verdict(read_directory(tmp_path))
    assert (found.kind, found.ranks, found.number) == ("pending", (0, 1, 2), (2, 0))
    assert found.sentence.startswith("All ranks are in call 2 of group 'default_pg (0)', all_reduce of float [4],")


# ---- hostile files


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["BOMB"],)


HOSTILE: dict[str, bytes] = {
    "a class": pickle.dumps(Path("x")),
    "an import without a call": b"cos\nsystem\n.",
    "an import by name": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    "an instance": b"(ios\nsystem\n.",
    "a persistent reference": b"Pname\n.",
    "an extension": b"\x82\x01.",
    "a build": b"\x80\x02}}b.",
    "a gap in the memo": b"\x80\x02]r" + struct.pack("<I", 1 << 31) + b".",
    "values that are not there": b"\x80\x02K\x01\x86.",
    "an item of a text": b"\x80\x02X\x01\x00\x00\x00aK\x01a.",
    "a tensor of many dimensions": pickle.dumps({"entries": [entry(1, "all_reduce", input_sizes=[[2] * 65])]}),
    "a key that cannot be hashed": b"\x80\x02}]K\x01s.",
    "a gap in the memo in text": b"]p4000000000\n.",
    "a huge text": b"X\xff\xff\xff\x7fabc.",
    "a huge number": b"\x8b\xff\xff\xff\x7f1.",
    "an empty file": b"",
    "no end": b"\x80\x02]",
    "nothing to return": b"\x80\x02.",
    "recursion": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "nested JSON": b"[" * 200_000,
    "a list that holds itself": b"\x80\x02}(X\x07\x00\x00\x00entries]q\x00h\x00au.",
    "a long number": b'{"format": ' + b"9" * 100_000 + b"}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(DumpError):
        read_file(path)


def test_nothing_in_a_pickle_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps({"entries": [Bomb()]}, protocol=protocol)
        with pytest.raises(DumpError, match="more than plain data"):
            load_plain_pickle(data)
    assert not (tmp_path / "exploded").exists()
    pickle.loads(data)
    assert (tmp_path / "exploded").exists(), "the bomb works"


def test_plain_data_survives_every_protocol() -> None:
    data = {
        "a": [1, -(1 << 40), (1 << 63) - 1, 1.5, None, True, "text"],
        "b": ((), (1,), (1, 2), (1, 2, 3), (1,) * 9),
        3: {},
    }
    data["again"] = data["a"]  # type: ignore[assignment]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert load_plain_pickle(pickle.dumps(data, protocol=protocol)) == data
    assert load_plain_pickle(pickle.dumps(b"bytes")) == b"bytes"


def unfolded(depth: int, value: Any) -> Any:
    """Return lists of lists that hold a value 100 times at each depth; their pickle has it once."""
    return [unfolded(depth - 1, value)] * 100 if depth else value


LARGE = {
    "lists": {"entries": unfolded(4, 0)},
    "shapes": {"entries": [entry(1, "all_reduce", input_sizes=unfolded(2, [4] * 64))] * 1_000},
    "texts": {
        "entries": [entry(1, "all_reduce", frames=[{"name": "f" * 4_000, "filename": "g", "line": 1}] * 100)] * 100
    },
    "entries": {"entries": [entry(1, "all_reduce")] * 30_000},
}


@pytest.mark.parametrize("name", LARGE)
def test_a_small_file_that_unfolds_to_many_values_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once such files took memory and minutes. A tenth of the limit is as good a limit."""
    monkeypatch.setattr(dumps, "MAX_VALUES", dumps.MAX_VALUES // 10)
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(LARGE[name]))
    with pytest.raises(DumpError, match="more values than"):
        read_file(tmp_path / "nccl_trace_rank_0")


def test_a_recorder_of_as_many_calls_as_torch_keeps_is_read(tmp_path: Path) -> None:
    frames = [{"name": "step", "filename": "/job/train.py", "line": line} for line in range(20)]
    calls = [entry(number, "all_reduce", frames=frames) for number in range(2_000)]
    write_nccl_dumps(tmp_path, {0: calls})
    assert len(read_directory(tmp_path).ranks[0].groups[0].events) == 2_000


def test_files_of_an_unbounded_size_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "rank0.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DumpError, match="larger than"):
        read_file(tmp_path / "rank0.json")
