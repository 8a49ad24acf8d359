"""What a run on this host gives to its machines."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from deepvm.runtime.cluster import Cluster
from deepvm.runtime.supervise.local_run import _memory_bytes
from tests.support.runtime.machines import machine

CLUSTER = Cluster(
    machines=(machine("worker/0"), machine("memory/0", "on-demand"), machine("memory/1", "on-demand")),
    architecture="tiering", catalog="c", checkpoint_bytes=100_000_000, restore_s=None,
)  # fmt: skip


@pytest.mark.parametrize(
    ("checkpoint_bytes", "memory_bytes"),
    [
        (100_000_000, 220_000_000),  # two of them, and some room
        (1_000, 64_000_000),  # the least
        (None, 64_000_000),
        (10**15, 2**30),  # each of two memory nodes has half of a quarter of this host
    ],
)
def test_a_memory_node_holds_two_checkpoints_but_takes_no_more_of_the_host_than_its_share(
    monkeypatch: pytest.MonkeyPatch, checkpoint_bytes: int | None, memory_bytes: int
) -> None:
    of_host = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**33 // 4096}
    monkeypatch.setattr(os, "sysconf", of_host.__getitem__)
    assert _memory_bytes(replace(CLUSTER, checkpoint_bytes=checkpoint_bytes)) == memory_bytes
