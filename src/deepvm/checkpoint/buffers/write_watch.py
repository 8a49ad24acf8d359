"""Ask the kernel whether memory was written: userfaultfd's asynchronous write protection and PAGEMAP_SCAN (Linux 6.7).

Input: address ranges. Output: whether every page of them is as it was when it was protected. A write to a protected
page does not wait: the kernel unprotects that page and continues. It makes no difference who writes: torch,
NumPy, C++ or the kernel itself. snapshot/ decides what is watched.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from deepvm.checkpoint.buffers.guarded_copy import check_guarded_copies

log = logging.getLogger("deepvm.checkpoint")

Range = tuple[int, int]  # first address, and the one behind the last

_SYSCALL = {"x86_64": 323, "aarch64": 282, "riscv64": 282}  # userfaultfd
_USER_MODE_ONLY = 1  # what ordinary users may ask for
_API, _FEATURES = 0xAA, 1 << 15 | 1 << 13 | 1  # WP_ASYNC, WP_UNPOPULATED, PAGEFAULT_FLAG_WP
_MODE_WP, _PROTECT = 2, 1
_IOC_API, _IOC_REGISTER, _IOC_UNREGISTER, _IOC_WRITEPROTECT = 0xC018AA3F, 0xC020AA00, 0x8010AA01, 0xC018AA06
_IOC_SCAN = 0xC0606610
_CHECK_WPASYNC = 2
_WPALLOWED, _WRITTEN, _PRESENT, _SWAPPED, _HUGE = 1 << 0, 1 << 1, 1 << 3, 1 << 4, 1 << 6
_REGIONS = 256
_MADV_COLLAPSE = 25
_PMD_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MOST_HUGE_BYTES = 32 * 2**20  # larger ones (512 MiB with pages of 64 KiB) hold more than one tensor

_libc = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock: each call takes microseconds
_ioctl = _libc.ioctl
_ioctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p]
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def huge_page_bytes() -> int:
    """Return the size of a huge page; 0 if the kernel has none of a useful size."""
    try:
        size = int(_PMD_SIZE.read_text())
    except (OSError, ValueError):
        return 0
    return size if 0 < size <= _MOST_HUGE_BYTES else 0


class WriteWatch:
    """The kernel's interface, once for a process. Ranges are of whole pages."""

    def __init__(self) -> None:
        """Raises OSError if the kernel cannot do it, or forbids it."""
        self.pid, self.huge_bytes = os.getpid(), huge_page_bytes()
        self._uffd = _userfaultfd()
        try:
            self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY)
        except OSError:
            os.close(self._uffd)
            raise
        self._owners: dict[int, object] = {}  # of each huge page's worth of addresses: who watches it
        self._lock = threading.Lock()
        try:
            check_guarded_copies()  # what is watched may be freed while it is read
            _scan(self._pagemap, (0, 0), 1, mask=_WRITTEN, inverted=0, any_of=0, returned=_WRITTEN)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._uffd)
        os.close(self._pagemap)

    # --- whose pages --------------------------------------------------------------------------------------------

    def claim(self, owner: object, pages: Iterable[int]) -> set[int]:
        """Claim huge pages, by number; return those that have no other owner. A second watcher would protect a written
        page again, and hide the write from the first."""
        with self._lock:
            return {page for page in pages if self._owners.setdefault(page, owner) is owner}

    def disclaim(self, owner: object) -> None:
        with self._lock:
            for page in [page for page, known in self._owners.items() if known is owner]:
                del self._owners[page]

    # --- pages --------------------------------------------------------------------------------------------------

    def register(self, start: int, end: int) -> bool:
        """Allow a range to be protected. False if it is not this process's plain memory."""
        return _control(self._uffd, _IOC_REGISTER, start, end - start, _MODE_WP, 0)

    def unregister(self, start: int, end: int) -> None:
        """Also unprotect it. Fails if the memory is gone, which needs neither."""
        _control(self._uffd, _IOC_UNREGISTER, start, end - start)

    def protect(self, start: int, end: int) -> bool:
        return _control(self._uffd, _IOC_WRITEPROTECT, start, end - start, _PROTECT)

    def unprotect(self, start: int, end: int) -> None:
        """Fails if the memory is gone: nothing is protected there."""
        _control(self._uffd, _IOC_WRITEPROTECT, start, end - start, 0)

    def untouched(self, ranges: Iterable[Range]) -> bool:
        """True if every page is there and still protected. What the kernel does not know counts as touched."""
        try:
            return all(self._protected_from(span) == span[1] for span in ranges)
        except OSError:
            return False

    def _protected_from(self, span: Range) -> int:
        """Return the end of what is protected from the first page on."""
        found = _scan(
            self._pagemap, span, 1, mask=_WRITTEN, inverted=_WRITTEN, any_of=_PRESENT | _SWAPPED, returned=_WPALLOWED
        )
        return found[0][1] if found and found[0][0] == span[0] else 0

    def huge(self, start: int, end: int) -> list[Range]:
        """Return the parts of a range that are in huge pages."""
        found: list[Range] = []
        try:
            while start < end:
                some = _scan(self._pagemap, (start, end), _REGIONS, mask=_HUGE, inverted=0, any_of=0, returned=_HUGE)
                found += some
                start = some[-1][1] if len(some) == _REGIONS else end
        except OSError:
            return []
        return found


