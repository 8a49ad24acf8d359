"""Places that keep checkpoints: memory nodes, files, object storage. One contract, opened by URL."""

from deepvm.store.base import DEFAULT_CHUNK_BYTES, Manifest, Store, Writer
from deepvm.store.urls import open_store, open_stores

__all__ = ["DEFAULT_CHUNK_BYTES", "Manifest", "Store", "Writer", "open_store", "open_stores"]
