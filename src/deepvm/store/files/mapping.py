"""Files that can be used where they are: mapped, not read. Good on a local disk, poison on a network's."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

from deepvm.errors import Corrupt, NotFound
from deepvm.store.regular_file import open_regular

_FAR = {
    0x6969, 0xFF534D42, 0xFE534D42, 0x517B, 0x65735546, 0x0BD00BD0, 0x00C36400, 0x01021997, 0x47504653, 0x5346414F,
    0x73757245, 0x19830326, 0x6B414653, 0x20030528,
}  # fmt: skip  # NFS, CIFS, SMB2, SMB, FUSE, Lustre, Ceph, 9P, GPFS, AFS, Coda, BeeGFS, kAFS, PVFS2


def is_local(path: Path) -> bool:
    """Whether a file lies on a disk or in memory of this machine, as far as its file system tells."""
    answer = (ctypes.c_long * 32)()  # a statfs begins with the type
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(path), ctypes.byref(answer)) != 0:
        return False
    return (answer[0] & 0xFFFFFFFF) not in _FAR


def map_file(path: Path, size_bytes: int) -> mmap.mmap:
    """A file's bytes as memory of this process's own: what is written to it does not reach the file."""
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        raise NotFound(f"{path} is gone: use another step") from None
    try:
        found = os.fstat(fd).st_size
        if found < size_bytes:
            raise Corrupt(f"{path} ends at {found} of {size_bytes} bytes: use another step")
        return mmap.mmap(fd, size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)