def collapse(start: int, length: int) -> bool:
    """Move memory into huge pages. The kernel copies it, unnoticed by its users."""
    return bool(_madvise(start, length, _MADV_COLLAPSE) == 0)


def plain_memory() -> list[Range]:
    """List this process's anonymous, private, writable memory: all else may be written through other mappings."""
    found: list[Range] = []
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            where, mode, _, device, inode = line.split(maxsplit=5)[:5]
            if mode.startswith("rw") and mode[3] == "p" and device == "00:00" and inode == "0":
                start, _, end = where.partition("-")
                found.append((int(start, 16), int(end, 16)))
    return joined(found)


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Join neighbours among sorted ranges."""
    found: list[Range] = []
    for start, end in ranges:
        found.append((found.pop()[0], end) if found and found[-1][1] == start else (start, end))
    return found


_shared: list[WriteWatch | None] = []
_sharing = threading.Lock()


def shared_watch() -> WriteWatch | None:
    """Return the process's watch; None, logged once, if the kernel has none or forbids it."""
    with _sharing:
        if _shared and _shared[0] is not None and _shared[0].pid != os.getpid():
            _shared.pop().close()  # type: ignore[union-attr]  # a fork: it is the parent's
        if not _shared:
            _shared.append(_open())
        return _shared[0]


def _open() -> WriteWatch | None:
    try:
        return WriteWatch()
    except OSError as error:
        log.warning(
            "save() copies the whole state before it returns, since the kernel cannot report writes to memory (%s): "
            "Linux 6.7 or later needs no such copy if userfaultfd is allowed, also by a container's seccomp profile",
            error,
        )
        return None


def _userfaultfd() -> int:
    number = _SYSCALL.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"userfaultfd is not known on {platform.machine()}")
    fd = int(_libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY))
    if fd < 0:
        raise OSError(ctypes.get_errno(), f"userfaultfd: {os.strerror(ctypes.get_errno())}")
    if not _control(fd, _IOC_API, _API, _FEATURES, 0):
        code = ctypes.get_errno()
        os.close(fd)
        raise OSError(code, f"userfaultfd without asynchronous write protection: {os.strerror(code)}")
    return fd


def _control(fd: int, request: int, *values: int) -> bool:
    arguments = (ctypes.c_uint64 * len(values))(*values)
    return bool(_ioctl(fd, request, ctypes.addressof(arguments)) == 0)


def _scan(fd: int, span: Range, most: int, *, mask: int, inverted: int, any_of: int, returned: int) -> Sequence[Range]:
    regions = (ctypes.c_uint64 * (3 * most))()
    flags = _CHECK_WPASYNC if mask == _WRITTEN and span[1] else 0
    arguments = (ctypes.c_uint64 * 12)(
        96, flags, *span, 0, ctypes.addressof(regions), most, 0, inverted, mask, any_of, returned
    )
    count = _ioctl(fd, _IOC_SCAN, ctypes.addressof(arguments))
    if count < 0:
        raise OSError(ctypes.get_errno(), f"PAGEMAP_SCAN: {os.strerror(ctypes.get_errno())}")
    return [(regions[3 * i], regions[3 * i + 1]) for i in range(count)]
