"""What the kernel tells of memory that was written, and what becomes of saves where it cannot."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepvm.checkpoint import Checkpointer
from deepvm.checkpoint.buffers import write_watch
from deepvm.checkpoint.buffers.write_watch import WriteWatch, collapse, plain_memory, shared_watch
from deepvm.checkpoint.snapshot.live_pages import LivePages, whole_pages, within
from tests.support.checkpoint.huge_memory import HUGE, in_huge_pages, watched

PAGE = 4096


@pytest.fixture
def watch() -> WriteWatch:
    found = shared_watch()
    assert found is not None
    return found


def spread(tensor: torch.Tensor) -> tuple[int, int]:
    return whole_pages(tensor.data_ptr(), tensor.nbytes)


@watched
def test_a_page_is_untouched_from_its_protection_to_the_first_write(watch: WriteWatch) -> None:
    tensor = torch.ones(20 * PAGE)
    start, end = spread(tensor)
    assert watch.register(start, end)
    assert not watch.untouched([(start, end)])  # it was never protected
    assert watch.protect(start, end)
    assert tensor.sum() == tensor.numel()
    assert watch.untouched([(start, end)])
    ctypes.memset(start + 3 * PAGE + 5, 7, 1)
    assert not watch.untouched([(start, end)])
    assert watch.untouched([(start, start + 3 * PAGE), (start + 4 * PAGE, end)])
    watch.unregister(start, end)
    assert not watch.untouched([(start, end)])


@watched
def test_memory_that_was_never_touched_and_memory_that_is_given_back_are_distinguished(watch: WriteWatch) -> None:
    memory = mmap.mmap(-1, 8 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert watch.register(start, start + 8 * PAGE)
    assert watch.protect(start, start + 8 * PAGE)
    assert watch.untouched([(start, start + 8 * PAGE)])
    assert memory[PAGE] == 0
    assert watch.untouched([(start, start + 8 * PAGE)])
    memory.madvise(mmap.MADV_DONTNEED, 2 * PAGE, PAGE)  # reads as zeros, whatever it was
    assert not watch.untouched([(start + 2 * PAGE, start + 3 * PAGE)])
    assert watch.untouched([(start, start + 2 * PAGE), (start + 3 * PAGE, start + 8 * PAGE)])
    watch.unregister(start, start + 8 * PAGE)
    assert not watch.untouched([(start, start + 8 * PAGE)])


@watched
def test_writes_of_a_forked_process_are_its_own(watch: WriteWatch) -> None:
    tensor = in_huge_pages(2 * HUGE)
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    assert watch.register(start, end)
    assert watch.protect(start, end)
    pid = os.fork()
    if not pid:
        ctypes.memset(start, 7, PAGE)
        os._exit(0)
    os.waitpid(pid, 0)
    assert watch.untouched([(start, end)])
    assert tensor[0] == 0
    ctypes.memset(start + HUGE, 7, 1)
    assert not watch.untouched([(start, end)])
    watch.unregister(start, end)


@watched
def test_existing_memory_is_brought_into_huge_pages_and_keeps_its_bytes(watch: WriteWatch) -> None:
    tensor = torch.arange(3 * HUGE // 4)
    start = -(-tensor.data_ptr() // HUGE) * HUGE
    assert collapse(start, HUGE)
    assert watch.huge(start, start + HUGE) == [(start, start + HUGE)]
    assert torch.equal(tensor, torch.arange(3 * HUGE // 4))


@watched
def test_a_page_has_one_watcher_at_a_time(watch: WriteWatch) -> None:
    """A second one would protect again what was written, and hide that from the first."""
    tensor = in_huge_pages(2 * HUGE // 4)
    first = LivePages(watch, [tensor])
    second = LivePages(watch, [tensor])
    assert sum(end - start for start, end in first.protect()) == 2 * HUGE
    assert second.protect() == ()
    tensor[5] = 1
    second.unprotect()
    assert not first.untouched(first._protected)
    first.close()
    third = LivePages(watch, [tensor])
    assert len(third.pages) == 2
    third.close()


@watched
def test_the_pages_of_a_closed_checkpointer_are_free_for_the_next_watcher(watch: WriteWatch, tmp_path: Path) -> None:
    model = torch.nn.Linear(1024, 1024, bias=False)
    model.weight.data = in_huge_pages(1024, 1024)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    first = Checkpointer(state, f"file://{tmp_path}", on_error="raise")
    first.save(1).wait("remote", 20)
    while_it_is_open = LivePages(watch, [model.weight])
    assert len(while_it_is_open.pages) == 0
    first.close()
    afterwards = LivePages(watch, [model.weight])
    assert len(afterwards.pages) == 2
    afterwards.close()


@watched
def test_neighbours_within_a_huge_page_may_be_written(watch: WriteWatch) -> None:
    memory = in_huge_pages(HUGE // 4)
    mine, theirs = memory[: 450 * PAGE // 4], memory[450 * PAGE // 4 :]
    pages = LivePages(watch, [mine])
    assert len(pages.protect()) == 1
    theirs.fill_(3)
    assert pages.untouched([spread(mine)])
    assert not pages.untouched(pages._protected)
    mine.numpy()[7] = 1
    assert not pages.untouched([spread(mine)])
    pages.close()


@watched
@pytest.mark.parametrize("kind", ["shared", "file"])
def test_memory_that_others_may_write_through_other_mappings_is_not_watched(watch: WriteWatch, kind: str) -> None:
    with open("/dev/zero" if kind == "shared" else sys.executable, "rb") as file:
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS if kind == "shared" else mmap.MAP_PRIVATE
        memory = mmap.mmap(-1 if kind == "shared" else file.fileno(), 4 * PAGE, flags=flags)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert within(plain_memory(), start, start + 4 * PAGE) == []
    tensor = torch.zeros(100).share_memory_()
    assert within(plain_memory(), tensor.data_ptr(), tensor.data_ptr() + 1) == []


def test_pages_are_cut_to_the_ranges_that_hold_them() -> None:
    assert whole_pages(PAGE + 1, 3 * PAGE) == (2 * PAGE, 4 * PAGE)
    assert whole_pages(PAGE + 1, PAGE) == (2 * PAGE, 2 * PAGE)
    assert within([(0, 10), (20, 30), (40, 50)], 5, 45) == [(5, 10), (20, 30), (40, 45)]
    assert within([(0, 10), (20, 30)], 10, 20) == []
    assert within([], 1, 2) == []


FORBIDDEN = """
    import ctypes, logging, struct, sys
    import torch
    from deepvm.checkpoint import Checkpointer

    def forbid(number):  # a seccomp filter as a container has it: the call fails with EPERM
        code = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
        lines = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
        program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code), ctypes.addressof(lines)))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()

    import platform
    forbid({"x86_64": 323}.get(platform.machine(), 282))
    logging.basicConfig(level="WARNING", stream=sys.stdout)
    model = torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for run in "ab":
        with Checkpointer({"model": model, "optimizer": optimizer}, sys.argv[1], run=run, on_error="raise") as ckpt:
            for step in (1, 2):
                truth = model.weight.clone()
                handle = ckpt.save(step)
                model.weight.data.mul_(0.5)
                handle.wait("remote", 30)
                ckpt.restore()
                assert torch.equal(model.weight, truth)
    print("saved as it was")
