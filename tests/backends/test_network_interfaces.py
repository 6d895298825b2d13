"""Lists of network interfaces in GLOO_SOCKET_IFNAME: both backends that use sockets read them."""

from __future__ import annotations

import os
from typing import Any

import pytest

import torchdist_ref as dist
from torchdist_ref.testing import fill, run


def total(rank: int) -> list[float]:
    tensor = fill(rank, (4,))
    dist.all_reduce(tensor)
    return tensor.tolist()


def as_two_hosts(rank: int, path: str) -> Any:
    os.environ["TORCHDIST_REF_HOST_ID"] = f"host {rank}"
    dist.init_process_group("ref", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    result = total(rank)
    dist.destroy_process_group()
    return result


SUM = (fill(0, (4,)) + fill(1, (4,))).tolist()


@pytest.mark.parametrize("names", ["lo", "lo,lo"])
def test_gloo_uses_every_interface_of_a_list(monkeypatch: pytest.MonkeyPatch, names: str) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", names)
    assert run(total, 2, backend="gloo", ranks="processes") == [SUM] * 2


def test_ref_uses_the_first_interface_that_exists(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0,lo")
    assert run(as_two_hosts, 2, str(tmp_path / "store"), init=False, ranks="processes") == [SUM] * 2


def test_a_missing_interface_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(dist.DistBackendError, match=r"Gloo could not connect on rank 0.*nosuch0"):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()
