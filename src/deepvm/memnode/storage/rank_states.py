"""The ranks' own states of one upload: JSON documents of all ranks in, one list for rank 0 out."""

from __future__ import annotations

import json

from deepvm import strict_json
from deepvm.memnode.errors import RequestRefused
from deepvm.memnode.storage.budgets import STATE_BYTES, KeptDocuments
from deepvm.protocol import frames

MOST_BYTES = 16 * 2**20  # of one rank
MOST_PARSED_BYTES = 256 * 2**10  # of one that is not a string: millions of small values would block all threads
_MOST_VALUES = 20_000


def check(rank: int, document: bytes) -> None:
    """Check that it is one JSON document. A string, as trainers send, takes no more memory than its length."""
    if len(document) > MOST_BYTES:
        raise RequestRefused(
            "failed", f"rank {rank}'s own state has {len(document)} bytes, at most {MOST_BYTES} are allowed"
        )
    try:
        if document[:1] == b'"':
            json.loads(document)
        else:
            strict_json.loads(document, most_bytes=MOST_PARSED_BYTES, most_values=_MOST_VALUES)
    except strict_json.MalformedJson as error:
        raise RequestRefused("failed", f"rank {rank}'s own state cannot be taken: {error}") from None
    except (ValueError, RecursionError):
        raise RequestRefused("failed", f"rank {rank}'s own state is not a JSON document") from None


class RankStates:
    """Call it with the upload's lock held."""

    def __init__(self, kept: KeptDocuments) -> None:
        self._kept = kept
        self._documents: dict[int, bytes] = {}
        self._bytes = 0
        self._list: bytes | None = None  # all of them, made once however many ask

    def __len__(self) -> int:
        return len(self._documents)

    def add(self, rank: int, document: bytes) -> None:
        more = len(document) - len(self._documents.get(rank, b""))
        if self._bytes + more + len(self._documents) + 3 > frames.MOST_DOCUMENT_BYTES:
            raise RequestRefused("no-room", f"the ranks' own states exceed {frames.MOST_DOCUMENT_BYTES} bytes in all")
        new = STATE_BYTES if rank not in self._documents else 0
        self._kept.add(2 * more + new, f"rank {rank}'s own state")  # alone, and in the list of all
        self._documents[rank] = document
        self._bytes += more
        self._list = None

    def as_list(self) -> bytes:
        if self._list is None:
            self._list = b"[" + b",".join(self._documents[rank] for rank in sorted(self._documents)) + b"]"
        return self._list

    def clear(self) -> None:
        self._kept.drop(2 * self._bytes + STATE_BYTES * len(self._documents))
        self._documents, self._bytes, self._list = {}, 0, None
