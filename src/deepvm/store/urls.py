"""Stores by their URLs, each opened by the one module that knows it; no module is loaded before it is needed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from urllib.parse import unquote, urlsplit

from deepvm.errors import UsageError
from deepvm.store.base import Store

KNOWN = ("memory://HOST:PORT,HOST:PORT?replicas=2", "file:///DIRECTORY", "s3://BUCKET/PREFIX", "gs://", "az://")
_OBJECTS = ("s3", "gs", "az")


def open_store(url: str | os.PathLike[str], *, token: str | None = None, key: str | None = None) -> Store:
    """The store at a URL, or in a directory. ``token`` opens memory nodes, ``key`` this run's checkpoints in them."""
    text = os.fspath(url)
    scheme, separator, rest = text.partition("://")
    if not text.strip():
        raise UsageError(f"an empty URL names no store: write it like {', '.join(KNOWN)} or a directory")
    if not separator:
        return _file_store(text)
    scheme = scheme.lower()
    if scheme == "file":
        return _file_store(_path_of(text))
    if scheme == "memory":
        from deepvm.store.memory.store import MemoryStore

        memory: Store = MemoryStore.from_url(text, token=token, key=key)
        return memory
    if scheme in _OBJECTS:
        from deepvm.store.objects.store import ObjectStore

        return ObjectStore.from_url(f"{scheme}://{rest}")
    raise UsageError(f"no store is known for {scheme}://: write it like {', '.join(KNOWN)} or a directory")


def open_stores(
    urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, token: str | None = None, key: str | None = None
) -> tuple[Store, ...]:
    """The stores of a tier, nearest first. If one cannot be opened, those before it are closed again."""
    wanted = [urls] if isinstance(urls, (str, os.PathLike)) else list(urls)
    if not wanted:
        raise UsageError("no store is given: a checkpoint needs one place at least")
    opened: list[Store] = []
    try:
        for url in wanted:
            opened.append(open_store(url, token=token, key=key))
    except BaseException:
        for store in opened:
            store.close()
        raise
    return tuple(opened)


def _file_store(path: str) -> Store:
    from deepvm.store.files.store import FileStore

    return FileStore(path)


def _path_of(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path or parts.query or parts.fragment:
        raise UsageError(f"{url!r} names no directory here: write file:///ABSOLUTE/PATH, special letters as %20")
    return unquote(parts.path)
