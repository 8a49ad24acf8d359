"""Bytes as they arrive -> whole lines: for sockets, pipes and files that others append to."""

from __future__ import annotations


class LineBuffer:
    def __init__(self) -> None:
        self.rest = b""  # of a line whose end has not arrived

    def feed(self, found: bytes) -> list[bytes]:
        """Add bytes and return the lines that they complete."""
        *lines, self.rest = (self.rest + found).split(b"\n")
        return lines