"""


def test_where_the_kernel_refuses_it_is_reported_once_and_the_state_is_copied(tmp_path: os.PathLike[str]) -> None:
    code = textwrap.dedent(FORBIDDEN)
    done = subprocess.run(
        [sys.executable, "-c", code, f"file://{tmp_path}"], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.endswith("saved as it was\n"), done.stdout + done.stderr
    assert done.stdout.count("save() copies the whole state before it returns") == 1
    assert "Operation not permitted" in done.stdout


@pytest.mark.parametrize(
    ("text", "size"), [(None, 0), ("many", 0), ("0", 0), ("2097152", 2**21), ("33554432", 2**25), ("67108864", 0)]
)
def test_huge_pages_count_up_to_a_useful_size(
    text: str | None, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_watch, "_PMD_SIZE", tmp_path / "size")
    if text is not None:
        (tmp_path / "size").write_text(text)
    assert write_watch.huge_page_bytes() == size


@pytest.mark.parametrize("refused", ["scan", "pagemap"])
def test_a_kernel_that_refuses_a_part_keeps_no_descriptor_open(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = [os.open("/dev/null", os.O_RDONLY)]
    real = os.open

    def refuse(*_: object, **__: object) -> Any:
        raise OSError("no")

    def remember(*words: Any) -> int:
        opened.append(real(*words))
        return opened[-1]

    monkeypatch.setattr(write_watch, "_userfaultfd", lambda: opened[0])
    monkeypatch.setattr(write_watch, "_scan", refuse)
    monkeypatch.setattr(write_watch.os, "open", refuse if refused == "pagemap" else remember)
    with pytest.raises(OSError, match="no"):
        WriteWatch()
    monkeypatch.undo()
    assert len(opened) == (2 if refused == "scan" else 1)
    for fd in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_a_watch_without_answers_knows_no_huge_pages_and_a_forked_process_opens_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise OSError("no")

    monkeypatch.setattr(write_watch, "_scan", refuse)
    watch = WriteWatch.__new__(WriteWatch)
    watch._pagemap = -1
    assert watch.huge(0, PAGE) == []
    closed: list[str] = []
    parents: Any = SimpleNamespace(pid=-1, close=lambda: closed.append("parent's"))
    own: Any = SimpleNamespace(pid=os.getpid())
    monkeypatch.setattr(write_watch, "_shared", [parents])
    monkeypatch.setattr(write_watch, "_open", lambda: own)
    assert shared_watch() is own
    assert shared_watch() is own
    assert closed == ["parent's"]
