"""Errors inside the node: serving/connection.py turns a refusal into an ERROR frame, and ends a lost connection."""

from __future__ import annotations


class RequestRefused(Exception):
    """A code of the protocol, and a sentence for the client."""

    def __init__(self, code: str, message: str) -> None:
        self.code, self.message = code, message
        super().__init__(f"{code}: {message}")


class PeerGone(Exception):
    """The client closed the connection, or was too slow."""
