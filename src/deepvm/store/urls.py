"""Open stores: URLs in, stores out. The module of a kind of store is imported when it is needed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from urllib.parse import unquote, urlsplit

from deepvm.errors import UsageError
from deepvm.store.base import Store

KNOWN = ("memory://HOST:PORT,HOST:PORT?replicas=2", "file:///DIRECTORY", "s3://BUCKET/PREFIX", "gs://", "az://")
_OBJECTS = ("s3", "gs", "az")


def open_store(url: str | os.PathLike[str], *, token: str | None = None, key: str | None = None) -> Store:
    """Open the store at a URL, or in a directory. ``token`` opens memory nodes, ``key`` a run's checkpoints in them."""
    text = os.fspath(url)
    scheme, separator, rest = text.partition("://")
    if not text.strip():
        raise UsageError(f"the store's URL is empty: write it like {', '.join(KNOWN)} or a directory")
    scheme = scheme.lower()
    if not separator or scheme == "file":
        from deepvm.store.files.store import FileStore

        return FileStore(_path_of(text) if separator else text)
    if scheme == "memory":
        from deepvm.store.memory.store import MemoryStore

        return MemoryStore.from_url(text, token=token, key=key)
    if scheme in _OBJECTS:
        from deepvm.store.objects.store import ObjectStore

        return ObjectStore.from_url(f"{scheme}://{rest}")
    raise UsageError(f"no store is known for {scheme}://: write it like {', '.join(KNOWN)} or a directory")


def open_stores(
    urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, token: str | None = None, key: str | None = None
) -> tuple[Store, ...]:
    """Open the stores of a tier, nearest first. If one cannot be opened, close those before it."""
    wanted = [urls] if isinstance(urls, (str, os.PathLike)) else list(urls)
    if not wanted:
        raise UsageError("the list of stores is empty: pass at least one URL or directory")
    opened: list[Store] = []
    try:
        for url in wanted:
            opened.append(open_store(url, token=token, key=key))
    except BaseException:
        for store in opened:
            store.close()
        raise
    return tuple(opened)


def _path_of(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path or parts.query or parts.fragment:
        raise UsageError(
            f"{url!r} is not a directory of this machine: write file:///ABSOLUTE/PATH, special letters like %20"
        )
    return unquote(parts.path)
