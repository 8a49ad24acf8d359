"""Map a checkpoint's file instead of reading it, for store.py: fast on a local disk, very slow over a network."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

from deepvm.store.base import Manifest
from deepvm.store.chunks import truncated
from deepvm.store.regular_file import open_regular

_FAR = {
    0x6969, 0xFF534D42, 0xFE534D42, 0x517B, 0x65735546, 0x0BD00BD0, 0x00C36400, 0x01021997, 0x47504653, 0x5346414F,
    0x73757245, 0x19830326, 0x6B414653, 0x20030528,
}  # fmt: skip  # NFS, CIFS, SMB2, SMB, FUSE, Lustre, Ceph, 9P, GPFS, AFS, Coda, BeeGFS, kAFS, PVFS2


def is_local(path: Path) -> bool:
    """True if a file is on a disk or in memory of this machine, by the type of its file system."""
    answer = (ctypes.c_long * 32)()  # a statfs begins with the type
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(path), ctypes.byref(answer)) != 0:
        return False
    return (answer[0] & 0xFFFFFFFF) not in _FAR


def map_file(path: Path, manifest: Manifest) -> mmap.mmap:
    """Map a file as private memory: what is written to it does not reach the file."""
    with open(open_regular(path), "rb", buffering=0) as file:
        found_bytes = os.fstat(file.fileno()).st_size
        if found_bytes < manifest.size_bytes:
            raise truncated(path, found_bytes, manifest)
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        return mmap.mmap(file.fileno(), manifest.size_bytes, flags=mmap.MAP_PRIVATE, prot=writable)
