"""The hub's groups -> torch's rendezvous interface, for PyTorch's elastic agents.

Each round has a store of its own, at the agent of rank 0. If that machine is lost, the round is over anyway, and the
next round has a fresh, empty store.
"""

from __future__ import annotations

import contextlib
import os
import time
from datetime import timedelta

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError, RendezvousTimeoutError

from deepvm.protocol.addresses import join_address, split_address
from deepvm.protocol.sockets import listen_at
from deepvm.runtime.hub.client import Group, HubClient

STORE_S = 30.0  # for the machine of rank 0 to answer; a round whose machine is lost breaks sooner
GROUP_S = 24 * 3600.0  # for a group to form: a market may have no machine for hours
_POLL_S = 1.0
_TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def listening_store(host: str) -> TCPStore:
    """Return a store that listens at this address only. By default torch listens on every interface, and its store has
    no access control."""
    listener = listen_at(join_address(host, 0))
    port, descriptor = listener.getsockname()[1], listener.detach()
    try:
        return TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=STORE_S),
            master_listen_fd=descriptor, use_libuv=_TORCH >= (2, 8),  # before, its libuv server took no socket
        )  # fmt: skip
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(descriptor)
        raise


class HubRendezvous(RendezvousHandler):
    """``hub`` may have joined the first round already, while this module was imported."""

    def __init__(self, hub: HubClient, run: str) -> None:
        self._hub, self._run = hub, run
        self.group: Group | None = None
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        return "deepvm"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        deadline = time.monotonic() + GROUP_S
        while time.monotonic() < deadline:
            over = 0 if self.group is None else self.group.number
            self._store = None
            if not self._hub.joined:
                self._hub.join()
            self._hub.joined = False
            group = self._await_group(over, deadline)
            self.group = group
            endpoint = self._endpoint(group)
            if endpoint is None:  # it broke before it began
                continue
            host, port = split_address(endpoint)
            store = self._store or self._join_store(host, port)
            if store is None:
                continue
            self._store = store
            return RendezvousInfo(
                store, group.rank, len(group.members), RendezvousStoreInfo(master_addr=host, master_port=port)
            )
        raise RendezvousTimeoutError(f"no group was formed within {GROUP_S:.0f} s")

    def _await_group(self, over: int, deadline: float) -> Group:
        while (left_s := deadline - time.monotonic()) > 0:
            group = self._hub.await_group(over, min(_POLL_S, left_s))  # in parts, so that signals are handled
            if group is not None:
                return group
            if self._hub.ended is not None:
                raise RendezvousGracefulExitError(self._hub.ended)
        raise RendezvousTimeoutError(f"no group was formed within {GROUP_S:.0f} s")

    def _endpoint(self, group: Group) -> str | None:
        if group.rank != 0:
            return self._hub.await_endpoint(group.number, STORE_S)
        host = str(group.members[0]["address"])
        self._store = listening_store(host)
        endpoint = join_address(host, self._store.port)
        self._hub.send("endpoint", round=group.number, endpoint=endpoint)
        return endpoint

    def _join_store(self, host: str, port: int) -> TCPStore | None:
        try:
            return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=STORE_S))
        except (DistError, RuntimeError, OSError):
            return None

    def broke(self, within_s: float) -> str | None:
        """Return the machine that broke this round, if one did or does within that time."""
        return None if self.group is None else self._hub.await_broken(self.group.number, within_s)

    def is_closed(self) -> bool:
        return self._hub.ended is not None

    def set_closed(self) -> None:
        """Do nothing: only the supervisor ends a run."""

    def num_nodes_waiting(self) -> int:
        return int(self.group is not None and self._hub.broken(self.group.number))

    def get_run_id(self) -> str:
        return self._run

    def shutdown(self) -> bool:
        return True
