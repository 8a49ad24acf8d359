"""The places that the contract is tried on: each opens stores, harms what is kept, and tells all that is left."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from deepvm.store import Store, open_store


class Place(Protocol):
    name: str

    def open(self) -> Store:
        """A store as another process would open it."""
        ...

    def flip(self, run: str, step: int, offset: int) -> None:
        """Change one stored byte."""
        ...

    def everything(self) -> list[str]:
        """All that is kept, hidden and half-done things too."""
        ...


class FilePlace:
    name = "files"

    def __init__(self, root: Path) -> None:
        self.root = root

    def open(self) -> Store:
        return open_store(f"file://{self.root}")

    def flip(self, run: str, step: int, offset: int) -> None:
        with (self.root / run / f"step-{step:012d}.safetensors").open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 1]))

    def everything(self) -> list[str]:
        return sorted(str(p.relative_to(self.root)) for p in self.root.rglob("*") if p.is_file())
