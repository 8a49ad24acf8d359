"""How the node says no: a code of the protocol and a sentence. It becomes an ERROR frame."""

from __future__ import annotations


class RequestRefused(Exception):
    def __init__(self, code: str, message: str) -> None:
        self.code, self.message = code, message
        super().__init__(f"{code}: {message}")


class PeerGone(Exception):
    """The client left, or was too slow."""
