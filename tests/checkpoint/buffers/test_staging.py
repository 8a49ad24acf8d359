"""Memory for saves and for restores: whose it is, and what becomes of it."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch

from deepvm.checkpoint.buffers.fresh_pages import PageChoice
from deepvm.checkpoint.buffers.staging import Staging

SIZE = 64 * 4096
HUGE = 2**21
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _pages_in_memory(staging: Staging) -> int:
    """How many pages of it this process has, as the kernel counts them."""
    first = staging.address // 4096
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(first * 8)
        entries = pagemap.read(staging.mapped_bytes // 4096 * 8)
    return sum(entries[i + 7] >> 7 for i in range(0, len(entries), 8))


def _huge_bytes(staging: Staging) -> int:
    within = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            within = int(found[1], 16) <= staging.address < int(found[2], 16)
        elif within and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return 0


def _in_a_fork(staging: Staging) -> int:
    """What a forked process finds in the first byte, or the signal that ends it."""
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # the test runner's handler would print a trace
        os._exit(staging.view[0])
    status = os.waitpid(pid, 0)[1]
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def test_it_is_touched_once_or_not_at_all() -> None:
    assert _pages_in_memory(Staging(SIZE)) == 64
    assert _pages_in_memory(Staging(SIZE, warm=False)) == 0


@pytest.mark.skipif(
    not _HUGE_PAGES.exists() or "[never]" in _HUGE_PAGES.read_text(), reason="this kernel gives no huge pages"
)
def test_a_large_one_has_huge_pages_where_they_are_fast_and_gives_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageChoice, "huge", lambda self: True)
    staging = Staging(16 * HUGE)
    assert _huge_bytes(staging) >= 8 * HUGE
    first = -(-staging.address // HUGE) * HUGE + 4 * HUGE
    staging.release_all_but([(first, 2 * HUGE)])
    assert _pages_in_memory(staging) == 2 * HUGE // 4096


def test_a_forked_process_has_no_part_in_a_save_s_memory() -> None:
    staging = Staging(SIZE)
    staging.view[0] = 42
    assert _in_a_fork(staging) == -signal.SIGSEGV
    assert staging.view[0] == 42


def test_a_forked_process_sees_what_was_restored_and_cannot_change_it() -> None:
    staging = Staging(SIZE, warm=False, inherited=True)
    staging.view[0] = 42
    assert _in_a_fork(staging) == 42
    pid = os.fork()
    if not pid:
        staging.view[0] = 7
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert staging.view[0] == 42


@pytest.mark.parametrize(("kept", "left"), [((), 0), (((4096 * 3, 4096 * 2),), 2), (((4096 * 3 + 8, 8),), 1)])
def test_what_nobody_kept_goes_back_to_the_system(kept: tuple[tuple[int, int], ...], left: int) -> None:
    staging = Staging(SIZE)
    staging.view[4096 * 3 + 8] = 42
    staging.release_all_but([(staging.address + start, length) for start, length in kept])
    assert _pages_in_memory(staging) == left
    assert staging.view[4096 * 3 + 8] == (42 if kept else 0)


def test_what_is_kept_goes_back_by_itself_when_nobody_has_it_any_more() -> None:
    staging = Staging(SIZE, warm=False, inherited=True)
    staging.view[:] = bytes(range(256)) * (SIZE // 256)
    first, second = (staging.lasting_tensor(at, torch.uint8, (4096 * 3,)) for at in (0, 4096 * 3))
    staging.release_all_but([(t.data_ptr(), t.nbytes) for t in (first, second)])
    assert _pages_in_memory(staging) == 6
    view = first[5:7]
    del first
    assert _pages_in_memory(staging) == 6  # a view is somebody, too
    del view
    assert _pages_in_memory(staging) == 3
    assert second[300] == 300 % 256
    del staging
    assert second[300] == 300 % 256
