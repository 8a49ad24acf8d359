"""Collectives find the machine's address, whatever its own name means."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepvm.runtime.agent.interfaces import VARIABLES, interface_of, socket_variables
from deepvm.runtime.backends.local.network import Network

RANK = """
import datetime, os, sys
from deepvm.runtime.agent.interfaces import socket_variables
rank, own, first, told = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4] == "told"
if told:
    os.environ.update(socket_variables(own, f"{first}:29500"))
import torch
import torch.distributed as dist
os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR=first, MASTER_PORT="29500")
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
total = torch.tensor([1.0])
dist.all_reduce(total)
print("total", total.item(), os.environ.get("GLOO_SOCKET_IFNAME"), flush=True)
dist.destroy_process_group()  # a rank that ends before the other may abort it otherwise
"""
ENTER = 'mount --make-rprivate / && mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'


@pytest.fixture
def network() -> Iterator[Network]:
    if os.geteuid() != 0:
        pytest.skip("only root may make network namespaces")
    made = Network.create()
    yield made
    for name in ("worker/0", "worker/1"):
        made.leave(name)
    made.close()


def ranks(network: Network, folder: Path, told: str, within_s: float) -> list[tuple[int, str]]:
    """Two hosts, each of which knows its own name as 127.0.1.1: exit codes and output."""
    running = []
    for rank, name in enumerate(("worker/0", "worker/1")):
        namespace, host = network.join(name), f"host{rank}"
        hosts = folder / host
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {host}\n", encoding="utf-8")
        words = [sys.executable, "-c", RANK, str(rank), network.address_of(name), network.address_of("worker/0"), told]
        env = {key: value for key, value in os.environ.items() if key not in VARIABLES}
        running.append(
            subprocess.Popen(
                ["nsenter", f"--net={namespace}", "unshare", "--uts", "--mount",
                 "bash", "-c", ENTER, "bash", str(hosts), host, *words],
                env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
    ended = []
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(within_s)
        process.kill()
        ended.append((process.wait(10), process.communicate()[0]))
    return ended


@pytest.mark.timeout(200)
def test_ranks_on_hosts_whose_own_name_is_127_0_1_1_meet_at_their_addresses(network: Network, tmp_path: Path) -> None:
    ended = ranks(network, tmp_path, "told", 90.0)
    assert [code for code, _ in ended] == [0, 0], ended
    assert all("total 2.0 eth0" in said for _, said in ended)


@pytest.mark.chaos
@pytest.mark.timeout(200)
def test_without_the_variables_they_do_not_connect(network: Network, tmp_path: Path) -> None:
    """So that the test above is known to test something."""
    ended = ranks(network, tmp_path, "not told", 20.0)
    assert all(code != 0 for code, _ in ended), ended
    assert not any("total" in said for _, said in ended)


def test_an_interface_is_found_by_address_name_and_route() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("localhost") == "lo"
    assert interface_of("127.0.1.1") == "lo"
    assert interface_of("203.0.113.77") is None
    assert interface_of("no.such.name.invalid") is None
    assert socket_variables(None, "127.0.0.1:80", {}) == dict.fromkeys(VARIABLES, "lo")
    assert socket_variables("203.0.113.77", "127.0.0.1:80", {}) == dict.fromkeys(VARIABLES, "lo")
    assert socket_variables(None, "nonsense", {}) == {}


def test_what_the_user_has_set_stays() -> None:
    given = {"NCCL_SOCKET_IFNAME": "ib0"}
    assert "NCCL_SOCKET_IFNAME" not in socket_variables("127.0.0.1", "127.0.0.1:80", given)
