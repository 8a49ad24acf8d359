"""A folder that makes every interpreter which has it on its path record lines of deepvm; see `line_hits`."""

from __future__ import annotations

from pathlib import Path

from tools.line_hits import compiled_name

_MODULE = Path(__file__).with_name("line_hits.py")


class Recorder:
    """Hits of all processes that run with `folder` on their path, for the sources below `src`."""

    def __init__(self, folder: Path, src: Path, *, module: str = "sitecustomize") -> None:
        self.folder = folder
        self.offsets: dict[str, int] = {}
        total = 0
        for path in sorted(src.rglob("*.py")):
            self.offsets[str(path)] = total
            total += 2 * (len(path.read_text(encoding="utf-8").splitlines()) + 2)
        (folder / "compiled").mkdir(parents=True, exist_ok=True)
        current = {compiled_name(path, offset) for path, offset in self.offsets.items()}
        for stale in (folder / "compiled").iterdir():
            if stale.name not in current:
                stale.unlink()
        (folder / "hits").write_bytes(bytes(total))
        text = _MODULE.read_text(encoding="utf-8")
        (folder / f"{module}.py").write_text(f"{text}\n\nstart({str(folder)!r}, {self.offsets!r})\n", encoding="utf-8")

    def lines(self, hits: bytes | list[int]) -> dict[str, tuple[list[int], list[int]]]:
        """Return by file the lines of statements that ran, and of those whose branch without a statement was taken."""
        found: dict[str, tuple[list[int], list[int]]] = {}
        places = sorted(self.offsets.items(), key=lambda item: item[1], reverse=True)
        numbers = hits if isinstance(hits, list) else [number for number, hit in enumerate(hits) if hit]
        name, start = places.pop()
        for number in sorted(numbers):
            while places and number >= places[-1][1]:
                name, start = places.pop()
            line, branch = divmod(number - start, 2)
            found.setdefault(name, ([], []))[branch].append(line)
        return found
